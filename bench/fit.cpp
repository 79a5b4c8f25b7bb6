#include "bench/fit.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>

#include "bench/batch.hpp"
#include "bench/harness.hpp"
#include "cases/compare.hpp"
#include "mla/layer.hpp"
#include "mla/staged_step.hpp"

namespace mla::bench {
namespace {

constexpr int64_t kPageSize = 64;
constexpr uint64_t kSeed = 1;

// Seconds of calls on a stream. On the CPU one at a time, as they come. On a GPU calls are captured and replayed, each
// behind a copy that leaves nothing of theirs in L2: a model's next layer has a cache and weights of its own.
class Timer {
 public:
  explicit Timer(Stream& stream) : stream_(stream) {
    if (!on_gpu()) return;
    away_ = Buffer(2 * kAway, stream.device());
    empty_ = Graph(stream_, [&] { flush(); });
    of(empty_);
    copying_ = of(empty_);
  }
  bool on_gpu() const { return stream_.device().kind == DeviceKind::cuda; }
  Graph capture(const std::function<void()>& call) {
    call();  // what is only done once
    return Graph(stream_, [&] {
      flush();
      call();
    });
  }
  double seconds(const Graph& captured) { return std::max(of(captured) - copying_, 1e-9); }
  static double seconds(const std::function<void()>& call) {
    const auto start = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  static constexpr size_t kAway = size_t{64} << 20;  // to and from: more than an L2
  static constexpr int kReplays = 10;                // in a row, so that their launches are not seen

  void flush() { copy(stream_, away_.data(), away_.data() + kAway, kAway); }
  double of(const Graph& graph) {
    stream_.synchronize();
    return seconds([&] {
             for (int i = 0; i < kReplays; ++i) graph.launch(stream_);
             stream_.synchronize();
           }) /
           kReplays;
  }

  Stream& stream_;
  Buffer away_;
  Graph empty_;
  double copying_ = 0;
};

// One request's attention form on one path. What its numbers are does not change its time, but NaN and zeros might.
class PathCall {
 public:
  PathCall(Stream& stream, Timer& timer, const ModelConfig& model, const LayerWeights& weights,
           const RotaryTable& rotary, Dtype compute, const PathShape& shape, Path path)
      : stream_(stream),
        timer_(timer),
        model_(model),
        weights_(weights),
        rotary_(rotary),
        batch_(std::array{Lengths{shape.query_len, shape.context}}, kPageSize),
        cache_(cache_spec(model, CacheFormat::bf16, kPageSize), batch_.pages(), stream.device()),
        staged_(stream) {
    if (!timer.on_gpu()) cache_.place(stream.pool());
    const auto some = cases::random_values(1 << 16, kSeed);
    const auto numbers = [&](Dtype dtype, size_t n) {
      Buffer to(n * size_of(dtype));
      for (size_t i = 0; i < n; ++i)
        if (dtype == Dtype::bf16) to.as<bf16>()[i] = to_bf16(some[i % some.size()]);
        else to.as<float>()[i] = some[i % some.size()];
      return to;
    };
    const CacheView cache = cache_.view();
    const size_t bytes = static_cast<size_t>(cache_.pages()) * cache.page_stride;
    const Buffer rows = numbers(Dtype::bf16, bytes / sizeof(bf16));
    copy(stream_, cache.page(0), rows.data(), bytes);
    stream_.synchronize();
    PlanOptions options;
    options.form = LayerForm::attention;
    options.path = path == Path::latent ? PathPolicy::latent : PathPolicy::expanded;
    options.compute = compute;
    plan_ = mla::plan(model, cache_.spec(), cache_.pages(), batch_.view(), device_info(stream, model), options);
    workspace_ = Buffer(plan_.workspace_bytes, stream.device());
    const int64_t t = shape.query_len, widths[] = {model.heads * (model.nope + model.rope), model.latent, model.rope};
    for (int i = 0; i < 3; ++i) {
      const Buffer host = numbers(plan_.activations(), static_cast<size_t>(t * widths[i]));
      rows_[i] = Buffer::copy_of(host.data(), host.size(), stream.device());
    }
    out_ = Buffer(static_cast<size_t>(t * model.heads * model.value) * sizeof(float), stream.device());
    staged_.stage(plan_, batch_.view());
    if (timer_.on_gpu()) captured_ = timer_.capture([this] { call(); });
  }

