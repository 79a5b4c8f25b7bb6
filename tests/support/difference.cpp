#include "support/difference.hpp"

#include <bit>
#include <cmath>

#include "layer/reference.hpp"
#include "support/engine.hpp"

namespace mla::test {
namespace {

constexpr double kFloor = 2e-6;

using cases::Random;

template <class T, size_t n>
T one_of(Random& r, const T (&choices)[n]) {
  return choices[r.integer(0, static_cast<int64_t>(n) - 1)];
}

struct Draw {
  ModelConfig model;
  CacheSpec spec;
  Engine::Options engine;
  PrepareOptions weights;
  std::vector<int64_t> lengths;
  std::vector<std::vector<Engine::Piece>> steps;
  bool odd = false;  ///< some hidden states are NaN or infinite

  explicit Draw(Random& r) {
    model.name = "random";
    model.hidden = r.integer(1, 40);
    model.layers = 1;
    model.heads = r.integer(0, 7) == 0 ? r.integer(33, 70) : r.integer(1, 6);
    model.query_latent = r.integer(0, 1) * r.integer(1, 24);
    model.latent = r.integer(1, 40);
    model.nope = r.integer(1, 24);
    model.rope = r.integer(0, 3) == 0 ? 0 : 2 * r.integer(1, 8);
    model.value = r.integer(1, 24);
    model.rotary.interleaved = r.integer(0, 1) == 0;
    model.rotary.rotate = model.rope > 0 && r.integer(0, 5) > 0;
    if (model.rotary.rotate && r.integer(0, 2) == 0) {
      model.rotary.scaling = RopeConfig::Scaling::yarn;
      model.rotary.factor = 40;
      model.rotary.mscale_all_dim = 1.0;
    }
    constexpr CacheFormat kFormats[] = {CacheFormat::f32, CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8};
    CacheFormat format = one_of(r, kFormats);
    if (r.integer(0, 15) == 0) {
      format = CacheFormat::fp8_ds_mla;
      model.latent = 512;
      model.rope = 64;
      model.heads = std::min<int64_t>(model.heads, 3);
    }
    PlanOptions& plan = engine.plan;
    constexpr PathPolicy kPaths[] = {PathPolicy::automatic, PathPolicy::latent, PathPolicy::expanded,
                                     PathPolicy::by_length, PathPolicy::by_prompt};
    plan.path = one_of(r, kPaths);
    plan.reorder_batch_threshold = r.integer(0, 8);
    plan.split = r.integer(0, 1) == 0 ? SplitPolicy::fast : SplitPolicy::batch_invariant;
    plan.compute = weights.dtype = r.integer(0, 1) == 0 ? Dtype::f32 : Dtype::bf16;
    if (r.integer(0, 3) == 0) {
      constexpr SparsePolicy kSparse[] = {SparsePolicy::automatic, SparsePolicy::mixed, SparsePolicy::direct,
                                          SparsePolicy::upconvert, SparsePolicy::dense, SparsePolicy::masked};
      constexpr IndexCacheFormat kIndex[] = {IndexCacheFormat::f32, IndexCacheFormat::bf16, IndexCacheFormat::fp8};
      model.query_latent = std::max<int64_t>(model.query_latent, 4);
      model.indexer = IndexerConfig{
          .heads = r.integer(1, 5), .dim = 128, .topk = r.integer(1, 30), .interleaved = r.integer(0, 1) == 0};
      plan.path = PathPolicy::automatic;
      plan.sparse = one_of(r, kSparse);
      plan.index_format = one_of(r, kIndex);
      plan.index_hadamard = r.integer(0, 2) == 0;
      plan.index_arithmetic = r.integer(0, 1) == 0 ? IndexArithmetic::exact : IndexArithmetic::fp8;
    }
    spec = cache_spec(model, format, r.integer(1, 20));
    spec.k_scale = format == CacheFormat::fp8 ? 0.0625f : 1.0f;
    engine.threads = static_cast<int>(r.integer(1, 4));
    engine.page_seed = r.next();
    const int64_t sequences = r.integer(1, 6);
    for (int64_t s = 0; s < sequences; ++s) lengths.push_back(r.integer(1, r.integer(0, 3) == 0 ? 150 : 40));
    std::vector<int64_t> done(lengths.size());
    int64_t rows = 0;
    while (done != lengths) {
      std::vector<Engine::Piece> step;
      for (int64_t s = 0; s < sequences; ++s) {
        const int64_t left = lengths[s] - done[s];
        if (r.integer(0, 3) == 0) continue;
        const int64_t most = std::min<int64_t>(left, one_of(r, {int64_t{1}, int64_t{7}, int64_t{200}}));
        const int64_t count = done[s] > 0 || left == 0 ? r.integer(0, most) : most;
        if (done[s] + count > 0) step.push_back({s, count});
        done[s] += count;
      }
      for (size_t i = step.size(); i > 1; --i) std::swap(step[i - 1], step[r.integer(0, static_cast<int64_t>(i) - 1)]);
      if (!step.empty()) steps.push_back(std::move(step));
    }
    for (int64_t n : lengths) rows += (n + spec.page_size - 1) / spec.page_size;
    engine.pages = rows + r.integer(0, 3);
    // Small enough for contexts to come in several chunks.
    if (r.integer(0, 1) == 0) plan.context_rows = r.integer(1, 8) * std::max<int64_t>(spec.page_size, 8);
    odd = r.integer(0, 2) == 0;
    factors(r);
    formats(r);
  }

