// What the two attentions over cached rows share: a task's scratch, its queries as tiles, its keys as a block. Form:
// one of block_forms.hpp.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <type_traits>

#include "backend/cpu/core/block_forms.hpp"
#include "backend/cpu/core/load_rows.hpp"
#include "backend/cpu/core/tiles.hpp"
#include "mla/view.hpp"

namespace mla::cpu {

template <class Form>
struct LatentScratch {
  using Element = typename Form::Element;
  static constexpr bool kAmx = std::is_same_v<Form, AmxForm>;
  static constexpr int64_t kRows = Form::kLatentTiles * kTileRows;  ///< of a task, at most
  /// Keys that lie side by side: a block, or of AMX, whose tiles are scored while keys are near, as many as a register
  /// tile takes at once.
  static constexpr int64_t kNear = kAmx ? 64 : Form::kKeys;

  RowTiles<Form, Form::kLatentTiles, kAmx ? Form::kLatentTiles : 1> tiles;
  Element* k;   // rows as keys, and in f32 as values at once
  uint32_t* v;  // bf16: a block's values again, as pairs
  LatentScratch(Cutter& cut, int64_t entry, int64_t width)
      : tiles(cut, entry, width),
        k(cut.take<Element>(kNear * key_stride(entry))),
        v(cut.take<uint32_t>(Form::kPairs ? Form::block_values(width) : 0)) {}