  double seconds() {
    return timer_.on_gpu() ? timer_.seconds(captured_) : Timer::seconds([this] { call(); });
  }

 private:
  void call() {
    const ModelConfig& m = model_;
    const int64_t t = plan_.tokens;
    const Dtype dtype = plan_.activations();
    const Batch batch = batch_.view();
    attend(stream_,
           {.plan = plan_,
            .batch = batch,
            .weights = weights_,
            .rotary = rotary_,
            .cache = cache_.view(),
            .workspace = {workspace_.data(), workspace_.size()},
            .staged = &staged_},
           AnyView<Token, Head, QueryKey>(dtype, rows_[0].data(), {t, m.heads, m.nope + m.rope}),
           AnyView<Token, Latent>(dtype, rows_[1].data(), {t, m.latent}),
           AnyView<Token, Rope>(dtype, rows_[2].data(), {t, m.rope}),
           View<float, Token, Head, Value>(out_.as<float>(), {t, m.heads, m.value}));
  }

  Stream& stream_;
  Timer& timer_;
  const ModelConfig& model_;
  const LayerWeights& weights_;
  const RotaryTable& rotary_;
  OwnedBatch batch_;
  Cache cache_;
  Plan plan_;
  Buffer workspace_, rows_[3], out_;
  StagedStep staged_;
  Graph captured_;
};

double path_seconds(const PathShape& s, const CostModel& rates, Path path) {
  const ModelConfig m = path_model(s.heads);
  return path_cost(m, cache_spec(m, CacheFormat::bf16, kPageSize), rates, path, s.query_len, s.context);
}

// Seconds of a path are the sum of these over 1, 1, 1 and 1 of: products, latent and expanded attention, bytes.
constexpr int kTerms = 4;
std::array<double, kTerms> terms(const PathShape& s, Path path, const CostModel& in_use) {
  constexpr double kFast = 1e300;
  std::array<double, kTerms> t;
  for (int i = 0; i < kTerms; ++i) {
    const auto rate = [&](int which) { return i == which ? 1.0 : kFast; };
    CostModel one = in_use;
    one.latent_flops = rate(1), one.expanded_flops = rate(2), one.projection_flops = rate(0);
    one.bytes = i == 3 ? 1.0 : 0;
    t[static_cast<size_t>(i)] = path_seconds(s, one, path);
  }
  return t;
}

// The least squares solution of the terms in `used`, by the normal equations.
using Vector = std::array<double, kTerms>;
Vector solve(std::array<Vector, kTerms> a, Vector b, unsigned used) {
  for (size_t i = 0; i < kTerms; ++i)
    if (!(used >> i & 1)) {
      for (size_t j = 0; j < kTerms; ++j) a[i][j] = a[j][i] = 0;
      a[i][i] = 1;
      b[i] = 0;
    }
  for (size_t i = 0; i < kTerms; ++i) {
    for (size_t r = i + 1; r < kTerms; ++r)
      if (std::abs(a[r][i]) > std::abs(a[i][i])) std::swap(a[r], a[i]), std::swap(b[r], b[i]);
    for (size_t r = 0; r < kTerms; ++r) {
      if (r == i || a[i][i] == 0) continue;
      const double f = a[r][i] / a[i][i];
      for (size_t c = i; c < kTerms; ++c) a[r][c] -= f * a[i][c];
      b[r] -= f * b[i];
    }
  }
  for (size_t i = 0; i < kTerms; ++i) b[i] = a[i][i] == 0 ? 0 : b[i] / a[i][i];
  return b;
}

}  // namespace

ModelConfig path_model(int64_t heads) {
  ModelConfig m = preset("deepseek-v2-lite");
  m.heads = heads;
  m.hidden = 64;
  return m;
}

std::vector<PathShape> path_grid() {
  std::vector<PathShape> grid;
  for (int64_t heads : {16, 128})
    for (int64_t context : {0, 256, 1024, 2048, 4096, 8192, 16384, 65536})
      for (int64_t query : {1, 8, 32, 64, 128, 192, 256, 512})
        if (heads * query * (context + query) <= int64_t{128} * 256 * 20000) grid.push_back({heads, query, context});
  return grid;
}

std::vector<PathTimes> measure_paths(Stream& stream, Dtype compute, std::span<const PathShape> shapes,
                                     const std::function<bool(size_t)>& done) {
  Timer timer(stream);
  std::vector<PathTimes> all;
  int64_t heads = 0;
  ModelConfig model;
  LayerWeights weights;
  RotaryTable rotary;
  for (const PathShape& s : shapes) {
    if (s.heads != heads) {
      heads = s.heads;
      model = path_model(heads);
      weights = prepare(model, random_layer(model, 0, kSeed, Dtype::bf16), compute, stream.device());
      if (!timer.on_gpu()) weights.place(stream.pool());
      rotary = RotaryTable(model.rotary, model.rope, 1 << 17, stream.device());
    }
    PathCall latent(stream, timer, model, weights, rotary, compute, s, Path::latent),
        expanded(stream, timer, model, weights, rotary, compute, s, Path::expanded);
    latent.seconds();
    const double guess = latent.seconds() + expanded.seconds();
    // In turn, so that what disturbs the one disturbs the other.
    std::vector<double> a, b;
    const int most = timer.on_gpu() ? 5 : 40;  // of samples, on a GPU of several calls each
    for (int i = 0, calls = std::clamp(static_cast<int>(0.3 / guess), 3, most); i < calls; ++i) {
      a.push_back(latent.seconds());
      b.push_back(expanded.seconds());
    }
    all.push_back({s, quantile(a, 0.5), quantile(b, 0.5)});
    if (!done(all.size())) break;
  }
  return all;
}

CostModel fit_rates(std::span<const PathTimes> times, int threads, const CostModel& in_use) {
  std::array<Vector, kTerms> a{};
  Vector b{};
  std::vector<Vector> rows;  // of which the rates are to make 1 each
  for (const PathTimes& t : times)
    for (Path path : {Path::latent, Path::expanded}) {
      const double seconds = path == Path::latent ? t.latent : t.expanded;
      Vector x = terms(t.shape, path, in_use);
      for (double& v : x) v /= seconds;  // relative error
      rows.push_back(x);
      for (size_t i = 0; i < kTerms; ++i) {
        b[i] += x[i];
        for (size_t j = 0; j < kTerms; ++j) a[i][j] += x[i] * x[j];
      }
    }
  Vector best{};
  double least = std::numeric_limits<double>::infinity();
  for (unsigned used = 1; used < 1u << kTerms; ++used) {
    const Vector x = solve(a, b, used);
    if (std::any_of(x.begin(), x.end(), [](double v) { return v < 0; })) continue;
    double error = 0;
    for (const Vector& row : rows) {
      const double off = std::inner_product(row.begin(), row.end(), x.begin(), -1.0);
      error += off * off;
    }
    if (error < least) {
      least = error;
      best = x;
    }
  }
  const auto rate = [&](size_t i, double none) { return best[i] > 0 ? 1 / best[i] / threads : none; };
  constexpr double kFast = 1e18;
  CostModel fitted = in_use;
  fitted.latent_flops = rate(1, kFast), fitted.expanded_flops = rate(2, kFast);
  fitted.projection_flops = rate(0, kFast), fitted.bytes = rate(3, 0);
  return fitted;
}

double cost_of_choice(const PathTimes& t, const CostModel& rates) {
  const bool latent = t.shape.query_len == 1 ||  // whatever the rates
                      path_seconds(t.shape, rates, Path::latent) <= path_seconds(t.shape, rates, Path::expanded);
  return (latent ? t.latent : t.expanded) / std::min(t.latent, t.expanded) - 1;
}

}  // namespace mla::bench
