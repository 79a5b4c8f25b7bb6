// The inner step of index_score: one token's heads meet a block of keys.
//
// Lanes are heads. A token's queries lie in chunks of kHeadChunk heads, [chunk][dim][head]; keys stay row-major and are
// taken one number at a time as a broadcast, so a key's dot products with all heads run in the order of dim. A key's
// score is then the weighted sum over the vector's lanes of what relu leaves. Nothing depends on which keys share a
// block: a score's bits are those of its query and key.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/dtype.hpp"

namespace mla::cpu {

/// Heads of a chunk: two vectors of 16, or eight of 4. A last chunk of at most half as many is half as wide.
constexpr int64_t kHeadChunk = 32, kHalfChunk = 16;
/// Keys a block holds at most: a multiple of every register tile. Rows past the last key, up to a multiple of
/// kIndexKeyTile, are read, whatever they hold.
constexpr int64_t kIndexKeys = 96, kIndexKeyTile = 24;

/// Keys whose cached bytes one address of IndexBlock::ahead leads to.
constexpr int64_t kAheadKeys = 12;

/// Heads with their padding.
constexpr int64_t padded_heads(int64_t heads) { return (heads + kHalfChunk - 1) / kHalfChunk * kHalfChunk; }

struct IndexBlock {
  const void* q = nullptr;         ///< f32 [chunk][dim][head], or pairs of bf16 [chunk][ceil(dim / 2)][head]
  const float* weights = nullptr;  ///< [padded heads], 0 for the padding
  int64_t heads = 0, dim = 0;      ///< heads padded
  int64_t real_heads = 0;          ///< without padding, whose products with an infinite key are no numbers: not summed
  const void* k = nullptr;         ///< f32 or bf16 rows; bf16 ones of odd dim end with a zero
  int64_t k_stride = 0;            ///< elements
  int64_t count = 0;               ///< keys
  /// Cached bytes to fetch meanwhile, a line now and then: those of kAheadKeys keys for as many of this block's, at
  /// ahead_row bytes a key. 0: nothing, the pointers need only be readable.
  const std::byte* ahead[kIndexKeys / kAheadKeys] = {};
  int64_t ahead_row = 0;
  float* scores = nullptr;  ///< [count rounded up to kIndexKeyTile]
};

/// A register tile's share of what to fetch ahead: `step` bytes an iteration. In one burst the fetches would keep the
/// tile's own loads waiting: with them spread out, decoding at 32K positions took 1.45 ms instead of 1.9 (Zen 5, bf16).
struct Ahead {
  const std::byte* at;
  int64_t step;
};
/// Of the tile of keys [n, n + keys) and heads [head, head + width), whose loop runs `iterations` times.
inline Ahead ahead_of(const IndexBlock& b, int64_t n, int64_t keys, int64_t head, int64_t width, int64_t iterations) {
  const int64_t tiles = (b.heads + width - 1) / width, all = tiles * iterations;
  const int64_t step = (keys * b.ahead_row + all - 1) / all;
  return {b.ahead[n / kAheadKeys] + n % kAheadKeys * b.ahead_row + head / width * iterations * step, step};
}

void score_block_f32(const IndexBlock& block);
/// Only where native_bf16_dot() holds.
void score_block_bf16(const IndexBlock& block);

/// The CPU, and what the system lets this process use, have what the next two need.
bool serves_index_amx();
/// Queries, weights and keys as for bf16, of dims padded with zeros to a multiple of 32; keys are read and scores
/// written up to the next multiple of 32. products: [32][heads].
void score_block_amx(const IndexBlock& block, float* products);
/// Rows of e4m3 codes, one behind the other, as bf16 rows of dims padded with zeros to a multiple of kCodeBlock, each
/// block of them in another order (order_as_codes): an order of sums.
void widen_codes_amx(const fp8_e4m3* codes, int64_t rows, int64_t dim, bf16* to, int64_t to_stride);
constexpr int64_t kCodeBlock = 64;
/// The same order for a row of `dims`, a multiple of kCodeBlock: of each block the first eight of every 16 dims, then
/// the others.
void order_as_codes(bf16* row, int64_t dims);

/// Rows of e4m3 codes, one behind the other, as bf16 rows: exact. Only where native_bf16_dot() holds.
void widen_codes(const fp8_e4m3* codes, int64_t rows, int64_t dim, bf16* to, int64_t to_stride);

/// to[c * to_stride + r] = from[r * from_stride + c] for rows r < rows, columns c < columns, as 32-bit words.
void transpose(const uint32_t* from, int64_t from_stride, int64_t rows, int64_t columns, uint32_t* to,
               int64_t to_stride);

}  // namespace mla::cpu
