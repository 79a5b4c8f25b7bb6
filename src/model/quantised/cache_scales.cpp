// Names under a layer's attention, by who writes them:
//   k_scale, k_proj.k_scale              compressed-tensors, ModelOpt
//   k_proj.output_scale                  Quark, earlier compressed-tensors
//   attn.k_scale, mla_attn.k_scale,      vLLM's own modules, its names for Mistral's fake quantisers
//   mla_attn.mla_attn.k_scale
//   attn_mqa.k_scale,                    SGLang's
//   kv_a_proj_with_mqa.k_scale
//   kv_scale                             vLLM's before there were two: of keys and values
// A stored value times its scale is the value.
#include "model/quantised/cache_scales.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "mla/error.hpp"
#include "model/text.hpp"

namespace mla {
namespace {

constexpr std::array<std::string_view, 7> kQuery{"q_scale",         "q_proj.q_scale",   "q_proj.output_scale",
                                                 "attn.q_scale",    "mla_attn.q_scale", "mla_attn.mla_attn.q_scale",
                                                 "attn_mqa.q_scale"};
constexpr std::array<std::string_view, 8> kKey{"k_scale",
                                               "k_proj.k_scale",
                                               "k_proj.output_scale",
                                               "attn.k_scale",
                                               "mla_attn.k_scale",
                                               "mla_attn.mla_attn.k_scale",
                                               "attn_mqa.k_scale",
                                               "kv_a_proj_with_mqa.k_scale"};
constexpr std::array<std::string_view, 8> kValue{"v_scale",
                                                 "v_proj.v_scale",
                                                 "v_proj.output_scale",
                                                 "attn.v_scale",
                                                 "mla_attn.v_scale",
                                                 "mla_attn.mla_attn.v_scale",
                                                 "attn_mqa.v_scale",
                                                 "kv_a_proj_with_mqa.v_scale"};
constexpr std::array<std::string_view, 2> kBoth{"kv_scale", "attn.kv_scale"};
// Of softmax's probabilities, which are not quantised here: passed over.
constexpr std::array<std::string_view, 4> kPassed{"prob_scale", "prob_output_scale", "attn.prob_scale",
                                                  "mla_attn.prob_scale"};

class Reader {
 public:
  Reader(const FindTensor& find, const std::string& prefix, int64_t heads, bool data,
         std::unordered_set<std::string>& used)
      : find_(find), prefix_(prefix), heads_(heads), data_(data), used_(used) {}

  /// The scale that one of these names has; empty where none does.
  template <class Names>
  std::vector<float> one_of(const Names& names) {
    std::vector<float> x;
    std::string_view found;
    for (const std::string_view name : names) {
      const Safetensors* file = find_(prefix_ + std::string(name));
      if (!file) continue;
      if (!found.empty()) fail(*file, name, "is there beside '" + prefix_ + std::string(found) + "': one is needed");
      found = name;
      x = read(*file, name);
    }
    return x;
  }
  template <class Names>
  void pass(const Names& names) {
    for (const std::string_view name : names) used_.insert(prefix_ + std::string(name));
  }

 private:
  [[noreturn]] void fail(const Safetensors& file, std::string_view name, const std::string& why) const {
    refuse(file.file().string(), "tensor '" + prefix_ + std::string(name) + "' " + why);
  }

  std::vector<float> read(const Safetensors& file, std::string_view name) {
    const std::string whole = prefix_ + std::string(name);
    const HostTensor outline = file.outline(whole);
    if (outline.dtype == Dtype::fp8_e4m3) fail(file, name, "is fp8, a float is needed");
    if (outline.size() != 1 && outline.size() != heads_)
      fail(file, name,
           "has shape " + shape_text(outline.shape) + ", expected one element or one for each of " +
               std::to_string(heads_) + " heads");
    used_.insert(whole);
    if (!data_) return {};
    const std::vector<float> x = file.tensor(whole).to_f32();
    for (size_t i = 0; i < x.size(); ++i)
      if (!(x[i] > 0) || !std::isfinite(x[i]))
        fail(file, name,
             "is " + std::to_string(x[i]) + " at element " + std::to_string(i) + ", scales must be finite and above 0");
    return x;
  }

  const FindTensor& find_;
  const std::string& prefix_;
  const int64_t heads_;
  const bool data_;
  std::unordered_set<std::string>& used_;
};

template <class Names>
bool among(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

bool is_cache_scale(std::string_view role) {
  return among(kQuery, role) || among(kKey, role) || among(kValue, role) || among(kBoth, role) || among(kPassed, role);
}

StoredScales read_cache_scales(const FindTensor& find, const std::string& prefix, int64_t heads, bool data,
                               std::unordered_set<std::string>& used) {
  Reader reader(find, prefix, heads, data, used);
  StoredScales s;
  s.q = reader.one_of(kQuery);
  s.k = reader.one_of(kKey);
  s.v = reader.one_of(kValue);
  const std::vector<float> both = reader.one_of(kBoth);
  if (s.k.empty()) s.k = both;
  if (s.v.empty()) s.v = both;
  reader.pass(kPassed);
  return s;
}

}  // namespace mla
