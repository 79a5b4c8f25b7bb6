// block_attention with dot products of bf16 pairs (bf16_dot.hpp). Query, key, value and probability operands are bf16;
// sums, maxima and the softmax are f32.
#include "backend/cpu/core/bf16_dot.hpp"
#include "backend/cpu/core/block_attention.hpp"
#include "backend/cpu/core/byte_tables.hpp"
#include "backend/cpu/core/convert.hpp"

#ifdef MLA_HAS_BF16_DOT

#include <array>

namespace mla::cpu {
namespace {

// scores[n][..] = sum over pairs of q[pair][..] . k[n][pair]
template <class V, int G, int N>
MLA_BF16_DOT [[gnu::noinline]] void score_tile(const uint32_t* __restrict q, int64_t width, const bf16* __restrict k,
                                               int64_t stride, int64_t pairs, float* __restrict scores) {
  typename V::Floats acc[N][G];
  sum_products<V, G, N>(acc, q, width, k, stride, pairs, Nothing{});
#pragma GCC unroll 32
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) V::store(scores + n * width + g * V::kLanes, acc[n][g]);
}

// o[d][..] = o[d][..] * alpha + sum over key pairs of p[pair][..] . v[pair][d]
template <class V, int G, int N>
MLA_BF16_DOT [[gnu::noinline]] void value_tile(const uint32_t* __restrict p, int64_t width,
                                               const uint32_t* __restrict v, int64_t stride, int64_t pairs,
                                               const float* __restrict alpha, float* __restrict o) {
  constexpr int kFew = N % V::kFew == 0 ? V::kFew : 1;
  typename V::Floats acc[N][G];
#pragma GCC unroll 32
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
      acc[n][g] = V::multiply(V::load(o + n * width + g * V::kLanes), V::load(alpha + g * V::kLanes));
  for (int64_t t = 0; t < pairs; ++t) {
    typename V::Pairs rows[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) rows[g] = V::load(p + t * width + g * V::kLanes);
    typename V::Few few{};
#pragma GCC unroll 32
    for (int n = 0; n < N; ++n) {
      if (n % kFew == 0) few = V::template few<kFew>(v + t * stride + n);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) acc[n][g] = V::dot(acc[n][g], rows[g], few, n % kFew);
    }
  }
#pragma GCC unroll 32
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) V::store(o + n * width + g * V::kLanes, acc[n][g]);
}

// Probabilities of keys 2t and 2t + 1 as pairs, in place over row 2t of the scores' memory: pair row t is written after
// rows 2t and 2t + 1 were read. A missing last key counts 0.
template <class V>
MLA_BF16_DOT void pair_probabilities(float* scores, int64_t width, int64_t count) {
  uint32_t* pairs = reinterpret_cast<uint32_t*>(scores);
  for (int64_t t = 0; t < count; t += 2)
    for (int64_t g = 0; g < width; g += V::kLanes) {
      const auto low = V::round(V::load(scores + t * width + g));
      const auto high = V::round(t + 1 < count ? V::load(scores + (t + 1) * width + g) : V::zero());
      V::store(pairs + t / 2 * width + g, V::join(low, high));
    }
}

// Value tiles over all rows and dims.
template <class V, int G, int kDims>
MLA_BF16_DOT void values(const uint32_t* p, int64_t w, const uint32_t* v, int64_t stride, int64_t v_dim, int64_t pairs,
                         const float* alpha, float* o) {
  for (const float* end = alpha + w; alpha < end; alpha += G * V::kLanes, p += G * V::kLanes, o += G * V::kLanes) {
    int64_t d = 0;
    for (; d + kDims <= v_dim; d += kDims) value_tile<V, G, kDims>(p, w, v + d, stride, pairs, alpha, o + d * w);
    for (; d + 4 <= v_dim; d += 4) value_tile<V, G, 4>(p, w, v + d, stride, pairs, alpha, o + d * w);
    for (; d < v_dim; ++d) value_tile<V, G, 1>(p, w, v + d, stride, pairs, alpha, o + d * w);
  }
}

// The same without the keys in `skip`: pairs between theirs as they are, in order, and theirs with a half zeroed.
template <class V, int G, int kDims>
void values_but(const bool* skip, const uint32_t* p, int64_t w, const KeyBlock& b, float* alpha, float* o) {
  const uint32_t* v = static_cast<const uint32_t*>(b.v);
  const int64_t pairs = (b.count + 1) / 2;
  values<V, G, kDims>(p, w, v, b.v_stride, b.v_dim, 0, alpha, o);
  std::fill_n(alpha, w, 1.0f);
  for (int64_t t = 0; t < pairs;) {
    int64_t end = t;
    while (end < pairs && !skip[2 * end] && !skip[2 * end + 1]) ++end;
    if (end > t) values<V, G, kDims>(p + t * w, w, v + t * b.v_stride, b.v_stride, b.v_dim, end - t, alpha, o);
    if ((t = end) == pairs) break;
    const uint32_t kept = (skip[2 * t] ? 0 : 0xffffu) | (skip[2 * t + 1] ? 0 : 0xffff0000u);
    for (int64_t d = 0; kept != 0 && d < b.v_dim; d += kDims) {
      const int64_t n = std::min<int64_t>(kDims, b.v_dim - d);
      uint32_t half[kDims];
      for (int64_t i = 0; i < n; ++i) half[i] = v[t * b.v_stride + d + i] & kept;
      values<V, G, kDims>(p + t * w, w, half, 0, n, 1, alpha, o + d * w);
    }
    ++t;
  }
}

