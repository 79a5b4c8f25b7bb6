#include "cli/rates_file.hpp"

#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "mla/error.hpp"
#include "model/json.hpp"

namespace mla::cli {
namespace {

struct Field {
  const char* name;
  double CostModel::*value;
  bool needed;
  bool above_zero;
};
constexpr Field kFields[] = {{"latent_flops", &CostModel::latent_flops, true, true},
                             {"expanded_flops", &CostModel::expanded_flops, true, true},
                             {"projection_flops", &CostModel::projection_flops, true, true},
                             {"bytes", &CostModel::bytes, true, false},
                             {"row_element", &CostModel::row_element, false, false},
                             {"plain_elements", &CostModel::plain_elements, false, false},
                             {"fp8_elements", &CostModel::fp8_elements, false, false},
                             {"expanded_tiles", &CostModel::expanded_tiles, false, false},
                             {"context_seconds", &CostModel::context_seconds, false, false}};

CostModel read_rates(const nlohmann::json& object, const std::string& where) {
  if (!object.is_object()) throw InputError(where + " is not an object of rates");
  std::vector<std::string_view> known;
  for (const Field& f : kFields) known.push_back(f.name);
  require_keys(object, known, where);
  CostModel rates;
  for (const Field& f : kFields) {
    const auto it = object.find(f.name);
    if (it == object.end()) {
      if (f.needed) throw InputError(where + ": " + f.name + " is missing");
      continue;
    }
    const double value = it->is_number() ? it->get<double>() : NAN;
    if (!(value >= 0) || std::isinf(value) || (f.above_zero && value == 0))
      throw InputError(where + ": " + f.name + " is " + it->dump() + ", must be a number " +
                       (f.above_zero ? "above 0" : "of at least 0"));
    rates.*f.value = value;
  }
  return rates;
}

}  // namespace

nlohmann::json rates_json(const CostModel& rates) {
  nlohmann::json object;
  for (const Field& f : kFields) object[f.name] = rates.*f.value;
  return object;
}

CostModel parse_rates(std::string_view text, std::string_view where, Dtype compute) {
  const JsonDocument document = parse_object(text, where);
  const std::string file(where);
  const auto paths = document.root.find("paths");
  if (paths == document.root.end()) return read_rates(document.root, file);
  if (!paths->is_array()) throw InputError(file + ": paths is not an array");
  std::string known;
  for (const nlohmann::json& of : *paths) {
    const auto name = of.is_object() ? of.find("compute") : of.end();
    if (!of.is_object() || name == of.end() || !name->is_string())
      throw InputError(file + ": an entry of paths does not say of which operands it is");
    if (name->get<std::string>() == to_string(compute)) {
      const auto fitted = of.find("rates_fitted");
      if (fitted == of.end()) throw InputError(file + ": rates_fitted is missing");
      return read_rates(*fitted, file + ": rates_fitted");
    }
    known += (known.empty() ? "" : ", ") + name->get<std::string>();
  }
  throw InputError(file + " has rates of " + (known.empty() ? "no operands" : known) + ", " +
                   std::string(to_string(compute)) + " are asked for");
}

}  // namespace mla::cli
