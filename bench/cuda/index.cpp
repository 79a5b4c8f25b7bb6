// Times whole calls of the sparse indexer's ops on a GPU: scores of a step's tokens, and the selection from them.
// Answers are checked in the same run: sampled scores against float64, selections exactly. The floor's peak is a cool
// card's.
//   index_bench [json=FILE] [only=SUBSTRING]... [replays=N]
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "backend/run.hpp"
#include "cuda/bench.hpp"
#include "cuda/device.hpp"
#include "cuda/kernels.hpp"
#include "cuda/staged.hpp"
#include "mla/device.hpp"
#include "mla/error.hpp"
#include "ops/index_score/cut_product.hpp"

namespace mla::cuda {
namespace {

using namespace test;

constexpr int kHeads = 64, kDim = 128, kPage = 64, kTopk = 2048;
constexpr int64_t kPageBytes = kPage * (kDim + 4);

struct Shape {
  const char* name;
  int batch, tokens, context;        // new tokens a request, positions that the last one sees
  bool select = false, fp8 = false;  // fp8: IndexArithmetic::fp8
  bool equal = false;                // all scores
};
const Shape shapes[] = {
    {"score b64 s1 128K", 64, 1, 131072},
    {"score b64 s2 128K", 64, 2, 131072},
    {"score b64 s4 32K", 64, 4, 32768},
    {"score b1 s1 64K", 1, 1, 65536},
    {"score b8 s1 32K", 8, 1, 32768},
    {"score b16 s1 5K", 16, 1, 5120},
    {"score b1 s64 64K", 1, 64, 65536},
    {"score b1 s1024 16K", 1, 1024, 16384},
    {"score b1 s512 4K", 1, 512, 4096},
    {"score b1 s512 8K", 1, 512, 8192},
    {"score b64 s1 128K fp8", 64, 1, 131072, false, true},
    {"score b64 s2 128K fp8", 64, 2, 131072, false, true},
    {"score b64 s4 32K fp8", 64, 4, 32768, false, true},
    {"score b1 s1 64K fp8", 1, 1, 65536, false, true},
    {"score b8 s1 32K fp8", 8, 1, 32768, false, true},
    {"score b16 s1 5K fp8", 16, 1, 5120, false, true},
    {"score b1 s64 64K fp8", 1, 64, 65536, false, true},
    {"score b1 s1024 16K fp8", 1, 1024, 16384, false, true},
    {"score b1 s512 4K fp8", 1, 512, 4096, false, true},
    {"select b64 s1 128K", 64, 1, 131072, true},
    {"select b1 s1 64K", 1, 1, 65536, true},
    {"select b8 s1 32K", 8, 1, 32768, true},
    {"select b1 s1 5K", 1, 1, 5120, true},
    {"select b16 s1 5K", 16, 1, 5120, true},
    {"select b128 s1 5K", 128, 1, 5120, true},
    {"select b1 s1 16K", 1, 1, 16384, true},
    {"select b64 s1 16K", 64, 1, 16384, true},
    {"select b1 s1024 16K", 1, 1024, 16384, true},
    {"select b1 s512 4K", 1, 512, 4096, true},
    {"select b1 s512 8K", 1, 512, 8192, true},
    // What a sample tells nothing of.
    {"select b64 s1 128K, equal scores", 64, 1, 131072, true, false, true},
    {"select b1 s1024 16K, equal scores", 1, 1024, 16384, true, false, true},
};

struct Result {
  bench::Times times;
  double floor, bytes, flops, error, bound;
};

std::vector<IndexItem> items_of(const Shape& s) {
  std::vector<IndexItem> items;
  for (int r = 0; r < s.batch; ++r)
    items.push_back({.request = r,
                     .q_begin = r * s.tokens,
                     .q_count = s.tokens,
                     .kv_end = s.context,
                     .visible = s.context - s.tokens,
                     .row = r * s.tokens});
  return items;
}

Result measure_score(const Shape& s, int replays, Stream& stream, const DeviceArray<uint8_t>& cache, int64_t pages) {
  std::mt19937 random(7);
  const int tokens = s.batch * s.tokens;
  const int64_t columns = s.context / kPage, needed = s.batch * columns;
  const double seen = static_cast<double>(tokens) * s.context - 0.5 * tokens * (s.tokens - 1);
  Result result{.bytes = static_cast<double>(needed) * kPageBytes + tokens * kHeads * (kDim + 4.0) + 4 * seen,
                .flops = 2 * seen * kHeads * kDim};
  result.floor = std::max(result.bytes / 4560e9, result.flops / (s.fp8 ? 2 : 1) / 790e12) * 1e6;
  const int sets = std::clamp(static_cast<int>(std::ceil(320e6 / result.bytes)), 1, static_cast<int>(pages / needed)),
            calls = bench::calls_for(sets);
  std::vector<int32_t> order(pages);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  order.resize(needed * sets);
  const bench::Staged<int32_t> table(order);
  const bench::Staged<IndexItem> items(items_of(s));
  const int64_t q_bytes = int64_t{tokens} * kHeads * kDim;
  DeviceArray<uint8_t> q(q_bytes);
  DeviceArray<float> weights(int64_t{tokens} * kHeads), scores(int64_t{tokens} * s.context);
  bench::fill_normal(nullptr, Dtype::fp8_e4m3, q.data(), q.size(), 1, 100.0f);
  bench::fill_normal(nullptr, Dtype::f32, weights.data(), weights.size(), 2, 0.01f);
  check(cudaDeviceSynchronize(), "bench", "fill");
  DeviceArray<std::byte> scratch(64);
  IndexCacheView view{{.format = IndexCacheFormat::fp8, .dim = kDim, .page_size = kPage},
                      reinterpret_cast<std::byte*>(cache.data()),
                      pages,
                      kPageBytes};
  const auto call = [&](int i) {
    ops::IndexScoreArgs a{.q = View<const fp8_e4m3, Token, IndexHead, IndexDim>(reinterpret_cast<fp8_e4m3*>(q.data()),
                                                                                {tokens, kHeads, kDim}),
                          .weights = {weights.data(), {tokens, kHeads}},
                          .scale = 1.0f,
                          .cache = view,
                          .block_table = {{order.data() + needed * (i % sets), {s.batch, columns}},
                                          table.list().device() + needed * (i % sets)},
                          .items = items.list(),
                          .scores = {scores.data(), {tokens, s.context}},
                          .arithmetic = s.fp8 ? IndexArithmetic::fp8 : IndexArithmetic::exact,
                          .scratch = {scratch.data(), 64}};
    ops::run(stream, a);
  };
  call(0);
  stream.synchronize();
  double worst = 0, plain = 0, square = 0;
  const auto codes = q.download(0, q_bytes);
  const auto w = weights.download(0, weights.size());
  for (int i = 0; i < 2000; ++i) {
    const int token = static_cast<int>(random() % tokens), r = token / s.tokens;
    const int at =
        i % 2 ? static_cast<int>(random() % (s.context - s.tokens)) : s.context - s.tokens + token % s.tokens;
    const auto page = cache.download(order[r * columns + at / kPage] * kPageBytes, kPageBytes);
    float scale, sum32 = 0;
    std::memcpy(&scale, page.data() + kPage * kDim + at % kPage * 4, 4);
    double sum = 0;
    for (int h = 0; h < kHeads; ++h) {
      double dot = 0;
      float dot32 = 0, x32[kDim], y32[kDim];
      for (int d = 0; d < kDim; ++d) {
        const float x = to_float(fp8_e4m3{codes[(int64_t{token} * kHeads + h) * kDim + d]}),
                    y = to_float(fp8_e4m3{page[at % kPage * kDim + d]});
        dot += static_cast<double>(x) * y, dot32 += x * y;
        x32[d] = x, y32[d] = y;
      }
      if (s.fp8) dot32 = static_cast<float>(ops::cut_product(x32, y32, kDim));
      sum += std::max(dot, 0.0) * w[int64_t{token} * kHeads + h],
          sum32 += std::max(dot32, 0.0f) * w[int64_t{token} * kHeads + h];
    }
    sum *= scale, sum32 *= scale;
    const float got = scores.download(int64_t{token} * s.context + at, 1)[0];
    worst = std::isnan(got) ? 1e30 : std::max(worst, std::abs(got - sum));
    plain = std::max(plain, std::abs(sum32 - sum));
    square += sum * sum;
    if (i == 150 && s.batch == 1) break;
  }
  const double rms = std::sqrt(square / 2000);
  result.error = worst / rms, result.bound = 4 * plain / rms;
  result.times = bench::time_calls(static_cast<cudaStream_t>(stream.native()), calls, replays, call);
  return result;
}

Result measure_select(const Shape& s, int replays, Stream& stream, const DeviceArray<float>& memory) {
  const int rows = s.batch * s.tokens;
  const int64_t elements = int64_t{rows} * s.context;
  Result result{.bytes = 4.0 * elements + 4.0 * rows * kTopk, .flops = 0};
  result.floor = result.bytes / 4560e9 * 1e6;
  // A selection follows its scoring: the scores of its rows lie in L2 as far as they fit. Sets rotate all the same.
  const int sets = std::clamp(static_cast<int>(std::ceil(320e6 / result.bytes)), 1,
                              static_cast<int>(static_cast<int64_t>(memory.size()) / elements)),
            calls = bench::calls_for(sets);
  const bench::Staged<IndexItem> items(items_of(s));
  DeviceArray<std::byte> state(rows * topk_state_bytes(kTopk)), scratch(size_t{64} << 20);
  DeviceArray<int32_t> indices(int64_t{rows} * kTopk);
  const auto call = [&](int i) {
    const View<const float, Token, Key> scores(memory.data() + elements * (i % sets), {rows, s.context});
    const ops::TopkState topk{state.data(), rows, kTopk};
    ops::run(stream, ops::SelectTopkArgs{.scores = scores,
                                         .items = items.list(),
                                         .positions = {},
                                         .begin = true,
                                         .state = topk,
                                         .scratch = {scratch.data(), scratch.size()},
                                         .indices = {indices.data(), {rows, kTopk}}});
  };
  call(sets - 1);
  stream.synchronize();
  double wrong = 0;
  for (int i = 0; i < 5; ++i) {
    const int row = i * (rows - 1) / 4;
    const int64_t n = s.context - s.tokens + row % s.tokens + 1;
    const auto scores = memory.download(elements * (sets - 1) + int64_t{row} * s.context, n);
    std::vector<int32_t> best(n);
    std::iota(best.begin(), best.end(), 0);
    std::nth_element(best.begin(), best.begin() + kTopk, best.end(),
                     [&](int32_t x, int32_t y) { return scores[x] != scores[y] ? scores[x] > scores[y] : x < y; });
    best.resize(kTopk);
    std::sort(best.begin(), best.end());
    wrong += best != indices.download(int64_t{row} * kTopk, kTopk);
  }
  result.error = wrong, result.bound = 0;
  result.times = bench::time_calls(static_cast<cudaStream_t>(stream.native()), calls, replays, call);
  return result;
}

void measure_all(bench::Report& report) {
  Stream stream(Device{DeviceKind::cuda, 0});
  const int64_t pages = (int64_t{3} << 30) / kPageBytes;
  DeviceArray<uint8_t> cache(pages * kPageBytes);
  DeviceArray<float> scores(size_t{160} << 20);
  bench::fill_index_pages(nullptr, cache.data(), pages);
  bench::fill_normal(nullptr, Dtype::f32, scores.data(), scores.size(), 3);
  check(cudaDeviceSynchronize(), "bench", "fill");
  for (const Shape& s : shapes) {
    if (!report.wants(s.name)) continue;
    if (s.equal) check(cudaMemset(scores.data(), 0, scores.size() * sizeof(float)), "bench", "equal scores");
    const Result r = s.select ? measure_select(s, report.replays(), stream, scores)
                              : measure_score(s, report.replays(), stream, cache, pages);
    report.add({{"op", s.select ? "select_topk" : "index_score"},
                {"shape", s.name},
                {"batch", s.batch},
                {"query_tokens", s.tokens},
                {"context", s.context},
                {"floor_us", bench::rounded(r.floor, 2)},
                {"of_floor", bench::rounded(r.floor / r.times.median, 3)},
                {"gb_per_s", bench::rounded(r.bytes / r.times.median * 1e-3, 0)},
                {"tflop_per_s", bench::rounded(r.flops / r.times.median * 1e-6, 1)},
                {"error", r.error},
                {"bound", r.bound}},
               r.times, r.error <= r.bound);
  }
}

}  // namespace
}  // namespace mla::cuda

int main(int argc, char** argv) {
  return mla::cuda::bench::run(argc, argv, {.columns = {"floor_us", "of_floor", "gb_per_s", "tflop_per_s"}},
                               mla::cuda::measure_all);
}
