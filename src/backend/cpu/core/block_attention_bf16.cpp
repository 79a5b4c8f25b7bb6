// block_attention with AVX-512 BF16 dot products: each multiplies two bf16 pairs a lane and adds them to an f32 sum,
// twice the rate of f32 multiplication. Query, key, value and probability operands are bf16; sums, maxima and the
// softmax are f32. Compiled for its target by function attributes, and called only where native_bf16_dot() holds.
#include "backend/cpu/core/block_attention.hpp"
#include "backend/cpu/core/byte_tables.hpp"
#include "backend/cpu/core/convert.hpp"

#if defined(__x86_64__)

// GCC 12 takes its own headers' undefined-value intrinsics for uninitialised reads (GCC bug 105593).
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <array>

// Highway's targets in this build have no bf16 dot product; the intrinsics below need no compiler flags beyond this.
#define MLA_BF16_DOT [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]]

namespace mla::cpu {
namespace {

// Vectors of rows: of 16, or of 8 for tiny tiles, which costs half where 512 bits are two passes.
struct Sixteen {
  using Floats = __m512;
  using Pairs = __m512i;
  static constexpr int64_t kLanes = 16;
  MLA_BF16_DOT static Floats load(const float* x) { return _mm512_loadu_ps(x); }
  MLA_BF16_DOT static Pairs load(const uint32_t* x) { return _mm512_loadu_si512(x); }
  MLA_BF16_DOT static void store(float* x, Floats v) { _mm512_storeu_ps(x, v); }
  MLA_BF16_DOT static void store(uint32_t* x, Pairs v) { _mm512_storeu_si512(x, v); }
  MLA_BF16_DOT static Floats zero() { return _mm512_setzero_ps(); }
  MLA_BF16_DOT static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  MLA_BF16_DOT static Floats dot(Floats sum, Pairs a, uint32_t pair) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)));
  }
  MLA_BF16_DOT static Pairs round(Floats x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }
  MLA_BF16_DOT static Pairs join(Pairs low, Pairs high) { return _mm512_or_si512(low, _mm512_slli_epi32(high, 16)); }
};
struct Eight {
  using Floats = __m256;
  using Pairs = __m256i;
  static constexpr int64_t kLanes = 8;
  MLA_BF16_DOT static Floats load(const float* x) { return _mm256_loadu_ps(x); }
  MLA_BF16_DOT static Pairs load(const uint32_t* x) { return _mm256_loadu_si256(reinterpret_cast<const Pairs*>(x)); }
  MLA_BF16_DOT static void store(float* x, Floats v) { _mm256_storeu_ps(x, v); }
  MLA_BF16_DOT static void store(uint32_t* x, Pairs v) { _mm256_storeu_si256(reinterpret_cast<Pairs*>(x), v); }
  MLA_BF16_DOT static Floats zero() { return _mm256_setzero_ps(); }
  MLA_BF16_DOT static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  MLA_BF16_DOT static Floats dot(Floats sum, Pairs a, uint32_t pair) {
    return _mm256_dpbf16_ps(sum, (__m256bh)a, (__m256bh)_mm256_set1_epi32(static_cast<int>(pair)));
  }
  MLA_BF16_DOT static Pairs round(Floats x) { return _mm256_cvtepu16_epi32((__m128i)_mm256_cvtneps_pbh(x)); }
  MLA_BF16_DOT static Pairs join(Pairs low, Pairs high) { return _mm256_or_si256(low, _mm256_slli_epi32(high, 16)); }
};
constexpr int64_t kLanes = Sixteen::kLanes;

MLA_BF16_DOT inline uint32_t pair_at(const bf16* x) {
  uint32_t pair;
  __builtin_memcpy(&pair, x, sizeof(pair));
  return pair;
}

// scores[n][..] = sum over pairs of q[pair][..] . k[n][pair]
template <class V, int G, int N>
MLA_BF16_DOT [[gnu::noinline]] void score_tile(const uint32_t* __restrict q, int64_t width, const bf16* __restrict k,
                                               int64_t stride, int64_t pairs, float* __restrict scores) {
  typename V::Floats acc[N][G];
#pragma GCC unroll 32
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) acc[n][g] = V::zero();
  constexpr int kPerBase = 8;
  for (int64_t d = 0; d < pairs; ++d) {
    typename V::Pairs rows[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) rows[g] = V::load(q + d * width + g * V::kLanes);
#pragma GCC unroll 32
    for (int n = 0; n < N; ++n) {
      const bf16* base = k + static_cast<int64_t>(n / kPerBase) * kPerBase * stride;
      const uint32_t pair = pair_at(base + (n % kPerBase) * stride + 2 * d);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) acc[n][g] = V::dot(acc[n][g], rows[g], pair);
    }
  }
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
#pragma GCC unroll 32
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) acc[n][g] = V::dot(acc[n][g], rows[g], v[t * stride + n]);
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

// Value tiles over all dims.
template <class V, int G, int kDims>
MLA_BF16_DOT void values(const uint32_t* p, int64_t w, const uint32_t* v, int64_t stride, int64_t v_dim, int64_t pairs,
                         const float* alpha, float* o) {
  int64_t d = 0;
  for (; d + kDims <= v_dim; d += kDims) value_tile<V, G, kDims>(p, w, v + d, stride, pairs, alpha, o + d * w);
  for (; d + 4 <= v_dim; d += 4) value_tile<V, G, 4>(p, w, v + d, stride, pairs, alpha, o + d * w);
  for (; d < v_dim; ++d) value_tile<V, G, 1>(p, w, v + d, stride, pairs, alpha, o + d * w);
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
    score_tile<V, G, kKeys>(q, w, k + n * b.k_stride, b.k_stride, (b.qk_dim + 1) / 2, scores + n * w);
  float alpha[kTileRows];
  bool skip[kBlockKeys];
  const bool skips = softmax_block(tile, b, scores, alpha, skip);
  pair_probabilities<V>(scores, w, b.count);
  const uint32_t* p = reinterpret_cast<const uint32_t*>(scores);
  if (skips) return values_but<V, G, kDims>(skip, p, w, b, alpha, tile.o);
  values<V, G, kDims>(p, w, static_cast<const uint32_t*>(b.v), b.v_stride, b.v_dim, (b.count + 1) / 2, alpha, tile.o);
}

}  // namespace

void attend_block_bf16(const RowTile& tile, const KeyBlock& block, float* scores) {
  if (tile.width == kTinyTile) block_of<Eight, 1, 24, 16>(tile, block, scores);
  else if (tile.width == kSmallTile) block_of<Sixteen, 1, 24, 16>(tile, block, scores);
  else block_of<Sixteen, 2, 12, 8>(tile, block, scores);
}

MLA_BF16_DOT void interleave_bf16(const bf16* a, const bf16* b, uint32_t* pairs, int64_t n) {
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

}  // namespace mla::cpu

#else  // never called: native_bf16_dot() is false

namespace mla::cpu {
void attend_block_bf16(const RowTile&, const KeyBlock&, float*) {}
void interleave_bf16(const bf16*, const bf16*, uint32_t*, int64_t) {}
void convert_fp8_bf16(const fp8_e4m3*, bf16*, int64_t, float) {}
void convert_fp8_bf16_by_words(const fp8_e4m3*, bf16*, int64_t, float) {}
}  // namespace mla::cpu

#endif
