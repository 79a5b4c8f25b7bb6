// Finished rows of attend_expanded's kernels as codes and scales of a quantised output, straight from the registers of
// a math warpgroup: the bits that `quantize` makes of f32 rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/scale_places.cuh"
#include "backend/cuda/core/warpgroup.cuh"
#include "backend/cuda/sm90/attend_expanded/attend_expanded.hpp"
#include "backend/cuda/sm90/attend_expanded/rows.cuh"
#include "mla/error.hpp"
#include "mla/quant.hpp"
#include "ops/quantize/op.hpp"

namespace mla::cuda::sm90 {

/// In place of a kernel's type of outputs: rows of items that are the rows' last part become codes, others f32.
struct Codes {};

/// Part of a kernel's parameters.
struct OutputCodes {
  enum class Form : uint8_t { fp8, groups_f32, groups_power, groups_packed };
  uint8_t* codes = nullptr;
  int64_t row = 0;  // bytes
  ScalePlaces scales;
  float number = 1;   // scale
  int32_t group = 0;  // elements of a scale
  Form form = Form::fp8;
};

inline void check_codes(std::string_view op, const QuantizedView& y, Dtype out, int64_t tokens, int64_t heads,
                        int64_t value) {
  ops::check_quantized_heads(op, y, tokens, heads, value);
  if (!writes_codes(y, value))
    throw UnsupportedError(std::string(op) + ": output " + to_string(y.spec) +
                           " in rows that do not begin at multiples of 8 bytes, or of a format that this kernel lacks");
  if (out != Dtype::f32)
    throw UnsupportedError(std::string(op) + ": out is " + std::string(to_string(out)) +
                           "; beside a quantised output it must be f32");
}

inline OutputCodes output_codes(const QuantizedView& y) {
  using Form = OutputCodes::Form;
  OutputCodes c{.codes = reinterpret_cast<uint8_t*>(y.data), .row = y.row_stride, .scales = scale_places(y)};
  c.number = y.spec.scale;
  c.group = static_cast<int32_t>(y.spec.group_size());
  if (y.spec.kind == OutputKind::fp8_groups)
    c.form = y.spec.form == ScaleForm::f32            ? Form::groups_f32
             : y.spec.form == ScaleForm::power_of_two ? Form::groups_power
                                                      : Form::groups_packed;
  return c;
}

/// x / s rounded once, wherever e4m3 looks, for many x: x high + x low with 1 / s = (high + low)(1 + 2^-43). It could
/// only be seen where x / s lies that close to the border between an f32 number in the middle of two codes and its
/// neighbour. Middles have 5 bits, and so, with s = S 2^n and S of 24 bits, x is at least S mod 2^20, or its
/// complement, in 2^49 away from s times a border: `exact` is false where that is less than 2^-42.
struct Inverse {
  float s, high, low;
  bool exact;
  Inverse() = default;
  __device__ __forceinline__ Inverse(float scale, float most) {
    s = scale;
    high = reciprocal_approx(s);
    // From below, so that low is not negative: a zero keeps its sign.
    if (__fmaf_rn(-high, s, 1.0f) < 0) high = __uint_as_float(__float_as_uint(high) - 1);
    const float rest = __fmaf_rn(-high, s, 1.0f);
    low = fmaxf(__fmul_rn(high, rest), FLT_MIN);  // nor 0, which an infinity would be multiplied by
    const bool far = ((__float_as_uint(s) + 128) & 0xfffff) > 256;
    exact = most < 0x1p66f && s > 0x1p-60f && s < 0x1p60f && (rest == 0.0f || far);
  }
  __device__ __forceinline__ float times(float x) const { return __fmaf_rn(x, high, __fmul_rn(x, low)); }
};

/// Where a thread's two rows go; a row that is not valid is not stored.
struct CodeRows {
  int64_t row[2];
  bool valid[2];
};

/// e4m3 of rows in groups of 64 or 128 columns or with one scale for all. x[4 j + 2 h + e] is column 8 j + 2 quad + e
/// of row h.
template <int n>
__device__ __forceinline__ void store_e4m3(const OutputCodes& c, const float (&x)[n], const CodeRows& rows,
                                           int32_t head) {
  using Form = OutputCodes::Form;
  constexpr int value = 2 * n;
  const int quad = threadIdx.x % 4;
  const bool groups = c.form != Form::fp8, whole = c.group == 128;
#pragma unroll
  for (int column = 0; column < value; column += 128) {
    // First what all columns of both rows wait for, side by side.
    float most[2][2];  // of 64 columns
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float part[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 16; ++i)
          part[i % 2] = fmaxf(part[i % 2], fabsf(x[4 * (column / 8 + 8 * half + i / 2) + 2 * h + i % 2]));
        most[h][half] = fmaxf(part[0], part[1]);
      }
    if (groups) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (whole) most[h][0] = fmaxf(most[h][0], most[h][1]);
        most[h][0] = largest_in_lanes<4>(most[h][0]);
        most[h][1] = whole ? most[h][0] : largest_in_lanes<4>(most[h][1]);
      }
    }
    Inverse inverse[2][2];
    uint32_t stored[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float s = groups ? group_scale(most[h][half]) : c.number;
        stored[h][half] = __float_as_uint(s);
        if (c.form == Form::groups_power || c.form == Form::groups_packed) {
          const int exponent = ceil_log2(s);
          s = power_of_two(exponent);
          stored[h][half] = c.form == Form::groups_power ? __float_as_uint(s) : static_cast<uint32_t>(exponent + 127);
        }
        inverse[h][half] = Inverse(s, most[h][half]);
      }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint8_t* const to = c.codes + rows.row[h] * c.row + head * value + column + 8 * quad;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto element = [&](int octet, int e) { return x[4 * (column / 8 + 8 * half + octet) + 2 * h + e]; };
        const Inverse& by = inverse[h][half];
        uint32_t w[4];  // of octets 0 and 4, 1 and 5, ...
        // A NaN here is what arithmetic makes, without a sign.
        if (by.exact) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            w[i] = narrow_pair<fp8_e4m3>(by.times(element(i, 0)), by.times(element(i, 1))) |
                   narrow_pair<fp8_e4m3>(by.times(element(i + 4, 0)), by.times(element(i + 4, 1))) << 16;
        } else {  // seldom: little code, by memory
          float all[16];
          uint16_t pairs[8];
#pragma unroll
          for (int i = 0; i < 16; ++i) all[i] = element(i / 4 + i % 4 / 2 * 4, i % 2);
#pragma unroll 1
          for (int i = 0; i < 8; ++i)
            pairs[i] = static_cast<uint16_t>(narrow_pair<fp8_e4m3>(all[2 * i] / by.s, all[2 * i + 1] / by.s));
          memcpy(&w, &pairs, sizeof(w));
        }
        transpose_quad(w, quad);  // its octet of the first four in the low halves, of the others in the high ones
        if (!rows.valid[h]) continue;
        *reinterpret_cast<uint2*>(to + 64 * half) = {__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410)};
        *reinterpret_cast<uint2*>(to + 64 * half + 32) = {__byte_perm(w[0], w[1], 0x7632),
                                                          __byte_perm(w[2], w[3], 0x7632)};
        if (!groups || quad != 0 || (whole && half == 1)) continue;
        const int32_t first = head * value + column + 64 * half, group = whole ? first / 128 : first / 64;
        uint32_t* const place = c.scales.at(rows.row[h], c.form == Form::groups_packed ? group / 4 : group);
        if (c.form == Form::groups_packed)
          reinterpret_cast<uint8_t*>(place)[group % 4] = static_cast<uint8_t>(stored[h][half]);
        else *place = stored[h][half];
      }
    }
  }
}

/// o times a row's factor, as f32 rows would hold it, as codes of the output. All of a warp call it.
template <int n>
__device__ __forceinline__ void store_codes(const OutputCodes& c, float (&o)[n], const float (&factor)[2],
                                            const CodeRows& rows, int32_t head) {
#pragma unroll
  for (int i = 0; i < n; ++i) o[i] = __fmul_rn(o[i], factor[i / 2 % 2]);
  store_e4m3(c, o, rows, head);
}

}  // namespace mla::cuda::sm90
