// Keys of a config's object by the kind of value that they must have.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "mla/error.hpp"
#include "mla/model.hpp"
#include "model/text.hpp"

namespace mla {

/// An object of a config; every error names the key, its value and where the object is.
class ConfigReader {
 public:
  ConfigReader(const nlohmann::json& json, std::string where) : json_(json), where_(std::move(where)) {}

  [[noreturn]] void fail(std::string_view key, const std::string& why) const {
    refuse(where_, std::string(key) + " " + why);
  }
  [[noreturn]] void unsupported(const std::string& what) const { throw UnsupportedError(where_ + ": " + what); }
  /// No key but these, unless unknown ones are allowed.
  void only(std::initializer_list<std::string_view> known, const ReadOptions& options) const {
    if (options.allow_unknown) return;
    for (const auto& [key, value] : json_.items())
      if (!value.is_null() && std::find(known.begin(), known.end(), key) == known.end())
        unsupported(key + " is " + value.dump() + ", a key that is not known (allow_unknown goes on past it)");
  }
  /// Absent and null are the same.
  const nlohmann::json* find(std::string_view key) const {
    const auto it = json_.find(key);
    return it == json_.end() || it->is_null() ? nullptr : &*it;
  }
  bool has(std::string_view key) const { return find(key) != nullptr; }
  /// There, null or not.
  bool mentions(std::string_view key) const { return json_.contains(key); }
  int64_t integer(std::string_view key, int64_t fallback) const {
    const nlohmann::json* v = find(key);
    if (!v) return fallback;
    constexpr double kMost = 1e12;
    const double x = v->is_number() ? v->get<double>() : NAN;
    if (!(std::fabs(x) <= kMost) || x != std::floor(x)) fail(key, "is " + v->dump() + ", an integer is needed");
    return static_cast<int64_t>(x);
  }
  int64_t integer(std::string_view key) const {
    if (!find(key)) fail(key, "is missing");
    return integer(key, 0);
  }
  /// A class's default where it has one: 0 is none.
  int64_t integer_of(std::string_view key, int64_t default_of_class) const {
    return default_of_class > 0 ? integer(key, default_of_class) : integer(key);
  }
  double number(std::string_view key, double fallback) const {
    const nlohmann::json* v = find(key);
    return v ? number_of(key, *v) : fallback;
  }
  bool flag(std::string_view key, bool fallback) const {
    const nlohmann::json* v = find(key);
    if (!v) return fallback;
    if (!v->is_boolean()) fail(key, "is " + v->dump() + ", true or false is needed");
    return v->get<bool>();
  }
  std::string text(std::string_view key, std::string fallback) const {
    const nlohmann::json* v = find(key);
    if (!v) return fallback;
    if (!v->is_string()) fail(key, "is " + v->dump() + ", a string is needed");
    return v->get<std::string>();
  }
  const nlohmann::json& object(std::string_view key) const {
    static const nlohmann::json none = nlohmann::json::object();
    const nlohmann::json* v = find(key);
    if (!v) return none;
    if (!v->is_object()) fail(key, "is " + v->dump() + ", an object is needed");
    return *v;
  }
  const nlohmann::json* list(std::string_view key) const {
    const nlohmann::json* v = find(key);
    if (v && !v->is_array()) fail(key, "is " + v->dump() + ", a list is needed");
    return v;
  }
  std::vector<double> numbers(std::string_view key) const {
    const nlohmann::json* v = list(key);
    if (!v) fail(key, "is missing");
    std::vector<double> x;
    for (const nlohmann::json& e : *v) x.push_back(number_of(key, e));
    return x;
  }
  const std::string& where() const { return where_; }
  const nlohmann::json& json() const { return json_; }

 private:
  double number_of(std::string_view key, const nlohmann::json& v) const {
    if (!v.is_number()) fail(key, "is " + v.dump() + ", a number is needed");
    return v.get<double>();
  }
  const nlohmann::json& json_;
  std::string where_;
};

}  // namespace mla
