#include "serve/replay.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "core/counted.hpp"
#include "layer/kernels.hpp"
#include "serve/hidden.hpp"
#include "serve/kv_scales.hpp"
#include "serve/processes.hpp"
#include "serve/ranks.hpp"
#include "serve/shares.hpp"

namespace mla::serve {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

int64_t pages_of(const TraceRequest& r, int64_t page_size) { return (r.input + r.output + page_size - 1) / page_size; }

// Of those that the page budget does not refuse.
int64_t longest_sequence(const Trace& trace, const Limits& limits) {
  int64_t longest = 1;
  for (const TraceRequest& r : trace.requests)
    if (pages_of(r, limits.page_size) <= limits.pages) longest = std::max(longest, r.input + r.output);
  return longest;
}

// Enough for all of the trace, if memory and the 32 bits of a slot allow.
int64_t page_budget(const Trace& trace, int64_t page_size, size_t page_bytes, size_t bytes) {
  int64_t all = 0;
  for (const TraceRequest& r : trace.requests) all += pages_of(r, page_size);
  const int64_t pages =
      std::min({all, static_cast<int64_t>(bytes / page_bytes), std::numeric_limits<int32_t>::max() / page_size});
  if (pages > 0) return pages;
  throw InputError("--cache-gib: " + counted(static_cast<int64_t>(bytes), "byte") + " cannot hold a page: one of " +
                   counted(page_size, "token") + " takes " + std::to_string(page_bytes) + " in all layers");
}

// Which rows to keep: each computed row has the same chance, whatever their number (reservoir sampling), on a random
// layer.
class Reservoir {
 public:
  Reservoir(int64_t size, int64_t layers, uint64_t seed) : size_(size), layers_(layers), state_(mix(seed + 77)) {}

  struct Pick {
    int64_t slot, row, layer;
  };
  /// Decides for the next `rows` rows; a later pick of a slot replaces an earlier one.
  std::vector<Pick> next(int64_t rows) {
    std::vector<Pick> picks;
    if (size_ == 0) return picks;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t slot = seen_ < size_ ? seen_ : static_cast<int64_t>(random() % static_cast<uint64_t>(seen_ + 1));
      ++seen_;
      if (slot < size_) picks.push_back({slot, row, static_cast<int64_t>(random() % static_cast<uint64_t>(layers_))});
    }
    return picks;
  }

 private:
  uint64_t random() { return state_ = mix(state_ + 0x9e3779b97f4a7c15u); }
  int64_t size_, layers_, seen_ = 0;
  uint64_t state_;
};

// One step's batch, in memory that grows to the largest step and is then reused.
struct StepInput {
  std::vector<int32_t> starts, lengths, prompts, table, slots;
  std::vector<float> hidden;
  Batch batch;

  void fill(const Trace& trace, const Scheduler& scheduler, std::span<const StepPiece> pieces, const Options& o,
            ThreadPool& pool) {
    const int64_t page_size = o.limits.page_size, width = o.model.hidden;
    starts.assign(1, 0);
    lengths.clear();
    prompts.clear();
    slots.clear();
    size_t pages = 1;
    for (const StepPiece& p : pieces) pages = std::max(pages, scheduler.pages(p.request).size());
    table.assign(pieces.size() * pages, -1);
    for (size_t i = 0; i < pieces.size(); ++i) {
      const StepPiece& p = pieces[i];
      const std::span<const PageId> own = scheduler.pages(p.request);
      std::copy(own.begin(), own.end(), table.begin() + static_cast<int64_t>(i * pages));
      for (int64_t at = p.start; at < p.start + p.count; ++at)
        slots.push_back(static_cast<int32_t>(own[static_cast<size_t>(at / page_size)] * page_size + at % page_size));
      starts.push_back(static_cast<int32_t>(starts.back() + p.count));
      lengths.push_back(static_cast<int32_t>(p.start + p.count));
      prompts.push_back(static_cast<int32_t>(trace.requests[static_cast<size_t>(p.request)].input));
    }
    const size_t tokens = slots.size();
    if (hidden.size() < tokens * static_cast<size_t>(width)) hidden.resize(tokens * static_cast<size_t>(width));
    pool.run(static_cast<int64_t>(pieces.size()), [&](int64_t i, int) {
      const StepPiece& p = pieces[static_cast<size_t>(i)];
      for (int64_t t = 0; t < p.count; ++t)
        hidden_row(o.seed, token_key(trace, p.request, p.start + t), p.start + t,
                   {hidden.data() + (starts[static_cast<size_t>(i)] + t) * width, static_cast<size_t>(width)});
    });
    batch = {starts,
             lengths,
             {table.data(), {static_cast<int64_t>(pieces.size()), static_cast<int64_t>(pages)}},
             slots,
             prompts};
  }
};