  // What families multiply queries and latents by.
  void factors(Random& r) {
    if (r.integer(0, 3) == 0) model.latent_scale = 0.5 + 0.25 * static_cast<double>(r.integer(0, 6));
    if (model.query_latent == 0) return;
    if (r.integer(0, 3) == 0) model.query_scale = 0.5 + 0.25 * static_cast<double>(r.integer(0, 6));
    if (r.integer(0, 3) != 0) return;
    model.query_growth_beta = 0.1 * static_cast<double>(r.integer(1, 5));
    model.query_growth_length = r.integer(1, 40);
  }

  // How weights are held.
  void formats(Random& r) {
    PlanOptions& plan = engine.plan;
    const int64_t kind = r.integer(0, 7);
    if (kind == 0) plan.up = weights.up = WeightFormat::fp8;
    if (kind == 1) plan.up = weights.up = WeightFormat::mxfp4;
    if (kind == 2) weights.products = WeightFormat::fp8;
    if (kind == 2 && r.integer(0, 1) == 0) plan.activations = Activations::fp8_128;
    const bool latent = plan.path == PathPolicy::automatic || plan.path == PathPolicy::latent;
    if (kind != 3 || model.indexer || !latent) return;
    weights.absorption = r.integer(0, 1) == 0 ? Absorption::full : Absorption::full_fp8;
    plan.absorbed = true;
  }

