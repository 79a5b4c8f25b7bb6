#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/core/weighted.cpp"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"
//
#include "backend/cpu/core/weighted.hpp"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void Add(float* to, float w, const float* x, int64_t n) {
  const hn::ScalableTag<float> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  const auto weight = hn::Set(df, w);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    hn::StoreU(hn::Add(hn::LoadU(df, to + i), hn::Mul(weight, hn::LoadU(df, x + i))), df, to + i);
  for (; i < n; ++i) to[i] += w * x[i];
}

void Set(float* to, float a, const float* x, float b, const float* y, int64_t n) {
  const hn::ScalableTag<float> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  const auto wa = hn::Set(df, a), wb = hn::Set(df, b);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    hn::StoreU(hn::Add(hn::Mul(wa, hn::LoadU(df, x + i)), hn::Mul(wb, hn::LoadU(df, y + i))), df, to + i);
  for (; i < n; ++i) to[i] = a * x[i] + b * y[i];
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mla::cpu {
HWY_EXPORT(Add);
HWY_EXPORT(Set);

void add_weighted(float* to, float w, const float* x, int64_t n) { HWY_DYNAMIC_DISPATCH(Add)(to, w, x, n); }
void set_weighted(float* to, float a, const float* x, float b, const float* y, int64_t n) {
  HWY_DYNAMIC_DISPATCH(Set)(to, a, x, b, y, n);
}

}  // namespace mla::cpu
#endif
