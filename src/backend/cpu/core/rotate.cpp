#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/core/rotate.cpp"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"
//
#include "backend/cpu/core/rotate.hpp"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void Rotate(float* x, const float* cos, const float* sin, int64_t pairs, bool interleaved) {
  const hn::ScalableTag<float> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  for (; i + lanes <= pairs; i += lanes) {
    const auto c = hn::LoadU(df, cos + i), s = hn::LoadU(df, sin + i);
    auto a = hn::Zero(df), b = hn::Zero(df);
    if (interleaved) {
      hn::LoadInterleaved2(df, x + 2 * i, a, b);
    } else {
      a = hn::LoadU(df, x + i);
      b = hn::LoadU(df, x + pairs + i);
    }
    const auto first = hn::Sub(hn::Mul(a, c), hn::Mul(b, s)), second = hn::Add(hn::Mul(b, c), hn::Mul(a, s));
    if (interleaved) {
      hn::StoreInterleaved2(first, second, df, x + 2 * i);
    } else {
      hn::StoreU(first, df, x + i);
      hn::StoreU(second, df, x + pairs + i);
    }
  }
  for (; i < pairs; ++i) {
    float& a = x[interleaved ? 2 * i : i];
    float& b = x[interleaved ? 2 * i + 1 : i + pairs];
    const float rotated = a * cos[i] - b * sin[i];
    b = b * cos[i] + a * sin[i];
    a = rotated;
  }
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mla::cpu {
HWY_EXPORT(Rotate);

void rotate_row(float* x, const float* cos, const float* sin, int64_t pairs, bool interleaved) {
  HWY_DYNAMIC_DISPATCH(Rotate)(x, cos, sin, pairs, interleaved);
}

}  // namespace mla::cpu
#endif