  std::string text() const {
    auto n = [](int64_t x) { return " " + std::to_string(x); };
    std::string t = "hidden" + n(model.hidden) + " heads" + n(model.heads) + " q_lora" + n(model.query_latent) +
                    " latent" + n(model.latent) + " nope" + n(model.nope) + " rope" + n(model.rope) + " value" +
                    n(model.value) + ", cache " + std::string(to_string(spec.format)) + " pages of" +
                    n(spec.page_size) + ", compute " + std::string(to_string(engine.plan.compute)) + ", path " +
                    std::string(to_string(engine.plan.path)) + ", split " + std::string(to_string(engine.plan.split)) +
                    ", context rows" + n(engine.plan.context_rows) + ", threads" + n(engine.threads);
    if (model.indexer)
      t += ", indexer" + n(model.indexer->heads) + " of" + n(model.indexer->dim) + " topk" + n(model.indexer->topk) +
           " " + std::string(to_string(engine.plan.sparse)) + " keys " +
           std::string(to_string(engine.plan.index_format)) + (engine.plan.index_hadamard ? " hadamard" : "") +
           (engine.plan.index_arithmetic == IndexArithmetic::fp8 ? " by fp8 products" : "");
    if (model.query_scale != 1 || model.latent_scale != 1 || model.query_growth_beta > 0)
      t += ", queries times " + std::to_string(model.query_scale) + " growing by " +
           std::to_string(model.query_growth_beta) + " in" + n(model.query_growth_length) + ", latents times " +
           std::to_string(model.latent_scale);
    t += ", weights " + std::string(to_string(weights.products)) + " maps " + std::string(to_string(weights.up)) +
         " absorption " + std::string(to_string(weights.absorption)) + " activations " +
         std::string(to_string(engine.plan.activations)) + ", lengths";
    for (int64_t l : lengths) t += n(l);
    return t + (odd ? ", NaN and infinities" : "");
  }
};

// Rows of every sequence, with what each attended to where that was a choice, and the path each took.
struct Ran {
  std::vector<std::vector<float>> out;
  std::vector<std::vector<std::vector<int32_t>>> selected;
  std::vector<std::vector<Path>> paths;
  bool padding_touched = false;
};

Ran run(const Draw& d, const LayerWeights& weights, const std::vector<std::vector<float>>& hidden) {
  Engine engine(weights, d.spec, d.engine);
  for (const auto& h : hidden) engine.add(h);
  Ran ran{std::vector<std::vector<float>>(hidden.size()), std::vector<std::vector<std::vector<int32_t>>>(hidden.size()),
          std::vector<std::vector<Path>>(hidden.size())};
  for (const auto& step : d.steps) {
    const auto rows = engine.step(step);
    auto selected = engine.selected();
    size_t token = 0;
    for (size_t i = 0; i < step.size(); ++i) {
      const size_t s = static_cast<size_t>(step[i].sequence);
      ran.out[s].insert(ran.out[s].end(), rows[i].begin(), rows[i].end());
      for (int64_t c = 0; c < step[i].count; ++c, ++token) {
        ran.selected[s].push_back(std::move(selected[token]));
        ran.paths[s].push_back(engine.last_plan.requests[i].path);
      }
    }
  }
  ran.padding_touched = engine.padding_touched;
  return ran;
}

std::string at(size_t sequence, int64_t row) {
  return "sequence " + std::to_string(sequence) + " row " + std::to_string(row) + ": ";
}

std::string judge(const Draw& d, const LayerTensors& tensors, const std::vector<std::vector<float>>& hidden,
                  const Ran& ran) {
  const reference::Weights exact_weights = reference::plain_weights(tensors, Dtype::f32),
                           weights = reference::plain_weights(d.model, tensors, d.weights);
  for (size_t s = 0; s < hidden.size(); ++s) {
    std::vector<int64_t> rows(static_cast<size_t>(d.lengths[s]));
    std::iota(rows.begin(), rows.end(), 0);
    const auto exact = reference::output_rows(d.model, exact_weights, hidden[s], rows, nullptr, ran.selected[s]);
    const Dtype compute = d.engine.plan.compute;
    reference::Rounding rounding{.weights = d.weights.dtype,
                                 .compute = compute,
                                 .inputs = d.engine.plan.activations,
                                 .activations = kOnGpu ? compute : Dtype::f32,
                                 .cache = d.spec};
    if (d.model.indexer) {
      rounding.index_cache = index_cache_spec(d.model, d.spec, d.engine.plan.index_format);
      rounding.index_hadamard = d.engine.plan.index_hadamard;
      rounding.index_arithmetic = d.engine.plan.index_arithmetic;
    }
    // One plain result a path; each row is judged beside its own.
    double plain = 0;
    for (Path path : {Path::latent, Path::expanded}) {
      const auto takes = [&](Path p) { return (p == Path::expanded) == (path == Path::expanded); };
      if (std::none_of(ran.paths[s].begin(), ran.paths[s].end(), takes)) continue;
      rounding.path = path;
      const auto y = reference::output_rows(d.model, weights, hidden[s], rows, &rounding, ran.selected[s]);
      plain = std::max(plain, reference::relative_error(std::vector<float>(y.begin(), y.end()), exact));
    }
    const double error = reference::relative_error(ran.out[s], exact), bound = 2 * plain + kFloor;
    if (!(error <= bound))
      return "sequence " + std::to_string(s) + ": error " + std::to_string(error) + " above bound " +
             std::to_string(bound);
    if (!d.model.indexer) continue;
    rounding.path = Path::latent;
    const auto scores = reference::index_scores(d.model, exact_weights, hidden[s], rows),
               plain_scores = reference::index_scores(d.model, weights, hidden[s], rows, &rounding);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (ran.selected[s][i].empty()) continue;
      const double part =
          reference::selection_error(ran.selected[s][i], scores[i], plain_scores[i], d.model.indexer->topk);
      if (!(part <= 1)) return at(s, rows[i]) + "its selection is " + std::to_string(part) + " of what is excused";
    }
  }
  return {};
}

// `ran` is of hidden states with odd ones at `odd`, `clean` of the same steps without.
std::string judge_odd(const Draw& d, const std::vector<std::vector<bool>>& odd, const Ran& ran, const Ran& clean) {
  const int64_t h = d.model.hidden;
  for (size_t s = 0; s < odd.size(); ++s) {
    const int64_t first = std::find(odd[s].begin(), odd[s].end(), true) - odd[s].begin();
    for (int64_t row = 0; row < d.lengths[s]; ++row) {
      const std::span got = std::span(ran.out[s]).subspan(row * h, h),
                      was = std::span(clean.out[s]).subspan(row * h, h);
      const auto& selected = ran.selected[s][row];
      const bool meets = odd[s][row] || (selected.empty() ? row >= first
                                                          : std::any_of(selected.begin(), selected.end(),
                                                                        [&](int32_t j) { return odd[s][j]; }));
      const bool nan = std::all_of(got.begin(), got.end(), [](float x) { return std::isnan(x); });
      if (meets && !nan) return at(s, row) + "attends to a token that is not finite, and is not NaN";
      if (!meets && std::any_of(got.begin(), got.end(), [](float x) { return !std::isfinite(x); }))
        return at(s, row) + "is not finite and attends to no such token";
      // A choice is another one when a position before the row has no score.
      if (row < first && !std::equal(got.begin(), got.end(), was.begin(), [](float a, float b) {
            return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
          }))
        return at(s, row) + "other bits because of a token that it does not see";
    }
  }
  return {};
}

}  // namespace

