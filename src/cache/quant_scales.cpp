#include "mla/quant_scales.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <string>

#include "mla/error.hpp"

namespace mla {
namespace {

class Largest {
 public:
  explicit Largest(const char* what) : what_(what) {}
  template <class... I>
  void see(float x, I... index) {
    if (std::isinf(x)) {
      std::string at;
      ((at += (at.empty() ? "" : ", ") + std::to_string(index)), ...);
      throw InputError("calc_kv_scales: " + std::string(what_) + " [" + at + "] is infinite");
    }
    if (std::fabs(x) > amax_) amax_ = std::fabs(x);
  }
  float over(float constant) const { return amax_ == 0 ? 1.0f : std::max(amax_ / constant, FLT_MIN); }

 private:
  const char* what_;
  float amax_ = 0;
};

void require(const char* name, float constant) {
  if (!(constant > 0) || !std::isfinite(constant))
    throw InputError("calc_kv_scales: constant " + std::string(name) + " is " + std::to_string(constant) +
                     ", must be finite and above 0");
}

}  // namespace

KvScales calc_kv_scales(View<const float, Token, Head, QueryKey> q, View<const float, Token, Latent> kv_c,
                        const KvScaleConstants& constants) {
  require("q", constants.q);
  require("k", constants.k);
  require("v", constants.v);
  Largest query("q"), latent("kv_c");
  for (int64_t t = 0; t < q.extent<Token>(); ++t)
    for (int64_t h = 0; h < q.extent<Head>(); ++h)
      for (int64_t i = 0; i < q.extent<QueryKey>(); ++i) query.see(q(t, h, i), t, h, i);
  for (int64_t t = 0; t < kv_c.extent<Token>(); ++t)
    for (int64_t i = 0; i < kv_c.extent<Latent>(); ++i) latent.see(kv_c(t, i), t, i);
  return {query.over(constants.q), latent.over(constants.k), latent.over(constants.v)};
}

std::optional<float> latent_k_scale(const StoredScales& scales) {
  if (scales.k.empty()) return {};
  for (const float x : scales.k)
    if (x != scales.k[0])
      throw UnsupportedError("k_scale has " + std::to_string(scales.k.size()) + " elements, " +
                             std::to_string(scales.k[0]) + " and " + std::to_string(x) +
                             " among them: a latent cache has one scale for all heads");
  return scales.k[0];
}

}  // namespace mla
