// score_block with AVX-512 BF16 dot products: each multiplies two bf16 pairs a lane and adds them to an f32 sum.
// Products of e4m3 codes are exact in it. Compiled for its target by function attributes, and called only where
// native_bf16_dot() holds.
#include <algorithm>

#include "backend/cpu/index_score/kernel.hpp"

#if defined(__x86_64__)

// GCC 12 takes its own headers' undefined-value intrinsics for uninitialised reads (GCC bug 105593).
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <array>

#define MLA_BF16_DOT [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]]

namespace mla::cpu {
namespace {

constexpr int64_t kLanes = 16;

MLA_BF16_DOT inline __mmask16 first_lanes(int64_t n) {
  return static_cast<__mmask16>((1u << std::clamp<int64_t>(n, 0, kLanes)) - 1);
}

MLA_BF16_DOT inline __m512 dot(__m512 sum, __m512i a, const bf16* pair) {
  uint32_t bits;
  __builtin_memcpy(&bits, pair, sizeof(bits));
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)_mm512_set1_epi32(static_cast<int>(bits)));
}

// scores[n] += sum over the first `real` lanes of G vectors of heads of w * relu(q . k[n]), for N keys.
template <int G, int N>
MLA_BF16_DOT [[gnu::noinline]] void score_tile(const uint32_t* __restrict q, const float* __restrict w, int64_t real,
                                               const bf16* __restrict k, int64_t stride, int64_t pairs,
                                               float* __restrict scores, Ahead ahead) {
  __m512 acc[N][G];
#pragma GCC unroll 32
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) acc[n][g] = _mm512_setzero_ps();
  constexpr int kPerBase = 8;
  for (int64_t d = 0; d < pairs; ++d) {
    __builtin_prefetch(ahead.at + d * ahead.step);
    __m512i heads[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) heads[g] = _mm512_loadu_si512(q + (d * G + g) * kLanes);
#pragma GCC unroll 32
    for (int n = 0; n < N; ++n) {
      const bf16* base = k + static_cast<int64_t>(n / kPerBase) * kPerBase * stride;
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) acc[n][g] = dot(acc[n][g], heads[g], base + (n % kPerBase) * stride + 2 * d);
    }
  }
  __m512 weight[G];
  __mmask16 is_real[G];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    weight[g] = _mm512_loadu_ps(w + g * kLanes);
    is_real[g] = first_lanes(real - g * kLanes);
  }
#pragma GCC unroll 32
  for (int n = 0; n < N; ++n) {
    __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const __mmask16 kept =
          _mm512_mask_cmp_ps_mask(is_real[g], acc[n][g], _mm512_setzero_ps(), _CMP_NLT_UQ);  // NaN stays
      sum = _mm512_fmadd_ps(_mm512_maskz_mov_ps(kept, acc[n][g]), weight[g], sum);
    }
    scores[n] += _mm512_reduce_add_ps(sum);
  }
}

template <int G, int N>
MLA_BF16_DOT void chunk(int64_t first_head, const IndexBlock& b) {
  const int64_t pairs = (b.dim + 1) / 2;
  const uint32_t* q = static_cast<const uint32_t*>(b.q) + first_head * pairs;
  const bf16* k = static_cast<const bf16*>(b.k);
  for (int64_t n = 0; n < b.count; n += N)
    score_tile<G, N>(q, b.weights + first_head, b.real_heads - first_head, k + n * b.k_stride, b.k_stride, pairs,
                     b.scores + n, ahead_of(b, n, N, first_head, G * kLanes, pairs));
}

}  // namespace

MLA_BF16_DOT void score_block_bf16(const IndexBlock& b) {
  std::fill_n(b.scores, (b.count + kIndexKeyTile - 1) / kIndexKeyTile * kIndexKeyTile, 0.0f);
  for (int64_t h = 0; h < b.heads; h += kHeadChunk) {
    if (b.heads - h >= kHeadChunk) chunk<2, 12>(h, b);
    else chunk<1, 24>(h, b);
  }
}

// All 128 magnitudes fit four registers: a conversion is two permutations and a blend for 32 codes.
MLA_BF16_DOT void widen_codes(const fp8_e4m3* codes, int64_t rows, int64_t dim, bf16* to, int64_t to_stride) {
  static constexpr auto kMagnitudes = [] {
    std::array<uint16_t, 128> m{};
    for (uint8_t code = 0; code < 128; ++code) m[code] = to_bf16(to_float(fp8_e4m3{code})).bits;
    return m;
  }();
  const __m512i t0 = _mm512_loadu_si512(kMagnitudes.data()), t1 = _mm512_loadu_si512(kMagnitudes.data() + 32),
                t2 = _mm512_loadu_si512(kMagnitudes.data() + 64), t3 = _mm512_loadu_si512(kMagnitudes.data() + 96);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < dim; i += 32) {
      const __mmask32 lanes = dim - i >= 32 ? 0xffffffffu : (1u << (dim - i)) - 1;
      const __m512i code = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(lanes, codes + r * dim + i));
      const __m512i small = _mm512_permutex2var_epi16(t0, code, t1), large = _mm512_permutex2var_epi16(t2, code, t3);
      const __m512i magnitude =
          _mm512_mask_blend_epi16(_mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40)), small, large);
      const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8);
      _mm512_mask_storeu_epi16(to + r * to_stride + i, lanes, _mm512_or_si512(magnitude, sign));
    }
}

}  // namespace mla::cpu

#else  // never called: native_bf16_dot() is false

namespace mla::cpu {
void score_block_bf16(const IndexBlock&) {}
void widen_codes(const fp8_e4m3*, int64_t, int64_t, bf16*, int64_t) {}
}  // namespace mla::cpu

#endif
