// attend_sparse on Hopper: one launch lists each row's slots that exist, attend_latent's kernels attend to them as to
// pages of one position.
#include <algorithm>
#include <limits>
#include <string>

#include "backend/cuda/sm90/attend_latent/rows.hpp"
#include "backend/cuda/sm90/attend_sparse/lists.hpp"

namespace mla::cuda::sm90 {
namespace {

int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

struct Extent {
  int32_t rows = 0, keys = 0;  // of all items; of the longest
};
Extent extent_of(const ops::AttendSparseArgs& a) {
  Extent e;
  for (const SparseItem& i : a.items) e.rows += i.q_count, e.keys = std::max(e.keys, i.k_end - i.k_begin);
  return e;
}

// As many rows as may run together: their lists, requests and partial rows share scratch.
struct Run {
  int32_t rows = 0;
  AttendLatentLimits limits;
  AttendLatentChoice choice;
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
    r.table_stride = up(keys, 4);
    const auto begin = reinterpret_cast<uintptr_t>(a.scratch.data), end = begin + a.scratch.per_worker;
    uintptr_t at = up(begin, 256);
    const auto take = [&](int64_t bytes) {
      auto* const found = reinterpret_cast<std::byte*>(at);
      at += up(bytes, 256);
      return found;
    };
    r.table = take(count * r.table_stride * 4);
    r.requests = take(count * static_cast<int64_t>(sizeof(LatentItem)));
    r.partials = reinterpret_cast<std::byte*>(at);
    r.partial_bytes = at < end ? end - at : 0;
    return r;
  };
  Run r = fitted(rows);
  while (r.rows > 1 && (attend_latent_partials(r.limits, r.choice) > r.partial_bytes ||
                        attend_latent_counters(r.limits, r.choice) > Queue::kCounters))
    r = fitted((r.rows + 1) / 2);
  return r;
}

}  // namespace

bool serves(const backend::GpuModel& gpu, const ops::AttendSparseArgs& a) {
  if (!gpu.hopper || a.sources.size() != 1 || a.items.empty()) return false;
  const CacheView& cache = a.sources[0].cache;
  const CacheSpec& spec = cache.spec;
  const bool whole = std::all_of(a.items.begin(), a.items.end(), [](const SparseItem& i) { return i.partial < 0; });
  const int64_t heads = a.q.extent<Head>();
  const auto gives_max_logits = [&] {
    const AttendLatentLimits row{.heads = static_cast<int>(heads)};
    return attend_latent_gives_max_logits(attend_latent_choice(row, 1, gpu.multiprocessors, spec.format), spec.format);
  };
  return whole && (a.part_keys == 0 || a.part_keys == kInvariantKeys) && heads >= 1 && serves_rows(a, cache) &&
         (!a.max_logits || gives_max_logits()) && cache.page_stride % 16 == 0 && cache.pages > 0 &&
         cache.pages * spec.page_size <= std::numeric_limits<int32_t>::max() &&
         static_cast<int64_t>(cache.page_stride / 16) * cache.pages <= std::numeric_limits<int32_t>::max();
}

std::string kernel(const backend::GpuModel& gpu, const ops::AttendSparseArgs& a) {
  const Extent e = extent_of(a);
  const int rows = run_of(a, std::max(e.rows, 1), e.keys, gpu.multiprocessors).choice.tile_rows;
  return "lists, " + std::string(rows <= 32 ? "narrow, " : "wide, ") + std::to_string(rows) + " rows";
}

void attend_sparse(const Queue& queue, const ops::AttendSparseArgs& a, const CallerArrays* caller) {
  constexpr std::string_view op = "attend_sparse";
  const Extent extent = extent_of(a);
  const ops::SparseSource& source = a.sources[0];
  const CacheView& cache = source.cache;
  SlotLists lists{.slots = source.slots.data(),
                  .slot_stride = source.slots.stride<Token>(),
                  .topk = static_cast<int32_t>(source.slots.extent<Topk>()),
                  .held = cache.pages * cache.spec.page_size,
                  .page_size = static_cast<int32_t>(cache.spec.page_size),
                  .page_units = static_cast<int32_t>(cache.page_stride / 16),
                  .row_units = static_cast<int32_t>(cache.spec.page_bytes() / cache.spec.page_size / 16)};
  if (caller) {
    lists.item = a.items[0];
    lists.lengths = caller->lengths.data(), lists.length_stride = caller->lengths.stride<Request>();
    lists.queries = static_cast<int32_t>(caller->lse.extent<Token>());
    lists.counters = queue.counters();
  } else {
    lists.items = queue.staged(a.items, op, "items"), lists.item_count = static_cast<int32_t>(a.items.size());
    lists.lengths = queue.staged(source.lengths, op, "lengths");
  }
  const float* const sinks = queue.staged(a.sinks, op, "sinks");
  for (int32_t first = 0; first < extent.rows;) {
    Run run = run_of(a, extent.rows - first, extent.keys, queue.multiprocessors());
    run.choice.late_items = true;
    lists.first_row = first, lists.rows = run.rows;
    lists.counter_count = static_cast<int32_t>(attend_latent_counters(run.limits, run.choice));
    lists.table = reinterpret_cast<int32_t*>(run.table), lists.table_stride = run.table_stride;
    lists.requests = reinterpret_cast<LatentItem*>(run.requests);
    list_rows(lists, queue.stream());
    AttendLatent args = call_of(queue, a, cache, caller);
    args.limits = run.limits;
    args.pages = static_cast<int64_t>(cache.pages * cache.page_stride / 16), args.page_size = 1, args.page_units = true;
    args.items = lists.requests;
    args.block_table = lists.table, args.table_stride = run.table_stride;
    args.sinks = sinks;
    args.max_logits = a.max_logits.data();
    args.max_token_stride = a.max_logits.stride<Token>(), args.max_head_stride = a.max_logits.stride<Head>();
    args.partials = run.partials, args.partials_bytes = run.partial_bytes;
    cuda::attend_latent(args, run.choice, queue.stream());
    first += run.rows;
  }
}

}  // namespace mla::cuda::sm90
