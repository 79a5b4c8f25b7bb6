// Times whole calls of attend_expanded with e4m3 operands on Hopper, and the pass that makes them of bf16 ones, answers
// checked against float64 in the same run.
//   attend_expanded_fp8_bench [json=FILE] [only=SUBSTRING]... [replays=N]
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/generic/cast/cast.hpp"
#include "backend/cuda/sm90/attend_expanded/fp8.hpp"
#include "cuda/bench.hpp"
#include "cuda/device.hpp"
#include "cuda/expanded_fp8.hpp"
#include "cuda/kernels.hpp"

namespace mla::cuda {
namespace {

using test::DeviceArray;

constexpr double read_gbps = 4560, peak_tflops = 1979;  // the roof that shares are given of
constexpr double rotation_bytes = 320e6;

struct Shape {
  std::string name;
  std::vector<int32_t> queries, keys;
  int heads;
  int nope = 128, rope = 64, value = 128;
  bool causal = true, accumulate = false, block_scales = false;
  ops::ExpandedSums sums = ops::ExpandedSums::precise;
};

std::vector<int32_t> repeat(int count, int32_t length) {
  return std::vector<int32_t>(static_cast<size_t>(count), length);
}

std::vector<Shape> shapes() {
  const std::vector<int32_t> uneven{100, 3000, 777, 4096, 64, 1500};
  std::vector<Shape> list{
      {.name = "h16 2K causal", .queries = {2048}, .keys = {2048}, .heads = 16},
      {.name = "h16 8K causal", .queries = {8192}, .keys = {8192}, .heads = 16},
      {.name = "h16 32K causal", .queries = {32768}, .keys = {32768}, .heads = 16},
      {.name = "h128 8K causal", .queries = {8192}, .keys = {8192}, .heads = 128},
      {.name = "h128 16K causal", .queries = {16384}, .keys = {16384}, .heads = 128},
      {.name = "h128 16 x 512 causal", .queries = repeat(16, 512), .keys = repeat(16, 512), .heads = 128},
      {.name = "h128 6 mixed causal", .queries = uneven, .keys = uneven, .heads = 128},
      {.name = "h128 4K over 16K context, merged",
       .queries = {4096},
       .keys = {16384},
       .heads = 128,
       .causal = false,
       .accumulate = true},
      {.name = "192/64/256 h64 8K causal", .queries = {8192}, .keys = {8192}, .heads = 64, .nope = 192, .value = 256},
      {.name = "192/64/256 h64 4K over 16K context",
       .queries = {4096},
       .keys = {16384},
       .heads = 64,
       .nope = 192,
       .value = 256,
       .causal = false}};
  for (size_t i = 0, n = list.size(); i < n; ++i) {
    Shape raw = list[i];
    raw.name += ", raw sums";
    raw.sums = ops::ExpandedSums::raw;
    list.push_back(raw);
  }
  list.push_back({.name = "h128 8K causal, scales of 128 rows",
                  .queries = {8192},
                  .keys = {8192},
                  .heads = 128,
                  .block_scales = true});
  return list;
}

std::vector<int32_t> starts(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> s{0};
  for (int32_t n : lengths) s.push_back(s.back() + n);
  return s;
}

/// Of keys: multiples of 16, and where the last item's end.
std::vector<int32_t> key_starts(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> s;
  int32_t end = 0;
  for (int32_t n : lengths) {
    s.push_back((end + 15) / 16 * 16);
    end = s.back() + n;
  }
  s.push_back(end);
  return s;
}

double of_code(uint8_t x) { return to_float(fp8_e4m3{x}); }

struct Sizes {
  int64_t tokens, keys, heads, nope, rope, value, pitch;  // pitch: bytes from one value's keys to the next's
  explicit Sizes(const Shape& s)
      : tokens(starts(s.queries).back()),
        keys(key_starts(s.keys).back()),
        heads(s.heads),
        nope(s.nope),
        rope(s.rope),
        value(s.value),
        pitch((keys + 15) / 16 * 16) {}
  int64_t qk() const { return nope + rope; }
  int64_t kv() const { return nope + value; }
};

/// bf16 as a layer makes them: k_nope and v are slices of one array.
struct Source {
  DeviceArray<uint16_t> q, k_v, k_pe;
};

struct Input {
  DeviceArray<uint8_t> q, k_nope, k_pe, v, out;
  DeviceArray<float> lse;
};

constexpr float q_scale = 4.0f / 256, k_scale = 5.0f / 256, v_scale = 6.0f / 256;

/// What makes a call's operands: q, keys, and values turned.
void quantise(const Queue& queue, const Sizes& z, const Source& from, const Input& to) {
  const auto copy = [&](const uint16_t* x, int64_t row, int64_t head, uint8_t* y, int64_t y_row, int64_t y_head,
                        int64_t y_in, int64_t rows, int64_t heads, int64_t width, float scale) {
    generic::copy_rows(queue,
                       {.x = {Dtype::bf16, x, {rows, heads, width}, {row, head, 1}},
                        .y = {Dtype::fp8_e4m3, y, {rows, heads, width}, {y_row, y_head, y_in}},
                        .rows = rows,
                        .scale = scale},
                       "bench");
  };
  const int64_t h = z.heads;
  copy(from.q.data(), h * z.qk(), z.qk(), to.q.data(), h * z.qk(), z.qk(), 1, z.tokens, h, z.qk(), q_scale);
  copy(from.k_v.data(), h * z.kv(), z.kv(), to.k_nope.data(), h * z.nope, z.nope, 1, z.keys, h, z.nope, k_scale);
  copy(from.k_pe.data(), z.rope, z.rope, to.k_pe.data(), z.rope, z.rope, 1, z.keys, 1, z.rope, k_scale);
  copy(from.k_v.data() + z.nope, h * z.kv(), z.kv(), to.v.data(), 1, z.value * z.pitch, z.pitch, z.keys, h, z.value,
       v_scale);
}

/// Largest error over its bound of sampled rows; NaN counts as infinite. Rows into which the same part was merged
/// `times` times hold its outputs and an lse of log(times) more.
double worst(const Shape& s, const Sizes& z, const Input& in, int times) {
  const std::vector<int32_t> qs = starts(s.queries), ks = key_starts(s.keys);
  const double scale = static_cast<float>(1 / std::sqrt(static_cast<double>(z.qk())));
  std::mt19937 random(9);
  double most = 0;
  for (int sample = 0; sample < 16; ++sample) {
    const auto r = static_cast<size_t>(random() % s.queries.size());
    const int64_t nq = s.queries[r], nk = s.keys[r], first = ks[r];
    const int64_t i = sample == 0 ? nq - 1 : static_cast<int64_t>(random() % static_cast<uint32_t>(nq)),
                  head = random() % static_cast<uint32_t>(z.heads);
    const int64_t seen = s.causal ? i + 1 + nk - nq : nk, row = (qs[r] + i) * z.heads + head;
    std::vector<uint8_t> k(static_cast<size_t>(seen * z.nope)), v(static_cast<size_t>(seen * z.value));
    const auto fetch = [](std::vector<uint8_t>& to, const uint8_t* from, int64_t pitch, int64_t width, int64_t rows) {
      check(cudaMemcpy2D(to.data(), static_cast<size_t>(width), from, static_cast<size_t>(pitch),
                         static_cast<size_t>(width), static_cast<size_t>(rows), cudaMemcpyDeviceToHost),
            "bench", "copy");
    };
    fetch(k, in.k_nope.data() + (first * z.heads + head) * z.nope, z.heads * z.nope, z.nope, seen);
    fetch(v, in.v.data() + head * z.value * z.pitch + first, z.pitch, seen, z.value);
    const std::vector<uint8_t> pe = in.k_pe.download(static_cast<size_t>(first * z.rope),
                                                     static_cast<size_t>(seen * z.rope)),
                               q = in.q.download(static_cast<size_t>(row * z.qk()), static_cast<size_t>(z.qk()));
    std::vector<double> scores(static_cast<size_t>(seen));
    for (int64_t j = 0; j < seen; ++j) {
      double dot = 0;
      for (int64_t e = 0; e < z.nope; ++e)
        dot += of_code(q[static_cast<size_t>(e)]) * of_code(k[static_cast<size_t>(j * z.nope + e)]);
      for (int64_t e = 0; e < z.rope; ++e)
        dot += of_code(q[static_cast<size_t>(z.nope + e)]) * of_code(pe[static_cast<size_t>(j * z.rope + e)]);
      scores[static_cast<size_t>(j)] = dot * scale * q_scale * k_scale;
    }
    const int64_t chain = s.sums == ops::ExpandedSums::raw ? seen : std::min<int64_t>(seen, 512);
    const test::Fp8Row want(
        scores, s.value,
        [&](int64_t j, int64_t e) { return of_code(v[static_cast<size_t>(e * seen + j)]) * double{v_scale}; },
        static_cast<double>(chain) / 32, s.accumulate ? 0x1p-24 : 0x1p-8);
    const int64_t size = s.accumulate ? 4 : 2;
    const std::vector<uint8_t> got =
        in.out.download(static_cast<size_t>(row * z.value * size), static_cast<size_t>(z.value * size));
    const auto add = [&](double x, double y, double bound) {
      const double error = std::abs(x - y) / bound;
      most = std::isfinite(error) ? std::max(most, error) : 1e9;
    };
    for (int64_t e = 0; e < z.value; ++e) {
      float x;
      if (s.accumulate) std::memcpy(&x, &got[static_cast<size_t>(4 * e)], 4);
      else {
        uint16_t bits;
        std::memcpy(&bits, &got[static_cast<size_t>(2 * e)], 2);
        x = to_float(bf16{bits});
      }
      add(x, want.out[static_cast<size_t>(e)], want.out_bound[static_cast<size_t>(e)]);
    }
    add(in.lse.download(static_cast<size_t>(row), 1)[0], want.lse + std::log(times), want.lse_bound + 1e-7 * times);
  }
  return most;
}

struct Result {
  bench::Times times;
  double tflops, gbps, floor_us, error;
  int tile;  // rows
};

struct Problem {
  const Shape& s;
  Sizes z;
  std::vector<Source> sources;
  std::vector<Input> inputs;
  double flops = 0, bytes = 0, pass_bytes = 0;

