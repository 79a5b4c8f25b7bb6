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

AttendLatentLimits limits_of(std::span<const LatentItem> items, const ops::AttendLatentArgs& a) {
  AttendLatentLimits l{.tokens = static_cast<int>(a.q.extent<Token>()),
                       .requests = static_cast<int>(items.size()),
                       .heads = static_cast<int>(a.q.extent<Head>()),
                       .query_tokens = 1,
                       .batch_invariant = a.batch_invariant};
  for (const LatentItem& i : items) {
    l.query_tokens = std::max(l.query_tokens, i.q_count);
    l.seq_len = std::max(l.seq_len, i.kv_end);
    l.positions += i.kv_end;
  }
  return l;
}

// As many items as may run together, from `begin` on. Pieces of fixed length may need more partial rows than scratch
// holds: then as many items at a time as fit.
struct Run {
  size_t count;
  AttendLatentLimits limits;
  AttendLatentChoice choice;
};
Run run_at(size_t begin, const ops::AttendLatentArgs& a, int multiprocessors, size_t room) {
  const auto first = [&](size_t count) {
    const AttendLatentLimits limits = limits_of(a.items.subspan(begin, count), a);
    Run run{count, limits,
            attend_latent_choice(limits, static_cast<int>(a.cache.spec.page_size), multiprocessors, a.cache.spec.format,
                                 a.q.dtype())};
    if (is_16_bit(a.cache.spec.format) && a.cache.page_stride % (a.cache.spec.entry() * 2) != 0)
      run.choice.box_rows = 0;
    return run;
  };
  Run run = first(a.items.size() - begin);
  while (run.count > 1 && (attend_latent_partials(run.limits, run.choice, a.cache.spec.format) > room ||
                           attend_latent_counters(run.limits, run.choice) > Queue::kCounters))
    run = first((run.count + 1) / 2);
  return run;
}

// Where partial rows begin in scratch.
size_t partials_at(const ops::AttendLatentArgs& a) { return -reinterpret_cast<uintptr_t>(a.scratch.data) & 255; }

// The second of the calls that are captured together and attend by the same lengths and table, a step's layers, has the
// schedule made for those after it: the graph makes it at every launch. Calls that are not captured, or read arrays
// that others may write meanwhile, find their own.
void use_schedule(const Queue& queue, AttendLatent& args, AttendLatentChoice& choice) {
  CapturedSchedule& made = queue.schedule();
  if (!made.data || attend_latent_schedule_bytes(choice) > CapturedSchedule::kBytes) return;
  cudaStreamCaptureStatus status{};
  unsigned long long capture = 0;
  check(cudaStreamGetCaptureInfo(queue.stream(), &status, &capture), "attend_latent", "capture");
  if (status != cudaStreamCaptureStatusActive) return;
  const AttendLatentLimits& l = args.limits;
  std::vector<int64_t> key = {reinterpret_cast<int64_t>(args.items),
                              reinterpret_cast<int64_t>(args.lengths),
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
  args.schedule = made.data, args.schedule_bytes = CapturedSchedule::kBytes;
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
    const Run run = run_at(begin, a, gpu.multiprocessors, a.scratch.per_worker - partials_at(a));
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
    auto [count, limits, choice] = run_at(begin, a, queue.multiprocessors(), room);
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
    if (count == a.items.size() && (caller ? by_lengths : a.items.device() != nullptr))
      use_schedule(queue, args, choice);
    cuda::attend_latent(args, choice, queue.stream());
    begin += count;
  }
}

}  // namespace mla::cuda::sm90
