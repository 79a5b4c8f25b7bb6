#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <mutex>
#include <numeric>
#include <string>
#include <tuple>

#include "layer/reference.hpp"
#include "serve/hidden.hpp"
#include "serve/replay.hpp"

namespace mla::serve {
namespace {

constexpr double kFloor = 2e-6;

struct Judged {
  double error = 0, bound = 0;                  ///< against float64 of the model as it is
  double rounded_error = 0, rounded_bound = 0;  ///< against float64 with the layer's own roundings
  bool done = false;
  bool chose = false;    ///< its selection was judged
  double selection = 0;  ///< as a part of what is excused
};

bool holds(const Judged& j) { return j.error <= j.bound && j.rounded_error <= j.rounded_bound && j.selection <= 1; }

// The computations that a row is judged by; in kPlainUp and kPlainDown what is about to be rounded is moved.
enum Pass { kExact, kRounded, kPlainUp, kPlainDown, kPasses };

// How far a result in f32 may be from float64, as a part of itself, before it is rounded to something narrower
// (docs/numerics.md).
double moved_by(const Options& o) {
  if (o.device.kind == DeviceKind::cpu) return 0x1p-18;
  const double longest = static_cast<double>(std::max(o.model.hidden, o.model.heads * o.model.value));
  return 0x1p-17 + longest / 16 * 0x1p-26 + (o.plan.activations == Activations::plain ? 0 : 0x1p-13);
}

// The same where rows are narrow, so that as many of their elements are at a border as of wider ones': else it would be
// by chance that one is. Codes of e4m3 lie 16 times as far apart as numbers of bf16; what f32 arithmetic leaves
// uncertain of them is too little for chance.
double moved_in_narrow_rows(const Options& o) {
  const ModelConfig& m = o.model;
  const bool codes = o.plan.activations != Activations::plain;
  if (codes && o.plan.compute == Dtype::f32) return moved_by(o);
  const int64_t narrowest = std::min(
      {m.hidden, m.latent, m.query_latent > 0 ? m.query_latent : m.hidden, m.heads * m.value, m.heads * m.query_key()});
  return moved_by(o) * std::max(1.0, 512.0 / static_cast<double>(narrowest)) * (codes && narrowest < 512 ? 16 : 1);
}

// What sums on tensor cores may add to a row's error that rounds nothing.
double device_floor(const Options& o) { return o.device.kind == DeviceKind::cpu ? 0 : 4 * moved_by(o); }

}  // namespace

// Samples of one layer and request share everything up to the furthest of their positions, so they are recomputed
// together.
Verification verify(const Trace& trace, const Options& o, std::span<const Sample> samples, ThreadPool& pool,
                    const std::atomic<bool>& stop, const std::function<void(const VerificationProgress&)>& progress) {
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  std::vector<size_t> order(samples.size());
  std::iota(order.begin(), order.end(), size_t{0});
  auto key = [&](size_t i) {
    return std::tuple(samples[i].layer, samples[i].request, samples[i].path, samples[i].masked, samples[i].position);
  };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
  std::vector<Judged> judged(samples.size());
  std::optional<IndexCacheSpec> index_spec;
  if (o.model.indexer) index_spec = index_cache_spec(o.model, cache_spec(o.model, o.format), o.plan.index_format);

  // Work is as positions to recompute, roughly.
  std::mutex progress_mutex;
  VerificationProgress so_far{.of = static_cast<int64_t>(samples.size())};
  double work = 0, worked = 0;
  for (const Sample& s : samples) work += static_cast<double>(s.position + 1);

  for (size_t begin = 0; begin < order.size() && !stop;) {
    const int64_t layer = samples[order[begin]].layer;
    const LayerTensors tensors = tensors_of(o, layer);
    const double most = moved_in_narrow_rows(o);
    const std::array<double, kPasses> moved{0, 0, most, -most};
    std::array<reference::Weights, kPasses> own_weights;
    std::array<const reference::Weights*, kPasses> weights;
    for (const Pass pass : {kExact, kRounded, kPlainUp, kPlainDown}) {
      // Codes of products of weights are at a border, too; other weights are held as they are.
      const bool own = pass <= kRounded || o.absorption == Absorption::full_fp8;
      weights[pass] = &own_weights[own ? pass : kRounded];
      if (pass == kExact) own_weights[pass] = reference::plain_weights(tensors, Dtype::f32);
      else if (own)
        own_weights[pass] =
            reference::plain_weights(o.model, tensors, prepare_options(o), o.plan.tensor_parallel, moved[pass]);
    }
    std::vector<std::pair<size_t, size_t>> groups;  // ranges of `order`
    size_t end = begin;
    while (end < order.size() && samples[order[end]].layer == layer) {
      const size_t first = end;
      while (end < order.size() && samples[order[end]].layer == layer &&
             samples[order[end]].request == samples[order[first]].request &&
             samples[order[end]].path == samples[order[first]].path &&
             samples[order[end]].masked == samples[order[first]].masked)
        ++end;
      groups.emplace_back(first, end);
    }
    std::vector<std::vector<double>> results(kPasses * groups.size());
    std::vector<std::vector<std::vector<double>>> scores(kPasses * groups.size());
    std::vector<int64_t> passed(groups.size());  // under the mutex
    pool.run(static_cast<int64_t>(results.size()), [&](int64_t task, int) {
      if (stop) return;
      const auto [first, last] = groups[static_cast<size_t>(task / kPasses)];
      const Sample& furthest = samples[order[last - 1]];
      std::vector<float> hidden(static_cast<size_t>((furthest.position + 1) * o.model.hidden));
      for (int64_t p = 0; p <= furthest.position; ++p)
        hidden_row(o.seed, token_key(trace, furthest.request, p), p,
                   {hidden.data() + p * o.model.hidden, static_cast<size_t>(o.model.hidden)});
      // A layer is judged by the hidden states that it was given.
      if (o.plan.activation_dtype != ActivationDtype::native) reference::round_rows(hidden_dtype(o), hidden);
      std::vector<int64_t> rows, contexts;
      std::vector<std::vector<int32_t>> selections;
      for (size_t i = first; i < last; ++i) {
        rows.push_back(samples[order[i]].position);
        // Under batch_invariant all keys are read as they are stored.
        if (o.plan.split == SplitPolicy::fast) contexts.push_back(samples[order[i]].context);
        selections.push_back(samples[order[i]].selected);
      }
      const auto pass = static_cast<Pass>(task % kPasses);
      const Path path = furthest.masked ? Path::expanded : furthest.path;
      const reference::Rounding rounding{
          .weights = o.weights,
          .compute = o.plan.compute,
          .inputs = o.plan.activations,
          .activations = o.device.kind == DeviceKind::cpu ? Dtype::f32 : o.plan.compute,
          .outputs = o.plan.activation_dtype == ActivationDtype::native ? Dtype::f32 : hidden_dtype(o),
          .cache = cache_of(o, layer),
          .path = path,
          .q_scale = !o.plan.fp8_query || path == Path::expanded ? 0.0f
                     : o.plan.q_scale > 0                        ? o.plan.q_scale
                                                                 : tensors.scales.q.at(0),
          .latent_codes = o.plan.decode == DecodeOperands::fp8 && o.device.kind != DeviceKind::cpu,
          .prefill = o.plan.prefill != PrefillOperands::compute ? &tensors.scales : nullptr,
          .prefill_probabilities = o.device.kind == DeviceKind::cpu ? Dtype::bf16 : Dtype::fp8_e4m3,
          .index_cache = index_spec,
          .index_hadamard = o.plan.index_hadamard,
          .index_arithmetic = o.plan.index_arithmetic,
          .float64 = pass == kRounded,
          .moved = moved[pass],
          .round_keys = pass != kRounded && o.device.kind != DeviceKind::cpu};
      const reference::Rounding* rounds = pass == kExact ? nullptr : &rounding;
      results[static_cast<size_t>(task)] =
          reference::output_rows(o.model, *weights[pass], hidden, rows, rounds, selections, contexts, &stop);
      // A layer that shares a selection has no scores of its own to judge it by.
      if (furthest.path == Path::sparse && tensors.indexer && (pass == kExact || pass == kPlainUp))
        scores[static_cast<size_t>(task)] =
            reference::index_scores(o.model, *weights[pass], hidden, rows, rounds, &stop);
      if (stop) return;
      const std::lock_guard lock(progress_mutex);
      for (size_t i = first; i < last; ++i)
        worked += static_cast<double>(samples[order[i]].position + 1) / int{kPasses};
      if (++passed[static_cast<size_t>(task / kPasses)] == kPasses) so_far.rows += static_cast<int64_t>(last - first);
      so_far.share = worked / work;
      so_far.elapsed = elapsed();
      if (progress) progress(so_far);
    });
    for (size_t g = 0; g < groups.size(); ++g)
      for (size_t i = groups[g].first; i < groups[g].second && passed[g] == kPasses; ++i) {
        const size_t at = (i - groups[g].first) * static_cast<size_t>(o.model.hidden),
                     width = static_cast<size_t>(o.model.hidden);
        const auto of = [&](Pass pass) {
          return std::span<const double>(results[kPasses * g + pass]).subspan(at, width);
        };
        const auto apart = [&](Pass pass, Pass from) {
          return reference::relative_error(std::vector<float>(of(pass).begin(), of(pass).end()), of(from));
        };
        const std::vector<float>& row = samples[order[i]].row;
        Judged& j = judged[order[i]];
        j.error = reference::relative_error(row, of(kExact));
        j.bound = 2 * std::max(apart(kPlainUp, kExact), apart(kPlainDown, kExact)) + kFloor;
        j.rounded_error = reference::relative_error(row, of(kRounded));
        j.rounded_bound =
            2 * std::hypot(apart(kPlainUp, kRounded), apart(kPlainDown, kRounded)) + kFloor + device_floor(o);
        j.done = true;
        j.chose = !scores[kPasses * g + kExact].empty();
        if (j.chose)
          j.selection =
              reference::selection_error(samples[order[i]].selected, scores[kPasses * g + kExact][i - groups[g].first],
                                         scores[kPasses * g + kPlainUp][i - groups[g].first], o.model.indexer->topk);
      }
    begin = end;
  }

  Verification v{.worst = {}, .interrupted = stop};
  double worst = -1;
  for (size_t i = 0; i < samples.size(); ++i) {
    const Judged& j = judged[i];
    if (!j.done) continue;
    ++v.rows;
    const double loose = j.error / j.bound, tight = j.rounded_error / j.rounded_bound,
                 part = std::max({loose, tight, j.selection});
    if (!holds(j)) ++v.failed;
    v.selections += j.chose;
    v.tightest = std::max(v.tightest, tight);
    if (part > worst || part != part) {
      worst = part;
      v.worst_error = tight > loose ? j.rounded_error : j.error;
      v.worst_bound = tight > loose ? j.rounded_bound : j.bound;
      v.worst = "layer " + std::to_string(samples[i].layer) + ", request " + std::to_string(samples[i].request) +
                ", position " + std::to_string(samples[i].position) + ", " + std::string(to_string(samples[i].path)) +
                " path, against " + (tight > loose ? "float64 with the same roundings" : "float64");
    }
  }
  v.seconds = elapsed();
  return v;
}

}  // namespace mla::serve
