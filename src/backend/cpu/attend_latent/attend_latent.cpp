// Tasks are (item, group of query rows). A task walks its item's positions in blocks: rows are dequantised once into a
// tile and meet all of the task's rows there (core/block_attention). Roofline and figures: README.md.
#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/load_rows.hpp"
#include "backend/cpu/core/target.hpp"
#include "backend/cpu/core/tiles.hpp"
#include "mla/error.hpp"

namespace mla::cpu {
namespace {

// Two tiles share each dequantised block: beyond that the queries and outputs push the block out of L2.
constexpr int kTiles = 2;
using Tiles = RowTiles<kTiles>;

struct Scratch {
  Tiles tiles;
  float *k, *v;  // a block of rows, in f32 (keys and values at once) or bf16 (values again, as pairs)
  Scratch(Cutter& cut, int64_t entry, int64_t width)
      : tiles(cut, entry, width),
        k(cut.take<float>(kBlockKeys * tile_stride(entry, sizeof(float)))),
        v(cut.take<float>(kBlockKeys / 2 * tile_stride(width, sizeof(uint32_t)))) {}
};

// Positions [first, first + count) of a request as rows, zero up to the padding.
template <class Element>
void load_block(const ops::AttendLatentArgs& a, int32_t request, int64_t first, int64_t count, const Scratch& s,
                KeyBlock& block) {
  const CacheSpec& spec = a.cache.spec;
  Element* rows = reinterpret_cast<Element*>(s.k);
  const int64_t stride = tile_stride(spec.entry(), sizeof(Element));
  for (int64_t i = 0; i < count;) {
    const int64_t offset = (first + i) % spec.page_size, n = std::min(count - i, spec.page_size - offset);
    const std::byte* page = a.cache.page(a.block_table(request, (first + i) / spec.page_size));
    if constexpr (std::is_same_v<Element, bf16>) load_rows_bf16(spec, page, offset, n, rows + i * stride, stride);
    else load_rows(spec, page, offset, n, rows + i * stride, stride);
    i += n;
  }
  const int64_t padded = (count + kKeyPad - 1) / kKeyPad * kKeyPad;
  std::fill(rows + count * stride, rows + padded * stride, Element{});
  block.k = block.v = rows;
  block.k_stride = block.v_stride = stride;
  if constexpr (std::is_same_v<Element, bf16>) {
    if (spec.entry() % 2)  // the last pair's missing half
      for (int64_t i = 0; i < count; ++i) rows[i * stride + spec.entry()] = {};
    block.v = s.v;
    block.v_stride = tile_stride(block.v_dim, sizeof(uint32_t));
    for (int64_t i = 0; i < count; i += 2)  // a missing last position has probability 0: any number will do
      interleave_bf16(rows + i * stride, rows + std::min(i + 1, count - 1) * stride,
                      reinterpret_cast<uint32_t*>(s.v) + i / 2 * block.v_stride, block.v_dim);
  }
}

const float* query_row(const ops::AttendLatentArgs& a, int64_t token, int64_t head, float* row) {
  if (a.q.dtype() == Dtype::f32) return static_cast<const float*>(a.q.at(token, head, 0));
  const float scale = a.q.dtype() == Dtype::fp8_e4m3 ? a.q_scale : 1.0f;
  for (int64_t d = 0; d < a.q.extent<Entry>(); ++d) row[d] = a.q(token, head, d) * scale;
  return row;
}

template <class Element>
void run_task(const ops::AttendLatentArgs& a, const LatentItem& item, int64_t first_row, int64_t rows,
              std::byte* memory) {
  const int64_t heads = a.q.extent<Head>(), entry = a.q.extent<Entry>(), width = a.out.extent<Value>();
  Cutter cut(memory);
  Scratch scratch(cut, entry, width);
  int tiles = 0;
  int32_t end = 0;
  for (int64_t r = 0; r < rows; r += kTileRows, ++tiles) {
    RowTile& tile = scratch.tiles.tiles[tiles];
    tile.rows = std::min(rows - r, kTileRows);
    tile.width = RowTile::width_for(tile.rows);
    std::memset(tile.q, 0, static_cast<size_t>(entry * tile.width) * sizeof(float));
    for (int64_t lane = 0; lane < tile.rows; ++lane) {
      const int64_t row = first_row + r + lane, token = row / heads;
      const float* q = query_row(a, item.q_begin + token, row % heads, scratch.tiles.row);
      if constexpr (std::is_same_v<Element, bf16>) set_query_bf16(tile, lane, q, entry);
      else set_query_f32(tile, lane, q, entry);
      tile.last[lane] = static_cast<int32_t>(std::min<int64_t>(item.visible + token, item.kv_end - 1));
    }
    begin_tile(tile, width);
    end = std::max(end, tile.last_last + 1);
  }
  for (int64_t first = item.kv_begin; first < end; first += kBlockKeys) {
    KeyBlock block{.qk_dim = entry, .v_dim = width, .first_key = first, .scale = a.scale};
    load_block<Element>(a, item.request, first, std::min<int64_t>(kBlockKeys, end - first), scratch, block);
    for (int i = 0; i < tiles; ++i) {
      const RowTile& tile = scratch.tiles.tiles[i];
      block.count = std::min<int64_t>(kBlockKeys, tile.last_last + 1 - first);
      if (block.count <= 0) continue;
      if constexpr (std::is_same_v<Element, bf16>) attend_block_bf16(tile, block, scratch.tiles.scores);
      else attend_block_f32(tile, block, scratch.tiles.scores);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const RowTile& tile = scratch.tiles.tiles[r / kTileRows];
    const int64_t token = (first_row + r) / heads, head = (first_row + r) % heads;
    if (item.partial < 0)
      a.lse(item.q_begin + token, head) = finish_row(tile, r % kTileRows, width, &a.out(item.q_begin + token, head, 0));
    else
      a.partial_lse(item.partial + token, head) =
          finish_row(tile, r % kTileRows, width, &a.partial_out(item.partial + token, head, 0));
  }
}

}  // namespace

size_t attend_latent_scratch(const backend::ScratchShape& s) {
  Cutter cut(nullptr);
  const Scratch scratch(cut, s.latent + s.rope, s.latent + s.rope);  // fp8_ds_v4's values are the whole row
  return cut.used();
}

void attend_latent(Stream& stream, const ops::AttendLatentArgs& a) {
  const int64_t heads = a.q.extent<Head>();
  const size_t needed = attend_latent_scratch({.heads = heads, .latent = a.q.extent<Entry>()});
  if (a.scratch.per_worker < needed)
    throw ShapeError("attend_latent: scratch is " + std::to_string(a.scratch.per_worker) + " bytes a worker, " +
                     std::to_string(needed) + " are needed");
  const bool dot = a.q.dtype() == Dtype::bf16 && native_bf16_dot() && loads_as_bf16(a.cache.spec.format);
  // Items have few distinct row counts, but tasks are counted exactly.
  int64_t tasks = 0;
  auto groups = [&](const LatentItem& i) { return (i.q_count * heads + Tiles::kRows - 1) / Tiles::kRows; };
  for (const LatentItem& i : a.items) tasks += groups(i);
  const bool uniform = !a.items.empty() && tasks == groups(a.items[0]) * static_cast<int64_t>(a.items.size());
  stream.pool().run(tasks, [&](int64_t task, int worker) {
    const LatentItem* item = a.items.data();
    if (uniform) {
      item += task / groups(*item);
      task %= groups(*item);
    } else {
      for (int64_t n; task >= (n = groups(*item)); ++item) task -= n;
    }
    const int64_t first = task * Tiles::kRows;
    const auto run = dot ? run_task<bf16> : run_task<float>;
    run(a, *item, first, std::min(Tiles::kRows, item->q_count * heads - first), a.scratch.worker(worker));
  });
}

}  // namespace mla::cpu
