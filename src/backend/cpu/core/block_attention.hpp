// The inner step both attention ops share: a tile of query rows meets a block of keys and values (online softmax).
//
// Lanes are query rows. Queries are held transposed, [dim][row]; scores and probabilities are [key][row]; outputs are
// [dim][row]. Every multiplication is then a vector of rows times one broadcast number of a key or value, so nothing is
// reduced across lanes and a row's sums run in the same order whatever tile it sits in: its bits depend on nothing
// else. Keys and values stay row-major.
//
// Three forms (block_forms.hpp): f32 (Highway, every target), bf16 pairs with dot products (bf16_dot.hpp), and bf16 in
// AMX's tile registers. The last holds outputs as rows, [row][dim].
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "mla/dtype.hpp"

namespace mla::cpu {

/// Keys a block holds at most: a multiple of every register tile (24, 12, 8, 6).
constexpr int64_t kBlockKeys = 96;
/// Rows a tile holds at most; tiles of up to kSmallTile rows use half the lanes, and of up to kTinyTile half of those.
constexpr int64_t kTileRows = 32, kSmallTile = 16, kTinyTile = 8;
/// Key rows past the last one are read up to a multiple of this and must be zero.
constexpr int64_t kKeyPad = 24;
/// The same of the AMX form; there values are read past the last key, too.
constexpr int64_t kAmxBlockKeys = 256, kAmxKeyPad = 32;

/// AMX: values lie in squares of 16 pairs of keys and 16 dims, a line of 64 bytes each row and one line between
/// squares, so that a row's squares do not share L1 sets. In pairs.
constexpr int64_t kSquareRows = 16, kValueSquare = 16 * 16 + 16;
/// Steps of 32 dims, and squares of 32 keys: an even number, for dims come by 32.
constexpr int64_t key_steps(int64_t qk_dim) { return (qk_dim + 31) / 32; }
constexpr int64_t value_squares(int64_t v_dim) { return (v_dim + 31) / 32 * 2; }
/// Keys as the AMX form counts them.
constexpr int64_t padded_keys_amx(int64_t count) { return (count + kAmxKeyPad - 1) / kAmxKeyPad * kAmxKeyPad; }

/// Sixteen keys one behind the other, read up to a multiple of 32 dims.
struct KeyGroup {
  const bf16* rows = nullptr;
  size_t row_bytes = 0;
};

/// One tile of query rows and its running softmax. Memory is the caller's scratch.
struct RowTile {
  int64_t rows = 0;         ///< lanes in use
  int64_t width = 0;        ///< lanes: kTinyTile (not of the AMX form), kSmallTile or kTileRows
  void* q = nullptr;        ///< [qk_dim][width] f32, or [ceil(qk_dim / 2)][width] pairs of bf16 (AMX: up to whole 16)
  float* o = nullptr;       ///< [v_dim][width], or [width][o_stride]
  int64_t o_stride = 0;     ///< floats of an output row; 0: outputs are columns
  bool fresh = true;        ///< AMX: no block was joined yet, o holds nothing
  float* m = nullptr;       ///< [width] running maximum
  float* l = nullptr;       ///< [width] running sum
  int32_t* last = nullptr;  ///< [width] last key each row sees, counted as first_key is
  int32_t first_last = 0;   ///< smallest `last` of the rows in use
  int32_t last_last = 0;    ///< largest
  /// Null, or [keys / 32][width] of the block that is joined next: bit t % 32 of (t / 32, row) says that a row sees its
  /// key t, if `last` does not hide that.
  const uint32_t* shown = nullptr;

