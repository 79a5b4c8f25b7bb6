// score_block with dot products of bf16 pairs (core/bf16_dot.hpp). Products of e4m3 codes are exact in it.
#include <algorithm>
#include <array>

#include "backend/cpu/core/bf16_dot.hpp"
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/index_score/kernel.hpp"

#ifdef MLA_HAS_BF16_DOT

namespace mla::cpu {
namespace {

// Vectors of heads. add_kept: of the lanes in `real`, sum + weight * relu(x), where NaN stays.
#if defined(__x86_64__)
struct Heads : Sixteen {
  using Mask = __mmask16;
  MLA_BF16_DOT static Mask first_lanes(int64_t n) {
    return static_cast<Mask>((1u << std::clamp<int64_t>(n, 0, kLanes)) - 1);
  }
  MLA_BF16_DOT static Floats add_kept(Floats sum, Floats x, Floats weight, Mask real) {
    const Mask kept = _mm512_mask_cmp_ps_mask(real, x, _mm512_setzero_ps(), _CMP_NLT_UQ);
    return _mm512_fmadd_ps(_mm512_maskz_mov_ps(kept, x), weight, sum);
  }
  MLA_BF16_DOT static float sum_of_lanes(Floats x) { return _mm512_reduce_add_ps(x); }
};
#else
struct Heads : Four {
  using Mask = uint32x4_t;
  MLA_BF16_DOT static Mask first_lanes(int64_t n) {
    constexpr uint32_t kLane[] = {0, 1, 2, 3};
    return vcltq_u32(vld1q_u32(kLane), vdupq_n_u32(static_cast<uint32_t>(std::clamp<int64_t>(n, 0, kLanes))));
  }
  MLA_BF16_DOT static Floats add_kept(Floats sum, Floats x, Floats weight, Mask real) {
    const Mask kept = vbicq_u32(real, vcltzq_f32(x));
    return vfmaq_f32(sum, vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), kept)), weight);
  }
  MLA_BF16_DOT static float sum_of_lanes(Floats x) { return vaddvq_f32(x); }
};
#endif

// scores[n] += sum over the first `real` lanes of G vectors of heads of w * relu(q . k[n]), for N keys.
template <int G, int N>
MLA_BF16_DOT [[gnu::noinline]] void score_tile(const uint32_t* __restrict q, int64_t width, const float* __restrict w,
                                               int64_t real, const bf16* __restrict k, int64_t stride, int64_t pairs,
                                               float* __restrict scores, Ahead ahead) {
  Heads::Floats acc[N][G];
  sum_products<Heads, G, N>(acc, q, width, k, stride, pairs,
                            [&](int64_t d) { __builtin_prefetch(ahead.at + d * ahead.step); });
  Heads::Floats weight[G];
  Heads::Mask is_real[G];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    weight[g] = Heads::load(w + g * Heads::kLanes);
    is_real[g] = Heads::first_lanes(real - g * Heads::kLanes);
  }
#pragma GCC unroll 32
  for (int n = 0; n < N; ++n) {
    Heads::Floats sum = Heads::zero();
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) sum = Heads::add_kept(sum, acc[n][g], weight[g], is_real[g]);
    scores[n] += Heads::sum_of_lanes(sum);
  }
}

// A chunk of `width` heads, G vectors of them at a time.
template <int G, int N>
MLA_BF16_DOT void chunk(int64_t first_head, int64_t width, const IndexBlock& b) {
  constexpr int64_t kHeads = G * Heads::kLanes;
  const int64_t pairs = (b.dim + 1) / 2;
  const uint32_t* q = static_cast<const uint32_t*>(b.q) + first_head * pairs;
  const bf16* k = static_cast<const bf16*>(b.k);
  for (int64_t g = 0; g < width; g += kHeads)
    for (int64_t n = 0; n < b.count; n += N)
      score_tile<G, N>(q + g, width, b.weights + first_head + g, b.real_heads - first_head - g, k + n * b.k_stride,
                       b.k_stride, pairs, b.scores + n, ahead_of(b, n, N, first_head + g, kHeads, pairs));
}

}  // namespace

MLA_BF16_DOT void score_block_bf16(const IndexBlock& b) {
  std::fill_n(b.scores, (b.count + kIndexKeyTile - 1) / kIndexKeyTile * kIndexKeyTile, 0.0f);
  for (int64_t h = 0; h < b.heads; h += kHeadChunk) {
    const int64_t width = std::min(kHeadChunk, b.heads - h);
#if defined(__x86_64__)
    if (width == kHeadChunk) chunk<2, 12>(h, width, b);
    else chunk<1, 24>(h, width, b);
#else
    chunk<4, 4>(h, width, b);
#endif
  }
}

#if defined(__x86_64__)

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

#else

void widen_codes(const fp8_e4m3* codes, int64_t rows, int64_t dim, bf16* to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r) convert_fp8_bf16(codes + r * dim, to + r * to_stride, dim, 1.0f);
}

#endif

}  // namespace mla::cpu

#else  // never called: native_bf16_dot() is false

namespace mla::cpu {
void score_block_bf16(const IndexBlock&) {}
void widen_codes(const fp8_e4m3*, int64_t, int64_t, bf16*, int64_t) {}
}  // namespace mla::cpu

#endif
