// The replay of a request trace through the attention of a model: every step planned and executed, every layer, on real
// memory.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mla/mla.hpp"
#include "serve/scheduler.hpp"
#include "serve/trace.hpp"

namespace mla::serve {

struct Options {
  Device device;
  ModelConfig model;
  std::optional<Checkpoint> checkpoint;  ///< its weights; random ones otherwise
  int64_t layers = 0;                    ///< 0: all
  Dtype weights = Dtype::bf16;
  Absorption absorption = Absorption::runtime;  ///< full forms run on the latent path alone
  WeightFormat up = WeightFormat::plain;        ///< of W_UK and W_UV on the latent path
  WeightFormat products = WeightFormat::plain;  ///< of the other products
  CacheFormat format = CacheFormat::bf16;
  /// Of plan.tensor_parallel ranks on GPUs; where they are threads, rank r's is device.index + r.
  GpuLink link = GpuLink::peer;
  /// Ranks that are processes: this one's place among them, of as many as plan.tensor_parallel says. All
  /// replay the same trace with the same options; whoever's call throws ends the others' by abort(). Null: ranks are
  /// threads.
  Communicator* group = nullptr;
  /// That a rank waits for the others, at most: then RankError.
  std::chrono::nanoseconds patience = std::chrono::minutes(10);
  /// Ranks of a group that splits the cache, too, `interleave` tokens in turn; 1: each rank has all of it. Divides
  /// plan.tensor_parallel. Each rank has its share of limits.page_size, whole turns.
  int context_parallel = 1;
  int64_t interleave = 1;
  ContextExchange exchange = ContextExchange::latents;
  /// fp8 cache: its scale in each layer, 0: as calc_kv_scales() finds it on the trace's first tokens. Empty: 1.
  std::vector<float> k_scales;
  PlanOptions plan;
  Limits limits;                         ///< pages 0: from the trace, within cache_bytes
  size_t cache_bytes = size_t{4} << 30;  ///< bound on the default page budget
  int threads = 2;
  Pinning pinning = Pinning::none;  ///< of the pools that ranks which are threads have, each on processors of its own
  uint64_t seed = 1;
  int64_t verify = 0;  ///< output rows to sample for verification
  int64_t spans = 0;   ///< op calls to keep one by one, at most
};

/// One output row as the run computed it.
struct Sample {
  int64_t layer = 0, request = 0, position = 0;
  Path path = Path::latent;
  bool masked = false;  ///< RequestPlan::masked
  int64_t context = 0;  ///< tokens of its request that were cached before its step
  std::vector<float> row;
  std::vector<int32_t> selected;  ///< sparse path: the positions it attended to, ascending
};

/// What one step did.
struct StepRecord {
  double start = 0, seconds = 0;        ///< on the simulated clock; seconds as measured
  double wall_start = 0, wall_end = 0;  ///< on std::chrono::steady_clock, seconds
  double plan_seconds = 0;              ///< of `seconds`, at their start
  int64_t requests = 0;                 ///< with tokens in the step
  int64_t prefill_tokens = 0, decode_tokens = 0;
  int64_t context_tokens = 0;                 ///< cached before the step, of its requests together
  int64_t pages = 0;                          ///< in use while it ran
  int64_t prompt_tokens = 0, hit_tokens = 0;  ///< of requests admitted for it: looked up in the cache, and found
  int64_t finished = 0;                       ///< requests that ended with it
};

/// One op's call. On a CPU as it happened; on a GPU of the layer that was sampled after a step, device time, one after
/// another from the step's start.
struct Span {
  std::string_view op;
  int64_t step = 0, layer = 0;
  double start = 0, seconds = 0;  ///< start on std::chrono::steady_clock
  double bytes = 0, flops = 0;
};

struct Progress {
  double elapsed = 0;  ///< wall seconds since the replay began
  int64_t finished = 0, refused = 0, requests = 0, steps = 0;
  int64_t prefill_tokens = 0, decode_tokens = 0;
  int64_t pages_used = 0, pages = 0;
  double share = 0;  ///< of the trace's tokens that are done
};

struct Result {
  int64_t layers = 0, threads = 0;
  double setup_seconds = 0;       ///< weights and caches
  uint64_t checkpoint_bytes = 0;  ///< of tensors, read for them by this process's ranks; 0: weights are random
  double wall_seconds = 0;        ///< the replay itself
  double step_seconds = 0;        ///< sum of steps' measured times
  double simulated_seconds = 0;   ///< the clock's end
  int64_t steps = 0;
  int64_t prefill_tokens = 0, decode_tokens = 0;  ///< computed in steps
  int64_t output_tokens = 0;                      ///< generated: each request's first one ends its prefill
  std::vector<double> step_latencies, ttft, tpot;
  std::vector<StepRecord> series;  ///< of every step
  std::vector<Span> spans;         ///< the first Options::spans calls, by start
  int64_t spans_left_out = 0;      ///< calls past those
  int64_t finished = 0, refused = 0, preemptions = 0, requests = 0;
  int64_t refused_pages = 0;  ///< that the smallest refused request needs
  int64_t pages = 0, page_size = 0, peak_pages = 0;
  double mean_pages = 0;
  int64_t prompt_tokens = 0, hit_tokens = 0, evictions = 0;
  size_t weight_bytes = 0, cache_bytes = 0, index_cache_bytes = 0, workspace_bytes = 0, peak_memory = 0;
  /// Over all steps of one layer: rows that attended to a selection, keys those rows saw, and keys they attended to;
  /// rows of requests that fit the indexer's topk.
  int64_t sparse_rows = 0, seen_keys = 0, selected_keys = 0, unscored_rows = 0;
  std::vector<float> k_scales;    ///< fp8 cache: [layers], as used
  std::vector<double> saturated;  ///< fp8 cache: [layers], the part of its codes that are at e4m3's largest, 448
  Profile profile;
  int64_t profiled_steps = 0;  ///< that the profile was measured on: on a GPU a sample, scaled to all steps
  std::vector<Sample> samples;
  bool interrupted = false;
};

/// Fills in what 0 stands for, and checks all that can be known before the work begins. Errors of what does not fit
/// together; InputError for a page budget that holds no page.
Options resolved(const Trace& trace, Options options);

/// Runs the trace to its end, or until `stop` becomes true (after the step in progress). `progress` is called after
/// every step. Of ranks that are processes each returns what it has measured itself, steps' times apart, which are rank
/// 0's, and memory, which is all ranks'; `stop` of one ends all after the same step.
Result replay(const Trace& trace, const Options& options, ThreadPool& pool, const std::atomic<bool>& stop,
              const std::function<void(const Progress&)>& progress = {});

struct Verification {
  int64_t rows = 0, failed = 0;             ///< judged; fewer than the samples when it was stopped
  int64_t selections = 0;                   ///< rows whose selection was judged too
  double worst_error = 0, worst_bound = 0;  ///< of the row whose error is the largest part of its bound
  std::string worst;                        ///< which row that is, and against what
  double tightest = 0;                      ///< largest error as a part of the second bound
  double seconds = 0;
  bool interrupted = false;
};
struct VerificationProgress {
  double elapsed = 0, share = 0;  ///< wall seconds since it began; share of the work done
  int64_t rows = 0, of = 0;       ///< done
};
/// Recomputes samples from the trace: in float64; in float64 with the layer's own roundings; and twice as a plain
/// computation in f32 with those roundings, with what is about to be rounded moved up and down by what f32 may have
/// moved it. A row fails when its relative error against the first is above twice the plain ones', or against the
/// second above twice what those are away from it, each plus a floor of 2e-6. The first bound holds the model, the
/// second sees what is smaller than a format's own error. A sparse row is judged on the positions that it attended to,
/// and fails also when the exact scores do not allow that choice. Ends soon after `stop` becomes true. `progress` is
/// called now and then, from one thread at a time.
Verification verify(const Trace& trace, const Options& options, std::span<const Sample> samples, ThreadPool& pool,
                    const std::atomic<bool>& stop,
                    const std::function<void(const VerificationProgress&)>& progress = {});

/// The p-th percentile (0 to 100) by linear interpolation; 0 for no values.
double percentile(std::vector<double> values, double p);

/// How the options ask for weights to be prepared.
inline PrepareOptions prepare_options(const Options& o) {
  return {.dtype = o.weights, .absorption = o.absorption, .up = o.up, .products = o.products};
}

/// Of the hidden states that layers take and give.
inline Dtype hidden_dtype(const Options& o) {
  if (o.plan.activation_dtype != ActivationDtype::native)
    return static_cast<Dtype>(static_cast<int>(o.plan.activation_dtype) - 1);
  return o.device.kind == DeviceKind::cpu ? Dtype::f32 : o.plan.compute;
}
/// What a layer's cache is under options whose k_scales are complete.
CacheSpec cache_of(const Options& options, int64_t layer);

/// A layer's tensors, from the checkpoint or by seed.
LayerTensors tensors_of(const Options& options, int64_t layer);
/// Those of some heads' part, and of a group's heads (LayerTensors::group_kv_up); of a checkpoint no more is read.
LayerTensors tensors_of(const Options& options, int64_t layer, HeadRange heads, std::span<const HeadRange> group);

}  // namespace mla::serve
