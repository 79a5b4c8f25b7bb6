// Tasks are (item, query row, group of heads). A task walks its row's list: slots that exist are collected until they
// fill a block, their rows are dequantised into a tile and meet all of the task's heads there (core/block_attention).
// Roofline and figures: README.md.
#include <algorithm>
#include <span>
#include <string>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/latent_task.hpp"
#include "backend/cpu/core/merge_weights.hpp"
#include "backend/cpu/core/target.hpp"
#include "mla/error.hpp"
#include "ops/attend_sparse/selected.hpp"

namespace mla::cpu {
namespace {

// The next keys of a list, compacted: slots that do not exist take no place. A block, and what is asked for meanwhile.
template <class Form>
struct Selected {
  static constexpr int64_t kMost = Form::kKeys + kRowsAhead;
  CachedRow rows[kMost];
  int64_t count = 0;

  void drop(int64_t n) {
    std::copy(rows + n, rows + count, rows);
    count -= n;
  }
};

// Reads a row's list from key `begin` on.
class ListReader {
 public:
  ListReader(std::span<const ops::SparseSource> sources, int64_t row, int64_t begin, int64_t end)
      : sources_(sources), row_(row), begin_(begin), end_(end) {
    enter();
  }
  template <class Form>
  void fill(Selected<Form>& next) {
    for (; source_ < sources_.size(); first_ += sources_[source_].slots.extent<Topk>(), ++source_, enter()) {
      const ops::SparseSource& s = sources_[source_];
      const CacheSpec& spec = s.cache.spec;
      const uint32_t page_size = static_cast<uint32_t>(spec.page_size);
      for (; key_ < stop_; ++key_) {
        const int32_t slot = s.slots(row_, key_);
        if (!ops::exists(s, slot)) continue;
        if (next.count == Selected<Form>::kMost) return;
        const uint32_t at = static_cast<uint32_t>(slot), page = at / page_size;
        next.rows[next.count++] = {&spec, s.cache.page(page), at - page * page_size};
      }
    }
  }

 private:
  // Places key_ and stop_ in the current source.
  void enter() {
    if (source_ == sources_.size()) return;
    key_ = std::max<int64_t>(0, begin_ - first_);
    stop_ = std::min(end_ - first_, ops::list_length(sources_[source_], row_));
  }

