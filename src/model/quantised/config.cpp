#include "model/quantised/config.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>

#include "model/config_reader.hpp"

namespace mla {
namespace {

using Json = nlohmann::json;

constexpr std::array<std::string_view, 13> kMethods{
    "fp8",   "fbgemm_fp8", "compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_mixed", "awq", "gptq", "mxfp4",
    "mxfp8", "quark",      "blockwise_int8",     "w8a8_int8"};
constexpr std::array<std::string_view, 7> kFormats{
    "dense",          "float-quantized",      "int-quantized",       "naive-quantized",
    "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"};

template <class All, class T>
bool among(const All& all, const T& x) {
  return std::find(all.begin(), all.end(), x) != all.end();
}
template <class Names>
std::string listed(const Names& names) {
  std::string all;
  for (const std::string_view n : names) all += " " + std::string(n);
  return all;
}

void once(std::vector<int64_t>& all, int64_t x) {
  if (!among(all, x)) all.push_back(x);
}

class QuantisationReader {
 public:
  QuantisationReader(const Json& object, const std::string& where, const ReadOptions& options, ModelConfig& m)
      : q_(object, where), options_(options), m_(m), found_(m.quantisation) {}

  void read() {
    found_.method = q_.text("quant_method", "fp8");
    if (!among(kMethods, found_.method))
      refuse_form(q_, "quant_method is '" + found_.method + "'", "read are" + listed(kMethods));
    names();
    if (q_.has("weight_block_size")) block(q_, "weight_block_size");
    if (found_.method == "compressed-tensors") compressed_tensors();
    if (found_.method == "gptq") gptq();
    if (found_.method == "awq") awq();
  }

 private:
  void refuse_form(const ConfigReader& r, const std::string& what, const std::string& known) const {
    if (!options_.allow_unknown) r.unsupported(what + ": weights of this form are not supported (" + known + ")");
  }

  // Other tools' names for what is stored: NVIDIA's, Mistral's, and DeepSeek's for the kind of fp8.
  void names() const {
    const std::string algo = q_.text("quant_algo", "FP8");
    const bool known = algo.starts_with("FP8") || algo.starts_with("fp8") || algo.starts_with("NVFP4") ||
                       algo.starts_with("MXFP") || algo == "MIXED_PRECISION";
    if (!known) refuse_form(q_, "quant_algo is '" + algo + "'", "read are FP8 and its kinds, NVFP4, MXFP4, MXFP8");
    const std::string weight = q_.text("qformat_weight", "fp8");
    if (!weight.starts_with("fp8") && !weight.starts_with("FP8"))
      refuse_form(q_, "qformat_weight is '" + weight + "'", "fp8 is read");
    const std::string kind = q_.text("fmt", "e4m3");
    if (kind != "e4m3" && kind != "float8_e4m3fn") refuse_form(q_, "fmt is '" + kind + "'", "e4m3 is read");
  }

  void set_block(const ConfigReader& r, std::string_view key, int64_t rows, int64_t cols) {
    if (m_.fp8_block_rows > 0 && (m_.fp8_block_rows != rows || m_.fp8_block_cols != cols))
      r.unsupported(std::string(key) + " is " + r.find(key)->dump() + ", another one is " +
                    std::to_string(m_.fp8_block_rows) + " x " + std::to_string(m_.fp8_block_cols) +
                    ": blocks of several sizes are not supported");
    m_.fp8_block_rows = rows;
    m_.fp8_block_cols = cols;
  }

  // [rows, columns], or "128x128".
  void block(const ConfigReader& r, std::string_view key) {
    const Json& v = *r.find(key);
    const auto good = [](int64_t n) { return n >= 1 && n <= 65536; };
    if (v.is_array() && v.size() == 2 && v[0].is_number_integer() && v[1].is_number_integer() &&
        good(v[0].get<int64_t>()) && good(v[1].get<int64_t>()))
      return set_block(r, key, v[0].get<int64_t>(), v[1].get<int64_t>());
    long long rows = 0, cols = 0;
    int end = 0;
    std::string text;
    if (v.is_string()) text = v.get<std::string>();
    if (text.size() < 16 && std::sscanf(text.c_str(), "%lldx%lld%n", &rows, &cols, &end) == 2 &&
        static_cast<size_t>(end) == text.size() && good(rows) && good(cols))
      return set_block(r, key, rows, cols);
    r.fail(key, "is " + v.dump() + ", two positive integers are needed");
  }

