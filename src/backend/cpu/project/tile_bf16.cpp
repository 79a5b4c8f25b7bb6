#include "backend/cpu/project/tile_bf16.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "backend/cpu/core/bf16_dot.hpp"
#include "backend/cpu/core/convert.hpp"
#include "mla/quant.hpp"

#ifdef MLA_HAS_BF16_DOT

namespace mla::cpu {
namespace {

// Vectors of columns, and rows of x: their sums and, on ARM, a row's next pairs each stay in registers beside kVectors
// vectors of weights.
constexpr int kVectors = 4;
#if defined(__x86_64__)
using Columns = Sixteen;
constexpr int64_t kMostTogether = 6;
#else
using Columns = Four;
constexpr int64_t kMostTogether = 4;
#endif
constexpr int64_t kWidth = kVectors * Columns::kLanes;
static_assert(kTileColumns % kWidth == 0);

template <int R>
MLA_BF16_DOT void rows_product(const bf16* __restrict x, int64_t x_stride, const bf16* __restrict tile, int64_t pairs,
                               const float* __restrict scale, float* __restrict sums, int64_t sums_stride,
                               bool accumulate) {
  Columns::Floats acc[R][kVectors];
  sum_products<Columns, kVectors, R>(acc, reinterpret_cast<const uint32_t*>(tile), kTileColumns, x, x_stride, pairs,
                                     Nothing{});
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* to = sums + r * sums_stride + v * Columns::kLanes;
      Columns::Floats sum = acc[r][v];
      if (scale) sum = Columns::multiply(sum, Columns::load(scale + v * Columns::kLanes));
      Columns::store(to, accumulate ? Columns::add(Columns::load(to), sum) : sum);
    }
}

}  // namespace

#if defined(__x86_64__)

namespace {

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

#else

void fp8_tile(const uint8_t* codes, float scale, int64_t pairs, bf16* tile) {
  convert_fp8_bf16(reinterpret_cast<const fp8_e4m3*>(codes), tile, pairs * kTileColumns * 2, scale);
}

// A value's two bytes are looked up apart, in tables of 16.
void e2m1_tile(const uint8_t* codes, int64_t pairs, bf16* tile) {
  static constexpr auto kBytes = [] {
    std::array<std::array<uint8_t, 16>, 2> bytes{};
    for (uint8_t code = 0; code < 16; ++code)
      for (size_t i = 0; i < 2; ++i) bytes[i][code] = static_cast<uint8_t>(to_bf16(from_e2m1(code)).bits >> 8 * i);
    return bytes;
  }();
  const uint8x16_t low = vld1q_u8(kBytes[0].data()), high = vld1q_u8(kBytes[1].data());
  for (int64_t i = 0; i < pairs * kTileColumns; i += 16) {
    const uint8x16_t both = vld1q_u8(codes + i), first = vandq_u8(both, vdupq_n_u8(15)), second = vshrq_n_u8(both, 4);
    vst4q_u8(reinterpret_cast<uint8_t*>(tile + 2 * i),
             {{vqtbl1q_u8(low, first), vqtbl1q_u8(high, first), vqtbl1q_u8(low, second), vqtbl1q_u8(high, second)}});
  }
}

#endif

void tile_product(const bf16* x, int64_t x_stride, int64_t rows, const bf16* tile, int64_t pairs, const float* scale,
                  float* sums, int64_t sums_stride, bool accumulate) {
  constexpr auto all = []<size_t... r>(std::index_sequence<r...>) {
    return std::array{rows_product<static_cast<int>(r) + 1>...};
  };
  static constexpr auto kBy = all(std::make_index_sequence<kMostTogether>());
  for (int64_t c = 0; c < kTileColumns; c += kWidth)
    for (int64_t r = 0; r < rows; r += kMostTogether)
      kBy[static_cast<size_t>(std::min(kMostTogether, rows - r) - 1)](
          x + r * x_stride, x_stride, tile + 2 * c, pairs, scale ? scale + c : nullptr, sums + r * sums_stride + c,
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
