// f32 vectors to narrow floats, and the largest magnitude that their scales follow from. Included once for each Highway
// target.
#if defined(MLA_NARROW_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef MLA_NARROW_INL_HPP
#undef MLA_NARROW_INL_HPP
#else
#define MLA_NARROW_INL_HPP
#endif

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// f16 and e4m3 from f32, both the same way: normal numbers round by an integer addition; below the smallest normal
// one, adding a power of two whose last place is the subnormal step lets the FPU round; at `limit` and above comes
// `overflow`.
template <int kMantissa, int kBias, class DF, class V, class DU = hn::RebindToUnsigned<DF>, class U = hn::Vec<DU>>
HWY_INLINE U Narrow(DF df, V x, uint32_t limit, uint32_t overflow, U nan) {
  const DU du;
  constexpr int kDropped = 23 - kMantissa;
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
  return hn::Or(y, hn::ShiftLeft < kMantissa == 3 ? 7 : 15 > (sign));
}

template <class DF, class V>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<DF>> NarrowE4m3(DF df, V x) {
  return Narrow<3, 7>(df, x, 0x43e00000, 0x7e, hn::Set(hn::RebindToUnsigned<DF>(), 0x7f));
}

// e2m1 likewise; what lies past 6, infinity and NaN too, has larger codes and saturates by a minimum. NaN loses its
// sign.
template <class DF, class V, class DU = hn::RebindToUnsigned<DF>, class U = hn::Vec<DU>>
HWY_INLINE U NarrowE2m1(DF df, V x) {
  const DU du;
  constexpr uint32_t kMagic = 0x4a800000;  // 2^22: its last place is 0.5
  const U bits = hn::BitCast(du, x), a = hn::And(bits, hn::Set(du, 0x7fffffff));
  const U odd = hn::And(hn::ShiftRight<22>(a), hn::Set(du, 1));
  const U normal = hn::ShiftRight<22>(hn::Add(hn::Add(a, odd), hn::Set(du, 0x1fffffu - 0x3f000000u)));
  const U small =
      hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(df, a), hn::BitCast(df, hn::Set(du, kMagic)))), hn::Set(du, kMagic));
  const U magnitude = hn::Min(hn::IfThenElse(hn::Lt(a, hn::Set(du, 0x3f800000)), small, normal), hn::Set(du, 7));
  const U sign = hn::And(hn::ShiftRight<28>(bits), hn::Set(du, 8));
  return hn::Or(magnitude, hn::IfThenZeroElse(hn::Gt(a, hn::Set(du, 0x7f800000)), sign));
}

// NaN does not count, infinity counts as the largest finite number. Magnitudes order as their bits do, and integers
// have the shorter chain; NaN lies above infinity there, and is looked for again only where one was met.
HWY_INLINE float LargestMagnitude(const float* x, int64_t n) {
  constexpr int32_t kInfinity = 0x7f800000;
  const hn::ScalableTag<int32_t> di;
  const hn::RebindToFloat<decltype(di)> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(di));
  const auto magnitude = hn::Set(di, 0x7fffffff);
  auto largest = hn::Zero(di);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    largest = hn::Max(largest, hn::And(hn::BitCast(di, hn::LoadU(df, x + i)), magnitude));
  int32_t bits = hn::GetLane(hn::MaxOfLanes(di, largest));
  if (bits > kInfinity) bits = 0, i = 0;
  for (; i < n; ++i) {
    const int32_t a = std::bit_cast<int32_t>(x[i]) & 0x7fffffff;
    if (a > bits && a <= kInfinity) bits = a;
  }
  return std::min(std::bit_cast<float>(bits), FLT_MAX);
}

// Bits of the largest magnitude, NaN's above infinity's; n a multiple of 16.
HWY_INLINE uint32_t LargestBits(const float* x, int64_t n) {
  const hn::CappedTag<int32_t, 16> di;
  const hn::RebindToFloat<decltype(di)> df;
  const auto magnitude = hn::Set(di, 0x7fffffff);
  auto largest = hn::Zero(di);
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(hn::Lanes(di)))
    largest = hn::Max(largest, hn::And(hn::BitCast(di, hn::LoadU(df, x + i)), magnitude));
  return static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di, largest)));
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
