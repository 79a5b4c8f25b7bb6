// f32 vectors to narrow floats, and the largest magnitude that their scales follow from. Included once for each Highway
// target.
#if defined(MLA_NARROW_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef MLA_NARROW_INL_HPP
#undef MLA_NARROW_INL_HPP
#else
#define MLA_NARROW_INL_HPP
#endif

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// f16, e4m3 and e2m1 from f32, all the same way: normal numbers round by an integer addition; below the smallest normal
// one, adding a power of two whose last place is the subnormal step lets the FPU round; at `limit` and above comes
// `overflow`.
template <int kMantissa, int kBias, class DF, class V, class DU = hn::RebindToUnsigned<DF>, class U = hn::Vec<DU>>
HWY_INLINE U Narrow(DF df, V x, uint32_t limit, uint32_t overflow, U nan) {
  const DU du;
  constexpr int kDropped = 23 - kMantissa;
  constexpr int kExponent = kBias == 1 ? 2 : kBias == 7 ? 4 : 5;
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;
  constexpr uint32_t kMagic = static_cast<uint32_t>(128 - kBias + kDropped)
                              << 23;  // its last place: 2^(1 - bias - mantissa)
  const U a = hn::And(hn::BitCast(du, x), hn::Set(du, 0x7fffffff));
  const U odd = hn::And(hn::ShiftRight<kDropped>(a), hn::Set(du, 1));
  const U rounded = hn::Add(a, hn::Add(odd, hn::Set(du, (1u << (kDropped - 1)) - 1)));
  const U normal = hn::ShiftRight<kDropped>(hn::Sub(rounded, hn::Set(du, static_cast<uint32_t>(127 - kBias) << 23)));
  const U small =
      hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(df, a), hn::BitCast(df, hn::Set(du, kMagic)))), hn::Set(du, kMagic));
  U y = hn::IfThenElse(hn::Lt(a, hn::Set(du, kSmallestNormal)), small, normal);
  y = hn::IfThenElse(hn::Gt(a, hn::Set(du, limit - 1)), hn::Set(du, overflow), y);
  y = hn::IfThenElse(hn::Gt(a, hn::Set(du, 0x7f800000)), nan, y);
  const U sign = hn::ShiftRight<31>(hn::BitCast(du, x));
  return hn::Or(y, hn::ShiftLeft<kMantissa + kExponent>(sign));
}

template <class DF, class V>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<DF>> NarrowE4m3(DF df, V x) {
  return Narrow<3, 7>(df, x, 0x43e00000, 0x7e, hn::Set(hn::RebindToUnsigned<DF>(), 0x7f));
}

// NaN does not count, infinity counts as the largest finite number.
HWY_INLINE float LargestMagnitude(const float* x, int64_t n) {
  const hn::ScalableTag<float> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  auto largest = hn::Zero(df);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto a = hn::Abs(hn::LoadU(df, x + i));
    largest = hn::IfThenElse(hn::Gt(a, largest), a, largest);
  }
  float result = hn::GetLane(hn::MaxOfLanes(df, largest));
  for (; i < n; ++i) {
    const float a = std::fabs(x[i]);
    if (a > result) result = a;
  }
  return std::min(result, FLT_MAX);
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
