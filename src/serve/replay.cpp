#include "serve/replay.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "serve/hidden.hpp"

namespace mla::serve {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

int64_t longest_sequence(const Trace& trace) {
  int64_t longest = 1;
  for (const TraceRequest& r : trace.requests) longest = std::max(longest, r.input + r.output);
  return longest;
}

// Enough for all of the trace if memory allows, for the longest sequence at least.
int64_t page_budget(const Trace& trace, int64_t page_size, size_t page_bytes, size_t bytes) {
  int64_t all = 0, longest = 0;
  for (const TraceRequest& r : trace.requests) {
    const int64_t pages = (r.input + r.output + page_size - 1) / page_size;
    all += pages;
    longest = std::max(longest, pages);
  }
  const int64_t affordable = static_cast<int64_t>(bytes / page_bytes);
  return std::max(std::min(all, affordable), longest);
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
  std::vector<int32_t> starts, lengths, table, slots;
  std::vector<float> hidden, out;
  Batch batch;

  void fill(const Trace& trace, const Scheduler& scheduler, std::span<const StepPiece> pieces, const Options& o,
            ThreadPool& pool) {
    const int64_t page_size = o.limits.page_size, width = o.model.hidden;
    starts.assign(1, 0);
    lengths.clear();
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
    }
    const size_t tokens = slots.size();
    if (hidden.size() < tokens * static_cast<size_t>(width)) {
      hidden.resize(tokens * static_cast<size_t>(width));
      out.resize(hidden.size());
    }
    pool.run(static_cast<int64_t>(pieces.size()), [&](int64_t i, int) {
      const StepPiece& p = pieces[static_cast<size_t>(i)];
      for (int64_t t = 0; t < p.count; ++t)
        hidden_row(o.seed, token_key(trace, p.request, p.start + t), p.start + t,
                   {hidden.data() + (starts[static_cast<size_t>(i)] + t) * width, static_cast<size_t>(width)});
    });
    batch = {
        starts, lengths, {table.data(), {static_cast<int64_t>(pieces.size()), static_cast<int64_t>(pages)}}, slots};
  }
};

void count_sparse(const Plan& p, Result& r) {
  if (p.topk == 0) return;
  r.unscored_rows += p.tokens - p.sparse_rows();
  for (const int32_t position : p.sparse_positions) {
    const int64_t seen = int64_t{position} + 1;
    if (seen <= p.topk) {  // the first rows of a request that outgrows topk
      ++r.unscored_rows;
      continue;
    }
    ++r.sparse_rows;
    r.seen_keys += seen;
    r.selected_keys += p.topk;
  }
}

// What a token attended to; empty when that was everything.
std::vector<int32_t> selection_of(const Plan& p, std::span<std::byte> selection, int64_t token) {
  std::vector<int32_t> positions;
  const auto first = p.latent_tokens.begin() + p.sparse_begin,
             at = std::find(first, p.latent_tokens.end(), static_cast<int32_t>(token));
  if (at == p.latent_tokens.end()) return positions;
  const View<int32_t, Token, Topk> selected = p.selected(selection);
  for (int64_t k = 0; k < p.topk; ++k)
    if (const int32_t position = selected(at - first, k); position >= 0) positions.push_back(position);
  return positions;
}

}  // namespace

LayerTensors tensors_of(const Options& o, int64_t layer) {
  return o.checkpoint ? o.checkpoint->layer(layer) : random_layer(o.model, layer, o.seed, o.weights);
}

double percentile(std::vector<double> values, double p) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double at = p / 100 * static_cast<double>(values.size() - 1);
  const size_t low = static_cast<size_t>(at), high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

