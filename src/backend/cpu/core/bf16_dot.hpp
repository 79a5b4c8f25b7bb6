// Dot products of bf16 pairs: an instruction multiplies two pairs a lane and adds both products to an f32 sum, AVX-512
// BF16's vdpbf16ps or ARM's bfdot. Highway 1.0.3 has targets with neither, so kernels are templates over the vectors
// below. They are compiled for their target by function attributes, and called only where native_bf16_dot() holds.
#pragma once

#include <cstdint>

#include "mla/dtype.hpp"

#if defined(__x86_64__)
#define MLA_HAS_BF16_DOT 1
#define MLA_BF16_DOT [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]]
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__) && \
    !defined(__clang__)  // Clang 14 declares bfdot by compiler flag only
#define MLA_HAS_BF16_DOT 1
#define MLA_BF16_DOT [[gnu::target("arch=armv8.2-a+bf16")]]
#include <arm_neon.h>
#endif

#ifdef MLA_HAS_BF16_DOT

// GCC 12 takes its own headers' undefined-value intrinsics for uninitialised reads (GCC bug 105593).
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace mla::cpu {

// Floats: f32 sums of kLanes rows. Pairs: as many rows' pairs. Few: up to kFew pairs of one key, each of which every
// row meets; few<n>(x) reads n of them, one or kFew.
#if defined(__x86_64__)
struct Sixteen {
  using Floats = __m512;
  using Pairs = __m512i;
  using Few = uint32_t;  // an instruction broadcasts it from memory
  static constexpr int64_t kLanes = 16;
  static constexpr int kFew = 1;
  MLA_BF16_DOT static Floats load(const float* x) { return _mm512_loadu_ps(x); }
  MLA_BF16_DOT static Pairs load(const uint32_t* x) { return _mm512_loadu_si512(x); }
  MLA_BF16_DOT static void store(float* x, Floats v) { _mm512_storeu_ps(x, v); }
  MLA_BF16_DOT static void store(uint32_t* x, Pairs v) { _mm512_storeu_si512(x, v); }
  MLA_BF16_DOT static Floats zero() { return _mm512_setzero_ps(); }
  MLA_BF16_DOT static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  MLA_BF16_DOT static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  template <int n>
  MLA_BF16_DOT static Few few(const void* x) {
    Few pair;
    __builtin_memcpy(&pair, x, sizeof(pair));
    return pair;
  }
  // The sum with the i-th of few pairs.
  MLA_BF16_DOT static Floats dot(Floats sum, Pairs a, Few pair, int) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)));
  }
  MLA_BF16_DOT static Pairs round(Floats x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }
  MLA_BF16_DOT static Pairs join(Pairs low, Pairs high) { return _mm512_or_si512(low, _mm512_slli_epi32(high, 16)); }
};
// For tiny tiles: it costs half where 512 bits are two passes.
struct Eight {
  using Floats = __m256;
  using Pairs = __m256i;
  using Few = uint32_t;
  static constexpr int64_t kLanes = 8;
  static constexpr int kFew = 1;
  MLA_BF16_DOT static Floats load(const float* x) { return _mm256_loadu_ps(x); }
  MLA_BF16_DOT static Pairs load(const uint32_t* x) { return _mm256_loadu_si256(reinterpret_cast<const Pairs*>(x)); }
  MLA_BF16_DOT static void store(float* x, Floats v) { _mm256_storeu_ps(x, v); }
  MLA_BF16_DOT static void store(uint32_t* x, Pairs v) { _mm256_storeu_si256(reinterpret_cast<Pairs*>(x), v); }
  MLA_BF16_DOT static Floats zero() { return _mm256_setzero_ps(); }
  MLA_BF16_DOT static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  template <int n>
  MLA_BF16_DOT static Few few(const void* x) {
    return Sixteen::few<n>(x);
  }
  MLA_BF16_DOT static Floats dot(Floats sum, Pairs a, Few pair, int) {
    return _mm256_dpbf16_ps(sum, (__m256bh)a, (__m256bh)_mm256_set1_epi32(static_cast<int>(pair)));
  }
  MLA_BF16_DOT static Pairs round(Floats x) { return _mm256_cvtepu16_epi32((__m128i)_mm256_cvtneps_pbh(x)); }
  MLA_BF16_DOT static Pairs join(Pairs low, Pairs high) { return _mm256_or_si256(low, _mm256_slli_epi32(high, 16)); }
};
#else
struct Four {
  using Floats = float32x4_t;
  using Pairs = uint32x4_t;
  using Few = uint32x4_t;  // an instruction takes one lane of it: a broadcast would be an operation of its own
  static constexpr int64_t kLanes = 4;
  static constexpr int kFew = 4;
  MLA_BF16_DOT static Floats load(const float* x) { return vld1q_f32(x); }
  MLA_BF16_DOT static Pairs load(const uint32_t* x) { return vld1q_u32(x); }
  MLA_BF16_DOT static void store(float* x, Floats v) { vst1q_f32(x, v); }
  MLA_BF16_DOT static void store(uint32_t* x, Pairs v) { vst1q_u32(x, v); }
  MLA_BF16_DOT static Floats zero() { return vdupq_n_f32(0); }
  MLA_BF16_DOT static Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
  MLA_BF16_DOT static Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
  template <int n>
  MLA_BF16_DOT static Few few(const void* x) {
    Few pairs = vdupq_n_u32(0);
    __builtin_memcpy(&pairs, x, n * sizeof(uint32_t));
    return pairs;
  }
  // The sum with the i-th of few pairs.
  MLA_BF16_DOT static Floats dot(Floats sum, Pairs a, Few pairs, int i) {
    const bfloat16x8_t rows = vreinterpretq_bf16_u32(a), few = vreinterpretq_bf16_u32(pairs);
    switch (i) {  // the instruction's lane is a constant
      case 0: return vbfdotq_laneq_f32(sum, rows, few, 0);
      case 1: return vbfdotq_laneq_f32(sum, rows, few, 1);
      case 2: return vbfdotq_laneq_f32(sum, rows, few, 2);
      default: return vbfdotq_laneq_f32(sum, rows, few, 3);
    }
  }
  MLA_BF16_DOT static Pairs round(Floats x) { return vmovl_u16(vreinterpret_u16_bf16(vcvt_bf16_f32(x))); }
  MLA_BF16_DOT static Pairs join(Pairs low, Pairs high) { return vsliq_n_u32(low, high, 16); }
};
#endif

