#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/core/convert.cpp"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"
//
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/core/narrow-inl.hpp"
#include "mla/quant.hpp"

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

void ToF16(const float* x, f16* y, int64_t n) {
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::Rebind<uint16_t, decltype(df)> d16;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto v = hn::LoadU(df, x + i);
    const auto payload = hn::And(hn::ShiftRight<13>(hn::BitCast(du, v)), hn::Set(du, 0x1ff));
    const auto bits = Narrow<10, 15>(df, v, 0x477ff000, 0x7c00, hn::Or(payload, hn::Set(du, 0x7e00)));
    hn::StoreU(hn::TruncateTo(d16, bits), d16, reinterpret_cast<uint16_t*>(y + i));
  }
  for (; i < n; ++i) y[i] = to_f16(x[i]);
}

void ToFp8(const float* x, fp8_e4m3* y, int64_t n, float scale) {
  const hn::ScalableTag<float> df;
  const hn::Rebind<uint8_t, decltype(df)> d8;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto v = hn::Div(hn::LoadU(df, x + i), hn::Set(df, scale));
    hn::StoreU(hn::TruncateTo(d8, NarrowE4m3(df, v)), d8, reinterpret_cast<uint8_t*>(y + i));
  }
  for (; i < n; ++i) y[i] = to_fp8_e4m3(x[i] / scale);
}

float LargestOf(const float* x, int64_t n) { return LargestMagnitude(x, n); }

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

// As FromFp8 below: f16's low bits are the value times 2^-112; infinity and NaN keep their mantissa.
void FromF16(const f16* x, float* y, int64_t n) {
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::Rebind<uint16_t, decltype(df)> d16;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto u = hn::PromoteTo(du, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(x + i)));
    const auto magnitude = hn::ShiftLeft<13>(hn::And(u, hn::Set(du, 0x7fff)));
    const auto sign = hn::ShiftLeft<16>(hn::And(u, hn::Set(du, 0x8000)));
    const auto value = hn::BitCast(du, hn::Mul(hn::BitCast(df, magnitude), hn::Set(df, 0x1p112f)));
    const auto special = hn::Gt(magnitude, hn::Set(du, 0x0f7fffff));
    const auto bits = hn::IfThenElse(special, hn::Or(magnitude, hn::Set(du, 0x7f800000)), value);
    hn::StoreU(hn::BitCast(df, hn::Or(bits, sign)), df, y + i);
  }
  for (; i < n; ++i) y[i] = to_float(x[i]);
}

// e4m3's seven low bits, moved to f32's exponent and mantissa, are the value times 2^-120, subnormals included: one
// multiplication restores it. Only the NaN code needs care.
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

// As FromFp8: e2m1's three low bits, moved to f32's exponent and mantissa, are the value times 2^-126.
void FromE2m1(const uint8_t* x, const float* scale, float* y, int64_t n) {
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::Rebind<uint8_t, decltype(df)> d8;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df)), half = (n + 1) / 2;
  const auto value = [&](auto code, int64_t at) {
    const auto magnitude = hn::ShiftLeft<22>(hn::And(code, hn::Set(du, 7)));
    const auto sign = hn::ShiftLeft<28>(hn::And(code, hn::Set(du, 8)));
    const auto v = hn::BitCast(du, hn::Mul(hn::BitCast(df, magnitude), hn::Set(df, 0x1p126f)));
    return hn::Mul(hn::BitCast(df, hn::Or(v, sign)), hn::LoadU(df, scale + at));
  };
  int64_t i = 0;
  for (; i + lanes <= n - half; i += lanes) {
    const auto codes = hn::PromoteTo(du, hn::LoadU(d8, x + i));
    hn::StoreU(value(codes, i), df, y + i);
    hn::StoreU(value(hn::ShiftRight<4>(codes), half + i), df, y + half + i);
  }
  for (; i < half; ++i) {
    y[i] = from_e2m1(x[i] & 15) * scale[i];
    if (half + i < n) y[half + i] = from_e2m1(x[i] >> 4) * scale[half + i];
  }
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mla::cpu {
HWY_EXPORT(ToBf16);
HWY_EXPORT(ToF16);
HWY_EXPORT(ToFp8);
HWY_EXPORT(FromBf16);
HWY_EXPORT(FromF16);
HWY_EXPORT(FromFp8);
HWY_EXPORT(LargestOf);
HWY_EXPORT(FromE2m1);

void convert(const float* x, bf16* y, int64_t n) { HWY_DYNAMIC_DISPATCH(ToBf16)(x, y, n); }
void convert(const float* x, f16* y, int64_t n) { HWY_DYNAMIC_DISPATCH(ToF16)(x, y, n); }
void convert(const float* x, fp8_e4m3* y, int64_t n, float scale) { HWY_DYNAMIC_DISPATCH(ToFp8)(x, y, n, scale); }
void convert(const bf16* x, float* y, int64_t n) { HWY_DYNAMIC_DISPATCH(FromBf16)(x, y, n); }
void convert(const f16* x, float* y, int64_t n) { HWY_DYNAMIC_DISPATCH(FromF16)(x, y, n); }
void convert(const fp8_e4m3* x, float* y, int64_t n, float scale) { HWY_DYNAMIC_DISPATCH(FromFp8)(x, y, n, scale); }
float largest_magnitude(const float* x, int64_t n) { return HWY_DYNAMIC_DISPATCH(LargestOf)(x, n); }
void convert_e2m1(const uint8_t* x, const float* scale, float* y, int64_t n) {
  HWY_DYNAMIC_DISPATCH(FromE2m1)(x, scale, y, n);
}

}  // namespace mla::cpu
#endif