  // Whether a list of what is left as it was has all of attention, by the pattern that tools write for it.
  bool attention_is_spared() const {
    const Json* ignored = q_.find("ignore");
    return ignored && ignored->is_array() &&
           std::any_of(ignored->begin(), ignored->end(), [](const Json& e) { return e == "re:.*self_attn.*"; });
  }

  void format(const ConfigReader& r) const {
    const std::string name = r.text("format", "dense");
    if (!among(kFormats, name) && name != "mixed-precision" && !attention_is_spared())
      refuse_form(r, "format is '" + name + "'", "read are" + listed(kFormats));
  }

  void compressed_tensors() {
    format(q_);
    // Rotations of weights are undone at run time: without that they would be another model's.
    const ConfigReader transforms(q_.object("transform_config"), q_.where() + ": transform_config");
    if (!transforms.object("config_groups").empty())
      refuse_form(q_, "transform_config is " + transforms.json().dump(), "weights without transforms are read");
    const ConfigReader sparsity(q_.object("sparsity_config"), q_.where() + ": sparsity_config");
    const std::string sparse = sparsity.text("format", "dense");
    if (sparse != "dense" && !attention_is_spared())
      refuse_form(q_, "sparsity_config is " + sparsity.json().dump(), "dense weights are read");

    int64_t kinds = 0, symmetric = 0;
    for (const auto& [name, group] : q_.object("config_groups").items()) {
      if (!group.is_object()) continue;  // a preset's name, with what it is for
      const ConfigReader g(group, q_.where() + ": config_groups: " + name);
      format(g);
      if (!g.has("weights")) continue;
      const ConfigReader w(g.object("weights"), g.where() + ": weights");
      const std::string strategy = w.text("strategy", "");
      if (w.has("block_structure")) block(w, "block_structure");
      if (w.text("type", "int") != "int") continue;
      ++kinds;
      symmetric += w.flag("symmetric", true);
      once(found_.bits, w.integer("num_bits", 8));
      const bool groups = strategy == "group" || (strategy.empty() && w.integer("group_size", -1) > 0);
      once(found_.group_sizes, groups ? group_size(w) : -1);
    }
    found_.zero_points = kinds > 0 && symmetric == 0;
  }

  static int64_t group_size(const ConfigReader& r, std::string_view key = "group_size") {
    const int64_t n = r.integer(key);
    if (n != -1 && (n < 1 || n > 1 << 20))
      r.fail(key, "is " + std::to_string(n) + ", -1 or 1 to " + std::to_string(1 << 20) + " is needed");
    return n;
  }

  void gptq() {
    // Kinds by layer ("dynamic"): tensors say which.
    if (!q_.has("dynamic")) {
      if (q_.has("bits")) once(found_.bits, q_.integer("bits"));
      if (q_.has("group_size")) once(found_.group_sizes, group_size(q_));
    }
    bool second = false;
    for (const char* key : {"checkpoint_format", "format"}) {
      const std::string name = q_.text(key, "gptq");
      second = second || name == "gptq_v2";
      if (name != "gptq" && name != "gptq_v2")
        refuse_form(q_, std::string(key) + " is '" + name + "'", "read are gptq and gptq_v2");
    }
    if (q_.flag("is_marlin_format", false)) refuse_form(q_, "is_marlin_format is true", "read are gptq and gptq_v2");
    if (const std::string word = q_.text("pack_dtype", "int32"); word != "int32")
      refuse_form(q_, "pack_dtype is '" + word + "'", "int32 is read");
    found_.zero_offset = second ? 0 : 1;
  }

  void awq() {
    for (const char* key : {"bits", "w_bit"})
      if (q_.has(key)) once(found_.bits, q_.integer(key));
    for (const char* key : {"group_size", "q_group_size"})
      if (q_.has(key)) once(found_.group_sizes, group_size(q_, key));
    for (const char* key : {"version", "format"}) {
      std::string name = q_.text(key, "gemm");
      std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
      if (name != "gemm") refuse_form(q_, std::string(key) + " is '" + name + "'", "gemm is read");
    }
  }

  const ConfigReader q_;
  const ReadOptions& options_;
  ModelConfig& m_;
  QuantisationConfig& found_;
};

}  // namespace

void read_quantisation(const Json& object, const std::string& where, const ReadOptions& options, ModelConfig& m) {
  QuantisationReader(object, where, options, m).read();
}

}  // namespace mla