// sum_products' pairs d to d + kFew - 1.
template <class V, int kFew, int G, int N, class Meanwhile>
MLA_BF16_DOT [[gnu::always_inline]] inline void add_few(typename V::Floats (&sums)[N][G],
                                                        const uint32_t* __restrict rows, int64_t width,
                                                        const bf16* __restrict k, int64_t stride, int64_t d,
                                                        Meanwhile&& meanwhile) {
  constexpr int kPerBase = 8;
  typename V::Few few[N];
#pragma GCC unroll 4
  for (int i = 0; i < kFew; ++i) {
    meanwhile(d + i);
    typename V::Pairs a[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) a[g] = V::load(rows + (d + i) * width + g * V::kLanes);
#pragma GCC unroll 32
    for (int n = 0; n < N; ++n) {
      const bf16* base = k + static_cast<int64_t>(n / kPerBase) * kPerBase * stride;
      if (i == 0) few[n] = V::template few<kFew>(base + (n % kPerBase) * stride + 2 * d);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[n][g] = V::dot(sums[n][g], a[g], few[n], i);
    }
    // GCC 12 would load the rows of all steps first, and keep sums in memory for want of registers.
    if constexpr (kFew > 1) asm volatile("");
  }
}

/// sums[n][..] = sum over pairs of rows[pair][..] . k[n][pair], in the pairs' order, for N keys and G vectors of rows.
/// meanwhile(pair) is called at each.
template <class V, int G, int N, class Meanwhile>
MLA_BF16_DOT [[gnu::always_inline]] inline void sum_products(typename V::Floats (&sums)[N][G],
                                                             const uint32_t* __restrict rows, int64_t width,
                                                             const bf16* __restrict k, int64_t stride, int64_t pairs,
                                                             Meanwhile&& meanwhile) {
#pragma GCC unroll 32
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) sums[n][g] = V::zero();
  int64_t d = 0;
  for (; d + V::kFew <= pairs; d += V::kFew) add_few<V, V::kFew>(sums, rows, width, k, stride, d, meanwhile);
  if constexpr (V::kFew > 1)
    for (; d < pairs; ++d) add_few<V, 1>(sums, rows, width, k, stride, d, meanwhile);
}
struct Nothing {
  void operator()(int64_t) const {}
};

}  // namespace mla::cpu
#endif