template <class V, int G, int kKeys, int kDims>
MLA_BF16_DOT void block_of(const RowTile& tile, const KeyBlock& b, float* scores) {
  const int64_t w = tile.width;
  const uint32_t* q = static_cast<const uint32_t*>(tile.q);
  const bf16* k = static_cast<const bf16*>(b.k);
  for (int64_t n = 0; n < b.count; n += kKeys)
    for (int64_t g = 0; g < w; g += G * V::kLanes)
      score_tile<V, G, kKeys>(q + g, w, k + n * b.k_stride, b.k_stride, (b.qk_dim + 1) / 2, scores + n * w + g);
  float alpha[kTileRows];
  bool skip[kBlockKeys];
  const bool skips = softmax_block(tile, b, scores, alpha, skip);
  pair_probabilities<V>(scores, w, b.count);
  const uint32_t* p = reinterpret_cast<const uint32_t*>(scores);
  if (skips) return values_but<V, G, kDims>(skip, p, w, b, alpha, tile.o);
  values<V, G, kDims>(p, w, static_cast<const uint32_t*>(b.v), b.v_stride, b.v_dim, (b.count + 1) / 2, alpha, tile.o);
}

}  // namespace

// 32 registers hold the sums beside the rows and, on ARM, a key's next pairs each, for 8 keys or for 8 dims.
void attend_block_bf16(const RowTile& tile, const KeyBlock& block, float* scores) {
#if defined(__x86_64__)
  if (tile.width == kTinyTile) block_of<Eight, 1, 24, 16>(tile, block, scores);
  else if (tile.width == kSmallTile) block_of<Sixteen, 1, 24, 16>(tile, block, scores);
  else block_of<Sixteen, 2, 12, 8>(tile, block, scores);
#else
  block_of<Four, 2, 8, 8>(tile, block, scores);
#endif
}

#if defined(__x86_64__)

MLA_BF16_DOT void interleave_bf16(const bf16* a, const bf16* b, uint32_t* pairs, int64_t n) {
  constexpr int64_t kLanes = Sixteen::kLanes;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + i)));
    __m512i high = _mm512_setzero_si512();
    if (b) high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + i)));
    _mm512_storeu_si512(pairs + i, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  for (; i < n; ++i) pairs[i] = a[i].bits | static_cast<uint32_t>(b ? b[i].bits : 0) << 16;
}

namespace {

bool permutes_bytes() {
  static const bool has = __builtin_cpu_supports("avx512vbmi");
  return has;
}

// All 128 magnitudes, already scaled, as bf16 and as their low and high bytes. Making it takes as long as converting a
// group of 128, so it is kept while the scale stays the same.
struct Magnitudes {
  __m512i words[4];
  ByteTables bytes;
  float scale;
  bool made;
};

MLA_BF16_DOT void make_words(Magnitudes& table, float scale) {
  static constexpr auto kValues = [] {
    std::array<float, 128> m{};
    for (uint8_t code = 0; code < 128; ++code) m[code] = to_float(fp8_e4m3{code});
    return m;
  }();
  for (int i = 0; i < 4; ++i) {
    const __m512 low = _mm512_loadu_ps(kValues.data() + 32 * i), high = _mm512_loadu_ps(kValues.data() + 32 * i + 16);
    table.words[i] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, _mm512_set1_ps(scale)),
                                                  _mm512_mul_ps(low, _mm512_set1_ps(scale)));
  }
}

MLA_BYTES void make_bytes(Magnitudes& table) {
  static constexpr auto kEven = [] {
    std::array<uint8_t, 64> at{};
    for (uint8_t i = 0; i < 64; ++i) at[i] = static_cast<uint8_t>(2 * i);
    return at;
  }();
  const __m512i even = _mm512_loadu_si512(kEven.data()), odd = _mm512_or_si512(even, _mm512_set1_epi8(1));
  for (int i = 0; i < 2; ++i) {
    table.bytes.low[i] = _mm512_permutex2var_epi8(table.words[2 * i], even, table.words[2 * i + 1]);
    table.bytes.high[i] = _mm512_permutex2var_epi8(table.words[2 * i], odd, table.words[2 * i + 1]);
  }
}