  static constexpr int64_t width_for(int64_t rows, int64_t least) {
    return rows <= least ? least : rows <= kSmallTile ? kSmallTile : kTileRows;
  }
};

/// A block's keys and values, either f32 rows or bf16 (values as pairs of keys: [key / 2][v_dim] of (key, key + 1)).
struct KeyBlock {
  const void* k = nullptr;
  int64_t k_stride = 0;  ///< elements
  const void* v = nullptr;
  int64_t v_stride = 0;  ///< elements of a row (f32), or pairs of a pair row (bf16)
  bool paired = false;   ///< values are pairs
  bool squares = false;  ///< values lie in the AMX form's squares; keys are not asked for here
  bool finite = false;   ///< values are known to be finite, those of half a last pair, too
  int64_t qk_dim = 0, v_dim = 0;
  int64_t first_key = 0, count = 0;
  float scale = 1;
};

/// Dense tiles walk memory at this stride, an odd number of cache lines, so that rows do not share L1 sets.
constexpr int64_t tile_stride(int64_t elements, int64_t element_size) {
  const int64_t per_line = 64 / element_size, lines = (elements + per_line - 1) / per_line;
  return (lines | 1) * per_line;
}

/// Whether all values of the block's keys are finite, as KeyBlock::finite means it. Squares are looked at up to a whole
/// one.
bool finite_values(const KeyBlock& block);
/// Empties a tile: no key seen yet. Sets first_last and last_last from `last`.
void begin_tile(RowTile& tile, int64_t v_dim);
/// Joins a block's keys into the tile.
void attend_block_f32(const RowTile& tile, const KeyBlock& block, float* scores);
void attend_block_bf16(const RowTile& tile, const KeyBlock& block, float* scores);
/// A tile that takes the first `count` keys of a block, at least one. Keys past them are hidden from its rows by
/// `last`.
struct AmxTile {
  RowTile* tile = nullptr;
  int64_t count = 0;
  float* scores = nullptr;  ///< room for AmxForm::kScores
};
/// The same in AMX, of several tiles: one's softmax beside the next one's products. With `keys` their scores are made
/// here, and scores of every second tile may lie in one place; without, padded_keys_amx(count) scores of each are
/// there. block.count is not looked at. probabilities: two of AmxForm::kProbabilities.
void attend_tiles_amx(std::span<const AmxTile> tiles, const KeyBlock& block, const KeyGroup* keys,
                      void* const (&probabilities)[2]);
/// Scores of keys [first, end), multiples of kAmxKeyPad, of a block.
void score_keys_amx(const RowTile& tile, const KeyGroup* groups, int64_t first, int64_t end, int64_t qk_dim,
                    float* scores);
/// Scores [count][width], unscaled, to probabilities relative to the tile's new maximum; alpha[width] is the factor for
/// what it had summed. True: the values of the keys in skip[count, rounded up to even] must not be multiplied.
bool softmax_block(const RowTile& tile, const KeyBlock& block, float* scores, float* alpha, bool* skip);
/// Row r of the result: out[v_dim] and its lse. A row that saw nothing: zeros and -inf. A row whose query holds NaN or
/// +inf, with a NaN or +inf score, or that saw a value that is no finite number: NaN, lse too.
float finish_row(const RowTile& tile, int64_t r, int64_t v_dim, float* out);

/// q_t[d * width + lane] = row[d].
void set_query_f32(const RowTile& tile, int64_t lane, const float* row, int64_t qk_dim);
/// The same in bf16 pairs, rounding to nearest even.
void set_query_bf16(const RowTile& tile, int64_t lane, const float* row, int64_t qk_dim);
/// The lane's query holds neither NaN nor +inf.
bool usable_query(const RowTile& tile, int64_t lane, const KeyBlock& block);

/// A row of values that belongs to two keys, in pieces: f(words, n) for each, all of them when f is true throughout.
template <class F>
bool for_pair_row(const KeyBlock& block, int64_t pair, F&& f) {
  const uint32_t* v = static_cast<const uint32_t*>(block.v);
  if (!block.squares) return f(v + pair * block.v_stride, block.v_dim);
  v += pair / kSquareRows * value_squares(block.v_dim) * kValueSquare + pair % kSquareRows * kSquareRows;
  for (int64_t n = 0; n < value_squares(block.v_dim); ++n)
    if (!f(v + n * kValueSquare, kSquareRows)) return false;
  return true;
}
/// The part of softmax_block that looks for what is no finite number, in keys from `from` on; with `odd`, some score is
/// none. Scores are scaled.
bool keep_out(const RowTile& tile, const KeyBlock& block, const float* scores, int64_t from, bool odd, bool* skip);

/// Joins rows a and b of bf16 values into pairs; b may be null: zeros.
void interleave_bf16(const bf16* a, const bf16* b, uint32_t* pairs, int64_t n);

/// The AMX form's operands. All of a tile's queries, from rows[tile.rows] of bf16, or f32 rows at a stride:
void set_queries_amx(const RowTile& tile, const bf16* const* rows, int64_t qk_dim);
void set_queries_amx(const RowTile& tile, const float* first, int64_t row_stride, int64_t qk_dim);
/// Values of keys t, even, and t + 1; no row: zeros.
void set_values_amx(uint32_t* v, int64_t t, const bf16* a, const bf16* b, int64_t v_dim);
/// out = factor times a row of outputs.
void finish_values_amx(const float* o, int64_t v_dim, float factor, float* out);

}  // namespace mla::cpu
