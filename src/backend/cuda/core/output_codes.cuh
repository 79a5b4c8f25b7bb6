// Codes and scales of quantised outputs, for the kernels that write them. Bits as ops/quantize/codec.hpp has them.
#pragma once

#include <cstdint>

#include "backend/cuda/core/convert.cuh"
#include "mla/quant.hpp"
#include "ops/quantize/codec.hpp"

namespace mla::cuda {

/// Where scales lie, in words of 4 bytes: an f32, or the bytes of four groups. As OutputSpec::scale_offset.
struct ScalePlaces {
  uint32_t* data = nullptr;
  int64_t row = 0, word = 0;  // from one to the next
  int32_t tiles = 0;          // e2m1: words of a row, otherwise 0
  __device__ uint32_t* at(int64_t r, int64_t w) const {
    if (tiles == 0) return data + r * row + w * word;
    return data + ((r >> 7) * tiles + w) * 128 + (r & 31) * 4 + (r >> 5 & 3);
  }
};

inline bool bytes_of_groups(const OutputSpec& spec) { return spec.group_size() > 0 && !ops::scale_is_f32(spec); }

inline ScalePlaces scale_places(const QuantizedView& y) {
  ScalePlaces s;
  if (y.spec.group_size() == 0) return s;
  const bool bytes = bytes_of_groups(y.spec);
  const auto at = [&](int64_t row, int64_t group) { return y.spec.scale_offset(y.tokens, y.width, row, group) / 4; };
  s.data = reinterpret_cast<uint32_t*>(y.scales);
  s.row = at(1, 0);
  s.word = at(0, bytes ? 4 : 1);
  if (y.spec.is_e2m1()) s.tiles = static_cast<int32_t>(ops::padded_groups(y) / 4);
  return s;
}

/// e2m1 of |q|: least of the roundings to multiples of 1/2, 1 and 2, each counted in codes from where it begins. The
/// sum with 1.5 * 2^23 rounds to a whole number, ties to even, in its low bits. Past 6.5 it must be told to saturate.
template <bool saturate>
__device__ inline uint32_t e2m1_bits(float q) {
  constexpr float kMagic = 12582912.0f;
  const float a = fabsf(q), high = __fmaf_rn(a, 0.5f, kMagic + 4);
  return __float_as_uint(
      fminf(fminf(__fmaf_rn(a, 2.0f, kMagic), __fadd_rn(a, kMagic + 2)), saturate ? fminf(high, kMagic + 7) : high));
}

/// p / 6 by 1 / 6 in two parts. It may be off by a unit in the last place, but is not where e4m3 would see it: tried
/// with every mantissa.
__device__ inline float over_six(float p) { return __fmaf_rn(p, 0x1.555554p-3f, __fmul_rn(p, 0x1.555556p-27f)); }
/// An nvfp4 group's scale; amax is its largest magnitude, infinity too.
__device__ inline fp8_e4m3 nvfp4_scale(float global_scale, float amax) {
  return narrow<fp8_e4m3>(over_six(global_scale * fminf(amax, FLT_MAX)));
}

/// Up to eight e2m1 codes of x * g / s, the first in the low bits; inverse is 1 / s rounded to nearest, s above 0.
/// plain: no NaN among them, and no quotient above 6.5.
template <bool plain, int n>
__device__ inline uint32_t encode_e2m1(const float (&x)[n], float g, float s, float inverse) {
  static_assert(n <= 8);
  uint32_t word = 0;
#pragma unroll
  for (int e = n - 1; e >= 0; --e) {
    // NaN becomes the largest; past 6 * 448 all is 6. One step of the remainder puts a quotient on the right side of
    // every boundary: those times s have few bits, and no number lies closer to one than its own last place.
    float p = __fmul_rn(x[e], g);
    if constexpr (!plain) p = fmaxf(fminf(p, 4096.0f), -4096.0f);
    float q = __fmul_rn(p, inverse);
    q = __fmaf_rn(__fmaf_rn(-q, s, p), inverse, q);
    word = word << 4 | (e2m1_bits<!plain>(q) & 7u) | (__float_as_uint(p) >> 28 & ~7u);
  }
  return word;
}

}  // namespace mla::cuda
