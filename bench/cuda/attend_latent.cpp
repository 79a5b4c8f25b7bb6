// Times whole calls of attend_latent on Hopper, answers checked against float64 in the same run. Calls follow each
// other as a step's layers do: one block table, a cache each, a schedule made once in front of them (in their time)
// unless each finds its own (alone).
//   attend_latent_bench [json=FILE] [only=SUBSTRING]... [replays=N] [variant=min:2,over:0]...
#include <cstdlib>
#include <numeric>
#include <string>
#include <string_view>

#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/sm90/attention/attention.hpp"
#include "cache/format.hpp"
#include "cuda/bench.hpp"
#include "cuda/device.hpp"
#include "cuda/kernels.hpp"

namespace mla::cuda {
namespace {

using namespace test;

struct Shape {
  const char* name;
  int batch, heads, query_tokens, context;
  int spread = 0;  // standard deviation of the context over requests
  int page_size = 64;
  CacheFormat cache = CacheFormat::bf16;
  bool invariant = false;
  bool alone = false;
  bool codes = false;  // are queries e4m3, as the cache is, and products of codes?
};

/// Of all requests whose lengths differ: as many as in the sample that peers were measured with.
constexpr int64_t spread_positions = 510294;

const Shape shapes[] = {
    {"b1 h16 4K", 1, 16, 1, 4096},
    {"b1 h128 4K", 1, 128, 1, 4096},
    {"b1 h16 64K", 1, 16, 1, 65536},
    {"b1 h128 64K", 1, 128, 1, 65536},
    {"b8 h16 4K", 8, 16, 1, 4096},
    {"b8 h128 4K", 8, 128, 1, 4096},
    {"b32 h16 4K", 32, 16, 1, 4096},
    {"b32 h16 16K", 32, 16, 1, 16384},
    {"b32 h128 4K", 32, 128, 1, 4096},
    {"b128 h16 4K", 128, 16, 1, 4096},
    {"b128 h16 4K varlen", 128, 16, 1, 4096, 2048},
    {"b128 h128 4K", 128, 128, 1, 4096},
    {"b128 h128 4K varlen", 128, 128, 1, 4096, 2048},
    {"b128 s2 h128 4K", 128, 128, 2, 4096},
    {"b128 h64 4K", 128, 64, 1, 4096},
    {"b128 s2 h16 4K", 128, 16, 2, 4096},
    {"b128 h16 4K page16", 128, 16, 1, 4096, 0, 16},
    {"b128 h16 4K page32", 128, 16, 1, 4096, 0, 32},
    {"b128 h16 4K page17", 128, 16, 1, 4096, 0, 17},
    {"b128 h16 4K page1", 128, 16, 1, 4096, 0, 1},
    {"b128 h128 4K page16", 128, 128, 1, 4096, 0, 16},
    {"b128 h128 4K page17", 128, 128, 1, 4096, 0, 17},
    {"b128 h128 4K page1", 128, 128, 1, 4096, 0, 1},
    {"b128 h16 4K f16", 128, 16, 1, 4096, 0, 64, CacheFormat::f16},
    {"b128 h128 4K f16", 128, 128, 1, 4096, 0, 64, CacheFormat::f16},
    {"b128 h16 4K invariant", 128, 16, 1, 4096, 0, 64, CacheFormat::bf16, true},
    {"b128 h128 4K invariant", 128, 128, 1, 4096, 0, 64, CacheFormat::bf16, true},
    {"b8 h128 4K invariant", 8, 128, 1, 4096, 0, 64, CacheFormat::bf16, true},
    {"b8 h16 4K invariant", 8, 16, 1, 4096, 0, 64, CacheFormat::bf16, true},
    {"b64 h128 8K", 64, 128, 1, 8192},
    {"b64 h128 8K invariant", 64, 128, 1, 8192, 0, 64, CacheFormat::bf16, true},
    {"b128 h64 4K invariant", 128, 64, 1, 4096, 0, 64, CacheFormat::bf16, true},
    {"b128 h128 4K varlen invariant", 128, 128, 1, 4096, 2048, 64, CacheFormat::bf16, true},
    {"b1 h16 4K alone", 1, 16, 1, 4096, 0, 64, CacheFormat::bf16, false, true},
    {"b1 h16 64K alone", 1, 16, 1, 65536, 0, 64, CacheFormat::bf16, false, true},
    {"b1 h128 64K alone", 1, 128, 1, 65536, 0, 64, CacheFormat::bf16, false, true},
    {"b8 h16 4K alone", 8, 16, 1, 4096, 0, 64, CacheFormat::bf16, false, true},
    {"b8 h128 4K alone", 8, 128, 1, 4096, 0, 64, CacheFormat::bf16, false, true},
    {"b128 h16 4K alone", 128, 16, 1, 4096, 0, 64, CacheFormat::bf16, false, true},
    {"b1 h16 64K invariant", 1, 16, 1, 65536, 0, 64, CacheFormat::bf16, true},
    {"fp8 b1 h16 4K", 1, 16, 1, 4096, 0, 64, CacheFormat::fp8},
    {"fp8 b1 h128 4K", 1, 128, 1, 4096, 0, 64, CacheFormat::fp8},
    {"fp8 b1 h16 64K", 1, 16, 1, 65536, 0, 64, CacheFormat::fp8},
    {"fp8 b8 h128 4K", 8, 128, 1, 4096, 0, 64, CacheFormat::fp8},
    {"fp8 b32 h16 4K", 32, 16, 1, 4096, 0, 64, CacheFormat::fp8},
    {"fp8 b128 h16 4K", 128, 16, 1, 4096, 0, 64, CacheFormat::fp8},
    {"fp8 b128 h16 4K varlen", 128, 16, 1, 4096, 2048, 64, CacheFormat::fp8},
    {"fp8 b128 s2 h16 4K", 128, 16, 2, 4096, 0, 64, CacheFormat::fp8},
    {"fp8 b128 h64 4K", 128, 64, 1, 4096, 0, 64, CacheFormat::fp8},
    {"fp8 b32 h128 4K", 32, 128, 1, 4096, 0, 64, CacheFormat::fp8},
    {"fp8 b128 h128 4K", 128, 128, 1, 4096, 0, 64, CacheFormat::fp8},
    {"fp8 b128 h16 4K page16", 128, 16, 1, 4096, 0, 16, CacheFormat::fp8},
    {"fp8 b128 h16 4K page17", 128, 16, 1, 4096, 0, 17, CacheFormat::fp8},
    {"fp8 b128 h16 4K page1", 128, 16, 1, 4096, 0, 1, CacheFormat::fp8},
    {"fp8 b128 h16 4K invariant", 128, 16, 1, 4096, 0, 64, CacheFormat::fp8, true},
    {"fp8 b128 h64 4K invariant", 128, 64, 1, 4096, 0, 64, CacheFormat::fp8, true},
    {"fp8 b128 h128 4K invariant", 128, 128, 1, 4096, 0, 64, CacheFormat::fp8, true},
    {"codes b1 h16 4K", 1, 16, 1, 4096, 0, 64, CacheFormat::fp8, false, false, true},
    {"codes b1 h128 4K", 1, 128, 1, 4096, 0, 64, CacheFormat::fp8, false, false, true},
    {"codes b1 h128 64K", 1, 128, 1, 65536, 0, 64, CacheFormat::fp8, false, false, true},
    {"codes b8 h128 4K", 8, 128, 1, 4096, 0, 64, CacheFormat::fp8, false, false, true},
    {"codes b32 h128 4K", 32, 128, 1, 4096, 0, 64, CacheFormat::fp8, false, false, true},
    {"codes b128 h16 4K", 128, 16, 1, 4096, 0, 64, CacheFormat::fp8, false, false, true},
    {"codes b128 h64 4K", 128, 64, 1, 4096, 0, 64, CacheFormat::fp8, false, false, true},
    {"codes b128 h128 4K", 128, 128, 1, 4096, 0, 64, CacheFormat::fp8, false, false, true},
    {"codes b128 h128 4K varlen", 128, 128, 1, 4096, 2048, 64, CacheFormat::fp8, false, false, true},
    {"codes b128 s2 h128 4K", 128, 128, 2, 4096, 0, 64, CacheFormat::fp8, false, false, true},
    {"codes b128 h128 4K page16", 128, 128, 1, 4096, 0, 16, CacheFormat::fp8, false, false, true},
    {"codes b128 h128 4K invariant", 128, 128, 1, 4096, 0, 64, CacheFormat::fp8, true, false, true},
    {"ds b1 h16 4K", 1, 16, 1, 4096, 0, 64, CacheFormat::fp8_ds_mla},
    {"ds b1 h128 4K", 1, 128, 1, 4096, 0, 64, CacheFormat::fp8_ds_mla},
    {"ds b1 h16 64K", 1, 16, 1, 65536, 0, 64, CacheFormat::fp8_ds_mla},
    {"ds b8 h128 4K", 8, 128, 1, 4096, 0, 64, CacheFormat::fp8_ds_mla},
    {"ds b32 h16 4K", 32, 16, 1, 4096, 0, 64, CacheFormat::fp8_ds_mla},
    {"ds b128 h16 4K", 128, 16, 1, 4096, 0, 64, CacheFormat::fp8_ds_mla},
    {"ds b128 h16 4K varlen", 128, 16, 1, 4096, 2048, 64, CacheFormat::fp8_ds_mla},
    {"ds b128 s2 h16 4K", 128, 16, 2, 4096, 0, 64, CacheFormat::fp8_ds_mla},
    {"ds b128 h64 4K", 128, 64, 1, 4096, 0, 64, CacheFormat::fp8_ds_mla},
    {"ds b32 h128 4K", 32, 128, 1, 4096, 0, 64, CacheFormat::fp8_ds_mla},
    {"ds b128 h128 4K", 128, 128, 1, 4096, 0, 64, CacheFormat::fp8_ds_mla},
    {"ds b128 h16 4K page1", 128, 16, 1, 4096, 0, 1, CacheFormat::fp8_ds_mla},
    {"ds b128 h16 4K invariant", 128, 16, 1, 4096, 0, 64, CacheFormat::fp8_ds_mla, true},
};

constexpr float k_scale = 0.0123f;  // of the fp8 cache

/// GB/s of a plain read of 4 GB, the best of a few: this card's roof.
double read_roof() {
  DeviceArray<uint4> data(size_t{1} << 28, 0x5a);
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "bench", "event");
  check(cudaEventCreate(&end), "bench", "event");
  const int blocks = multiprocessors("bench") * 8;
  float best = 1e30f;
  for (int i = 0; i < 20; ++i) {
    check(cudaEventRecord(begin), "bench", "event");
    bench::read_all(nullptr, blocks, data.data(), data.size());
    check(cudaEventRecord(end), "bench", "event");
    check(cudaDeviceSynchronize(), "bench", "read");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "bench", "event");
    best = std::min(best, ms);
  }
  return data.size() * 16 / best * 1e-6;
}

