#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "backend/cuda/core/check.hpp"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/sm90/attention/rows.hpp"
#include "backend/cuda/sm90/ops.hpp"
#include "mla/error.hpp"

namespace mla::cuda::sm90 {
namespace {

// What a launch follows from, of a call or of the schedule made for it.
struct Shape {
  int64_t tokens, heads;
  Dtype q_dtype;
  const CacheSpec& cache;
  bool batch_invariant;
  bool whole_rows = true;  ///< do pages of 16-bit rows lie whole rows apart?
};
Shape shape_of(const ops::AttendLatentArgs& a) {
  const CacheSpec& spec = a.cache.spec;
  return {a.q.extent<Token>(), a.q.extent<Head>(),
          a.q.dtype(),         spec,
          a.batch_invariant,   !is_16_bit(spec.format) || a.cache.page_stride % (spec.entry() * 2) == 0};
}
Shape shape_of(const ops::ScheduleLatentArgs& a) { return {a.tokens, a.heads, a.q_dtype, a.cache, a.batch_invariant}; }

AttendLatentLimits limits_of(std::span<const LatentItem> items, const Shape& s) {
  AttendLatentLimits l{.tokens = static_cast<int>(s.tokens),
                       .requests = static_cast<int>(items.size()),
                       .heads = static_cast<int>(s.heads),
                       .query_tokens = 1,
                       .batch_invariant = s.batch_invariant};
  for (const LatentItem& i : items) {
    l.query_tokens = std::max(l.query_tokens, i.q_count);
    l.seq_len = std::max(l.seq_len, i.kv_end);
    l.positions += i.kv_end;
  }
  return l;
}

// The first of these items, as many as may run together. Pieces of fixed length may need more partial rows than scratch
// holds: then as many items at a time as fit.
struct Run {
  size_t count;
  AttendLatentLimits limits;
  AttendLatentChoice choice;
};
Run first_run(std::span<const LatentItem> items, const Shape& s, int multiprocessors, size_t room) {
  const auto first = [&](size_t count) {
    const AttendLatentLimits limits = limits_of(items.first(count), s);
    Run run{
        count, limits,
        attend_latent_choice(limits, static_cast<int>(s.cache.page_size), multiprocessors, s.cache.format, s.q_dtype)};
    if (!s.whole_rows) run.choice.box_rows = 0;
    return run;
  };
  Run run = first(items.size());
  while (run.count > 1 && (attend_latent_partials(run.limits, run.choice, s.cache.format) > room ||
                           attend_latent_counters(run.limits, run.choice) > Queue::kCounters))
    run = first((run.count + 1) / 2);
  return run;
}

// Where partial rows begin in scratch.
size_t partials_at(const ops::AttendLatentArgs& a) { return -reinterpret_cast<uintptr_t>(a.scratch.data) & 255; }

bool holds_schedule(const AttendLatentChoice& choice) {
  return attend_latent_schedule_bytes(choice) <= ops::kLatentScheduleBytes;
}

// The second of the calls that are captured together and attend by the same lengths and table, a step's layers, has the
// schedule made for those after it: the graph makes it at every launch. Calls that are not captured find their own.
void use_schedule(const Queue& queue, CapturedSchedule& made, AttendLatent& args, AttendLatentChoice& choice) {
  if (!holds_schedule(choice)) return;
  cudaStreamCaptureStatus status{};
  unsigned long long capture = 0;
  check(cudaStreamGetCaptureInfo(queue.stream(), &status, &capture), "attend_latent", "capture");
  if (status != cudaStreamCaptureStatusActive) return;
  const AttendLatentLimits& l = args.limits;
  std::vector<int64_t> key = {reinterpret_cast<int64_t>(args.lengths),
                              args.length_stride,
                              args.causal,
                              reinterpret_cast<int64_t>(args.block_table),
                              args.table_stride,
                              args.page_size,
                              static_cast<int64_t>(args.format),
                              l.tokens,
                              l.requests,
                              l.heads,
                              l.query_tokens,
                              l.seq_len,
                              choice.tile_rows,
                              choice.workers,
                              choice.box_rows,
                              choice.codes,
                              choice.split_blocks,
                              choice.min_blocks,
                              choice.line_overhead};
  if (made.capture == capture && made.stream != queue.stream()) return;
  if (made.capture != capture || made.key != key) {
    made.capture = capture, made.stream = queue.stream(), made.key = std::move(key), made.there = false;
    return;
  }
  args.schedule = made.data, args.schedule_bytes = ops::kLatentScheduleBytes;
  if (made.there) {
    // Every kernel of attention lets the next begin when those before it are complete: the schedule and what wrote
    // lengths.
    choice.late_items = false;
    return;
  }
  attend_latent_schedule(args, choice, queue.stream());
  made.there = true, args.schedule = nullptr;  // this call may begin before it is there
}

}  // namespace

bool serves(const backend::GpuModel& gpu, const ops::AttendLatentArgs& a) {
  const CacheSpec& spec = a.cache.spec;
  const bool whole =
      std::all_of(a.items.begin(), a.items.end(), [](const LatentItem& i) { return i.kv_begin == 0 && i.partial < 0; });
  return gpu.hopper && whole && !a.items.empty() && spec.format != CacheFormat::fp8_ds_v4 &&
         serves_rows(a, a.cache, true) &&
         // Boxes of the rope's codes begin at multiples of two rows.
         (a.q.dtype() != Dtype::fp8_e4m3 || spec.page_size % 2 == 0) && a.cache.page_stride % 16 == 0 &&
         a.cache.page_stride >= static_cast<size_t>(spec.page_bytes()) && a.block_table.stride<Page>() == 1 &&
         // Rows of e4m3 are found by 32-bit numbers of 16 bytes, others by signed ones, of rows if pages lie so apart.
         static_cast<uint64_t>(a.cache.pages) * a.cache.page_stride / 16 <=
             (is_e4m3(spec.format) ? std::numeric_limits<uint32_t>::max()
              : a.cache.page_stride % (spec.entry() * 2) == 0
                  ? uint64_t{std::numeric_limits<int32_t>::max()} * spec.entry() / 8
                  : std::numeric_limits<int32_t>::max());
}

// The launches' tiles, the first launch's first.
std::string kernel(const backend::GpuModel& gpu, const ops::AttendLatentArgs& a) {
  std::string names;
  for (size_t begin = 0; begin < a.items.size();) {
    const Run run = first_run(a.items.subspan(begin, a.items.size() - begin), shape_of(a), gpu.multiprocessors,
                              a.scratch.per_worker - partials_at(a));
    const std::string name = (run.choice.tile_rows <= 32 ? "narrow, " : "wide, ") +
                             std::to_string(run.choice.tile_rows) + " rows" +
                             (run.choice.codes ? " of e4m3 products" : "");
    if (names.find(name) == std::string::npos) names += (names.empty() ? "" : " and ") + name;
    begin += run.count;
  }
  return names;
}

void attend_latent(const Queue& queue, const ops::AttendLatentArgs& a, const CallerArrays* caller) {
  const int page_size = static_cast<int>(a.cache.spec.page_size);
  const bool by_lengths = caller && caller->lengths[0];
  const LatentItem* items = by_lengths ? nullptr : queue.reads(a.items, "attend_latent", "items");
  const int32_t* const table = queue.reads(a.block_table, "attend_latent");
  const size_t room = a.scratch.per_worker - partials_at(a);
  for (size_t begin = 0; begin < a.items.size();) {
    auto [count, limits, choice] =
        first_run(a.items.subspan(begin, a.items.size() - begin), shape_of(a), queue.multiprocessors(), room);
    if (by_lengths && count < a.items.size())
      throw UnsupportedError("attend_latent: " + std::to_string(a.items.size()) +
                             " requests by lengths need more than " + std::to_string(room) + " bytes of scratch");
    choice.late_items = caller != nullptr;
    choice.settled = a.cache_settled;
    AttendLatent args = call_of(queue, a, a.cache, caller);
    args.limits = limits;
    if (choice.codes) args.scale *= a.q_scale;
    args.pages = a.cache.pages, args.page_size = page_size;
    args.page_stride = static_cast<int64_t>(a.cache.page_stride);
    if (caller) args.given_q_scale = caller->q_scale, args.given_k_scale = caller->k_scale;
    if (by_lengths) {
      const auto& lengths = caller->lengths[0];
      args.lengths = lengths.data(), args.length_stride = lengths.stride<Request>(), args.causal = caller->causal;
    } else {
      args.items = items + begin;
    }
    args.block_table = table, args.table_stride = a.block_table.stride<Request>();
    args.partials = a.scratch.data + partials_at(a), args.partials_bytes = room;
    if (by_lengths && caller->schedule) {
      use_schedule(queue, *caller->schedule, args, choice);
    } else if (!a.schedule.empty() && count == a.items.size() && shape_of(a).whole_rows && holds_schedule(choice)) {
      // It is there: no kernel begins before that which made it is complete.
      args.schedule = const_cast<std::byte*>(a.schedule.data()), args.schedule_bytes = a.schedule.size();
    }
    cuda::attend_latent(args, choice, queue.stream());
    begin += count;
  }
}

void schedule_latent(const Queue& queue, const ops::ScheduleLatentArgs& a) {
  if (a.items.empty() || a.heads > kMostHeads || a.q_dtype == Dtype::f32 || !serves_rows(a.cache) ||
      a.cache.format == CacheFormat::fp8_ds_v4)
    return;
  auto [count, limits, choice] = first_run(a.items, shape_of(a), queue.multiprocessors(), a.scratch_bytes);
  if (count < a.items.size() || !holds_schedule(choice)) return;
  choice.overlap = false;
  AttendLatent call;
  call.limits = limits, call.format = a.cache.format;
  call.page_size = static_cast<int>(a.cache.page_size);
  call.items = queue.reads(a.items, "schedule_latent", "items");
  call.block_table = queue.reads(a.block_table, "schedule_latent"), call.table_stride = a.block_table.stride<Request>();
  call.schedule = a.schedule.data(), call.schedule_bytes = a.schedule.size();
  attend_latent_schedule(call, choice, queue.stream());
}

}  // namespace mla::cuda::sm90
