// score_block in AMX's tile registers: a tile of sums is 16 keys by 16 heads, keys are the row-major operand and a
// chunk of queries the paired one. Called only where serves_index_amx() holds.
#include <algorithm>
#include <array>

#include "backend/cpu/core/byte_tables.hpp"
#include "backend/cpu/core/tile_registers.hpp"
#include "backend/cpu/index_score/kernel.hpp"

#ifdef MLA_HAS_AMX

// GCC 12 takes its own headers' undefined-value intrinsics for uninitialised reads (GCC bug 105593).
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

namespace mla::cpu {
namespace {

constexpr int64_t kLanes = 16, kGroup = 2 * kTileSide;  // keys that meet a chunk of heads together
static_assert(kIndexKeys % kGroup == 0 && kHeadChunk == 2 * kTileSide && kHalfChunk == kTileSide);

// What to fetch ahead, line by line: an equal share with every step of the products.
class Lines {
 public:
  Lines(const IndexBlock& b, int64_t steps) : at_(b.ahead), end_(std::end(b.ahead)), bytes_(kAheadKeys * b.ahead_row) {
    if (bytes_ == 0) return;
    const int64_t all = (end_ - at_) * ((bytes_ + 63) / 64);
    share_ = (all + steps - 1) / steps;
  }
  void fetch() {
    for (int64_t i = 0; i < share_ && at_ != end_; ++i) {
      __builtin_prefetch(*at_ + offset_);
      if ((offset_ += 64) < bytes_) continue;
      offset_ = 0;
      ++at_;
    }
  }

 private:
  const std::byte *const *at_, *const *end_;
  int64_t bytes_, share_ = 0, offset_ = 0;
};

// to[key][head] of 32 keys and a chunk of 32 heads, or of 16.
MLA_AMX void multiply(const uint32_t* q, bool wide, const bf16* k, int64_t stride, int64_t steps, float* to,
                      int64_t to_stride, Lines& lines) {
  const int64_t width = wide ? kHeadChunk : kHalfChunk;
  const size_t q_row = static_cast<size_t>(width) * sizeof(uint32_t),
               k_row = static_cast<size_t>(stride) * sizeof(bf16),
               to_row = static_cast<size_t>(to_stride) * sizeof(float);
  const bf16* second = k + kTileSide * stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s, q += kTilePairs * width) {
    const int64_t d = s * kTileInputs;
    lines.fetch();
    _tile_loadd(6, q, q_row);
    _tile_loadd(4, k + d, k_row);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, second + d, k_row);
    _tile_dpbf16ps(1, 5, 6);
    if (wide) {
      _tile_loadd(7, q + kLanes, q_row);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  float* below = to + kTileSide * to_stride;
  _tile_stored(0, to, to_row);
  _tile_stored(1, below, to_row);
  if (!wide) return;
  _tile_stored(2, to + kLanes, to_row);
  _tile_stored(3, below + kLanes, to_row);
}

// Lane i: the sum of vector i's lanes.
MLA_AMX inline __m512 sums_of(__m512 (&v)[16]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
    v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
#pragma GCC unroll 2
  for (int n = 2; n > 0; n /= 2)
#pragma GCC unroll 2
    for (int i = 0; i < n; ++i)
      v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                           _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
  return v[0];
}

// scores of 16 keys: the weighted sum over the real ones of `heads` of what relu leaves of their products. NaN stays.
MLA_AMX inline void weigh(const float* products, const float* weights, int64_t heads, int64_t real, float* scores) {
  __m512 sum[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) sum[i] = _mm512_setzero_ps();
  for (int64_t h = 0; h < heads; h += kLanes) {
    const __m512 w = _mm512_loadu_ps(weights + h);
    const auto is_real = static_cast<__mmask16>((1u << std::clamp<int64_t>(real - h, 0, kLanes)) - 1);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m512 product = _mm512_maskz_loadu_ps(is_real, products + i * heads + h);
      sum[i] = _mm512_fmadd_ps(_mm512_max_ps(_mm512_setzero_ps(), product), w, sum[i]);
    }
  }
  _mm512_storeu_ps(scores, sums_of(sum));
}

}  // namespace

bool serves_index_amx() {
  static const bool bytes = __builtin_cpu_supports("avx512vbmi");
  return bytes && has_amx_bf16();
}

MLA_AMX void score_block_amx(const IndexBlock& b, float* products) {
  const int64_t steps = (b.dim + kTileInputs - 1) / kTileInputs, words = steps * kTilePairs;
  const int64_t groups = (b.count + kGroup - 1) / kGroup, chunks = (b.heads + kHeadChunk - 1) / kHeadChunk;
  Lines lines(b, groups * chunks * steps);
  _tile_loadconfig(&kWholeTiles);
  for (int64_t n = 0; n < b.count; n += kGroup) {
    const bf16* keys = static_cast<const bf16*>(b.k) + n * b.k_stride;
    for (int64_t h = 0; h < b.heads; h += kHeadChunk)
      multiply(static_cast<const uint32_t*>(b.q) + h * words, b.heads - h >= kHeadChunk, keys, b.k_stride, steps,
               products + h, b.heads, lines);
    weigh(products, b.weights, b.heads, b.real_heads, b.scores + n);
    weigh(products + kTileSide * b.heads, b.weights, b.heads, b.real_heads, b.scores + n + kTileSide);
  }
  _tile_release();
}

MLA_BYTES void widen_codes_amx(const fp8_e4m3* codes, int64_t rows, int64_t dim, bf16* to, int64_t to_stride) {
  static constexpr auto kBytes = [] {
    std::array<std::array<uint8_t, 128>, 2> bytes{};
    for (uint8_t code = 0; code < 128; ++code) {
      const uint16_t bits = to_bf16(to_float(fp8_e4m3{code})).bits;
      bytes[0][code] = static_cast<uint8_t>(bits);
      bytes[1][code] = static_cast<uint8_t>(bits >> 8);
    }
    return bytes;
  }();
  const ByteTables table{.low = {_mm512_loadu_si512(kBytes[0].data()), _mm512_loadu_si512(kBytes[0].data() + 64)},
                         .high = {_mm512_loadu_si512(kBytes[1].data()), _mm512_loadu_si512(kBytes[1].data() + 64)}};
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < dim; i += kCodeBlock) {
      __m512i first, second;
      widen(table, _mm512_maskz_loadu_epi8(code_lanes(dim - i), codes + r * dim + i), first, second);
      bf16* at = to + r * to_stride + i;
      _mm512_storeu_si512(at, first);
      _mm512_storeu_si512(at + kCodeBlock / 2, second);
    }
}

void order_as_codes(bf16* row, int64_t dims) {
  constexpr int64_t kEight = 8;
  for (bf16* block = row; block < row + dims; block += kCodeBlock) {
    bf16 from[kCodeBlock];
    std::copy_n(block, kCodeBlock, from);
    for (int64_t i = 0; i < kCodeBlock / kEight; ++i)
      std::copy_n(from + i * kEight, kEight, block + i % 2 * (kCodeBlock / 2) + i / 2 * kEight);
  }
}

}  // namespace mla::cpu

#else  // never called

namespace mla::cpu {
bool serves_index_amx() { return false; }
void score_block_amx(const IndexBlock&, float*) {}
void widen_codes_amx(const fp8_e4m3*, int64_t, int64_t, bf16*, int64_t) {}
void order_as_codes(bf16*, int64_t) {}
}  // namespace mla::cpu

#endif