void require_k_scales(const Options& o) {
  if (o.k_scales.empty()) return;
  if (o.format != CacheFormat::fp8)
    throw InputError("k_scales are there for a cache in " + std::string(to_string(o.format)) + ", fp8 has them");
  if (std::ssize(o.k_scales) != o.layers)
    throw InputError("k_scales has " + std::to_string(o.k_scales.size()) + " elements, the run has " +
                     counted(o.layers, "layer"));
  for (size_t l = 0; l < o.k_scales.size(); ++l)
    if (!(o.k_scales[l] >= 0) || !std::isfinite(o.k_scales[l]))
      throw InputError("k_scales is " + std::to_string(o.k_scales[l]) + " at layer " + std::to_string(l) +
                       ", a finite number above 0 is needed, or 0 to find one");
}

}  // namespace

LayerTensors tensors_of(const Options& o, int64_t layer) { return tensors_of(o, layer, {0, o.model.heads}, {}); }

LayerTensors tensors_of(const Options& o, int64_t layer, HeadRange heads, std::span<const HeadRange> group) {
  if (o.checkpoint) return o.checkpoint->layer(layer, heads, group);
  LayerTensors all = random_layer(o.model, layer, o.seed, o.weights);
  return heads.count == o.model.heads ? all : part_of(o.model, all, heads, group);
}

CacheSpec cache_of(const Options& o, int64_t layer) {
  CacheSpec spec = cache_spec(o.model, o.format, o.limits.page_size);
  if (!o.k_scales.empty()) spec.k_scale = o.k_scales[static_cast<size_t>(layer)];
  return spec;
}

double percentile(std::vector<double> values, double p) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double at = p / 100 * static_cast<double>(values.size() - 1);
  const size_t low = static_cast<size_t>(at), high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

Options resolved(const Trace& trace, Options o) {
  o.model.validate();
  o.plan.absorbed = o.absorption != Absorption::runtime;
  o.plan.up = o.up;
  if (o.layers == 0) o.layers = o.model.layers;
  if (o.layers < 1 || o.layers > o.model.layers)
    throw InputError("--layers is " + std::to_string(o.layers) + ", " + o.model.name + " has 1 to " +
                     std::to_string(o.model.layers));
  const int64_t ranks = o.plan.tensor_parallel, sharing = o.context_parallel;
  if (sharing < 1 || ranks % sharing != 0)
    throw InputError("context_parallel is " + std::to_string(sharing) + ", it must divide tensor_parallel, " +
                     std::to_string(ranks));
  if (o.interleave < 1) throw InputError("interleave is " + std::to_string(o.interleave) + ", must be at least 1");
  if (o.group && o.group->ranks() != ranks)
    throw InputError("tensor_parallel is " + std::to_string(ranks) + ", the group has " +
                     counted(o.group->ranks(), "rank"));
  if (sharing > 1 && o.limits.page_size % (sharing * o.interleave) != 0)
    throw InputError("pages of " + std::to_string(o.limits.page_size) + " tokens over " + std::to_string(sharing) +
                     " ranks, " + std::to_string(o.interleave) +
                     " in turn: a rank's share of a page (--page-size) must be whole turns (--dcp-interleave)");
  const CacheSpec spec = cache_spec(o.model, o.format, o.limits.page_size);
  spec.validate();
  require_k_scales(o);
  size_t page_bytes = spec.page_bytes() * static_cast<size_t>(o.layers);  // of all layers
  if (o.model.indexer) {
    const IndexCacheSpec index_spec = index_cache_spec(o.model, spec, o.plan.index_format);
    index_spec.validate();
    for (int64_t l = 0; l < o.layers; ++l) page_bytes += o.model.layer_has_indexer(l) ? index_spec.page_bytes() : 0;
  }
  if (o.limits.pages == 0) o.limits.pages = page_budget(trace, o.limits.page_size, page_bytes, o.cache_bytes);
  o.limits.validate();
  o.limits.prompts_apart = o.plan.path == PathPolicy::by_prompt;
  // A step of one token that ends a page, for what a plan and the weights have to agree on.
  ModelConfig model = o.model;
  CacheSpec own = spec;
  PlanOptions options = o.plan;
  if (sharing > 1) {  // as rank 0 has it
    model = part_of(o.model, head_share(o.model.heads, 0, static_cast<int>(ranks)));
    own.page_size /= sharing;
    options.context_parallel =
        context_share(o.model.heads, 0, static_cast<int>(ranks), o.context_parallel, o.interleave, o.exchange);
  }
  const std::vector<int32_t> starts{0, 1}, lengths{static_cast<int32_t>(spec.page_size)}, table{0}, slots{-1};
  const Batch batch{starts, lengths, {table.data(), {1, 1}}, slots, lengths};
  const Plan p = plan(model, own, o.limits.pages, batch, device_info(o.device, o.threads, model), options);
  layer::kernels(p, batch, prepare_options(o), {});
  return o;
}