  std::span<const ops::SparseSource> sources_;
  int64_t row_, begin_, end_;
  size_t source_ = 0;
  int64_t first_ = 0;           // the list's number of the source's first slot
  int64_t key_ = 0, stop_ = 0;  // in the source
};

// Keys [begin, end) of a row's list into emptied tiles.
template <class Form>
void attend_keys(const ops::AttendSparseArgs& a, int64_t row, int64_t begin, int64_t end, std::span<RowTile> tiles,
                 const LatentScratch<Form>& scratch) {
  const int64_t width = a.out.extent<Value>();
  for (RowTile& tile : tiles) {
    std::fill_n(tile.last, tile.rows, static_cast<int32_t>(Form::kKeys - 1));
    begin_tile(tile, width);
  }
  ListReader list(a.sources, row, begin, end);
  Selected<Form> keys;
  for (;;) {
    list.fill(keys);
    if (keys.count == 0) return;
    const int64_t count = std::min(keys.count, Form::kKeys);
    // Heads see every key of a block and nothing past it.
    KeyBlock block{.qk_dim = a.q.extent<Entry>(), .v_dim = width, .first_key = Form::kKeys - count, .scale = a.scale};
    attend_rows(
        tiles, block, count, keys.count, scratch, [&](int64_t i) { return keys.rows[i]; },
        [](int64_t, int64_t) { return false; });
    keys.drop(count);
  }
}

// Where a head's result goes; max is null when it is not wanted.
struct Target {
  float *out, *lse, *max;
};

Target target_of(const ops::AttendSparseArgs& a, const SparseItem& item, int64_t index, int64_t head) {
  if (const int64_t p = item.partial + index; item.partial >= 0)
    return {&a.partial_out(p, head, 0), &a.partial_lse(p, head), a.partial_max ? &a.partial_max(p, head) : nullptr};
  const int64_t row = item.q_begin + index;
  return {static_cast<float*>(a.out.at(row, head, 0)), &a.lse(row, head),
          a.max_logits ? &a.max_logits(row, head) : nullptr};
}

template <class Form>
void run_task(const ops::AttendSparseArgs& a, const SparseItem& item, int64_t index, int64_t first_head, int64_t heads,
              std::byte* memory) {
  const int64_t entry = a.q.extent<Entry>(), width = a.out.extent<Value>(), row = item.q_begin + index;
  Cutter cut(memory);
  LatentScratch<Form> scratch(cut, entry, width);
  float* const spare = scratch.tiles.row;
  int count = 0;
  for (int64_t h = 0; h < heads; h += kTileRows, ++count)
    set_queries(scratch.tiles.tiles[count], std::min(heads - h, kTileRows), a.q, a.q_scale, scratch,
                [&](int64_t lane) { return std::pair(row, first_head + h + lane); });
  const std::span<RowTile> tiles(scratch.tiles.tiles, static_cast<size_t>(count));
  const int64_t part = a.part_keys > 0 ? a.part_keys : std::max(1, item.k_end - item.k_begin);
  for (int64_t begin = item.k_begin; begin == item.k_begin || begin < item.k_end; begin += part) {
    attend_keys<Form>(a, row, begin, std::min<int64_t>(item.k_end, begin + part), tiles, scratch);
    for (int64_t i = 0; i < heads; ++i) {
      const RowTile& tile = tiles[i / kTileRows];
      const int64_t lane = i % kTileRows;
      const Target to = target_of(a, item, index, first_head + i);
      const bool first = begin == item.k_begin;
      const float lse = finish_row(tile, lane, width, first ? to.out : spare), largest = std::isnan(lse) ? lse
                                                                                         : tile.l[lane] == 0
                                                                                             ? kEmptyLse
                                                                                             : tile.m[lane];
      if (first) *to.lse = lse;
      else join_part(to.out, *to.lse, spare, lse, width);
      if (to.max) *to.max = first ? largest : larger(*to.max, largest);
    }
  }
  if (item.partial >= 0 || a.sinks.empty()) return;
  for (int64_t h = first_head; h < first_head + heads; ++h)
    apply_sink(static_cast<float*>(a.out.at(row, h, 0)), width, a.lse(row, h), a.sinks[h]);
}

template <class Form>
void attend(Stream& stream, const ops::AttendSparseArgs& a) {
  const int64_t heads = a.q.extent<Head>();
  int64_t rows = 0;
  for (const SparseItem& i : a.items) rows += i.q_count;
  const int64_t group =
      rows_of_a_task<Form>(stream.pool().threads(), [&](int64_t n) { return rows * ((heads + n - 1) / n); });
  const int64_t groups = (heads + group - 1) / group;
  stream.pool().run(rows * groups, [&](int64_t task, int worker) {
    const SparseItem* item = a.items.data();
    for (int64_t n; task >= (n = item->q_count * groups); ++item) task -= n;
    const int64_t first = task % groups * group;
    run_task<Form>(a, *item, task / groups, first, std::min(group, heads - first), a.scratch.worker(worker));
  });
}

}  // namespace

size_t attend_sparse_scratch(const backend::ScratchShape& s) { return latent_scratch(s.latent + s.rope); }

void attend_sparse(Stream& stream, const ops::AttendSparseArgs& a) {
  const size_t needed = attend_sparse_scratch({.heads = a.q.extent<Head>(), .latent = a.q.extent<Entry>()});
  if (!a.items.empty() && a.scratch.per_worker < needed)
    throw ShapeError("attend_sparse: scratch is " + std::to_string(a.scratch.per_worker) + " bytes a worker, " +
                     std::to_string(needed) + " are needed");
  (void)a.out.as<float>();  // the CPU's outputs are f32
  bool bf16_operands = a.q.dtype() == Dtype::bf16;
  for (const ops::SparseSource& s : a.sources) bf16_operands = bf16_operands && loads_as_bf16(s.cache.spec.format);
  with_form(bf16_operands, [&](auto form) { attend<decltype(form)>(stream, a); });
}

// One task a row and head: rows of one split lie together, whatever their number.
void merge_sparse(Stream& stream, const ops::MergeSparseArgs& a) {
  const auto to = a.out.as<float>();
  const int64_t heads = to.extent<Head>(), width = to.extent<Value>();
  int64_t rows = 0;
  for (const SplitRows& s : a.items) rows += s.rows;
  stream.pool().run(rows * heads, [&](int64_t task, int) {
    const int64_t h = task % heads;
    int64_t r = task / heads;
    const SplitRows* s = a.items.data();
    for (; r >= s->rows; ++s) r -= s->rows;
    float *out = &to(s->row + r, h, 0), lse = kEmptyLse, largest = kEmptyLse;
    for (int64_t p = s->partial + r; p < s->partial + int64_t{s->splits} * s->rows; p += s->rows) {
      join_part(out, lse, &a.partial_out(p, h, 0), a.partial_lse(p, h), width);
      if (a.max_logits) largest = larger(largest, a.partial_max(p, h));
    }
    a.lse(s->row + r, h) = lse;
    if (a.max_logits) a.max_logits(s->row + r, h) = largest;
    if (!a.sinks.empty()) apply_sink(out, width, lse, a.sinks[h]);
  });
}

}  // namespace mla::cpu