// 32 codes: two permutations of words, and a blend.
MLA_BF16_DOT void convert_words(const Magnitudes& table, const fp8_e4m3* x, bf16* y, int64_t n) {
  const __m512i t0 = table.words[0], t1 = table.words[1], t2 = table.words[2], t3 = table.words[3];
  for (int64_t i = 0; i < n; i += 32) {
    const __mmask32 lanes = n - i >= 32 ? 0xffffffffu : (1u << (n - i)) - 1;
    const __m512i code = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(lanes, x + i));
    const __m512i small = _mm512_permutex2var_epi16(t0, code, t1), large = _mm512_permutex2var_epi16(t2, code, t3);
    const __m512i magnitude =
        _mm512_mask_blend_epi16(_mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40)), small, large);
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8);
    _mm512_mask_storeu_epi16(y + i, lanes, _mm512_xor_si512(magnitude, sign));  // of a negative scale, too
  }
}

// 64 codes, put where widening leaves them in order.
MLA_BYTES void convert_bytes(const ByteTables& table, const fp8_e4m3* x, bf16* y, int64_t n) {
  const ByteTables t = table;
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  __m512i first, second;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    widen(t, _mm512_permutexvar_epi64(order, _mm512_loadu_si512(x + i)), first, second);
    _mm512_storeu_si512(y + i, first);
    _mm512_storeu_si512(y + i + 32, second);
  }
  if (i == n) return;
  const uint64_t lanes = code_lanes(n - i);
  widen(t, _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(lanes, x + i)), first, second);
  _mm512_mask_storeu_epi16(y + i, static_cast<__mmask32>(lanes), first);
  _mm512_mask_storeu_epi16(y + i + 32, static_cast<__mmask32>(lanes >> 32), second);
}

// The table of a scale, the one of the last call where that has not changed.
const Magnitudes& magnitudes(float scale) {
  alignas(64) thread_local Magnitudes table{};
  if (table.made && table.scale == scale) return table;
  make_words(table, scale);
  if (permutes_bytes()) make_bytes(table);
  table.scale = scale;
  table.made = true;
  return table;
}

}  // namespace

void convert_fp8_bf16(const fp8_e4m3* x, bf16* y, int64_t n, float scale) {
  const Magnitudes& table = magnitudes(scale);
  if (permutes_bytes()) convert_bytes(table.bytes, x, y, n);
  else convert_words(table, x, y, n);
}

void convert_fp8_bf16_by_words(const fp8_e4m3* x, bf16* y, int64_t n, float scale) {
  convert_words(magnitudes(scale), x, y, n);
}

#else

void interleave_bf16(const bf16* a, const bf16* b, uint32_t* pairs, int64_t n) {
  constexpr int64_t kLanes = 8;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const uint16x8_t low = vld1q_u16(&a[i].bits), high = b ? vld1q_u16(&b[i].bits) : vdupq_n_u16(0);
    vst2q_u16(reinterpret_cast<uint16_t*>(pairs + i), {{low, high}});
  }
  for (; i < n; ++i) pairs[i] = a[i].bits | static_cast<uint32_t>(b ? b[i].bits : 0) << 16;
}

// A code's bits are those of an f16, 2^-8 times its value, which widens exactly. Only the NaN code needs care.
MLA_BF16_DOT void convert_fp8_bf16(const fp8_e4m3* x, bf16* y, int64_t n, float scale) {
  constexpr int64_t kLanes = 8;
  auto four = [scale](float16x4_t v) { return vmulq_n_f32(vmulq_n_f32(vcvt_f32_f16(v), 256), scale); };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const int8x8_t code = vld1_s8(reinterpret_cast<const int8_t*>(x + i));
    const uint8x8_t nan = vceq_u8(vand_u8(vreinterpret_u8_s8(code), vdup_n_u8(0x7f)), vdup_n_u8(0x7f));
    // The sign goes to the two highest bits, of which f16's exponent does without the lower one.
    const uint16x8_t bits = vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(code, 7)), vdupq_n_u16(0xbfff));
    const float16x8_t half = vreinterpretq_f16_u16(bits);
    const bfloat16x8_t rounded =
        vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(four(vget_low_f16(half))), four(vget_high_f16(half)));
    const uint16x8_t all = vreinterpretq_u16_s16(vmovl_s8(vreinterpret_s8_u8(nan)));
    vst1q_u16(&y[i].bits, vorrq_u16(vreinterpretq_u16_bf16(rounded), all));
  }
  for (; i < n; ++i) y[i] = to_bf16(to_float(x[i]) * scale);
}

void convert_fp8_bf16_by_words(const fp8_e4m3* x, bf16* y, int64_t n, float scale) { convert_fp8_bf16(x, y, n, scale); }

#endif

}  // namespace mla::cpu

#else  // never called: native_bf16_dot() is false

namespace mla::cpu {
void attend_block_bf16(const RowTile&, const KeyBlock&, float*) {}
void interleave_bf16(const bf16*, const bf16*, uint32_t*, int64_t) {}
void convert_fp8_bf16(const fp8_e4m3*, bf16*, int64_t, float) {}
void convert_fp8_bf16_by_words(const fp8_e4m3*, bf16*, int64_t, float) {}
}  // namespace mla::cpu

#endif