  static int64_t key_stride(int64_t entry) { return tile_stride(Form::key_elements(entry), sizeof(Element)); }
};

/// Bytes of scratch a worker needs for the largest of the forms that this CPU has.
inline size_t latent_scratch(int64_t entry) {
  // fp8_ds_v4's values are the whole row.
  auto bytes = [&](auto form) {
    Cutter cut(nullptr);
    const LatentScratch<decltype(form)> scratch(cut, entry, entry);
    return cut.used();
  };
  return largest_of_forms(bytes);
}

/// A query as f32, in place or in `row`.
inline const float* query_row(const AnyView<Token, Head, Entry>& q, float q_scale, int64_t token, int64_t head,
                              float* row) {
  if (q.dtype() == Dtype::f32) return static_cast<const float*>(q.at(token, head, 0));
  const float scale = q.dtype() == Dtype::fp8_e4m3 ? q_scale : 1.0f;
  for (int64_t d = 0; d < q.extent<Entry>(); ++d) row[d] = q(token, head, d) * scale;
  return row;
}

/// Lays out the queries of a tile's lanes; the i-th is of (token, head) = at(i). Lanes without a row are zero.
template <class Form, class At>
void set_queries(RowTile& tile, int64_t rows, const AnyView<Token, Head, Entry>& q, float q_scale,
                 const LatentScratch<Form>& s, At&& at) {
  const int64_t entry = q.extent<Entry>();
  tile.rows = rows;
  tile.width = RowTile::width_for(rows, Form::kLeast);
  if constexpr (std::is_same_v<Form, AmxForm>) {
    const bf16* from[kTileRows];
    for (int64_t lane = 0; lane < rows; ++lane) {
      const auto [token, head] = at(lane);
      from[lane] = static_cast<const bf16*>(q.at(token, head, 0));
    }
    set_queries_amx(tile, from, entry);
  } else {
    std::memset(tile.q, 0, static_cast<size_t>(Form::query_words(entry) * tile.width) * sizeof(float));
    for (int64_t lane = 0; lane < rows; ++lane) {
      const auto [token, head] = at(lane);
      const float* row = query_row(q, q_scale, token, head, s.tiles.row);
      if constexpr (std::is_same_v<Form, DotForm>) set_query_bf16(tile, lane, row, entry);
      else set_query_f32(tile, lane, row, entry);
    }
  }
}

/// Rows of a task: as many as share a block best, or fewer where threads would go idle. tasks(rows) counts the tasks. A
/// row's bits do not depend on its group.
template <class Form, class Tasks>
int64_t rows_of_a_task(int threads, Tasks&& tasks) {
  int64_t rows = LatentScratch<Form>::kRows;
  constexpr int64_t kFewest = 2 * kTileRows;
  while (rows > kFewest && tasks(rows) < 2 * threads) rows /= 2;
  return rows;
}

/// Rows asked for ahead of the one that is loaded. 8 to 32 serve alike.
constexpr int64_t kRowsAhead = 16;

/// Where a cached row lies.
struct CachedRow {
  const CacheSpec* spec;
  const std::byte* page;
  int64_t offset;
};

/// Joins a block of cached rows 0 to count - 1 into tiles. at(i) is a CachedRow, known for i below `known`; near(i, n)
/// says whether n rows from i on follow one another in a page. block.first_key is the first one's number; a tile takes
/// the keys up to its last_last.
template <class Form, class At, class Near>
void attend_rows(std::span<RowTile> tiles, KeyBlock& block, int64_t count, int64_t known, const LatentScratch<Form>& s,
                 At&& at, Near&& near) {
  auto seen_by = [&](const RowTile& tile) { return std::min<int64_t>(count, tile.last_last + 1 - block.first_key); };
  const int64_t entry = block.qk_dim, stride = s.key_stride(entry);
  // Each row is asked for some rows before its turn: the hardware foresees neither the next page nor, often, the next
  // row.
  auto ask = [&](int64_t i) {
    const CachedRow row = at(i);
    prefetch_row(*row.spec, row.page, row.offset);
  };
  if constexpr (LatentScratch<Form>::kAmx) {
    const int64_t padded = padded_keys_amx(count);
    KeyGroup groups[AmxForm::kKeys / kSquareRows];
    for (int64_t first = 0; first < padded; first += s.kNear) {
      const int64_t end = std::min(padded, first + s.kNear);
      for (int64_t g = first; g < end; g += kSquareRows) {
        KeyGroup& group = groups[g / kSquareRows];
        if (entry % kAmxKeyPad == 0 && g + kSquareRows <= count && near(g, kSquareRows)) {
          const CachedRow row = at(g);
          if (row.spec->format == CacheFormat::bf16) {
            group = {reinterpret_cast<const bf16*>(row.page) + row.offset * entry,
                     static_cast<size_t>(entry) * sizeof(bf16)};
            continue;
          }
        }
        bf16* to = s.k + (g - first) * stride;
        group = {to, static_cast<size_t>(stride) * sizeof(bf16)};
        for (int64_t i = g; i < g + kSquareRows; ++i, to += stride) {
          if (i + kRowsAhead < known) ask(i + kRowsAhead);
          if (i < count) {
            const CachedRow row = at(i);
            load_rows_bf16(*row.spec, row.page, row.offset, 1, to, stride);
          }
          std::fill(to + (i < count ? entry : 0), to + AmxForm::key_elements(entry), bf16{});
        }
      }
      for (size_t i = 0; i < tiles.size(); ++i)
        if (const int64_t seen = padded_keys_amx(seen_by(tiles[i])); first < seen)
          score_keys_amx(tiles[i], groups, first, std::min(end, seen), entry, s.tiles.scores + i * AmxForm::kScores);
      for (int64_t t = first; t < end; t += 2) {
        const KeyGroup& g = groups[t / kSquareRows];
        const bf16* row = g.rows + t % kSquareRows * static_cast<int64_t>(g.row_bytes / sizeof(bf16));
        set_values_amx(s.v, t, row, row + g.row_bytes / sizeof(bf16), block.v_dim);
      }
    }
    block.v = s.v;
    block.paired = block.squares = true;
    AmxTile scored[Form::kLatentTiles];
    size_t used = 0;
    for (size_t i = 0; i < tiles.size(); ++i)
      if (const int64_t seen = seen_by(tiles[i]); seen > 0)
        scored[used++] = {&tiles[i], seen, s.tiles.scores + i * AmxForm::kScores};
    if (used > 0) attend_tiles_amx({scored, used}, block, nullptr, s.tiles.probabilities);
  } else {
    for (int64_t i = 0; i < std::min(kRowsAhead, known); ++i) ask(i);
    for (int64_t i = 0; i < count; ++i) {
      if (i + kRowsAhead < known) ask(i + kRowsAhead);
      const CachedRow row = at(i);
      auto* to = s.k + i * stride;
      if constexpr (Form::kPairs) load_rows_bf16(*row.spec, row.page, row.offset, 1, to, stride);
      else load_rows(*row.spec, row.page, row.offset, 1, to, stride);
      std::fill(to + entry, to + Form::key_elements(entry), typename Form::Element{});
    }
    const int64_t padded = (count + Form::kStep - 1) / Form::kStep * Form::kStep;
    std::fill(s.k + count * stride, s.k + padded * stride, typename Form::Element{});
    block.k = block.v = s.k;
    block.k_stride = block.v_stride = stride;
    if constexpr (Form::kPairs) {
      block.v = s.v;
      block.v_stride = tile_stride(block.v_dim, sizeof(uint32_t));
      block.paired = true;
      for (int64_t i = 0; i < count; i += 2)  // a missing last position has probability 0: any number will do
        interleave_bf16(s.k + i * stride, s.k + std::min(i + 1, count - 1) * stride, s.v + i / 2 * block.v_stride,
                        block.v_dim);
    }
    for (const RowTile& tile : tiles)
      if ((block.count = seen_by(tile)) > 0) Form::attend(tile, block, s.tiles.scores);
  }
}

}  // namespace mla::cpu