Result replay(const Trace& trace, const Options& given, ThreadPool& pool, const std::atomic<bool>& stop,
              const std::function<void(const Progress&)>& progress) {
  const auto setup = Clock::now();
  Options o = given;
  o.model.validate();
  o.plan.absorbed = o.absorption != Absorption::runtime;
  o.plan.up = o.up;
  if (o.layers == 0) o.layers = o.model.layers;
  if (o.layers < 1 || o.layers > o.model.layers)
    throw InputError("layers is " + std::to_string(o.layers) + ", " + o.model.name + " has 1 to " +
                     std::to_string(o.model.layers));
  CacheSpec spec = cache_spec(o.model, o.format, o.limits.page_size);
  spec.validate();
  IndexCacheSpec index_spec;
  size_t page_bytes = spec.page_bytes() * static_cast<size_t>(o.layers);  // of all layers
  if (o.model.indexer) {
    index_spec = index_cache_spec(o.model, spec, o.plan.index_format);
    index_spec.validate();
    for (int64_t l = 0; l < o.layers; ++l) page_bytes += o.model.layer_has_indexer(l) ? index_spec.page_bytes() : 0;
  }
  if (o.limits.pages == 0) o.limits.pages = page_budget(trace, o.limits.page_size, page_bytes, o.cache_bytes);
  Scheduler scheduler(trace, o.limits);

  Result r;
  r.layers = o.layers;
  r.threads = pool.threads();
  r.requests = static_cast<int64_t>(trace.requests.size());
  r.pages = o.limits.pages;
  r.page_size = o.limits.page_size;
  std::vector<LayerWeights> weights;
  std::vector<Cache> caches;
  std::vector<IndexCache> index_caches(static_cast<size_t>(o.layers));  // empty where a layer has no indexer
  for (int64_t l = 0; l < o.layers && !stop; ++l) {
    weights.push_back(prepare(o.model, tensors_of(o, l), prepare_options(o)));
    caches.emplace_back(spec, o.limits.pages);
    // Touched now, as an engine would at its start: otherwise the first write to each page waits for the system to find
    // memory.
    const CacheView cache = caches.back().view();
    pool.run(cache.pages, [&](int64_t page, int) { std::memset(cache.page(page), 0, spec.page_bytes()); });
    r.weight_bytes += weights.back().bytes();
    r.cache_bytes += spec.page_bytes() * static_cast<size_t>(o.limits.pages);
    if (!o.model.layer_has_indexer(l)) continue;
    IndexCache& index = index_caches[static_cast<size_t>(l)] = IndexCache(index_spec, o.limits.pages);
    pool.run(index.pages(),
             [&](int64_t page, int) { std::memset(index.view().page(page), 0, index_spec.page_bytes()); });
    r.index_cache_bytes += index_spec.page_bytes() * static_cast<size_t>(o.limits.pages);
  }
  const RotaryTable rotary(o.model.rotary, o.model.rope, longest_sequence(trace)),
      index_rotary(o.model.index_rotary(), o.model.rope, o.model.indexer ? longest_sequence(trace) : 0);
  Stream stream(pool);
  const DeviceInfo device = device_info(stream, o.model);
  Buffer workspace, selection;
  StepInput input;
  Reservoir reservoir(o.verify, o.layers, o.seed);
  r.samples.reserve(static_cast<size_t>(o.verify));
  int64_t trace_tokens = 0;
  for (const TraceRequest& q : trace.requests) trace_tokens += q.input + q.output - 1;
  r.setup_seconds = since(setup);

  const auto start = Clock::now();
  double now = 0, page_seconds = 0;
  while (!stop && !scheduler.done()) {
    const std::vector<StepPiece>& pieces = scheduler.plan_step(now);
    if (pieces.empty()) {
      if (!std::isfinite(scheduler.next_arrival())) break;  // the rest was refused
      now = std::max(now, scheduler.next_arrival());
      continue;
    }
    input.fill(trace, scheduler, pieces, o, pool);
    const int64_t tokens = input.batch.tokens(), width = o.model.hidden;
    const std::vector<Reservoir::Pick> picks = reservoir.next(tokens);

    const auto planning = Clock::now();
    const Plan p = plan(o.model, spec, o.limits.pages, input.batch, device, o.plan);
    const double plan_seconds = since(planning);
    if (workspace.size() < p.workspace_bytes) {  // between steps: an engine sizes it once, for its largest batch
      workspace = Buffer(p.workspace_bytes + p.workspace_bytes / 4);
      std::memset(workspace.data(), 0, workspace.size());
    }
    if (selection.size() < p.selection_bytes) selection = Buffer(p.selection_bytes + p.selection_bytes / 4);
    count_sparse(p, r);
    const auto step = Clock::now();
    for (int64_t l = 0; l < o.layers; ++l) {
      const size_t layer = static_cast<size_t>(l);
      forward(stream,
              {.plan = p,
               .batch = input.batch,
               .weights = weights[layer],
               .rotary = rotary,
               .cache = caches[layer].view(),
               .workspace = {workspace.data(), workspace.size()},
               .profile = &r.profile,
               .index_cache = index_caches[layer].view(),
               .index_rotary = &index_rotary,
               .selection = {selection.data(), selection.size()}},
              View<const float, Token, Hidden>(input.hidden.data(), {tokens, width}),
              View<float, Token, Hidden>(input.out.data(), {tokens, width}));
      for (const Reservoir::Pick& pick : picks) {
        if (pick.layer != l) continue;
        const size_t piece = static_cast<size_t>(std::upper_bound(input.starts.begin(), input.starts.end(), pick.row) -
                                                 input.starts.begin() - 1);
        Sample sample{.layer = l,
                      .request = pieces[piece].request,
                      .position = pieces[piece].start + pick.row - input.starts[piece],
                      .path = p.requests[piece].path,
                      .row = {input.out.begin() + pick.row * width, input.out.begin() + (pick.row + 1) * width},
                      .selected = selection_of(p, {selection.data(), selection.size()}, pick.row)};
        if (r.samples.size() <= static_cast<size_t>(pick.slot)) r.samples.resize(static_cast<size_t>(pick.slot) + 1);
        r.samples[static_cast<size_t>(pick.slot)] = std::move(sample);
      }
    }
    const double seconds = plan_seconds + since(step);

    now += seconds;
    r.step_seconds += seconds;
    r.step_latencies.push_back(seconds);
    ++r.steps;
    int64_t decodes = 0;
    for (const StepPiece& piece : pieces) decodes += piece.decode;
    r.decode_tokens += decodes;
    r.prefill_tokens += tokens - decodes;
    r.decode_seconds += seconds * static_cast<double>(decodes) / static_cast<double>(tokens);
    r.prefill_seconds += seconds * static_cast<double>(tokens - decodes) / static_cast<double>(tokens);
    const int64_t used = scheduler.allocator().counts().referenced;
    r.peak_pages = std::max(r.peak_pages, used);
    page_seconds += static_cast<double>(used) * seconds;
    r.workspace_bytes = workspace.size();
    scheduler.commit(now);
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
  r.simulated_seconds = now;
  r.interrupted = stop;
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
    if (t.first_token >= 0) r.ttft.push_back(t.first_token - q.arrival);
    if (t.finish >= 0 && q.output > 1) r.tpot.push_back((t.finish - t.first_token) / static_cast<double>(q.output - 1));
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  r.peak_memory = static_cast<size_t>(usage.ru_maxrss) * 1024;
  return r;
}

}  // namespace mla::serve
