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

template <class Form>
void run_task(const ops::AttendLatentArgs& a, const LatentItem& item, int64_t first_row, int64_t rows,
              std::byte* memory) {
  const int64_t heads = a.q.extent<Head>(), entry = a.q.extent<Entry>(), width = a.out.extent<Value>();
  Cutter cut(memory);
  LatentScratch<Form> scratch(cut, entry, width);
  int tiles = 0;
  int32_t end = 0;
  for (int64_t r = 0; r < rows; r += kTileRows, ++tiles) {
    RowTile& tile = scratch.tiles.tiles[tiles];
    set_queries(tile, std::min(rows - r, kTileRows), a.q, a.q_scale, scratch, [&](int64_t lane) {
      const int64_t row = first_row + r + lane;
      return std::pair(item.q_begin + row / heads, row % heads);
    });
    for (int64_t lane = 0; lane < tile.rows; ++lane)
      tile.last[lane] =
          static_cast<int32_t>(std::min<int64_t>(item.visible + (first_row + r + lane) / heads, item.kv_end - 1));
    begin_tile(tile, width);
    end = std::max(end, tile.last_last + 1);
  }
  const CacheSpec& spec = a.cache.spec;
  const uint32_t page_size = static_cast<uint32_t>(spec.page_size);
  for (int64_t first = item.kv_begin; first < end; first += Form::kKeys) {
    KeyBlock block{.qk_dim = entry, .v_dim = width, .first_key = first, .scale = a.scale};
    attend_rows(
        std::span(scratch.tiles.tiles, static_cast<size_t>(tiles)), block, std::min<int64_t>(Form::kKeys, end - first),
        end - first, scratch,
        [&](int64_t i) -> CachedRow {
          const uint32_t position = static_cast<uint32_t>(first + i), page = position / page_size;
          return {&spec, a.cache.page(a.block_table(item.request, page)), position - page * page_size};
        },
        [&](int64_t i, int64_t n) { return static_cast<uint32_t>(first + i) % page_size + n <= page_size; });
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

template <class Form>
void attend(Stream& stream, const ops::AttendLatentArgs& a) {
  const int64_t heads = a.q.extent<Head>();
  const int64_t group = rows_of_a_task<Form>(stream.pool().threads(), [&](int64_t rows) {
    int64_t tasks = 0;
    for (const LatentItem& i : a.items) tasks += (i.q_count * heads + rows - 1) / rows;
    return tasks;
  });
  auto groups = [&](const LatentItem& i) { return (i.q_count * heads + group - 1) / group; };
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
    const int64_t first = task * group;
    run_task<Form>(a, *item, first, std::min(group, item->q_count * heads - first), a.scratch.worker(worker));
  });
}

}  // namespace

size_t attend_latent_scratch(const backend::ScratchShape& s) { return latent_scratch(s.latent + s.rope); }

void attend_latent(Stream& stream, const ops::AttendLatentArgs& a) {
  const size_t needed = attend_latent_scratch({.heads = a.q.extent<Head>(), .latent = a.q.extent<Entry>()});
  if (a.scratch.per_worker < needed)
    throw ShapeError("attend_latent: scratch is " + std::to_string(a.scratch.per_worker) + " bytes a worker, " +
                     std::to_string(needed) + " are needed");
  with_form(a.q.dtype() == Dtype::bf16 && loads_as_bf16(a.cache.spec.format),
            [&](auto form) { attend<decltype(form)>(stream, a); });
}

void schedule_latent(Stream&, const ops::ScheduleLatentArgs&) {}  // tasks are cut when the pool runs them

}  // namespace mla::cpu