Difference difference(uint64_t seed) {
  Random r(seed);
  const Draw d(r);
  Difference result{d.text(), {}};
  const LayerTensors tensors = random_layer(d.model, 0, r.next(), Dtype::f32);
  const LayerWeights weights = prepare(d.model, tensors, d.weights, kDevice);
  std::vector<std::vector<float>> hidden;
  for (int64_t n : d.lengths) {
    hidden.emplace_back(n * d.model.hidden);
    r.fill_normal(hidden.back());
  }
  const Ran ran = run(d, weights, hidden);
  result.wrong = ran.padding_touched ? "rows past the step's tokens were written" : judge(d, tensors, hidden, ran);
  if (!result.wrong.empty() || !d.odd) return result;
  std::vector<std::vector<bool>> odd;
  for (size_t s = 0; s < hidden.size(); ++s) {
    odd.emplace_back(d.lengths[s]);
    for (int64_t n = r.integer(0, 2); n > 0; --n) {
      const int64_t row = r.integer(0, d.lengths[s] - 1);
      odd[s][row] = true;
      hidden[s][row * d.model.hidden + r.integer(0, d.model.hidden - 1)] = cases::odd_number(r, true);
    }
  }
  result.wrong = judge_odd(d, odd, run(d, weights, hidden), ran);
  return result;
}

}  // namespace mla::test
