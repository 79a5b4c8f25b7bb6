// Tasks are (item, group of query rows). A task walks its item's positions in blocks: rows are dequantised once into a
// tile and meet all of the task's rows there (core/block_attention). Roofline and figures: README.md.
#include <algorithm>
#include <string>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/latent_task.hpp"
#include "backend/cpu/core/target.hpp"
#include "mla/error.hpp"

namespace mla::cpu {
namespace {

// Positions [first, first + count) of a request as a block; those below `end` will be loaded after it.
template <class Element>
void load_block(const ops::AttendLatentArgs& a, int32_t request, int64_t first, int64_t count, int64_t end,
                const LatentScratch& s, KeyBlock& block) {
  const CacheSpec& spec = a.cache.spec;
  const uint32_t page_size = static_cast<uint32_t>(spec.page_size);
  load_block_rows<Element>(count, end - first, s, [&](int64_t i) -> CachedRow {
    const uint32_t position = static_cast<uint32_t>(first + i), page = position / page_size;
    return {&spec, a.cache.page(a.block_table(request, page)), position - page * page_size};
  });
  finish_block<Element>(count, s, block);
}

template <class Element>
void run_task(const ops::AttendLatentArgs& a, const LatentItem& item, int64_t first_row, int64_t rows,
              std::byte* memory) {
  const int64_t heads = a.q.extent<Head>(), entry = a.q.extent<Entry>(), width = a.out.extent<Value>();
  Cutter cut(memory);
  LatentScratch scratch(cut, entry, width);
  int tiles = 0;
  int32_t end = 0;
  for (int64_t r = 0; r < rows; r += kTileRows, ++tiles) {
    RowTile& tile = scratch.tiles.tiles[tiles];
    clear_queries(tile, std::min(rows - r, kTileRows), entry);
    for (int64_t lane = 0; lane < tile.rows; ++lane) {
      const int64_t row = first_row + r + lane, token = row / heads;
      set_query<Element>(tile, lane, query_row(a.q, a.q_scale, item.q_begin + token, row % heads, scratch.tiles.row),
                         entry);
      tile.last[lane] = static_cast<int32_t>(std::min<int64_t>(item.visible + token, item.kv_end - 1));
    }
    begin_tile(tile, width);
    end = std::max(end, tile.last_last + 1);
  }
  for (int64_t first = item.kv_begin; first < end; first += kBlockKeys) {
    KeyBlock block{.qk_dim = entry, .v_dim = width, .first_key = first, .scale = a.scale};
    load_block<Element>(a, item.request, first, std::min<int64_t>(kBlockKeys, end - first), end, scratch, block);
    for (int i = 0; i < tiles; ++i) {
      const RowTile& tile = scratch.tiles.tiles[i];
      block.count = std::min<int64_t>(kBlockKeys, tile.last_last + 1 - first);
      if (block.count <= 0) continue;
      attend_block<Element>(tile, block, scratch);
    }
  }
  const auto out = a.out.as<float>();
  for (int64_t r = 0; r < rows; ++r) {
    const RowTile& tile = scratch.tiles.tiles[r / kTileRows];
    const int64_t token = (first_row + r) / heads, head = (first_row + r) % heads;
    if (item.partial < 0)
      a.lse(item.q_begin + token, head) = finish_row(tile, r % kTileRows, width, &out(item.q_begin + token, head, 0));
    else
      a.partial_lse(item.partial + token, head) =
          finish_row(tile, r % kTileRows, width, &a.partial_out(item.partial + token, head, 0));
  }
}

}  // namespace

size_t attend_latent_scratch(const backend::ScratchShape& s) {
  Cutter cut(nullptr);
  const LatentScratch scratch(cut, s.latent + s.rope, s.latent + s.rope);  // fp8_ds_v4's values are the whole row
  return cut.used();
}

void attend_latent(Stream& stream, const ops::AttendLatentArgs& a) {
  const int64_t heads = a.q.extent<Head>();
  const size_t needed = attend_latent_scratch({.heads = heads, .latent = a.q.extent<Entry>()});
  if (a.scratch.per_worker < needed)
    throw ShapeError("attend_latent: scratch is " + std::to_string(a.scratch.per_worker) + " bytes a worker, " +
                     std::to_string(needed) + " are needed");
  const bool dot = a.q.dtype() == Dtype::bf16 && bf16_dot_pays() && loads_as_bf16(a.cache.spec.format);
  auto groups = [&](const LatentItem& i) { return (i.q_count * heads + LatentTiles::kRows - 1) / LatentTiles::kRows; };
  int64_t tasks = 0;
  for (const LatentItem& i : a.items) tasks += groups(i);
  // Where every item has as many groups as the first, a task's item is a quotient; else it is searched for.
  const int64_t each = a.items.empty() ? 0 : groups(a.items[0]);
  const bool uniform =
      each > 0 && std::all_of(a.items.begin(), a.items.end(), [&](const LatentItem& i) { return groups(i) == each; });
  stream.pool().run(tasks, [&](int64_t task, int worker) {
    const LatentItem* item = a.items.data();
    if (uniform) {
      item += task / each;
      task %= each;
    } else {
      for (int64_t n; task >= (n = groups(*item)); ++item) task -= n;
    }
    const int64_t first = task * LatentTiles::kRows;
    const auto run = dot ? run_task<bf16> : run_task<float>;
    run(a, *item, first, std::min(LatentTiles::kRows, item->q_count * heads - first), a.scratch.worker(worker));
  });
}

}  // namespace mla::cpu
