#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/quantize/kernel.cpp"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"
//
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/core/narrow-inl.hpp"
#include "backend/cpu/quantize/kernel.hpp"
#include "ops/quantize/codec.hpp"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {

// Whole groups, 64 or 128: multiples of every vector.
void Fp8Groups(const QuantizedView& y, int64_t row, int64_t group, const float* x, int64_t n, std::byte* codes) {
  const hn::ScalableTag<float> df;
  const hn::Rebind<uint8_t, decltype(df)> d8;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df)), size = y.spec.group;
  for (int64_t i = 0; i < n; i += size, ++group) {
    const ops::GroupScale s = ops::group_scale(y.spec, LargestMagnitude(x + i, size));
    ops::store_scale(y.spec, s, y.scale(row, group));
    uint8_t* to = reinterpret_cast<uint8_t*>(codes + i);
    auto encode = [&](auto&& scaled) {
      for (int64_t j = 0; j < size; j += lanes)
        hn::StoreU(hn::TruncateTo(d8, NarrowE4m3(df, scaled(hn::LoadU(df, x + i + j)))), d8, to + j);
    };
    if (y.spec.form == ScaleForm::f32) {
      const auto scale = hn::Set(df, s.value);
      encode([&](auto v) { return hn::Div(v, scale); });
    } else {  // the inverse of a power of two is exact, and so the product rounds as the quotient does
      const auto inverse = hn::Set(df, 1.0f / s.value);
      encode([&](auto v) { return hn::Mul(v, inverse); });
    }
  }
}

#if HWY_TARGET == HWY_SCALAR
void Nvfp4(const QuantizedView& y, int64_t row, int64_t group, const float* x, int64_t n, std::byte* codes) {
  for (int64_t i = 0; i < n; i += 16) ops::encode_group(y.spec, x + i, 16, codes + i / 2, y.scale(row, group + i / 16));
}
#else
void Nvfp4(const QuantizedView& y, int64_t row, int64_t group, const float* x, int64_t n, std::byte* codes) {
  constexpr int64_t kSize = 16;
  const hn::CappedTag<float, kSize> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::RepartitionToWide<decltype(du)> d64;
  const hn::Rebind<uint8_t, decltype(d64)> d8;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  const auto g = hn::Set(df, y.spec.global_scale);
  for (int64_t i = 0; i < n; i += kSize, ++group) {
    const ops::GroupScale s = ops::group_scale(y.spec, LargestMagnitude(x + i, kSize));
    ops::store_scale(y.spec, s, y.scale(row, group));
    uint8_t* to = reinterpret_cast<uint8_t*>(codes + i / 2);
    const bool zero = s.value == 0;
    const auto scale = hn::Set(df, zero ? 1.0f : s.value);
    for (int64_t j = 0; j < kSize; j += lanes) {
      const auto v = hn::Div(hn::Mul(hn::LoadU(df, x + i + j), g), scale);
      const auto six = hn::Set(du, 7);
      auto code = Narrow<1, 1>(df, v, 0x40c00000, 7, six);
      code = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), six, code);  // drops its sign
      if (zero) code = hn::Zero(du);
      const auto pair = hn::BitCast(d64, code);  // lower code in the lower half
      hn::StoreU(hn::TruncateTo(d8, hn::Or(pair, hn::ShiftRight<28>(pair))), d8, to + j / 2);
    }
  }
}
#endif

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mla::cpu {
HWY_EXPORT(Fp8Groups);
HWY_EXPORT(Nvfp4);

void quantize_part(const QuantizedView& y, int64_t row, int64_t column, const float* x, int64_t n) {
  std::byte* codes = y.codes(row) + y.spec.row_bytes(column);
  if (y.spec.kind == OutputKind::fp8) {
    convert(x, reinterpret_cast<fp8_e4m3*>(codes), n, y.spec.scale);
    return;
  }
  const int64_t size = y.spec.group_size(), group = column / size, whole = n / size * size;
  if (y.spec.kind == OutputKind::nvfp4) HWY_DYNAMIC_DISPATCH(Nvfp4)(y, row, group, x, whole, codes);
  else HWY_DYNAMIC_DISPATCH(Fp8Groups)(y, row, group, x, whole, codes);
  if (whole < n)
    ops::encode_group(y.spec, x + whole, n - whole, codes + y.spec.row_bytes(whole),
                      y.scale(row, group + whole / size));
}

}  // namespace mla::cpu
#endif
