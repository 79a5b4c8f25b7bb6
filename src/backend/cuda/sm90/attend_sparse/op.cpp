// attend_sparse on Hopper: one launch lists each row's slots that exist, attend_latent's kernels attend to them as to
// pages of one position.
#include <algorithm>
#include <limits>
#include <string>

#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/sm90/attend_latent/attend_latent.hpp"
#include "backend/cuda/sm90/attend_sparse/lists.hpp"
#include "backend/cuda/sm90/ops.hpp"

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

bool dense_rows(const auto& v, int64_t width) {
  return v.template stride<Head>() == width && v.template stride<Token>() == v.template extent<Head>() * width;
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

bool serves(const backend::GpuModel& gpu, const ops::AttendSparseArgs& a) {
  if (!gpu.hopper || a.sources.size() != 1 || a.items.empty()) return false;
  const CacheView& cache = a.sources[0].cache;
  const CacheSpec& spec = cache.spec;
  const bool wide = spec.format == CacheFormat::bf16 || spec.format == CacheFormat::f16;
  const bool served = wide || spec.format == CacheFormat::fp8 || spec.format == CacheFormat::fp8_ds_mla;
  const bool whole = std::all_of(a.items.begin(), a.items.end(), [](const SparseItem& i) { return i.partial < 0; });
  const int64_t heads = a.q.extent<Head>();
  return served && whole && (a.part_keys == 0 || a.part_keys == kInvariantKeys) && a.q.dtype() == Dtype::bf16 &&
         spec.latent == 512 && spec.rope == 64 && cache.page_stride % 16 == 0 && cache.pages > 0 &&
         cache.pages * spec.page_size <= std::numeric_limits<int32_t>::max() &&
         static_cast<int64_t>(cache.page_stride / 16) * cache.pages <= std::numeric_limits<int32_t>::max() &&
         (spec.format != CacheFormat::fp8 || spec.k_scale > 0) && heads >= 1 && heads <= 128 &&
         (wide || heads > 64 || !a.max_logits) && dense_rows(a.q, 576) && dense_rows(a.out, 512) &&
         a.q.extent<Token>() * heads < std::numeric_limits<int32_t>::max() && aligned(a.q.data()) &&
         aligned(a.out.data()) && aligned(cache.data) && a.scale > 0;
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
    AttendLatent args{.limits = run.limits,
                      .q = a.q.data(),
                      .cache = cache.data,
                      .format = cache.spec.format,
                      .k_scale = cache.spec.k_scale,
                      .pages = static_cast<int64_t>(cache.pages * cache.page_stride / 16),
                      .page_size = 1,
                      .page_units = true,
                      .items = lists.requests,
                      .block_table = lists.table,
                      .table_stride = run.table_stride,
                      .scale = a.scale,
                      .out = a.out.data(),
                      .out_dtype = a.out.dtype(),
                      .lse = a.lse.data(),
                      .lse_token_stride = a.lse.stride<Token>(),
                      .lse_head_stride = a.lse.stride<Head>(),
                      .sinks = sinks,
                      .max_logits = a.max_logits.data(),
                      .max_token_stride = a.max_logits.stride<Token>(),
                      .max_head_stride = a.max_logits.stride<Head>(),
                      .counters = queue.counters(),
                      .counter_count = Queue::kCounters,
                      .partials = run.partials,
                      .partials_bytes = run.partial_bytes};
    if (caller) args.put_lse(caller->lse);
    cuda::attend_latent(args, run.choice, queue.stream());
    first += run.rows;
  }
}

}  // namespace mla::cuda::sm90
