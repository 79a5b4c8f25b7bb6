// Times whole calls of attend_expanded on Hopper, answers checked against float64 in the same run.
//   attend_expanded_bench [json=FILE] [only=SUBSTRING]... [replays=N]
// With MLA_EXPANDED_TILE=128, 192 or 256 in the environment: that tile for every shape that has it.
#include "backend/cuda/sm90/attend_expanded/attend_expanded.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <utility>

#include "cuda/bench.hpp"
#include "cuda/device.hpp"
#include "cuda/kernels.hpp"

namespace mla::cuda {
namespace {

using test::DeviceArray;

constexpr double read_gbps = 4560, peak_tflops = 680;  // the roof that shares are given of
constexpr double rotation_bytes = 320e6;

struct Shape {
  std::string name;
  std::vector<int32_t> queries, keys;
  int heads;
  int nope = 128, rope = 64, value = 128;
  bool causal = true;
  Dtype dtype = Dtype::bf16;
  bool accumulate = false;  // f32 outputs, merged with what they hold
  int topk = 0;             // every row sees so many random keys at most, by a mask; 0: no masks
};

// Bits of one row's keys, [tokens, words], and where they lie on the device.
struct Masks {
  int64_t words = 0;
  std::vector<uint32_t> bits;
  DeviceArray<uint32_t> device;
  bool names(int64_t token, int64_t key) const {
    return words == 0 || (bits[static_cast<size_t>(token * words + key / 32)] >> key % 32 & 1);
  }
};

std::vector<int32_t> repeat(int count, int32_t length) {
  return std::vector<int32_t>(static_cast<size_t>(count), length);
}

std::vector<Shape> shapes() {
  const std::vector<int32_t> uneven{100, 3000, 777, 4096, 64, 1500};
  std::vector<int32_t> mixed;
  std::mt19937 random(1);
  for (int i = 0; i < 24; ++i)
    mixed.push_back(static_cast<int32_t>(32 * std::exp2(static_cast<double>(random() % 1000) / 1000 * 6)));
  return {
      {.name = "h16 2K causal", .queries = {2048}, .keys = {2048}, .heads = 16},
      {.name = "h16 8K causal", .queries = {8192}, .keys = {8192}, .heads = 16},
      {.name = "h16 32K causal", .queries = {32768}, .keys = {32768}, .heads = 16},
      {.name = "h16 16 x 512 causal", .queries = repeat(16, 512), .keys = repeat(16, 512), .heads = 16},
      {.name = "h16 6 mixed causal", .queries = uneven, .keys = uneven, .heads = 16},
      {.name = "h128 2K causal", .queries = {2048}, .keys = {2048}, .heads = 128},
      {.name = "h128 8K causal", .queries = {8192}, .keys = {8192}, .heads = 128},
      {.name = "h128 16K causal", .queries = {16384}, .keys = {16384}, .heads = 128},
      {.name = "h128 16 x 512 causal", .queries = repeat(16, 512), .keys = repeat(16, 512), .heads = 128},
      {.name = "h128 6 mixed causal", .queries = uneven, .keys = uneven, .heads = 128},
      {.name = "h128 64 x 128 causal", .queries = repeat(64, 128), .keys = repeat(64, 128), .heads = 128},
      {.name = "h128 4 x 2K causal", .queries = repeat(4, 2048), .keys = repeat(4, 2048), .heads = 128},
      {.name = "h128 24 mixed, 32 to 2K causal", .queries = mixed, .keys = mixed, .heads = 128},
      {.name = "h128 512 over 8K context", .queries = {512}, .keys = {8192}, .heads = 128, .causal = false},
      {.name = "h128 2K causal after 6K", .queries = {2048}, .keys = {8192}, .heads = 128},
      {.name = "h16 2K over 16K context", .queries = {2048}, .keys = {16384}, .heads = 16, .causal = false},
      {.name = "h128 4K over 16K context", .queries = {4096}, .keys = {16384}, .heads = 128, .causal = false},
      {.name = "h128 4K over 16K context, merged",
       .queries = {4096},
       .keys = {16384},
       .heads = 128,
       .causal = false,
       .accumulate = true},
      {.name = "h128 512 over 8K context, merged",
       .queries = {512},
       .keys = {8192},
       .heads = 128,
       .causal = false,
       .accumulate = true},
      {.name = "h128 16 x 64 over 2K, merged",
       .queries = repeat(16, 64),
       .keys = repeat(16, 2048),
       .heads = 128,
       .causal = false,
       .accumulate = true},
      {.name = "h128 4K causal, masks of 2048", .queries = {4096}, .keys = {4096}, .heads = 128, .topk = 2048},
      {.name = "h128 4K causal after 4K, masks of 2048", .queries = {4096}, .keys = {8192}, .heads = 128, .topk = 2048},
      {.name = "h128 4K over 4K context, merged, masks of 2048",
       .queries = {4096},
       .keys = {4096},
       .heads = 128,
       .causal = false,
       .accumulate = true,
       .topk = 2048},
      {.name = "h128 4K causal", .queries = {4096}, .keys = {4096}, .heads = 128},
      {.name = "h128 4K causal after 4K", .queries = {4096}, .keys = {8192}, .heads = 128},
      {.name = "h16 8K causal f16", .queries = {8192}, .keys = {8192}, .heads = 16, .dtype = Dtype::f16},
      {.name = "192/64/256 h64 8K causal", .queries = {8192}, .keys = {8192}, .heads = 64, .nope = 192, .value = 256},
      {.name = "192/64/256 h64 4K over 16K context",
       .queries = {4096},
       .keys = {16384},
       .heads = 64,
       .nope = 192,
       .value = 256,
       .causal = false},
      {.name = "192/64/256 h64 16 x 512 causal",
       .queries = repeat(16, 512),
       .keys = repeat(16, 512),
       .heads = 64,
       .nope = 192,
       .value = 256},
  };
}

std::vector<int32_t> starts(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> s{0};
  for (int32_t n : lengths) s.push_back(s.back() + n);
  return s;
}

struct Input {
  DeviceArray<uint16_t> q, k_v, k_pe;
  DeviceArray<uint8_t> out;
  DeviceArray<float> lse;
};

double to_double(Dtype t, uint16_t x) { return t == Dtype::bf16 ? to_float(bf16{x}) : to_float(f16{x}); }

/// Largest error over its bound of sampled rows, against float64 (see the test for the bound); NaN counts as infinite.
/// Rows into which the same part was merged `times` times hold its outputs and an lse of log(times) more.
double worst(const Shape& s, const Input& in, const Masks& masks, int times) {
  const std::vector<int32_t> qs = starts(s.queries), ks = starts(s.keys);
  const int64_t h = s.heads, qk = s.nope + s.rope, kv = s.nope + s.value;
  const double u = s.dtype == Dtype::bf16 ? 0x1p-8 : 0x1p-11,
               scale = static_cast<float>(1 / std::sqrt(static_cast<double>(qk)));
  std::mt19937 random(9);
  double most = 0;
  std::vector<uint16_t> rows;
  for (int sample = 0; sample < 24; ++sample) {
    const auto r = static_cast<size_t>(random() % s.queries.size());
    const int64_t nq = s.queries[r], nk = s.keys[r];
    const int64_t i = sample == 0 ? nq - 1 : static_cast<int64_t>(random() % static_cast<uint32_t>(nq)),
                  head = random() % static_cast<uint32_t>(h);
    const int64_t seen = s.causal ? i + 1 + nk - nq : nk, row = (qs[r] + i) * h + head;
    rows.resize(static_cast<size_t>(seen * kv));
    check(cudaMemcpy2D(rows.data(), static_cast<size_t>(kv) * 2, in.k_v.data() + (ks[r] * h + head) * kv,
                       static_cast<size_t>(h * kv) * 2, static_cast<size_t>(kv) * 2, static_cast<size_t>(seen),
                       cudaMemcpyDeviceToHost),
          "bench", "copy");
    const std::vector<uint16_t> pe = in.k_pe.download(ks[r] * s.rope, seen * s.rope), q = in.q.download(row * qk, qk);
    const int64_t size = s.accumulate ? 4 : 2;
    const std::vector<uint8_t> got = in.out.download(row * s.value * size, s.value * size);
    const auto got_at = [&](int e) -> double {
      if (s.accumulate) {
        float x;
        std::memcpy(&x, &got[static_cast<size_t>(4 * e)], 4);
        return x;
      }
      return to_double(
          s.dtype, static_cast<uint16_t>(got[static_cast<size_t>(2 * e)] | got[static_cast<size_t>(2 * e + 1)] << 8));
    };
    std::vector<double> score(static_cast<size_t>(seen)), o(static_cast<size_t>(s.value)),
        magnitude(static_cast<size_t>(s.value));
    double high = -1e300, sum = 0;
    for (int64_t j = 0; j < seen; ++j) {
      if (!masks.names(qs[r] + i, j)) continue;
      double dot = 0;
      for (int e = 0; e < s.nope; ++e)
        dot +=
            to_double(s.dtype, q[static_cast<size_t>(e)]) * to_double(s.dtype, rows[static_cast<size_t>(j * kv + e)]);
      for (int e = 0; e < s.rope; ++e)
        dot += to_double(s.dtype, q[static_cast<size_t>(s.nope + e)]) *
               to_double(s.dtype, pe[static_cast<size_t>(j * s.rope + e)]);
      score[static_cast<size_t>(j)] = dot * scale;
      high = std::max(high, dot * scale);
    }
    for (int64_t j = 0; j < seen; ++j) {
      if (!masks.names(qs[r] + i, j)) continue;
      const double w = std::exp(score[static_cast<size_t>(j)] - high);
      sum += w;
      for (int e = 0; e < s.value; ++e) {
        const double x = w * to_double(s.dtype, rows[static_cast<size_t>(j * kv + s.nope + e)]);
        o[static_cast<size_t>(e)] += x;
        magnitude[static_cast<size_t>(e)] += std::abs(x);
      }
    }
    for (int e = 0; e < s.value; ++e) {
      const double want = o[static_cast<size_t>(e)] / sum,
                   bound = (u + 2e-5) * magnitude[static_cast<size_t>(e)] / sum + u * std::abs(want) + 1e-7;
      const double error = std::abs(got_at(e) - want) / bound;
      most = std::isfinite(error) ? std::max(most, error) : 1e9;
    }
    const double lse = in.lse.download(row, 1)[0], want = high + std::log(sum) + std::log(times);
    const double error = std::abs(lse - want) / (2e-5 * (1 + std::abs(want)) + 1e-7 * times);
    most = std::isfinite(error) ? std::max(most, error) : 1e9;
  }
  return most;
}

Masks masks_of(const Shape& s) {
  Masks m;
  if (s.topk == 0) return m;
  const std::vector<int32_t> qs = starts(s.queries);
  m.words = (*std::ranges::max_element(s.keys) + 31) / 32;
  m.bits.resize(static_cast<size_t>(qs.back() * m.words));
  std::mt19937 random(3);
  for (size_t r = 0; r < s.queries.size(); ++r)
    for (int32_t i = 0; i < s.queries[r]; ++i) {
      uint32_t* const row = &m.bits[static_cast<size_t>((qs[r] + i) * m.words)];
      const auto seen = static_cast<uint32_t>(s.causal ? i + 1 + s.keys[r] - s.queries[r] : s.keys[r]);
      // A key is taken by its chance, so that a row has about as many as it may.
      for (uint32_t j = 0; j < seen; ++j)
        if (random() % seen < static_cast<uint32_t>(s.topk) || j + 1 == seen) row[j / 32] |= 1u << j % 32;
    }
  m.device = DeviceArray<uint32_t>(m.bits);
  return m;
}

sm90::ExpandedTile forced_tile(const Shape& s) {
  using enum sm90::ExpandedTile;
  const char* rows = std::getenv("MLA_EXPANDED_TILE");
  switch (rows ? std::atoi(rows) : 0) {
    case 128: return rows_128;
    case 192: return s.nope == 128 ? rows_192 : automatic;
    case 256: return rows_256;
    default: return automatic;
  }
}

struct Result {
  bench::Times times;
  double tflops, gbps, floor_us, error;
  int tile;  // rows
};

Result measure(const Shape& s, cudaStream_t stream, int replays) {
  const int64_t tokens = starts(s.queries).back(), keys = starts(s.keys).back(), h = s.heads, qk = s.nope + s.rope,
                kv = s.nope + s.value;
  double pairs = 0;
  for (size_t r = 0; r < s.queries.size(); ++r) {
    const double nq = s.queries[r], nk = s.keys[r];
    pairs += s.causal ? nq * (nk - nq) + nq * (nq + 1) / 2 : nq * nk;
  }
  const double flops = 2 * pairs * static_cast<double>(h * (qk + s.value));
  const int64_t out_size = s.accumulate ? 4 : 2;
  const double bytes = 2.0 * static_cast<double>(tokens * h * qk + keys * (h * kv + s.rope)) +
                       static_cast<double>(tokens * h * (s.value * out_size + 4)) * (s.accumulate ? 2 : 1);

  const int sets = std::max(1, static_cast<int>(std::ceil(rotation_bytes / bytes)));
  std::vector<Input> inputs;
  const auto array = [&](int64_t count, uint32_t seed) {
    DeviceArray<uint16_t> a(count);
    bench::fill_normal(stream, s.dtype, a.data(), a.size(), seed);
    return a;
  };
  for (int i = 0; i < sets; ++i) {
    const auto seed = static_cast<uint32_t>(i * 8);
    Input in{array(tokens * h * qk, seed), array(keys * h * kv, seed + 1), array(keys * s.rope, seed + 2),
             DeviceArray<uint8_t>(tokens * h * s.value * out_size), DeviceArray<float>(tokens * h)};
    // A NaN lse beside numbers is an empty part's, beside NaN a NaN row's.
    check(cudaMemsetAsync(in.out.data(), s.accumulate ? 0 : 0xff, static_cast<size_t>(in.out.size()), stream), "bench",
          "poison");
    check(cudaMemsetAsync(in.lse.data(), 0xff, static_cast<size_t>(in.lse.size()) * 4, stream), "bench", "poison");
    inputs.push_back(std::move(in));
  }
  std::vector<ExpandedItem> list;
  for (size_t r = 0; r < s.queries.size(); ++r)
    list.push_back({starts(s.queries)[r], s.queries[r], starts(s.keys)[r], s.keys[r],
                    s.causal ? s.keys[r] - s.queries[r] : ExpandedItem::everything(), false, s.topk > 0, 0});
  const DeviceArray<ExpandedItem> items(list);
  const DeviceArray<int32_t> workspace(std::vector<int32_t>(4, 0));
  const Masks masks = masks_of(s);
  const DeviceArray<uint8_t> columns(s.topk > 0 ? (tokens + 256) * ((keys + 79) / 80) * 16 : 0);
  sm90::ExpandedTile tile{};
  const auto call = [&](const Input& in) {
    sm90::AttendExpandedArgs a;
    a.q = {s.dtype, in.q.data(), {tokens, h, qk}};
    a.k_nope = {s.dtype, in.k_v.data(), {keys, h, s.nope}, {h * kv, kv, 1}};
    a.k_pe = {s.dtype, in.k_pe.data(), {keys, s.rope}};
    a.v = {s.dtype, in.k_v.data() + s.nope, {keys, h, s.value}, {h * kv, kv, 1}};
    a.items = items.data();
    a.item_count = items.size();
    a.most_queries = *std::ranges::max_element(s.queries);
    a.scale = 1 / std::sqrt(static_cast<float>(qk));
    a.out = {s.accumulate ? Dtype::f32 : s.dtype, in.out.data(), {tokens, h, s.value}};
    a.accumulate = s.accumulate;
    a.tile = forced_tile(s);
    if (s.topk > 0) {
      a.mask = {masks.device.data(), {tokens, masks.words}};
      a.columns = columns.data();
    }
    a.lse = {in.lse.data(), {tokens, h}};
    a.workspace = workspace.data();
    tile = sm90::attend_expanded_tile(a);
    sm90::attend_expanded(stream, a);
  };
  const int calls = bench::calls_for(sets);
  const bench::Times times =
      bench::time_calls(stream, calls, replays, [&](int i) { call(inputs[static_cast<size_t>(i % sets)]); });
  // How often set i was merged.
  const auto merges = [&](int i) { return s.accumulate ? times.launches * ((calls - i + sets - 1) / sets) : 1; };
  return {times,
          flops / times.median * 1e-6,
          bytes / times.median * 1e-3,
          std::max(bytes / read_gbps * 1e-3, flops / peak_tflops * 1e-6),
          std::max(worst(s, inputs.front(), masks, merges(0)), worst(s, inputs.back(), masks, merges(sets - 1))),
          tile == sm90::ExpandedTile::rows_128   ? 128
          : tile == sm90::ExpandedTile::rows_192 ? 192
                                                 : 256};
}

void measure_all(bench::Report& report) {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "bench", "stream");
  for (const Shape& s : shapes()) {
    if (!report.wants(s.name)) continue;
    const Result r = measure(s, stream, report.replays());
    report.add({{"op", "attend_expanded"},
                {"shape", s.name},
                {"heads", s.heads},
                {"dims", {s.nope, s.rope, s.value}},
                {"causal", s.causal},
                {"merged", s.accumulate},
                {"masks_of", s.topk},
                {"tile", r.tile},
                {"items", s.queries.size()},
                {"tokens", starts(s.queries).back()},
                {"keys", starts(s.keys).back()},
                {"tflop_per_s", bench::rounded(r.tflops, 1)},
                {"gb_per_s", bench::rounded(r.gbps, 0)},
                {"floor_us", bench::rounded(r.floor_us, 2)},
                {"of_floor", bench::rounded(r.floor_us / r.times.median, 3)},
                {"error_of_bound", bench::rounded(r.error, 3)}},
               r.times, r.error <= 1.01);
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
