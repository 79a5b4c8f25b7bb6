// Tasks are (item, head, group of query rows). A task walks the keys its rows can see in blocks: keys and values are copied once into
// dense tiles and meet all of the task's rows there (core/block_attention). Roofline and figures: README.md.
#include <algorithm>
#include <cstring>
#include <string>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/core/merge_weights.hpp"
#include "backend/cpu/core/tiles.hpp"
#include "mla/error.hpp"

namespace mla::cpu {
namespace {

// Four tiles share each copied block; their queries, outputs and the block stay in L2.
constexpr int kTiles = 4;
using Tiles = RowTiles<kTiles>;

struct Scratch {
  Tiles tiles;
  float* k;  // [kBlockKeys][k_stride]
  float* v;  // [kBlockKeys][v_stride]
  Scratch(Cutter& cut, int64_t qk, int64_t width)
      : tiles(cut, qk, width),
        k(cut.take<float>(kBlockKeys * tile_stride(qk, sizeof(float)))),
        v(cut.take<float>(kBlockKeys * tile_stride(width, sizeof(float)))) {}
};

void load(Dtype t, const void* x, float* y, int64_t n) {
  if (t == Dtype::bf16) convert(static_cast<const bf16*>(x), y, n);
  else std::copy_n(static_cast<const float*>(x), n, y);
}

// Keys far apart in memory become rows side by side: a head's rows lie a power of two apart and would share cache sets.
void load_block(const ops::AttendExpandedArgs& a, int64_t head, int64_t key, int64_t count, const Scratch& s, int64_t k_stride,
                int64_t v_stride) {
  const int64_t nope = a.k_nope.extent<Nope>(), rope = a.k_pe.extent<Rope>(), width = a.v.extent<Value>();
  const Dtype t = a.k_nope.dtype();
  for (int64_t j = 0; j < count; ++j) {
    load(t, a.k_nope.at(key + j, head, 0), s.k + j * k_stride, nope);
    if (rope > 0) load(t, a.k_pe.at(key + j, 0), s.k + j * k_stride + nope, rope);
    load(t, a.v.at(key + j, head, 0), s.v + j * v_stride, width);
  }
  const int64_t padded = (count + kKeyPad - 1) / kKeyPad * kKeyPad;
  std::fill(s.k + count * k_stride, s.k + padded * k_stride, 0.0f);
}

void store_row(const ops::AttendExpandedArgs& a, int64_t token, int64_t head, const RowTile& tile, int64_t lane, float* row) {
  const int64_t width = a.out.extent<Value>();
  float* out = &a.out(token, head, 0);
  float& lse = a.lse(token, head);
  if (!a.accumulate) {
    lse = finish_row(tile, lane, width, out);
    return;
  }
  const float part_lse = finish_row(tile, lane, width, row);
  const MergeWeights w = merge_weights(lse, part_lse);
  if (w.b == 0) return;
  for (int64_t d = 0; d < width; ++d) out[d] = w.a == 0 ? w.b * row[d] : w.a * out[d] + w.b * row[d];
  lse = w.lse;
}

void run_task(const ops::AttendExpandedArgs& a, const ExpandedItem& item, int64_t head, int64_t first_row, int64_t rows,
              std::byte* memory) {
  const int64_t qk = a.q.extent<QueryKey>(), width = a.v.extent<Value>();
  const int64_t k_stride = tile_stride(qk, sizeof(float)), v_stride = tile_stride(width, sizeof(float));
  Cutter cut(memory);
  Scratch scratch(cut, qk, width);
  int tiles = 0;
  int64_t end = 0;
  for (int64_t r = 0; r < rows; r += kTileRows, ++tiles) {
    RowTile& tile = scratch.tiles.tiles[tiles];
    tile.rows = std::min(rows - r, kTileRows);
    tile.width = RowTile::width_for(tile.rows);
    std::memset(tile.q, 0, static_cast<size_t>(qk * tile.width) * sizeof(float));
    for (int64_t lane = 0; lane < tile.rows; ++lane) {
      const int64_t row = first_row + r + lane;
      const float* q = &a.q(item.q_begin + row, head, 0);
      if (a.k_nope.dtype() == Dtype::bf16) {
        for (int64_t d = 0; d < qk; ++d) scratch.tiles.row[d] = to_float(to_bf16(q[d]));
        q = scratch.tiles.row;
      }
      set_query_f32(tile, lane, q, qk);
      tile.last[lane] = static_cast<int32_t>(std::clamp<int64_t>(row + item.visible, -1, item.k_count - 1));
    }
    begin_tile(tile, width);
    end = std::max<int64_t>(end, tile.last_last + 1);
  }
  for (int64_t first = 0; first < end; first += kBlockKeys) {
    const int64_t count = std::min(kBlockKeys, end - first);
    load_block(a, head, item.k_begin + first, count, scratch, k_stride, v_stride);
    const KeyBlock block{.k = scratch.k, .k_stride = k_stride, .v = scratch.v, .v_stride = v_stride, .qk_dim = qk, .v_dim = width,
                         .first_key = first, .count = count, .scale = a.scale};
    for (int i = 0; i < tiles; ++i)
      if (first <= scratch.tiles.tiles[i].last_last) attend_block_f32(scratch.tiles.tiles[i], block, scratch.tiles.scores);
  }
  for (int64_t r = 0; r < rows; ++r)
    store_row(a, item.q_begin + first_row + r, head, scratch.tiles.tiles[r / kTileRows], r % kTileRows, scratch.tiles.row);
}

}  // namespace

size_t attend_expanded_scratch(const backend::ScratchShape& s) {
  Cutter cut(nullptr);
  const Scratch scratch(cut, s.nope + s.rope, s.value);
  return cut.used();
}

void attend_expanded(Stream& stream, const ops::AttendExpandedArgs& a) {
  const int64_t heads = a.q.extent<Head>();
  const size_t needed = attend_expanded_scratch({.nope = a.q.extent<QueryKey>(), .value = a.v.extent<Value>()});
  if (a.scratch.per_worker < needed)
    throw ShapeError("attend_expanded: scratch is " + std::to_string(a.scratch.per_worker) + " bytes a worker, " + std::to_string(needed) +
                     " are needed");
  auto groups = [](const ExpandedItem& i) { return (i.q_count + Tiles::kRows - 1) / Tiles::kRows; };
  int64_t tasks = 0;
  for (const ExpandedItem& i : a.items) tasks += groups(i) * heads;
  stream.pool().run(tasks, [&](int64_t task, int worker) {
    const ExpandedItem* item = a.items.data();
    for (int64_t n; task >= (n = groups(*item) * heads); ++item) task -= n;
    // Under a causal mask the last rows see most: they go first.
    const int64_t first = (groups(*item) - 1 - task / heads) * Tiles::kRows;
    run_task(a, *item, task % heads, first, std::min<int64_t>(Tiles::kRows, item->q_count - first), a.scratch.worker(worker));
  });
}

}  // namespace mla::cpu
