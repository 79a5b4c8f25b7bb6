// The forms of block attention, as what the ops' tasks are templates over.
#pragma once

#include "backend/cpu/core/block_attention.hpp"
#include "backend/cpu/core/target.hpp"

namespace mla::cpu {

/// Operands widened to f32, whatever they are.
struct F32Form {
  using Element = float;                        ///< of queries, keys and values
  static constexpr int64_t kKeys = kBlockKeys;  ///< of a block, at most
  static constexpr int64_t kStep = kKeyPad;     ///< keys are read up to a multiple of this
  static constexpr int64_t kLeast = kTinyTile;  ///< rows that a tile has room for, at least
  static constexpr int kLatentTiles = 2;        ///< tiles that share a block of cached rows
  static constexpr int kExpandedTiles = 8;      ///< the same of a head's keys: they, their outputs and the block fit L2
  static constexpr bool kPairs = false;         ///< values come as pairs of keys
  static constexpr bool kRowsOut = false;       ///< outputs lie as rows, not as columns
  static constexpr int64_t kScores = kKeys * kTileRows,
                           kProbabilities = 0;  ///< floats of a tile's scores, and beside them
  static constexpr int64_t query_words(int64_t qk_dim) { return qk_dim; }   ///< of a row
  static constexpr int64_t key_elements(int64_t qk_dim) { return qk_dim; }  ///< the same of a key, with its padding
  /// 32-bit words of a block's values.
  static constexpr int64_t block_values(int64_t v_dim) { return kKeys * tile_stride(v_dim, sizeof(float)); }
  static void attend(const RowTile& tile, const KeyBlock& block, float* scores) {
    attend_block_f32(tile, block, scores);
  }
};

/// Dot products of pairs of bf16.
struct DotForm {
  using Element = bf16;
  static constexpr int64_t kKeys = kBlockKeys, kStep = kKeyPad, kLeast = kTinyTile;
  static constexpr int kLatentTiles = 2, kExpandedTiles = 8;
  static constexpr bool kPairs = true, kRowsOut = false;
  static constexpr int64_t kScores = kKeys * kTileRows, kProbabilities = 0;
  static constexpr int64_t query_words(int64_t qk_dim) { return (qk_dim + 1) / 2; }
  static constexpr int64_t key_elements(int64_t qk_dim) { return (qk_dim + 1) / 2 * 2; }
  static constexpr int64_t block_values(int64_t v_dim) { return kKeys / 2 * tile_stride(v_dim, sizeof(uint32_t)); }
  static void attend(const RowTile& tile, const KeyBlock& block, float* scores) {
    attend_block_bf16(tile, block, scores);
  }
};

/// bf16 in AMX's tile registers. Its blocks are attended by several tiles at once (block_attention.hpp).
struct AmxForm {
  using Element = bf16;
  static constexpr int64_t kKeys = kAmxBlockKeys, kStep = kAmxKeyPad, kLeast = kSmallTile;
  // Sharing a block is worth more where its products take less time.
  static constexpr int kLatentTiles = 4, kExpandedTiles = 16;
  static constexpr bool kPairs = true, kRowsOut = true;
  static constexpr int64_t kScores = kKeys * kTileRows;             ///< floats of a tile's scores
  static constexpr int64_t kProbabilities = kKeys * kTileRows / 2;  ///< and its probabilities, two a float
  static constexpr int64_t query_words(int64_t qk_dim) { return key_steps(qk_dim) * 16; }
  static constexpr int64_t key_elements(int64_t qk_dim) { return key_steps(qk_dim) * 32; }
  static constexpr int64_t block_values(int64_t v_dim) { return kKeys / 32 * value_squares(v_dim) * kValueSquare; }
};

/// Calls f(Form{}) for the form that multiplies operands: bf16 ones by what was measured to be fastest.
template <class F>
void with_form(bool bf16_operands, F&& f) {
  switch (bf16_operands ? bf16_products() : Bf16Products::widened) {
    case Bf16Products::widened: return f(F32Form{});
    case Bf16Products::dot: return f(DotForm{});
    case Bf16Products::amx: return f(AmxForm{});
  }
}

}  // namespace mla::cpu
