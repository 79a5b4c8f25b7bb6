// What kernels share: views of any element type, conversions, and reductions over a warp or block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "mla/dtype.hpp"
#include "mla/view.hpp"

namespace mla::cuda {

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
__device__ inline float widen(f16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ inline float widen(fp8_e4m3 x) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3))); }

/// Nearest even; e4m3 saturates at 448, NaN stays NaN: the bits that the portable conversions give, but for NaN's
/// payload and sign.
template <class T>
__device__ T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) {
  return x;
}
template <>
__device__ inline bf16 narrow<bf16>(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
template <>
__device__ inline f16 narrow<f16>(float x) {
  return {__half_as_ushort(__float2half_rn(x))};
}
template <>
__device__ inline fp8_e4m3 narrow<fp8_e4m3>(float x) {
  return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int d = 16; d; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
  return x;
}

// Several elements at once.

template <class T, int n>
struct alignas(sizeof(T) * n < 16 ? sizeof(T) * n : 16) Pack {
  T at[n];
};
/// Elements that fill words of 32 bits are moved and converted by the word: taken apart and put together one by one, a
/// conversion would be several times as long.
template <class T, int n>
constexpr int kWordsOf = sizeof(T) * n % 4 == 0 ? sizeof(T) * n / 4 : 0;

/// n neighbours, in accesses of up to 16 bytes when wide (then `from` is so aligned), otherwise one by one.
template <bool wide, class T, int n>
__device__ inline void load(const T* from, T (&x)[n]) {
  if constexpr (wide && kWordsOf<T, n> != 0) {
    struct alignas(Pack<T, n>) Words {
      uint32_t at[kWordsOf<T, n>];
    };
    const Words words = *reinterpret_cast<const Words*>(from);
    memcpy(&x, &words, sizeof(x));
  } else if constexpr (wide) {
    const auto pack = *reinterpret_cast<const Pack<T, n>*>(from);
#pragma unroll
    for (int e = 0; e < n; ++e) x[e] = pack.at[e];
  } else {
#pragma unroll
    for (int e = 0; e < n; ++e) x[e] = from[e];
  }
}
template <bool wide, class T, int n>
__device__ inline void store(const T (&x)[n], T* to) {
  if constexpr (wide && kWordsOf<T, n> != 0) {
    struct alignas(Pack<T, n>) Words {
      uint32_t at[kWordsOf<T, n>];
    } words;
    memcpy(&words, &x, sizeof(x));
    *reinterpret_cast<Words*>(to) = words;
  } else if constexpr (wide) {
    Pack<T, n> pack;
#pragma unroll
    for (int e = 0; e < n; ++e) pack.at[e] = x[e];
    *reinterpret_cast<Pack<T, n>*>(to) = pack;
  } else {
#pragma unroll
    for (int e = 0; e < n; ++e) to[e] = x[e];
  }
}

template <class T, int n>
__device__ inline void widen_all(const T (&x)[n], float (&y)[n]) {
  constexpr Dtype dtype = dtype_of<T>::value;
  if constexpr (dtype == Dtype::f32 || kWordsOf<T, n> == 0) {
#pragma unroll
    for (int e = 0; e < n; ++e) y[e] = widen(x[e]);
  } else {
    uint32_t words[kWordsOf<T, n>];
    memcpy(words, &x, sizeof(x));
#pragma unroll
    for (int w = 0; w < kWordsOf<T, n>; ++w) {
      if constexpr (dtype == Dtype::bf16) {
        y[2 * w] = __uint_as_float(words[w] << 16);
        y[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
      } else if constexpr (dtype == Dtype::f16) {
        __half2 pair;
        memcpy(&pair, &words[w], 4);
        const float2 wide = __half22float2(pair);
        y[2 * w] = wide.x;
        y[2 * w + 1] = wide.y;
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const auto pair = static_cast<__nv_fp8x2_storage_t>(words[w] >> (16 * h));
          const float2 wide = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
          y[4 * w + 2 * h] = wide.x;
          y[4 * w + 2 * h + 1] = wide.y;
        }
      }
    }
  }
}

/// Two neighbours in the low bits, or f32's alone.
template <class T>
__device__ inline uint32_t narrow_pair(float a, float b) {
  if constexpr (dtype_of<T>::value == Dtype::bf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    uint32_t word;
    memcpy(&word, &pair, 4);
    return word;
  } else if constexpr (dtype_of<T>::value == Dtype::f16) {
    const __half2 pair = __floats2half2_rn(a, b);
    uint32_t word;
    memcpy(&word, &pair, 4);
    return word;
  } else {
    return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  }
}

/// As the portable conversions round, bit for bit; the hardware's differ in NaN alone, whose payload and sign are
/// mended where one occurs unless the caller has no use for them.
template <bool mend = true, class T, int n>
__device__ inline void narrow_all(const float (&x)[n], T (&y)[n]) {
  if constexpr (dtype_of<T>::value == Dtype::f32) {
#pragma unroll
    for (int e = 0; e < n; ++e) y[e] = x[e];
  } else if constexpr (kWordsOf<T, n> == 0) {
#pragma unroll
    for (int e = 0; e < n; ++e) y[e] = from_float<T>(x[e]);
  } else {
    constexpr int per_word = 4 / sizeof(T), bits = 8 * sizeof(T);
    uint32_t words[kWordsOf<T, n>];
    bool odd = false;
#pragma unroll
    for (int w = 0; w < kWordsOf<T, n>; ++w) {
      words[w] = narrow_pair<T>(x[per_word * w], x[per_word * w + 1]);
      if constexpr (per_word == 4) words[w] |= narrow_pair<T>(x[4 * w + 2], x[4 * w + 3]) << 16;
    }
    if constexpr (mend) {
#pragma unroll
      for (int e = 0; e < n; e += 2) odd |= x[e] != x[e] || x[e + 1] != x[e + 1];
      if (odd) {
#pragma unroll
        for (int e = 0; e < n; ++e) {
          const int shift = e % per_word * bits;
          const uint32_t u = __float_as_uint(x[e]), mask = ((1u << bits) - 1) << shift;
          const uint32_t nan = dtype_of<T>::value == Dtype::bf16  ? u >> 16 | 0x40
                               : dtype_of<T>::value == Dtype::f16 ? (u >> 16 & 0x8000) | 0x7e00 | (u >> 13 & 0x1ff)
                                                                  : (u >> 24 & 0x80) | 0x7f;
          if (x[e] != x[e]) words[e / per_word] = (words[e / per_word] & ~mask) | nan << shift;
        }
      }
    }
    memcpy(&y, words, sizeof(y));
  }
}

// Scales of quantised groups, as cache/codec.hpp has them.

__device__ inline float power_of_two(int e) { return __uint_as_float(static_cast<uint32_t>(e + 127) << 23); }
/// Exponent of the smallest power of two not below x; x positive, normal and finite.
__device__ inline int ceil_log2(float x) { return static_cast<int>((__float_as_uint(x) + 0x7fffffu) >> 23) - 127; }
/// ceil_log2 of max(amax / 448, 1e-4), infinity as the largest number: past 1.75 * 2^k it is k - 7, up to there k - 8.
__device__ inline int scale_exponent(float amax) {
  return max(static_cast<int>((__float_as_uint(amax) + 0x1fffffu) >> 23) - 135, -13);
}
__device__ inline float from_ue8m0(uint8_t e) {
  return __uint_as_float(e == 255 ? 0x7fc00000u : e == 0 ? 0x00400000u : static_cast<uint32_t>(e) << 23);
}

/// p / 448 rounded once, p from 1e-10 on: the quotient's remainder, twice (tried with every mantissa).
__device__ inline float over_448(float p) {
  constexpr float kInverse = 1 / 448.0f;
  float q = __fmul_rn(p, kInverse);
  q = __fmaf_rn(__fmaf_rn(-q, 448.0f, p), kInverse, q);
  return __fmaf_rn(__fmaf_rn(-q, 448.0f, p), kInverse, q);
}
/// Of a group of fp8 whose largest magnitude is amax: ops/quantize's.
__device__ inline float group_scale(float amax) { return over_448(fmaxf(fminf(amax, FLT_MAX), 1e-10f)); }

/// Largest magnitude of n elements; NaN does not count, infinity does.
template <int n>
__device__ inline float largest_of(const float (&x)[n]) {
  float m = 0;
#pragma unroll
  for (int e = 0; e < n; ++e) m = fmaxf(m, fabsf(x[e]));
  return m;
}
/// The same over `lanes` neighbouring lanes, a power of two of them; all of the warp call it.
template <int lanes>
__device__ inline float largest_in_lanes(float m) {
#pragma unroll
  for (int d = lanes / 2; d; d /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
  return m;
}

/// Of each half's two bf16 numbers the larger. nan: NaN if either is, otherwise only if both are.
template <bool nan = false>
__device__ inline uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  __nv_bfloat162 x, y;
  memcpy(&x, &a, 4);
  memcpy(&y, &b, 4);
  x = nan ? __hmax2_nan(x, y) : __hmax2(x, y);
  memcpy(&a, &x, 4);
  return a;
}
/// Largest magnitude of 2 n bf16 numbers, in both halves; n a power of two.
template <bool nan = false, int n>
__device__ inline uint32_t largest_bf16(const uint32_t (&x)[n]) {
  uint32_t m[n];
#pragma unroll
  for (int w = 0; w < n; ++w) {
    __nv_bfloat162 pair;
    memcpy(&pair, &x[w], 4);
    pair = __habs2(pair);
    memcpy(&m[w], &pair, 4);
  }
#pragma unroll
  for (int d = n / 2; d; d /= 2)
#pragma unroll
    for (int w = 0; w < d; ++w) m[w] = max_bf16x2<nan>(m[w], m[w + d]);
  return max_bf16x2<nan>(m[0], __byte_perm(m[0], 0, 0x1032));
}

/// y = x / s, rounded once, s above 0, and `most` the x's largest magnitude. Where nothing over- or underflows, by the
/// reciprocal of s and the quotient's remainder twice over: the steps of an IEEE division with the part that depends on
/// s alone done once. Quotients below 2^-60 may be off by a unit.
template <int n>
__device__ inline void divide_all(const float (&x)[n], float s, float most, float (&y)[n]) {
  if (most < 0x1p66f && s > 0x1p-60f && s < 0x1p60f) {
    const float inverse = __frcp_rn(s);
#pragma unroll
    for (int e = 0; e < n; ++e) {
      float q = __fmul_rn(x[e], inverse);
      q = __fmaf_rn(__fmaf_rn(-q, s, x[e]), inverse, q);
      q = __fmaf_rn(__fmaf_rn(-q, s, x[e]), inverse, q);
      // A zero's sign is lost on the way, and a NaN's.
      y[e] = __uint_as_float((__float_as_uint(q) & 0x7fffffffu) | (__float_as_uint(x[e]) & 0x80000000u));
    }
  } else {
#pragma unroll
    for (int e = 0; e < n; ++e) y[e] = x[e] / s;
  }
}

/// f(T{}) with the element type of a dtype, among f32 and bf16: what activations are.
template <class F>
void for_activation(Dtype dtype, F&& f) {
  if (dtype == Dtype::f32) f(float{});
  else f(bf16{});
}

}  // namespace mla::cuda