struct Result {
  bench::Times times;
  double floor, bytes, flops, error, bound;
};

Result measure(const Shape& s, const std::string& variant, int replays) {
  std::mt19937 random(7);
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "bench", "device");
  std::vector<int32_t> lens(s.batch), starts(s.batch + 1);
  std::normal_distribution<double> normal(s.context, s.spread);
  for (int& n : lens)
    n = s.spread ? std::clamp(static_cast<int>(normal(random)), s.query_tokens, 3 * s.context) : s.context;
  for (int r = 0; r <= s.batch; ++r) starts[r] = r * s.query_tokens;
  if (s.spread) {  // by the same for each
    const int64_t off = spread_positions - std::accumulate(lens.begin(), lens.end(), int64_t{0});
    for (int r = 0; r < s.batch; ++r)
      lens[r] = std::max(lens[r] + static_cast<int>(off * (r + 1) / s.batch - off * r / s.batch), s.query_tokens);
  }
  const int longest = *std::max_element(lens.begin(), lens.end());
  const int64_t stride = (longest + s.page_size - 1) / s.page_size;
  int64_t pages = 0, positions = 0, visible = 0;
  for (const int n : lens) {
    pages += (n + s.page_size - 1) / s.page_size, positions += n;
    for (int i = 0; i < s.query_tokens; ++i) visible += n - s.query_tokens + i + 1;
  }
  const int tokens = s.batch * s.query_tokens;
  CacheSpec spec;
  spec.format = s.cache, spec.page_size = s.page_size, spec.k_scale = k_scale;
  const cache::Format& format = cache::format(s.cache);
  const double bytes = positions * spec.token_bytes() + tokens * s.heads * (1152.0 + 1024.0 + 4.0),
               flops = visible * s.heads * 2176.0;
  const int sets = std::max(2, static_cast<int>(std::ceil(320e6 / (positions * spec.token_bytes())))),
            calls = bench::calls_for(sets);

  // Every set has a cache of its own, as every layer has; one block table, of shuffled pages.
  const size_t page_bytes = spec.page_bytes(), q_elements = static_cast<size_t>(tokens) * s.heads * 576;
  DeviceArray<std::byte> cache(pages * sets * page_bytes);
  DeviceArray<uint16_t> q(q_elements * sets);
  switch (s.cache) {
    case CacheFormat::fp8:
      bench::fill_bounded(nullptr, Dtype::fp8_e4m3, cache.data(), cache.size(), 1, 1 / k_scale);
      break;
    case CacheFormat::fp8_ds_mla:
      bench::fill_ds_mla(nullptr, cache.data(), cache.size() / 656, 1, bench::DsMlaScales::seven);
      break;
    default:
      bench::fill_bounded(nullptr, s.cache == CacheFormat::f16 ? Dtype::f16 : Dtype::bf16, cache.data(),
                          cache.size() / 2, 1);
  }
  if (s.codes) bench::fill_bounded(nullptr, Dtype::fp8_e4m3, q.data(), q_elements * sets, 2, 1 / k_scale);
  else bench::fill_bounded(nullptr, Dtype::bf16, q.data(), q.size(), 2);
  check(cudaDeviceSynchronize(), "bench", "fill");
  std::vector<int32_t> order(pages), table(s.batch * stride, -1);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  size_t used = 0;
  for (int r = 0; r < s.batch; ++r)
    for (int i = 0; i < (lens[r] + s.page_size - 1) / s.page_size; ++i) table[r * stride + i] = order[used++];
  std::vector<LatentItem> items(s.batch);
  for (int r = 0; r < s.batch; ++r) items[r] = {r, starts[r], s.query_tokens, 0, lens[r], lens[r] - s.query_tokens};
  DeviceArray<int32_t> d_table(table);
  DeviceArray<LatentItem> d_items(items);
  DeviceArray<uint16_t> out(static_cast<size_t>(tokens) * s.heads * 512);
  DeviceArray<float> lse(static_cast<size_t>(tokens) * s.heads);

  const AttendLatentLimits limits{.tokens = tokens,
                                  .requests = s.batch,
                                  .heads = s.heads,
                                  .query_tokens = s.query_tokens,
                                  .seq_len = longest,
                                  .positions = positions,
                                  .batch_invariant = s.invariant};
  AttendLatentChoice choice =
      attend_latent_choice(limits, s.page_size, processors, s.cache, s.codes ? Dtype::fp8_e4m3 : Dtype::bf16);
  choice.settled = !s.alone;  // no call writes the cache
  for (size_t at = 0; at < variant.size();) {
    const size_t end = std::min(variant.find(',', at), variant.size()), colon = variant.find(':', at);
    const std::string key = variant.substr(at, colon - at);
    const int value = std::atoi(variant.c_str() + colon + 1);
    if (key == "min") choice.min_blocks = value;
    if (key == "over") choice.overlap = value;
    if (key == "patience") choice.patience = value;
    if (key == "box") choice.box_rows = value;
    if (key == "split") choice.split_blocks = value;
    if (key == "line") choice.line_overhead = value;
    if (key == "workers") choice.workers = value;
    if (key == "settled") choice.settled = value;
    if (key == "relay") choice.relay = value;
    if (key == "rows") choice.tile_rows = value, choice.workers = processors / choice.ctas();
    at = end + 1;
  }
  DeviceArray<std::byte> partials(attend_latent_partials(limits, choice, s.cache));
  DeviceArray<unsigned> counters(attend_latent_counters(limits, choice), 0);
  AttendLatent args{.limits = limits,
                    .q_dtype = s.codes ? Dtype::fp8_e4m3 : Dtype::bf16,
                    .format = s.cache,
                    .k_scale = k_scale,
                    .pages = pages,
                    .page_size = s.page_size,
                    .items = d_items.data(),
                    .block_table = d_table.data(),
                    .table_stride = stride,
                    .scale = 0.0721688f * (s.codes ? k_scale : 1.0f),
                    .out = out.data(),
                    .out_dtype = Dtype::bf16,
                    .lse = lse.data(),
                    .lse_token_stride = s.heads,
                    .counters = counters.data(),
                    .counter_count = counters.size(),
                    .partials = partials.data(),
                    .partials_bytes = partials.size()};
  DeviceArray<std::byte> schedule(attend_latent_schedule_bytes(choice));
  const size_t q_step = s.codes ? 2 : 1;               // queries in 16 bits
  const auto call = [&](int i, cudaStream_t stream) {  // the i-th of calls in a row
    const int set = i % sets;
    args.q = q.data() + q_elements * set / q_step, args.cache = cache.data() + page_bytes * pages * set;
    if (s.alone) return attend_latent(args, choice, stream);
    args.schedule = schedule.data(), args.schedule_bytes = schedule.size();
    if (i == 0) attend_latent_schedule(args, choice, stream), args.schedule = nullptr;  // for those after this one
    attend_latent(args, choice, stream);
  };

  // Right?
  Result result{.floor = std::max(bytes / 4560e9, flops / 680e12) * 1e6, .bytes = bytes, .flops = flops};
  call(0, nullptr), call(1, nullptr);
  check(cudaDeviceSynchronize(), "bench", "run");
  double square = 0, worst = 0, plain = 0;
  for (int sample = 0; sample < 3; ++sample) {
    const int r = sample == 0 ? s.batch - 1 : static_cast<int>(random() % s.batch);
    const int token = static_cast<int>(random() % s.query_tokens), head = static_cast<int>(random() % s.heads);
    const int n = lens[r] - s.query_tokens + token + 1;
    std::vector<float> rows(static_cast<size_t>(lens[r]) * 576);
    const auto as_float = [](uint16_t bits) { return to_float(bf16{bits}); };
    const auto page_at = [&](int i) { return pages + table[r * stride + i]; };  // of set 1
    for (int at = 0; at < lens[r]; at += s.page_size) {
      const int count = std::min(s.page_size, lens[r] - at);
      const auto page = cache.download(page_at(at / s.page_size) * page_bytes, page_bytes);
      format.decode(spec, page.data(), 0, count, &rows[static_cast<size_t>(at) * 576], 576);
    }
    // The kernel's rows are bf16; codes of fp8 are as they are.
    if (choice.converts && s.cache == CacheFormat::fp8_ds_mla)
      for (float& x : rows) x = to_float(to_bf16(x));
    const size_t row = (static_cast<size_t>(starts[r]) + token) * s.heads + head;
    const auto q_bits = q.download((q_elements + row * 576) / q_step, 576 / q_step), got = out.download(row * 512, 512);
    float query[576];
    for (int i = 0; i < 576; ++i)
      query[i] = s.codes ? to_float(fp8_e4m3{reinterpret_cast<const uint8_t*>(q_bits.data())[i]}) : as_float(q_bits[i]);
    const Dtype probabilities = s.codes ? Dtype::fp8_e4m3 : s.cache == CacheFormat::f16 ? Dtype::f16 : Dtype::bf16;
    const LatentRow want =
        attend_row(query, n, args.scale, probabilities, [&](int j) { return &rows[static_cast<size_t>(j) * 576]; });
    for (int i = 0; i < 512; ++i) {
      worst = std::max(worst, std::abs(as_float(got[i]) - want.out[i]));
      plain = std::max(plain, std::abs(to_float(to_bf16(want.plain[i])) - want.out[i]));
      square += want.out[i] * want.out[i];
      if (std::isnan(as_float(got[i]))) worst = 1e30;
    }
    if (!(std::abs(lse.download(row, 1)[0] - want.lse) < (s.codes ? 1e-2 : 1e-3))) worst = 1e30;
  }
  const double rms = std::sqrt(square / (3 * 512));
  result.error = worst / rms, result.bound = 2 * plain / rms;

  // Fast?
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "bench", "stream");
  result.times = bench::time_calls(stream, calls, replays, [&](int i) { call(i, stream); });
  cudaStreamDestroy(stream);
  return result;
}

