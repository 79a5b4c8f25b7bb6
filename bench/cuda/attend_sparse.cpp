// Times whole calls of attend_sparse on a GPU, answers checked against float64 in the same run. Calls above 500 GFLOP
// are timed in graphs of 2.
//   attend_sparse_bench [json=FILE] [only=SUBSTRING]... [replays=N]
#include <cstring>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/check.hpp"
#include "backend/cuda/core/queue.hpp"
#include "cuda/bench.hpp"
#include "cuda/device.hpp"
#include "cuda/kernels.hpp"
#include "mla/device.hpp"

namespace mla::cuda {
namespace {

using namespace test;

struct Shape {
  const char* name;
  int requests, query_tokens, heads, context, topk;
  CacheFormat format;
  int extra_topk = 0;  // of a second cache of as many slots; 0: none
  bool rope = true;    // bf16: or values alone
};

constexpr CacheFormat kFp8 = CacheFormat::fp8_ds_mla, kBf16 = CacheFormat::bf16, kV4 = CacheFormat::fp8_ds_v4;
const Shape shapes[] = {
    {"decode b1 h64 fp8_ds_mla", 1, 1, 64, 32768, 2048, kFp8},
    {"decode b1 h128 fp8_ds_mla", 1, 1, 128, 32768, 2048, kFp8},
    {"decode b8 h128 fp8_ds_mla", 8, 1, 128, 32768, 2048, kFp8},
    {"decode b16 h128 fp8_ds_mla", 16, 1, 128, 5120, 2048, kFp8},
    {"decode b64 h16 fp8_ds_mla", 64, 1, 16, 8192, 2048, kFp8},
    {"decode b128 h16 fp8_ds_mla", 128, 1, 16, 8192, 2048, kFp8},
    {"decode b64 h64 fp8_ds_mla", 64, 1, 64, 8192, 2048, kFp8},
    {"decode b128 h64 fp8_ds_mla", 128, 1, 64, 8192, 2048, kFp8},
    {"decode b64 h128 fp8_ds_mla", 64, 1, 128, 8192, 2048, kFp8},
    {"decode b128 h128 fp8_ds_mla", 128, 1, 128, 8192, 2048, kFp8},
    {"decode b64 s2 h128 fp8_ds_mla", 64, 2, 128, 8192, 2048, kFp8},
    {"decode b128 s2 h128 fp8_ds_mla", 128, 2, 128, 8192, 2048, kFp8},
    {"decode b2 s2 h128 fp8_ds_v4 two caches", 2, 2, 128, 32768, 128, kV4, 1024},
    {"decode b64 h64 fp8_ds_v4 two caches", 64, 1, 64, 8192, 128, kV4, 1024},
    {"decode b128 s2 h128 fp8_ds_v4 two caches", 128, 2, 128, 8192, 128, kV4, 1024},
    {"decode b64 h128 fp8_ds_v4", 64, 1, 128, 8192, 2048, kV4},
    {"decode b1 h64 bf16", 1, 1, 64, 32768, 2048, kBf16},
    {"decode b1 h128 bf16", 1, 1, 128, 32768, 2048, kBf16},
    {"decode b8 h128 bf16", 8, 1, 128, 32768, 2048, kBf16},
    {"decode b64 h16 bf16", 64, 1, 16, 8192, 2048, kBf16},
    {"decode b64 h64 bf16", 64, 1, 64, 8192, 2048, kBf16},
    {"decode b64 h128 bf16", 64, 1, 128, 8192, 2048, kBf16},
    {"decode b128 h128 bf16", 128, 1, 128, 8192, 2048, kBf16},
    {"decode b64 h128 bf16 without rope", 64, 1, 128, 8192, 2048, kBf16, 0, false},
    {"prefill 4096 h16 bf16", 1, 4096, 16, 65536, 2048, kBf16},
    {"prefill 4096 h64 bf16", 1, 4096, 64, 65536, 2048, kBf16},
    {"prefill 4096 h128 bf16", 1, 4096, 128, 65536, 2048, kBf16},
    {"prefill 4096 h128 bf16 without rope", 1, 4096, 128, 65536, 2048, kBf16, 0, false},
    {"prefill 4096 h16 fp8_ds_mla", 1, 4096, 16, 65536, 2048, kFp8},
    {"prefill 4096 h64 fp8_ds_mla", 1, 4096, 64, 65536, 2048, kFp8},
    {"prefill 4096 h128 fp8_ds_mla", 1, 4096, 128, 65536, 2048, kFp8},
};
constexpr int kWidth = 512, kPage = 64;
int entry_of(const Shape& s) { return s.format == kV4 || !s.rope ? 512 : 576; }

// Row `slot` of a cache.
std::vector<float> decoded(const DeviceArray<std::byte>& cache, int64_t slot, CacheFormat format, int entry) {
  std::vector<float> x(static_cast<size_t>(entry));
  const int64_t row_bytes = format == kBf16  ? 2 * entry
                            : format == kFp8 ? 656
                                             : 576,
                page = slot / kPage, offset = slot % kPage;
  const auto row = cache.download(format == kV4 ? page * kPage * 584 + offset * 576 : slot * row_bytes, row_bytes);
  const auto scales = format == kV4 ? cache.download(page * kPage * 584 + kPage * 576 + offset * 8, 8) : row;
  const auto bf = [&](size_t at, int i) {
    bf16 b;
    std::memcpy(&b, row.data() + at + 2 * i, 2);
    return to_float(b);
  };
  const auto code = [&](int i) { return to_float(fp8_e4m3{static_cast<uint8_t>(row[i])}); };
  for (int i = 0; i < static_cast<int>(x.size()); ++i) {
    if (format == kBf16) {
      x[i] = bf(0, i);
    } else if (format == kV4) {
      x[i] = i < 448 ? code(i) * std::ldexp(1.0f, static_cast<int>(scales[i / 64]) - 127) : bf(448, i - 448);
    } else if (i < 512) {
      float scale;
      std::memcpy(&scale, row.data() + 512 + i / 128 * 4, 4);
      x[i] = code(i) * scale;
    } else {
      x[i] = bf(528, i - 512);
    }
  }
  return x;
}

struct Result {
  bench::Times times;
  double floor, bytes, flops, error, bound;
};

Result measure(const Shape& s, int replays) {
  Stream stream(Device{DeviceKind::cuda, 0});
  const auto native = static_cast<cudaStream_t>(stream.native());
  const int rows = s.requests * s.query_tokens, entry = entry_of(s);
  const CacheSpec spec{
      .format = s.format, .latent = s.format == kV4 ? 448 : 512, .rope = s.rope ? 64 : 0, .page_size = kPage};
  const int topks[] = {s.topk, s.extra_topk}, sources = s.extra_topk ? 2 : 1, all = s.topk + s.extra_topk;
  const int64_t positions = static_cast<int64_t>(s.requests) * s.context, row_bytes = spec.page_bytes() / kPage;
  double bytes = rows * (s.heads * (2.0 * entry + 2.0 * kWidth + 4.0) + all * 4.0);
  for (const int topk : topks)
    bytes += static_cast<double>(std::min<int64_t>(positions, static_cast<int64_t>(rows) * topk)) * row_bytes;
  const double flops = static_cast<double>(rows) * all * s.heads * 2.0 * (entry + kWidth);
  const int sets = std::max(2, static_cast<int>(std::ceil(320e6 / bytes))),
            calls = flops > 5e11 ? 2 : bench::calls_for(sets);

  // Every set has its own cache, or its own slots of one that is larger than the last-level cache. The second source's
  // are those of the next set.
  const int caches = positions * row_bytes > 400e6
                         ? sources
                         : std::max(sources, static_cast<int>(std::ceil(400e6 / (positions * row_bytes))));
  DeviceArray<std::byte> cache(static_cast<size_t>(caches * positions * row_bytes));
  if (s.format == kBf16) bench::fill_bounded(nullptr, Dtype::bf16, cache.data(), cache.size() / 2, 1);
  else if (s.format == kV4) bench::fill_ds_v4(nullptr, cache.data(), cache.size() / (kPage * 584));
  else bench::fill_ds_mla(nullptr, cache.data(), cache.size() / 656, 0, bench::DsMlaScales::powers_of_two);
  const size_t q_elements = static_cast<size_t>(rows) * s.heads * entry, slot_count = static_cast<size_t>(rows) * all;
  const int q_sets = std::min<int>(sets, static_cast<int>(1e9 / (q_elements * 2)) + 1);
  DeviceArray<bf16> q(q_elements * q_sets), out(static_cast<size_t>(rows) * s.heads * kWidth);
  DeviceArray<int32_t> slots(slot_count * sets);
  DeviceArray<float> lse(static_cast<size_t>(rows) * s.heads);
  bench::fill_bounded(nullptr, Dtype::bf16, q.data(), q.size(), 2);
  const auto first_slot = [&](int set, int source) {
    return set * slot_count + (source ? static_cast<size_t>(rows) * s.topk : 0);
  };
  for (int set = 0; set < sets; ++set)
    for (int source = 0; source < sources; ++source)
      bench::fill_slots(nullptr, slots.data() + first_slot(set, source), rows, topks[source], s.context, s.query_tokens,
                        2 * set + source);
  DeviceArray<std::byte> scratch(kScratch);
  check(cudaDeviceSynchronize(), "bench", "fill");

  // Staged, as a layer's items are.
  const SparseItem item{.q_begin = 0, .q_count = rows, .k_begin = 0, .k_end = all};
  const DeviceArray<SparseItem> items(std::vector<SparseItem>{item});
  const float scale = 1.0f / std::sqrt(static_cast<float>(entry));
  const auto first_position = [&](int set, int source) { return (set + source) % caches * positions; };
  const auto call = [&](int set) {
    ops::SparseSource of[2];
    for (int i = 0; i < sources; ++i)
      of[i] = {.cache = {spec, cache.data() + first_position(set, i) * row_bytes, positions / kPage,
                         static_cast<size_t>(kPage * row_bytes)},
               .slots = {slots.data() + first_slot(set, i), {rows, topks[i]}}};
    const ops::AttendSparseArgs args{.q = {Dtype::bf16, q.data() + set % q_sets * q_elements, {rows, s.heads, entry}},
                                     .sources = {of, static_cast<size_t>(sources)},
                                     .items = {{&item, 1}, items.data()},
                                     .shared_keys = s.query_tokens > 1,
                                     .scale = scale,
                                     .out = {Dtype::bf16, out.data(), {rows, s.heads, kWidth}},
                                     .lse = {lse.data(), {rows, s.heads}},
                                     .scratch = {scratch.data(), kScratch}};
    attend_sparse(stream, args);
  };

  // Right?
  Result result{.floor = std::max(bytes / 4560e9, flops / 680e12) * 1e6, .bytes = bytes, .flops = flops};
  call(1);
  stream.synchronize();
  std::mt19937 random(7);
  double square = 0, worst = 0, plain = 0;
  for (int sample = 0; sample < 3; ++sample) {
    const int row = sample == 0 ? rows - 1 : static_cast<int>(random() % rows),
              head = static_cast<int>(random() % s.heads);
    std::vector<std::vector<float>> keys;
    for (int i = 0; i < sources; ++i)
      for (const int32_t slot : slots.download(first_slot(1, i) + static_cast<size_t>(row) * topks[i], topks[i]))
        keys.push_back(decoded(cache, first_position(1, i) + slot, s.format, entry));
    const size_t at = static_cast<size_t>(row) * s.heads + head;
    const auto q_bits = q.download(1 % q_sets * q_elements + at * entry, entry),
               got = out.download(at * kWidth, kWidth);
    std::vector<float> query(576, 0.0f);
    for (int i = 0; i < entry; ++i) query[i] = to_float(q_bits[i]);
    for (std::vector<float>& key : keys) key.resize(576, 0.0f);  // no rope: zeros
    const LatentRow want = attend_row(query.data(), all, scale, Dtype::bf16, [&](int j) { return keys[j].data(); });
    for (int i = 0; i < kWidth; ++i) {
      const double x = to_float(got[i]);
      worst = std::max(worst, std::abs(x - want.out[i]));
      plain = std::max(plain, std::abs(to_float(to_bf16(want.plain[i])) - want.out[i]));
      square += want.out[i] * want.out[i];
      if (std::isnan(x)) worst = 1e30;
    }
    if (!(std::abs(lse.download(at, 1)[0] - want.lse) < 1e-3)) worst = 1e30;
  }
  const double rms = std::sqrt(square / (3 * kWidth));
  result.error = worst / rms, result.bound = 2 * plain / rms;

  // Fast?
  result.times = bench::time_calls(native, calls, replays, [&](int i) { call(i % sets); });
  return result;
}

void measure_all(bench::Report& report) {
  for (const Shape& s : shapes) {
    if (!report.wants(s.name)) continue;
    const Result r = measure(s, report.replays());
    report.add({{"op", "attend_sparse"},
                {"shape", s.name},
                {"requests", s.requests},
                {"query_tokens", s.query_tokens},
                {"heads", s.heads},
                {"context", s.context},
                {"topk", s.topk},
                {"extra_topk", s.extra_topk},
                {"floor_us", bench::rounded(r.floor, 2)},
                {"of_floor", bench::rounded(r.floor / r.times.median, 3)},
                {"tflop_per_s", bench::rounded(r.flops / r.times.median * 1e-6, 1)},
                {"error", bench::rounded(r.error, 5)},
                {"bound", bench::rounded(r.bound, 5)}},
               r.times, r.error <= r.bound);
  }
}

}  // namespace
}  // namespace mla::cuda

int main(int argc, char** argv) {
  return mla::cuda::bench::run(argc, argv, {.columns = {"floor_us", "of_floor", "tflop_per_s"}},
                               mla::cuda::measure_all);
}
