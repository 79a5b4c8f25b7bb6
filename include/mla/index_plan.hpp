// How a step's sparse indexer walks queries x context: tiles of scores, the running selection, and work items, all of
// bounded size. A pure function of the requests; results do not depend on the tiles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "mla/work.hpp"

namespace mla {

struct RequestPlan;

constexpr int64_t kMostTopk = 8192;
/// Bytes that a tile of scores and its selection state take together, unless the caller says otherwise. The last-level
/// caches of servers hold it.
constexpr size_t kIndexTileBytes = size_t{8} << 20;
/// The same on a GPU, whose calls must be large: a step of 64 tokens over 128K positions is one tile.
constexpr size_t kIndexTileBytesGpu = size_t{64} << 20;

/// Candidates that a row's selection keeps at most before it drops all but the best topk.
constexpr int64_t topk_capacity(int64_t topk) {
  const int64_t most = topk + (topk > 1024 ? topk : 1024);
  return (most + 15) / 16 * 16;
}
/// Bytes of one row's running selection: a multiple of 64.
constexpr size_t topk_state_bytes(int64_t topk) {
  return 64 + 2 * sizeof(int32_t) * static_cast<size_t>(topk_capacity(topk) + 16);
}

struct IndexTiles {
  int64_t rows = 0;        ///< query rows a tile
  int64_t keys = 0;        ///< positions a tile
  size_t score_bytes = 0;  ///< rows x keys f32
  size_t state_bytes = 0;  ///< rows x topk_state_bytes(topk)
};
/// Tiles for a step of `rows` query rows over at most `longest` positions; score_bytes + state_bytes <= most_bytes.
/// ShapeError when topk is outside 1..kMostTopk, when rows or longest is negative, or when most_bytes does not hold one
/// row and 1024 positions.
IndexTiles index_tiles(int64_t rows, int64_t longest, int64_t topk, size_t most_bytes = kIndexTileBytes);

/// One tile of query rows: score and select each round in turn, then finish. Round r is the ops' window of positions
/// [r * keys, (r + 1) * keys): the items are the same in all of them.
struct IndexTile {
  std::vector<IndexItem> rows;    ///< every row of the tile with all of its positions, of a split cache the rank's own
  std::vector<IndexItem> joined;  ///< of a split cache: every row over the candidates of all members
  /// Rounds of `keys` positions that cover what the rows see.
  int64_t rounds(int64_t keys) const;
};
struct IndexSchedule {
  IndexTiles tiles;
  std::vector<IndexItem> all;  ///< rows whose positions fit topk: fill_topk, no scoring
  std::vector<IndexTile> selected;
  int64_t candidates = 0;  ///< of a split cache: positions that a member gives for a row
};
/// q_begin of the items counts rows as the requests do.
IndexSchedule schedule_index(std::span<const RequestPlan> requests, int64_t topk, size_t most_bytes = kIndexTileBytes);

}  // namespace mla
