// One group of a quantised output, element by element: what every faster form must equal bit for bit.
#pragma once

#include <algorithm>

#include "cache/codec.hpp"
#include "core/quantised_weights.hpp"
#include "mla/quant.hpp"

namespace mla::ops {

/// A scale as the codes use it and as it is stored: an f32's bits, or one byte.
struct GroupScale {
  float value = 0;
  uint32_t stored = 0;
};

/// Of fp8_groups or nvfp4.
inline GroupScale group_scale(const OutputSpec& spec, float amax) {
  if (spec.kind == OutputKind::nvfp4) {
    const fp8_e4m3 s = to_fp8_e4m3(spec.global_scale * amax / 6.0f);
    return {to_float(s), s.bits};
  }
  const float s = std::max(amax, 1e-10f) / 448.0f;
  if (spec.form == ScaleForm::f32) return {s, std::bit_cast<uint32_t>(s)};
  const int exponent = cache::ceil_log2(s);
  const float power = cache::power_of_two(exponent);
  if (spec.form == ScaleForm::packed_ue8m0) return {power, static_cast<uint32_t>(exponent + 127)};
  return {power, std::bit_cast<uint32_t>(power)};
}

/// Of mxfp4's group: ue8m0, NaN if an element is no finite number.
inline GroupScale mx_group_scale(const float* x, int64_t n) {
  const bool finite = std::all_of(x, x + n, [](float v) { return std::isfinite(v); });
  const uint8_t code = finite ? mx_scale(cache::largest_magnitude(x, n)) : 255;
  return {e8m0_value(code), code};
}

/// fp8_groups' scales are f32 unless packed; all others take a byte.
inline bool scale_is_f32(const OutputSpec& spec) {
  return spec.kind == OutputKind::fp8_groups && spec.form != ScaleForm::packed_ue8m0;
}

inline void store_scale(const OutputSpec& spec, const GroupScale& s, std::byte* to) {
  if (scale_is_f32(spec)) cache::put(to, 0, s.stored);
  else cache::put(to, 0, static_cast<uint8_t>(s.stored));
}

/// n e2m1 codes of x * g / s, two a byte, 0 where s is 0 or NaN; the last byte's high nibble is 0 when n is odd.
inline void encode_e2m1(const float* x, std::byte* codes, int64_t n, float g, float s) {
  auto code = [&](int64_t i) { return i < n && s > 0 ? to_e2m1(x[i] * g / s) : uint8_t{0}; };
  for (int64_t i = 0; i < n; i += 2) cache::put(codes, i / 2, static_cast<uint8_t>(code(i) | code(i + 1) << 4));
}

/// n <= group_size() elements: codes and scale.
inline void encode_group(const OutputSpec& spec, const float* x, int64_t n, std::byte* codes, std::byte* scale) {
  const bool mx = spec.kind == OutputKind::mxfp4;
  const GroupScale s = mx ? mx_group_scale(x, n) : group_scale(spec, cache::largest_magnitude(x, n));
  store_scale(spec, s, scale);
  if (spec.is_e2m1()) encode_e2m1(x, codes, n, mx ? 1.0f : spec.global_scale, s.value);
  else cache::encode_e4m3(x, codes, n, s.value);
}

/// Group places of a scale tensor's rows: the groups, rounded up to four where four share a word.
inline int64_t padded_groups(const QuantizedView& y) {
  const int64_t groups = y.spec.groups(y.width);
  return scale_is_f32(y.spec) ? groups : (groups + 3) / 4 * 4;
}

/// Rows of a scale tensor.
inline int64_t padded_tokens(const QuantizedView& y) {
  const int64_t to = y.spec.is_e2m1() ? 128 : y.spec.layout == ScaleLayout::tma_aligned ? 4 : 1;
  return (y.tokens + to - 1) / to * to;
}

}  // namespace mla::ops