Result replay(const Trace& trace, const Options& given, ThreadPool& pool, const std::atomic<bool>& stop,
              const std::function<void(const Progress&)>& progress) {
  const auto setup = Clock::now();
  const Options o = resolved(trace, given);
  Scheduler scheduler(trace, o.limits);

  Result r;
  r.layers = o.layers;
  r.threads = pool.threads();
  r.requests = static_cast<int64_t>(trace.requests.size());
  r.pages = o.limits.pages;
  r.page_size = o.limits.page_size;
  Processes processes(o);
  processes.agree_on(trace, o);
  Ranks ranks(o, longest_sequence(trace, o.limits), pool, stop, r);
  bool stopped = processes.decide({.stop = stop}).stop;
  if (o.format == CacheFormat::fp8 && !stopped)
    r.k_scales = ranks.use_k_scales(o.k_scales, first_hidden(trace, o), processes);
  StepInput input;
  std::vector<WantedRow> rows;
  Reservoir reservoir(o.verify, o.layers, o.seed);
  r.samples.reserve(static_cast<size_t>(o.verify));
  int64_t trace_tokens = 0;
  for (const TraceRequest& q : trace.requests) trace_tokens += q.input + q.output - 1;
  r.setup_seconds = since(setup);
  if (o.checkpoint) r.checkpoint_bytes = o.checkpoint->bytes_read();

  const auto start = Clock::now();
  double now = 0, page_seconds = 0;
  int64_t looked_up = 0, found = 0;  // before the step
  // One process ends at once, those of a group where they have decided to.
  const auto over = [&] { return o.group ? stopped : stop.load(); };
  while (!over() && !scheduler.done()) {
    const std::vector<StepPiece>& pieces = scheduler.plan_step(now);
    if (pieces.empty()) {
      if (!std::isfinite(scheduler.next_arrival())) break;  // the rest was refused
      now = std::max(now, scheduler.next_arrival());
      continue;
    }
    input.fill(trace, scheduler, pieces, o, pool);
    const int64_t tokens = input.batch.tokens();
    const std::vector<Reservoir::Pick> picks = reservoir.next(tokens);
    rows.clear();
    for (const Reservoir::Pick& pick : picks) rows.push_back({.row = pick.row, .layer = pick.layer});
    const StepTime time = ranks.run(input.batch, input.hidden, rows, r);
    const Processes::Decision decision = processes.decide({.seconds = time.seconds, .stop = stop});
    const double seconds = decision.seconds;
    stopped = decision.stop;
    for (size_t i = 0; i < picks.size(); ++i) {
      const size_t piece = static_cast<size_t>(std::upper_bound(input.starts.begin(), input.starts.end(), rows[i].row) -
                                               input.starts.begin() - 1);
      Sample sample{.layer = rows[i].layer,
                    .request = pieces[piece].request,
                    .position = pieces[piece].start + rows[i].row - input.starts[piece],
                    .path = rows[i].path,
                    .masked = rows[i].masked,
                    .context = pieces[piece].start,
                    .row = std::move(rows[i].out),
                    .selected = std::move(rows[i].selected)};
      const size_t slot = static_cast<size_t>(picks[i].slot);
      if (r.samples.size() <= slot) r.samples.resize(slot + 1);
      r.samples[slot] = std::move(sample);
    }

    StepRecord record{.start = now,
                      .seconds = seconds,
                      .wall_start = time.start,
                      .wall_end = time.end,
                      .plan_seconds = time.plan,
                      .requests = static_cast<int64_t>(pieces.size())};
    now += seconds;
    r.step_seconds += seconds;
    r.step_latencies.push_back(seconds);
    ++r.steps;
    int64_t decodes = 0;
    for (const StepPiece& piece : pieces) {
      decodes += piece.decode;
      record.context_tokens += piece.start;
      r.output_tokens += piece.emits;
    }
    r.decode_tokens += decodes;
    r.prefill_tokens += tokens - decodes;
    const int64_t used = scheduler.allocator().counts().referenced;
    r.peak_pages = std::max(r.peak_pages, used);
    page_seconds += static_cast<double>(used) * seconds;
    record.prefill_tokens = tokens - decodes;
    record.decode_tokens = decodes;
    record.pages = used;
    record.prompt_tokens = scheduler.prompt_tokens() - std::exchange(looked_up, scheduler.prompt_tokens());
    record.hit_tokens = scheduler.hit_tokens() - std::exchange(found, scheduler.hit_tokens());
    const int64_t before = scheduler.finished();
    scheduler.commit(now);
    record.finished = scheduler.finished() - before;
    r.series.push_back(record);
    if (progress)
      progress({.elapsed = since(start),
                .finished = scheduler.finished(),
                .refused = scheduler.refused(),
                .requests = r.requests,
                .steps = r.steps,
                .prefill_tokens = r.prefill_tokens,
                .decode_tokens = r.decode_tokens,
                .pages_used = used,
                .pages = o.limits.pages,
                .share = static_cast<double>(r.prefill_tokens + r.decode_tokens + scheduler.hit_tokens()) /
                         static_cast<double>(trace_tokens)});
  }
  r.wall_seconds = since(start);
  ranks.finish(r);
  r.simulated_seconds = now;
  r.interrupted = over();
  r.finished = scheduler.finished();
  r.refused = scheduler.refused();
  r.preemptions = scheduler.preemptions();
  r.prompt_tokens = scheduler.prompt_tokens();
  r.hit_tokens = scheduler.hit_tokens();
  r.evictions = scheduler.allocator().counts().evictions;
  r.mean_pages = r.step_seconds > 0 ? page_seconds / r.step_seconds : 0;
  for (size_t i = 0; i < trace.requests.size(); ++i) {
    const RequestTimes& t = scheduler.times()[i];
    const TraceRequest& q = trace.requests[i];
    if (t.refused) {
      const int64_t pages = pages_of(q, o.limits.page_size);
      r.refused_pages = r.refused_pages == 0 ? pages : std::min(r.refused_pages, pages);
    }
    if (t.first_token >= 0) r.ttft.push_back(t.first_token - q.arrival);
    if (t.finish >= 0 && q.output > 1) r.tpot.push_back((t.finish - t.first_token) / static_cast<double>(q.output - 1));
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  r.peak_memory = static_cast<size_t>(usage.ru_maxrss) * 1024;
  processes.add_up({&r.weight_bytes, &r.cache_bytes, &r.index_cache_bytes, &r.workspace_bytes, &r.peak_memory});
  return r;
}

}  // namespace mla::serve
