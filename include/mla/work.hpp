// Units of work: plain data that a plan writes and ops read. Row and position counts fit 32 bits; byte offsets are
// 64-bit.
#pragma once

#include <cstdint>
#include <limits>

namespace mla {

/// Keys of a part where a row's bits follow from the row alone (SplitPolicy::batch_invariant). 1024 keeps two threads
/// busy from 2K positions on; a partial row costs one pass over its output for as many cache rows read, about 1% of the
/// work at 16 heads.
constexpr int32_t kInvariantKeys = 1024;

/// Cached positions [start, start + count) of a request, placed at flat rows [row, row + count).
struct GatherPiece {
  int32_t request = 0;
  int32_t start = 0;
  int32_t count = 0;
  int32_t row = 0;
};

/// Query rows [q_begin, q_begin + q_count) over key rows [k_begin, k_begin + k_count): query i sees keys j <= i +
/// visible.
struct ExpandedItem {
  int32_t q_begin = 0, q_count = 0;
  int32_t k_begin = 0, k_count = 0;
  int32_t visible = 0;     ///< 0: causal over equal-length queries and keys; everything(): not causal
  bool last = false;       ///< the rows' last part: what they hold after it is final
  bool masked = false;     ///< rows see, of those keys, the ones that their masks name alone
  int32_t mask_begin = 0;  ///< masked: column of the first key in the rows' masks
  static constexpr int32_t everything() { return std::numeric_limits<int32_t>::max() / 2; }
};

/// Query rows of a request over its cached positions [kv_begin, kv_end): query i sees positions j <= visible + i.
struct LatentItem {
  int32_t request = 0;  ///< row of the block table
  int32_t q_begin = 0, q_count = 0;
  int32_t kv_begin = 0, kv_end = 0;
  int32_t visible = 0;
  int32_t partial = -1;  ///< first partial row to write; -1: straight to the output rows
};

/// Query rows of a request over its cached positions [kv_begin, kv_end) in the sparse indexer: query i sees positions
/// j <= visible + i. Its scores lie at rows [row, row + q_count) of a tile whose column 0 is position kv_begin, or one
/// behind it where an op is given a window of the positions.
struct IndexItem {
  int32_t request = 0;  ///< row of the block table
  int32_t q_begin = 0, q_count = 0;
  int32_t kv_begin = 0, kv_end = 0;
  int32_t visible = 0;
  int32_t row = 0;

  /// Columns that query i sees.
  constexpr int32_t columns(int64_t i) const {
    const int64_t seen = int64_t{visible} + i + 1 - kv_begin, most = int64_t{kv_end} - kv_begin;
    return static_cast<int32_t>(seen < 0 ? 0 : seen < most ? seen : most);
  }
};

/// The item over a window of its positions: the `count` from kv_begin + first on, those of them that it has.
constexpr IndexItem clipped(IndexItem item, int64_t first, int64_t count) {
  const int64_t end = item.kv_end, begin = item.kv_begin + first < end ? item.kv_begin + first : end;
  item.kv_begin = static_cast<int32_t>(begin);
  item.kv_end = static_cast<int32_t>(count < end - begin ? begin + count : end);
  return item;
}

/// Query rows [q_begin, q_begin + q_count), each over keys [k_begin, k_end) of its own list: the slots selected from
/// the first source, then those from the second.
struct SparseItem {
  int32_t q_begin = 0, q_count = 0;
  int32_t k_begin = 0, k_end = 0;
  int32_t partial = -1;  ///< first partial row to write; -1: straight to the output rows
};

/// Partial rows of a split request: split s of query row i lies at partial + s * rows + i; joined into output row `row`
/// + i.
struct SplitRows {
  int32_t row = 0;
  int32_t rows = 0;
  int32_t partial = 0;
  int32_t splits = 0;
};

}  // namespace mla
