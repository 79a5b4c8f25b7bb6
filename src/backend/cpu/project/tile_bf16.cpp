#include "backend/cpu/project/tile_bf16.hpp"

#if defined(__x86_64__)

// GCC 12 takes its own headers' undefined-value intrinsics for uninitialised reads (GCC bug 105593).
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <algorithm>
#include <array>

#include "mla/quant.hpp"

#define MLA_BF16_DOT [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]]

namespace mla::cpu {
namespace {

constexpr int kVectors = 4;  // of 16 columns
static_assert(kVectors * 16 == kTileColumns);
constexpr int64_t kMostTogether = 6;  // rows: 24 sums and 4 vectors of weights stay in registers

// Magnitudes of e4m3's codes 0 to 126; 127, its NaN, is not asked for.
constexpr auto kMagnitudes = [] {
  std::array<float, 128> m{};
  for (uint8_t code = 0; code < 127; ++code) m[code] = to_float(fp8_e4m3{code});
  return m;
}();

// e2m1's 16 values, twice.
constexpr auto kE2m1 = [] {
  std::array<bf16, 32> values{};
  for (size_t i = 0; i < values.size(); ++i) values[i] = to_bf16(from_e2m1(static_cast<uint8_t>(i % 16)));
  return values;
}();

template <int R>
MLA_BF16_DOT void rows_product(const bf16* __restrict x, int64_t x_stride, const bf16* __restrict tile, int64_t pairs,
                               const float* __restrict scale, float* __restrict sums, int64_t sums_stride,
                               bool accumulate) {
  __m512 acc[R][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[r][v] = _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; ++p) {
    __m512i w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) w[v] = _mm512_loadu_si512(tile + (p * kTileColumns + v * 16) * 2);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      int pair;
      __builtin_memcpy(&pair, x + r * x_stride + 2 * p, sizeof(pair));
      const __m512i both = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], (__m512bh)w[v], (__m512bh)both);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* to = sums + r * sums_stride + v * 16;
      __m512 sum = acc[r][v];
      if (scale) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(scale + v * 16));
      _mm512_storeu_ps(to, accumulate ? _mm512_add_ps(_mm512_loadu_ps(to), sum) : sum);
    }
}

}  // namespace

MLA_BF16_DOT void fp8_tile(const uint8_t* codes, float scale, int64_t pairs, bf16* tile) {
  // A lookup of 128 magnitudes in four registers, already scaled and rounded.
  __m512i part[4];
  const __m512 factor = _mm512_set1_ps(scale);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    part[i] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_loadu_ps(kMagnitudes.data() + 32 * i + 16), factor),
                                           _mm512_mul_ps(_mm512_loadu_ps(kMagnitudes.data() + 32 * i), factor));
  const __m512i sign_bit = _mm512_set1_epi16(static_cast<short>(0x8000)), upper = _mm512_set1_epi16(0x40);
  for (int64_t i = 0; i < pairs * kTileColumns * 2; i += 32) {
    const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
    const __m512i low = _mm512_permutex2var_epi16(part[0], code, part[1]),
                  high = _mm512_permutex2var_epi16(part[2], code, part[3]);
    const __m512i magnitude = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(code, upper), low, high);
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(code, 8), sign_bit);
    _mm512_storeu_si512(tile + i, _mm512_or_si512(magnitude, sign));
  }
}

MLA_BF16_DOT void e2m1_tile(const uint8_t* codes, int64_t pairs, bf16* tile) {
  const __m512i table = _mm512_loadu_si512(kE2m1.data()), nibbles = _mm512_set1_epi32(0x000f000f);
  for (int64_t i = 0; i < pairs * kTileColumns; i += 16) {
    const __m512i byte = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
    const __m512i code = _mm512_and_si512(_mm512_or_si512(byte, _mm512_slli_epi32(byte, 12)), nibbles);
    _mm512_storeu_si512(tile + 2 * i, _mm512_permutexvar_epi16(code, table));
  }
}

void tile_product(const bf16* x, int64_t x_stride, int64_t rows, const bf16* tile, int64_t pairs, const float* scale,
                  float* sums, int64_t sums_stride, bool accumulate) {
  constexpr decltype(&rows_product<1>) kBy[] = {rows_product<1>, rows_product<2>, rows_product<3>,
                                                rows_product<4>, rows_product<5>, rows_product<6>};
  for (int64_t r = 0; r < rows; r += kMostTogether)
    kBy[std::min(kMostTogether, rows - r) - 1](x + r * x_stride, x_stride, tile, pairs, scale, sums + r * sums_stride,
                                               sums_stride, accumulate);
}

}  // namespace mla::cpu

#else  // never called: native_bf16_dot() is false

namespace mla::cpu {
void fp8_tile(const uint8_t*, float, int64_t, bf16*) {}
void e2m1_tile(const uint8_t*, int64_t, bf16*) {}
void tile_product(const bf16*, int64_t, int64_t, const bf16*, int64_t, const float*, float*, int64_t, bool) {}
}  // namespace mla::cpu

#endif
