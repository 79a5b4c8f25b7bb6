#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/core/convert.cpp"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"
//
#include "backend/cpu/core/convert.hpp"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void ToBf16(const float* x, bf16* y, int64_t n) {
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::Rebind<uint16_t, decltype(df)> d16;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto u = hn::BitCast(du, hn::LoadU(df, x + i));
    const auto high = hn::ShiftRight<16>(u);
    const auto rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(hn::And(high, hn::Set(du, 1)), hn::Set(du, 0x7fff))));
    const auto nan = hn::Gt(hn::And(u, hn::Set(du, 0x7fffffff)), hn::Set(du, 0x7f800000));
    const auto bits = hn::IfThenElse(nan, hn::Or(high, hn::Set(du, 0x40)), rounded);
    hn::StoreU(hn::TruncateTo(d16, bits), d16, reinterpret_cast<uint16_t*>(y + i));
  }
  for (; i < n; ++i) y[i] = to_bf16(x[i]);
}

void FromBf16(const bf16* x, float* y, int64_t n) {
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::Rebind<uint16_t, decltype(df)> d16;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto u = hn::PromoteTo(du, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(x + i)));
    hn::StoreU(hn::BitCast(df, hn::ShiftLeft<16>(u)), df, y + i);
  }
  for (; i < n; ++i) y[i] = to_float(x[i]);
}

// e4m3's seven low bits, moved to f32's exponent and mantissa, are the value times 2^-120, subnormals included: one multiplication
// restores it. Only the NaN code needs care.
void FromFp8(const fp8_e4m3* x, float* y, int64_t n, float scale) {
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::Rebind<uint8_t, decltype(df)> d8;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto u = hn::PromoteTo(du, hn::LoadU(d8, reinterpret_cast<const uint8_t*>(x + i)));
    const auto magnitude = hn::And(u, hn::Set(du, 0x7f));
    const auto sign = hn::ShiftLeft<24>(hn::And(u, hn::Set(du, 0x80)));
    const auto value = hn::Mul(hn::BitCast(df, hn::ShiftLeft<20>(magnitude)), hn::Set(df, 0x1p120f));
    const auto nan = hn::Eq(magnitude, hn::Set(du, 0x7f));
    const auto bits = hn::IfThenElse(nan, hn::Set(du, 0x7fc00000), hn::BitCast(du, value));
    hn::StoreU(hn::Mul(hn::BitCast(df, hn::Or(bits, sign)), hn::Set(df, scale)), df, y + i);
  }
  for (; i < n; ++i) y[i] = to_float(x[i]) * scale;
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mla::cpu {
HWY_EXPORT(ToBf16);
HWY_EXPORT(FromBf16);
HWY_EXPORT(FromFp8);

void convert(const float* x, bf16* y, int64_t n) { HWY_DYNAMIC_DISPATCH(ToBf16)(x, y, n); }
void convert(const bf16* x, float* y, int64_t n) { HWY_DYNAMIC_DISPATCH(FromBf16)(x, y, n); }
void convert(const fp8_e4m3* x, float* y, int64_t n, float scale) { HWY_DYNAMIC_DISPATCH(FromFp8)(x, y, n, scale); }

}  // namespace mla::cpu
#endif
