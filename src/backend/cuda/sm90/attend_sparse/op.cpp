// attend_sparse on Hopper: one launch lists each row's slots that exist, attend_latent's kernels attend to them as to
// pages of one position.
#include <algorithm>
#include <limits>
#include <span>
#include <string>

#include "backend/cuda/sm90/attend_sparse/lists.hpp"
#include "backend/cuda/sm90/attention/rows.hpp"

namespace mla::cuda::sm90 {
namespace {

int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

struct Extent {
  int32_t rows = 0, keys = 0;  // of all items; of the longest
};
Extent extent_of(std::span<const SparseItem> items) {
  Extent e;
  for (const SparseItem& i : items) e.rows += i.q_count, e.keys = std::max(e.keys, i.k_end - i.k_begin);
  return e;
}

// Does attention read the lists itself? It takes a launch an item then, and multiplies what does not exist as zeros:
// a launch that leaves these out first costs 8 us, nothing beside many rows. Batch-invariant calls are alike for any
// number of rows.
constexpr int32_t kFewRows = 1024;
bool reads_lists(const ops::AttendSparseArgs& a) {
  const CacheFormat format = a.sources[0].cache.spec.format;
  const bool few = a.part_keys > 0 || extent_of(a.items).rows <= kFewRows;
  return ((format == CacheFormat::fp8_ds_mla && a.items.size() == 1 && few && !a.many_holes) ||
          format == CacheFormat::fp8_ds_v4) &&
         std::all_of(a.items.begin(), a.items.end(), [](const SparseItem& i) { return i.k_begin == 0; });
}

// Of scratch. With twice as much, lists of 4,096 rows leave L2 before they are read: 64 heads of fp8_ds_mla took 3.82
// ms for 3.59.
constexpr size_t kRoom = size_t{64} << 20;

// As many rows as may run together: their lists, requests and partial rows share scratch.
struct Run {
  int32_t rows = 0;
  AttendLatentLimits limits;
  AttendLatentChoice choice;
  bool lists = false;  // does attention read them itself?
  int64_t table_stride = 0;
  std::byte *table = nullptr, *requests = nullptr, *partials = nullptr;
  size_t partial_bytes = 0;
};
Run run_of(const ops::AttendSparseArgs& a, int32_t rows, int32_t keys, int multiprocessors) {
  const auto fitted = [&](int32_t count) {
    Run r{.rows = count,
          .limits = {.tokens = static_cast<int>(a.q.extent<Token>()),
                     .requests = count,
                     .heads = static_cast<int>(a.q.extent<Head>()),
                     .query_tokens = 1,
                     .seq_len = keys,
                     .positions = int64_t{count} * keys,
                     .batch_invariant = a.part_keys > 0}};
    r.choice = attend_latent_choice(r.limits, 1, multiprocessors, a.sources[0].cache.spec.format);
    r.lists = reads_lists(a);
    const auto begin = reinterpret_cast<uintptr_t>(a.scratch.data), end = begin + std::min(a.scratch.per_worker, kRoom);
    uintptr_t at = up(begin, 256);
    const auto take = [&](int64_t bytes) {
      auto* const found = reinterpret_cast<std::byte*>(at);
      at += up(bytes, 256);
      return found;
    };
    if (!r.lists) {
      r.table_stride = up(keys, 4);
      r.table = take(count * r.table_stride * 4);
      r.requests = take(count * static_cast<int64_t>(sizeof(LatentItem)));
    }
    r.partials = reinterpret_cast<std::byte*>(at);
    r.partial_bytes = at < end ? end - at : 0;
    return r;
  };
  Run r = fitted(rows);
  while (r.rows > 1 && (attend_latent_partials(r.limits, r.choice, a.sources[0].cache.spec.format) > r.partial_bytes ||
                        attend_latent_counters(r.limits, r.choice) > Queue::kCounters))
    r = fitted((r.rows + 1) / 2);
  return r;
}

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

bool serves_source(const ops::AttendSparseArgs& a, const CacheView& cache) {
  const CacheSpec &spec = cache.spec, &first = a.sources[0].cache.spec;
  return spec.format == first.format && (spec.format != CacheFormat::fp8 || spec.k_scale == first.k_scale) &&
         serves_rows(a, cache) && cache.page_stride % 16 == 0 && cache.pages > 0 &&
         cache.pages * spec.page_size <= kMost && static_cast<int64_t>(cache.page_stride / 16) * cache.pages <= kMost;
}

// The first byte of all sources, and units of 16 bytes from there to the last one's end.
struct Span {
  const std::byte* begin;
  int64_t units;
};
Span span_of(const ops::AttendSparseArgs& a) {
  auto begin = reinterpret_cast<uintptr_t>(a.sources[0].cache.data), end = begin;
  for (const ops::SparseSource& s : a.sources) {
    const auto at = reinterpret_cast<uintptr_t>(s.cache.data);
    begin = std::min(begin, at), end = std::max(end, at + s.cache.page_stride * static_cast<size_t>(s.cache.pages));
  }
  return {reinterpret_cast<const std::byte*>(begin), static_cast<int64_t>((end - begin) / 16)};
}

SlotSource source_of(const ops::SparseSource& s) {
  const CacheSpec& spec = s.cache.spec;
  // A page of fp8_ds_v4 has the scales of its rows behind them.
  const int64_t row = spec.format == CacheFormat::fp8_ds_v4 ? 576 : spec.page_bytes() / spec.page_size;
  return {.slots = s.slots.data(),
          .slot_stride = s.slots.stride<Token>(),
          .topk = static_cast<int32_t>(s.slots.extent<Topk>()),
          .held = static_cast<int32_t>(s.cache.pages * spec.page_size),
          .cache = static_cast<const std::byte*>(s.cache.data),
          .page_size = static_cast<int32_t>(spec.page_size),
          .page_units = static_cast<uint32_t>(s.cache.page_stride / 16),
          .row_units = static_cast<uint32_t>(row / 16)};
}

}  // namespace

bool serves(const backend::GpuModel& gpu, const ops::AttendSparseArgs& a) {
  if (!gpu.hopper || a.sources.empty() || a.sources.size() > 2 || a.items.empty()) return false;
  const bool whole = std::all_of(a.items.begin(), a.items.end(), [](const SparseItem& i) { return i.partial < 0; });
  const int64_t heads = a.q.extent<Head>();
  if (!whole || (a.part_keys != 0 && a.part_keys != kInvariantKeys) || heads < 1) return false;
  for (const ops::SparseSource& s : a.sources)
    if (!serves_source(a, s.cache)) return false;
  const CacheFormat format = a.sources[0].cache.spec.format;
  const AttendLatentChoice choice =
      attend_latent_choice({.heads = static_cast<int>(heads)}, 1, gpu.multiprocessors, format);
  if (!reads_lists(a) && (format == CacheFormat::fp8_ds_v4 || span_of(a).units > kMost)) return false;
  return !a.max_logits || attend_latent_gives_max_logits(choice, format);
}

std::string kernel(const backend::GpuModel& gpu, const ops::AttendSparseArgs& a) {
  const Extent e = extent_of(a.items);
  const Run run = run_of(a, std::max(e.rows, 1), e.keys, gpu.multiprocessors);
  return std::string(run.lists ? "" : "lists, ") + (run.choice.tile_rows <= 32 ? "narrow, " : "wide, ") +
         std::to_string(run.choice.tile_rows) + " rows";
}

void attend_sparse(const Queue& queue, const ops::AttendSparseArgs& a, const CallerArrays* caller) {
  constexpr std::string_view op = "attend_sparse";
  SlotLists lists{.sources = static_cast<int32_t>(a.sources.size())};
  for (size_t i = 0; i < a.sources.size(); ++i) {
    lists.source[i] = source_of(a.sources[i]);
    if (caller) {
      lists.source[i].lengths = caller->lengths[i].data();
      lists.source[i].length_stride = caller->lengths[i].stride<Request>();
    } else {
      lists.source[i].lengths = queue.reads(a.sources[i].lengths, op, "lengths");
    }
  }
  if (caller) lists.item = a.items[0], lists.queries = static_cast<int32_t>(caller->lse.extent<Token>());
  const SparseItem* const items = caller ? nullptr : queue.reads(a.items, op, "items");
  const float* const sinks = queue.reads(a.sinks, op, "sinks");
  const Span span = span_of(a);

  const auto attend = [&](AttendLatent args, const Run& run) {
    args.limits = run.limits;
    args.shared_keys = caller ? lists.queries > 1 : a.shared_keys;
    args.sinks = sinks;
    args.max_logits = a.max_logits.data();
    args.max_token_stride = a.max_logits.stride<Token>(), args.max_head_stride = a.max_logits.stride<Head>();
    args.partials = run.partials, args.partials_bytes = run.partial_bytes;
    cuda::attend_latent(args, run.choice, queue.stream());
  };
  // Rows of these items, as many at a time as scratch has room for.
  const auto attend_items = [&](size_t begin, size_t end) {
    const Extent extent = extent_of(a.items.subspan(begin, end - begin));
    if (!caller) lists.items = items + begin, lists.item_count = static_cast<int32_t>(end - begin);
    for (int32_t first = 0; first < extent.rows;) {
      Run run = run_of(a, extent.rows - first, extent.keys, queue.multiprocessors());
      lists.first_row = first;
      AttendLatent args = call_of(queue, a, a.sources[0].cache, caller);
      if (run.lists) {
        // The kernel waits for what makes the lists before it reads any; for a caller's lengths, before it plans.
        run.choice.late_items = caller && (lists.source[0].lengths || lists.source[1].lengths);
        args.lists = &lists;
      } else {
        run.choice.late_items = true;
        list_rows(lists,
                  {.rows = run.rows,
                   .table = reinterpret_cast<int32_t*>(run.table),
                   .stride = run.table_stride,
                   .cache = span.begin,
                   .requests = reinterpret_cast<LatentItem*>(run.requests)},
                  queue.stream());
        args.cache = span.begin, args.pages = span.units, args.page_size = 1, args.page_units = true;
        args.items = reinterpret_cast<LatentItem*>(run.requests);
        args.block_table = reinterpret_cast<int32_t*>(run.table), args.table_stride = run.table_stride;
      }
      attend(args, run);
      first += run.rows;
    }
  };
  if (a.items.size() > 1 && a.sources[0].cache.spec.format == CacheFormat::fp8_ds_v4)
    for (size_t i = 0; i < a.items.size(); ++i) attend_items(i, i + 1);
  else attend_items(0, a.items.size());
}

}  // namespace mla::cuda::sm90
