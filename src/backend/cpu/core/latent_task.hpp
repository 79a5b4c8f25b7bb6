// What the two attentions over cached rows share: a task's scratch, its queries as tiles, its keys as a block.
// Element: float, or bf16 for the dot-product form.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "backend/cpu/core/load_rows.hpp"
#include "backend/cpu/core/tiles.hpp"
#include "mla/view.hpp"

namespace mla::cpu {

// Two tiles share each dequantised block: beyond that the queries and outputs push the block out of L2.
constexpr int kLatentTiles = 2;
using LatentTiles = RowTiles<kLatentTiles>;

struct LatentScratch {
  LatentTiles tiles;
  float *k, *v;  // a block of rows, in f32 (keys and values at once) or bf16 (values again, as pairs)
  LatentScratch(Cutter& cut, int64_t entry, int64_t width)
      : tiles(cut, entry, width),
        k(cut.take<float>(kBlockKeys * tile_stride(entry, sizeof(float)))),
        v(cut.take<float>(kBlockKeys / 2 * tile_stride(width, sizeof(uint32_t)))) {}
};

/// A query as f32, in place or in `row`.
inline const float* query_row(const AnyView<Token, Head, Entry>& q, float q_scale, int64_t token, int64_t head,
                              float* row) {
  if (q.dtype() == Dtype::f32) return static_cast<const float*>(q.at(token, head, 0));
  const float scale = q.dtype() == Dtype::fp8_e4m3 ? q_scale : 1.0f;
  for (int64_t d = 0; d < q.extent<Entry>(); ++d) row[d] = q(token, head, d) * scale;
  return row;
}

/// Sizes a tile for its rows and clears its queries: lanes without a row stay zero.
inline void clear_queries(RowTile& tile, int64_t rows, int64_t entry) {
  tile.rows = rows;
  tile.width = RowTile::width_for(rows);
  std::memset(tile.q, 0, static_cast<size_t>(entry * tile.width) * sizeof(float));
}

template <class Element>
void set_query(const RowTile& tile, int64_t lane, const float* row, int64_t entry) {
  if constexpr (std::is_same_v<Element, bf16>) set_query_bf16(tile, lane, row, entry);
  else set_query_f32(tile, lane, row, entry);
}

/// Where row i of the block is to be loaded.
template <class Element>
Element* block_row(const LatentScratch& s, int64_t entry, int64_t i) {
  return reinterpret_cast<Element*>(s.k) + i * tile_stride(entry, sizeof(Element));
}

/// Rows asked for ahead of the one that is loaded. 8 to 32 serve alike.
constexpr int64_t kRowsAhead = 16;

/// Where a cached row lies.
struct CachedRow {
  const CacheSpec* spec;
  const std::byte* page;
  int64_t offset;
};

/// Loads the block's rows 0 to count - 1 from at(i), a CachedRow, which is known for i below `known`. Each row is asked
/// for some rows before its turn: the hardware foresees neither the next page nor, often, the next row.
template <class Element, class At>
void load_block_rows(int64_t count, int64_t known, const LatentScratch& s, At&& at) {
  auto ask = [&](int64_t i) {
    const CachedRow row = at(i);
    prefetch_row(*row.spec, row.page, row.offset);
  };
  for (int64_t i = 0; i < std::min(kRowsAhead, known); ++i) ask(i);
  for (int64_t i = 0; i < count; ++i) {
    if (i + kRowsAhead < known) ask(i + kRowsAhead);
    const CachedRow row = at(i);
    const int64_t entry = row.spec->entry(), stride = tile_stride(entry, sizeof(Element));
    Element* to = block_row<Element>(s, entry, i);
    if constexpr (std::is_same_v<Element, bf16>) load_rows_bf16(*row.spec, row.page, row.offset, 1, to, stride);
    else load_rows(*row.spec, row.page, row.offset, 1, to, stride);
  }
}

/// Makes a block of the `count` rows that were loaded: zero up to the padding, and in bf16 the values as pairs.
template <class Element>
void finish_block(int64_t count, const LatentScratch& s, KeyBlock& block) {
  const int64_t entry = block.qk_dim, stride = tile_stride(entry, sizeof(Element));
  Element* rows = block_row<Element>(s, entry, 0);
  const int64_t padded = (count + kKeyPad - 1) / kKeyPad * kKeyPad;
  std::fill(rows + count * stride, rows + padded * stride, Element{});
  block.count = count;
  block.k = block.v = rows;
  block.k_stride = block.v_stride = stride;
  if constexpr (std::is_same_v<Element, bf16>) {
    if (entry % 2)  // the last pair's missing half
      for (int64_t i = 0; i < count; ++i) rows[i * stride + entry] = {};
    block.v = s.v;
    block.v_stride = tile_stride(block.v_dim, sizeof(uint32_t));
    block.paired = true;
    for (int64_t i = 0; i < count; i += 2)  // a missing last position has probability 0: any number will do
      interleave_bf16(rows + i * stride, rows + std::min(i + 1, count - 1) * stride,
                      reinterpret_cast<uint32_t*>(s.v) + i / 2 * block.v_stride, block.v_dim);
  }
}

template <class Element>
void attend_block(const RowTile& tile, const KeyBlock& block, const LatentScratch& s) {
  if constexpr (std::is_same_v<Element, bf16>) attend_block_bf16(tile, block, s.tiles.scores);
  else attend_block_f32(tile, block, s.tiles.scores);
}

}  // namespace mla::cpu
