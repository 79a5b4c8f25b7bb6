#include <algorithm>
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
  double error = 0, bound = 0;
  bool chose = false;    ///< its selection was judged
  double selection = 0;  ///< as a part of what is excused
};

bool holds(const Judged& j) { return j.error <= j.bound && j.selection <= 1; }

}  // namespace

// Samples of one layer and request share everything up to the furthest of their positions, so they are recomputed
// together.
Verification verify(const Trace& trace, const Options& o, std::span<const Sample> samples, ThreadPool& pool) {
  std::vector<size_t> order(samples.size());
  std::iota(order.begin(), order.end(), size_t{0});
  auto key = [&](size_t i) {
    return std::tuple(samples[i].layer, samples[i].request, samples[i].path, samples[i].position);
  };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
  std::vector<Judged> judged(samples.size());
  std::optional<IndexCacheSpec> index_spec;
  if (o.model.indexer) index_spec = index_cache_spec(o.model, cache_spec(o.model, o.format), o.plan.index_format);

  for (size_t begin = 0; begin < order.size();) {
    const int64_t layer = samples[order[begin]].layer;
    const LayerTensors tensors = tensors_of(o, layer);
    const reference::Weights exact_weights = reference::plain_weights(tensors, Dtype::f32);
    const reference::Weights plain_weights = reference::plain_weights(o.model, tensors, prepare_options(o));
    std::vector<std::pair<size_t, size_t>> groups;  // ranges of `order`
    size_t end = begin;
    while (end < order.size() && samples[order[end]].layer == layer) {
      const size_t first = end;
      while (end < order.size() && samples[order[end]].layer == layer &&
             samples[order[end]].request == samples[order[first]].request &&
             samples[order[end]].path == samples[order[first]].path)
        ++end;
      groups.emplace_back(first, end);
    }
    // Two tasks a group: float64 and plain.
    std::vector<std::vector<double>> results(2 * groups.size());
    std::vector<std::vector<std::vector<double>>> scores(2 * groups.size());
    pool.run(static_cast<int64_t>(results.size()), [&](int64_t task, int) {
      const auto [first, last] = groups[static_cast<size_t>(task / 2)];
      const Sample& furthest = samples[order[last - 1]];
      std::vector<float> hidden(static_cast<size_t>((furthest.position + 1) * o.model.hidden));
      for (int64_t p = 0; p <= furthest.position; ++p)
        hidden_row(o.seed, token_key(trace, furthest.request, p), p,
                   {hidden.data() + p * o.model.hidden, static_cast<size_t>(o.model.hidden)});
      std::vector<int64_t> rows;
      std::vector<std::vector<int32_t>> selections;
      for (size_t i = first; i < last; ++i) {
        rows.push_back(samples[order[i]].position);
        selections.push_back(samples[order[i]].selected);
      }
      const reference::Rounding rounding{
          .weights = o.weights,
          .compute = o.plan.compute,
          .inputs = o.plan.activations,
          .activations = o.device.kind == DeviceKind::cpu ? Dtype::f32 : o.plan.compute,
          .cache = cache_spec(o.model, o.format),
          .path = furthest.path,
          .q_scale = o.plan.fp8_query && furthest.path != Path::expanded ? o.plan.q_scale : 0.0f,
          .index_cache = index_spec,
          .index_hadamard = o.plan.index_hadamard};
      const bool exact = task % 2 == 0;
      const reference::Weights& weights = exact ? exact_weights : plain_weights;
      const reference::Rounding* rounds = exact ? nullptr : &rounding;
      results[static_cast<size_t>(task)] = reference::output_rows(o.model, weights, hidden, rows, rounds, selections);
      // A layer that shares a selection has no scores of its own to judge it by.
      if (furthest.path == Path::sparse && tensors.indexer)
        scores[static_cast<size_t>(task)] = reference::index_scores(o.model, weights, hidden, rows, rounds);
    });
    for (size_t g = 0; g < groups.size(); ++g)
      for (size_t i = groups[g].first; i < groups[g].second; ++i) {
        const size_t at = (i - groups[g].first) * static_cast<size_t>(o.model.hidden),
                     width = static_cast<size_t>(o.model.hidden);
        const std::span exact = std::span<const double>(results[2 * g]).subspan(at, width);
        const std::span plain = std::span<const double>(results[2 * g + 1]).subspan(at, width);
        Judged& j = judged[order[i]];
        j = {reference::relative_error(samples[order[i]].row, exact),
             2 * reference::relative_error(std::vector<float>(plain.begin(), plain.end()), exact) + kFloor};
        j.chose = !scores[2 * g].empty();
        if (j.chose)
          j.selection = reference::selection_error(samples[order[i]].selected, scores[2 * g][i - groups[g].first],
                                                   scores[2 * g + 1][i - groups[g].first], o.model.indexer->topk);
      }
    begin = end;
  }

  Verification v{.rows = static_cast<int64_t>(samples.size()), .worst = {}};
  double worst = -1;
  for (size_t i = 0; i < samples.size(); ++i) {
    const double part = std::max(judged[i].error / judged[i].bound, judged[i].selection);
    if (!holds(judged[i])) ++v.failed;
    v.selections += judged[i].chose;
    if (part > worst || part != part) {
      worst = part;
      v.worst_error = judged[i].error;
      v.worst_bound = judged[i].bound;
      v.worst = "layer " + std::to_string(samples[i].layer) + ", request " + std::to_string(samples[i].request) +
                ", position " + std::to_string(samples[i].position) + ", " + std::string(to_string(samples[i].path)) +
                " path";
    }
  }
  return v;
}

}  // namespace mla::serve