void measure_all(bench::Report& report) {
  report.head()["read_roof_gb_per_s"] = std::round(read_roof());
  std::vector<std::string> variants = report.values("variant");
  if (variants.empty()) variants.emplace_back("");
  for (const Shape& s : shapes) {
    if (!report.wants(s.name)) continue;
    for (const std::string& v : variants) {
      const Result r = measure(s, v, report.replays());
      report.add({{"op", "attend_latent"},
                  {"shape", s.name},
                  {"variant", v},
                  {"batch", s.batch},
                  {"heads", s.heads},
                  {"query_tokens", s.query_tokens},
                  {"context", s.context},
                  {"context_deviation", s.spread},
                  {"page_size", s.page_size},
                  {"floor_us", bench::rounded(r.floor, 2)},
                  {"of_floor", bench::rounded(r.floor / r.times.median, 3)},
                  {"gb_per_s", bench::rounded(r.bytes / r.times.median * 1e-3, 0)},
                  {"tflop_per_s", bench::rounded(r.flops / r.times.median * 1e-6, 1)},
                  {"error", bench::rounded(r.error, 5)},
                  {"bound", bench::rounded(r.bound, 5)}},
                 r.times, r.error <= r.bound);
    }
  }
}

}  // namespace
}  // namespace mla::cuda

int main(int argc, char** argv) {
  return mla::cuda::bench::run(
      argc, argv, {.columns = {"variant", "floor_us", "of_floor", "gb_per_s", "tflop_per_s"}, .arguments = {"variant"}},
      mla::cuda::measure_all);
}