  Problem(const Shape& shape, const Queue& queue) : s(shape), z(shape) {
    double pairs = 0;
    for (size_t r = 0; r < s.queries.size(); ++r) {
      const double nq = s.queries[r], nk = s.keys[r];
      pairs += s.causal ? nq * (nk - nq) + nq * (nq + 1) / 2 : nq * nk;
    }
    const int64_t h = z.heads, out_size = s.accumulate ? 4 : 2;
    flops = 2 * pairs * static_cast<double>(h * (z.qk() + z.value));
    const double codes = static_cast<double>(z.tokens * h * z.qk() + z.keys * (h * z.kv() + z.rope));
    bytes = codes + static_cast<double>(z.tokens * h * (z.value * out_size + 4)) * (s.accumulate ? 2 : 1);
    pass_bytes = 3 * codes;
    const int sets = std::max(1, static_cast<int>(std::ceil(rotation_bytes / bytes)));
    cudaStream_t stream = queue.stream();
    const auto array = [&](int64_t count, uint32_t seed) {
      DeviceArray<uint16_t> a(static_cast<size_t>(count));
      bench::fill_normal(stream, Dtype::bf16, a.data(), a.size(), seed);
      return a;
    };
    for (int i = 0; i < sets; ++i) {
      const auto seed = static_cast<uint32_t>(i * 8);
      sources.push_back(
          {array(z.tokens * h * z.qk(), seed), array(z.keys * h * z.kv(), seed + 1), array(z.keys * z.rope, seed + 2)});
      const auto codes_of = [](int64_t n) { return DeviceArray<uint8_t>(static_cast<size_t>(n)); };
      inputs.push_back({codes_of(z.tokens * h * z.qk()), codes_of(z.keys * h * z.nope), codes_of(z.keys * z.rope),
                        codes_of(h * z.value * z.pitch), codes_of(z.tokens * h * z.value * out_size),
                        DeviceArray<float>(static_cast<size_t>(z.tokens * h))});
      quantise(queue, z, sources.back(), inputs.back());
      // A NaN lse beside numbers is an empty part's, beside NaN a NaN row's.
      if (s.accumulate)
        check(cudaMemsetAsync(inputs.back().out.data(), 0, inputs.back().out.size(), stream), "bench", "poison");
    }
    check(cudaStreamSynchronize(stream), "bench", "fill");
  }
};

Result measure(const Problem& problem, cudaStream_t stream, int replays) {
  const Shape& s = problem.s;
  const Sizes& z = problem.z;
  const int64_t h = z.heads;
  std::vector<ExpandedItem> list;
  std::vector<ops::ScaleRows> rows;
  ops::ScaleRows groups;
  for (size_t r = 0; r < s.queries.size(); ++r) {
    list.push_back({starts(s.queries)[r], s.queries[r], key_starts(s.keys)[r], s.keys[r],
                    s.causal ? s.keys[r] - s.queries[r] : ExpandedItem::everything()});
    rows.push_back(groups);
    groups.q += (s.queries[r] + 127) / 128;
    groups.k += (s.keys[r] + 127) / 128;
  }
  const DeviceArray<ExpandedItem> items(list);
  const DeviceArray<ops::ScaleRows> scale_rows(rows);
  const int64_t blocks = s.block_scales ? std::max(groups.q, groups.k) * h : 1;
  const auto filled = [&](float x) { return DeviceArray<float>(std::vector<float>(static_cast<size_t>(blocks), x)); };
  const DeviceArray<float> q_scales = filled(q_scale), k_scales = filled(k_scale), v_scales = filled(v_scale);
  const DeviceArray<int32_t> workspace(std::vector<int32_t>(4, 0));
  sm90::ExpandedTile tile{};
  const auto call = [&](const Input& in) {
    sm90::AttendExpandedFp8Args a;
    a.q = {Dtype::fp8_e4m3, in.q.data(), {z.tokens, h, z.qk()}};
    a.k_nope = {Dtype::fp8_e4m3, in.k_nope.data(), {z.keys, h, z.nope}};
    a.k_pe = {Dtype::fp8_e4m3, in.k_pe.data(), {z.keys, z.rope}};
    a.v = {Dtype::fp8_e4m3, in.v.data(), {z.keys, h, z.value}, {1, z.value * z.pitch, z.pitch}};
    const auto scales = [&](const DeviceArray<float>& x) -> View<const float, Group, Head> {
      return {x.data(),
              {static_cast<int64_t>(x.size()) / (s.block_scales ? h : 1), h},
              {s.block_scales ? h : 0, s.block_scales}};
    };
    a.q_scale = scales(q_scales);
    a.k_scale = scales(k_scales);
    a.v_scale = scales(v_scales);
    if (s.block_scales) a.scale_rows = scale_rows.data();
    a.sums = s.sums;
    a.items = items.data();
    a.item_count = static_cast<int64_t>(items.size());
    a.most_queries = *std::ranges::max_element(s.queries);
    a.scale = 1 / std::sqrt(static_cast<float>(z.qk()));
    a.out = {s.accumulate ? Dtype::f32 : Dtype::bf16, in.out.data(), {z.tokens, h, z.value}};
    a.accumulate = s.accumulate;
    a.lse = {in.lse.data(), {z.tokens, h}};
    a.workspace = workspace.data();
    tile = sm90::attend_expanded_tile(a);
    sm90::attend_expanded(stream, a);
  };
  const int sets = static_cast<int>(problem.inputs.size()), calls = bench::calls_for(sets);
  const bench::Times times =
      bench::time_calls(stream, calls, replays, [&](int i) { call(problem.inputs[static_cast<size_t>(i % sets)]); });
  // How often set i was merged.
  const auto merges = [&](int i) { return s.accumulate ? times.launches * ((calls - i + sets - 1) / sets) : 1; };
  return {
      times,
      problem.flops / times.median * 1e-6,
      problem.bytes / times.median * 1e-3,
      std::max(problem.bytes / read_gbps * 1e-3, problem.flops / peak_tflops * 1e-6),
      std::max(worst(s, z, problem.inputs.front(), merges(0)), worst(s, z, problem.inputs.back(), merges(sets - 1))),
      tile == sm90::ExpandedTile::rows_128 ? 128 : 256};
}

/// The pass that makes a call's operands. Codes are checked where they were made of few numbers, by the conversions of
/// mla/dtype.hpp.
void measure_pass(bench::Report& report, const Problem& p, const Queue& queue) {
  const int sets = static_cast<int>(p.inputs.size());
  const bench::Times times = bench::time_calls(queue.stream(), bench::calls_for(sets), report.replays(), [&](int i) {
    const auto set = static_cast<size_t>(i % sets);
    quantise(queue, p.z, p.sources[set], p.inputs[set]);
  });
  const Sizes& z = p.z;
  const int64_t token = z.keys - 1, head = z.heads - 1;
  const auto row = p.sources.front().k_v.download(static_cast<size_t>((token * z.heads + head) * z.kv()),
                                                  static_cast<size_t>(z.kv()));
  bool right = true;
  const std::vector<uint8_t> k = p.inputs.front().k_nope.download(
      static_cast<size_t>((token * z.heads + head) * z.nope), static_cast<size_t>(z.nope));
  for (int64_t d = 0; d < z.kv(); ++d) {
    const float x = to_float(bf16{row[static_cast<size_t>(d)]});
    const uint8_t got = d < z.nope ? k[static_cast<size_t>(d)]
                                   : p.inputs.front().v.download(
                                         static_cast<size_t>((head * z.value + d - z.nope) * z.pitch + token), 1)[0];
    right = right && got == to_fp8_e4m3(x / (d < z.nope ? k_scale : v_scale)).bits;
  }
  report.add({{"op", "quantise"},
              {"shape", p.s.name + ", q, k and v to e4m3"},
              {"heads", p.s.heads},
              {"dims", {p.s.nope, p.s.rope, p.s.value}},
              {"tokens", z.tokens},
              {"keys", z.keys},
              {"gb_per_s", bench::rounded(p.pass_bytes / times.median * 1e-3, 0)},
              {"floor_us", bench::rounded(p.pass_bytes / read_gbps * 1e-3, 2)},
              {"of_floor", bench::rounded(p.pass_bytes / read_gbps * 1e-3 / times.median, 3)}},
             times, right);
}

void measure_all(bench::Report& report) {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "bench", "stream");
  const Queue queue(0, stream);
  for (const Shape& s : shapes()) {
    if (!report.wants(s.name)) continue;
    const Problem problem(s, queue);
    const Result r = measure(problem, stream, report.replays());
    report.add({{"op", "attend_expanded_fp8"},
                {"shape", s.name},
                {"heads", s.heads},
                {"dims", {s.nope, s.rope, s.value}},
                {"causal", s.causal},
                {"merged", s.accumulate},
                {"raw", s.sums == ops::ExpandedSums::raw},
                {"tile", r.tile},
                {"items", s.queries.size()},
                {"tokens", problem.z.tokens},
                {"keys", problem.z.keys},
                {"tflop_per_s", bench::rounded(r.tflops, 1)},
                {"gb_per_s", bench::rounded(r.gbps, 0)},
                {"floor_us", bench::rounded(r.floor_us, 2)},
                {"of_floor", bench::rounded(r.floor_us / r.times.median, 3)},
                {"error_of_bound", bench::rounded(r.error, 3)}},
               r.times, r.error <= 1.0);
    if (s.sums == ops::ExpandedSums::precise && !s.accumulate && !s.block_scales) measure_pass(report, problem, queue);
  }
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace mla::cuda

int main(int argc, char** argv) {
  using namespace mla::cuda;
  return bench::run(argc, argv,
                    {.columns = {"tile", "tflop_per_s", "gb_per_s", "of_floor", "error_of_bound"},
                     .head = {{"roof", {{"gb_per_s", read_gbps}, {"tflop_per_s", peak_tflops}}}}},
                    measure_all);
}
