// Times prefill over cached context, part by part and as a whole: new tokens of one request attend their cached context
// chunk by chunk. A chunk is gathered from the paged cache, expanded by the kv_up product (cuBLASLt) and attended,
// merging into what the chunks before it left; the first part is the causal attention among the new tokens.
//   context_chunk_bench [json=FILE] [only=SUBSTRING]... [replays=N]
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <string>

#include "backend/cuda/core/blas.hpp"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/sm90/attend_expanded/attend_expanded.hpp"
#include "cuda/bench.hpp"
#include "cuda/device.hpp"
#include "cuda/kernels.hpp"

namespace mla::cuda {
namespace {

using namespace test;

constexpr int nope = 128, rope = 64, value = 128, latent = 512, row = latent + rope, page = 64;

struct Shape {
  int tokens, context, heads, chunk;
};

struct Prefill {
  Shape s;
  int kv;  // elements of an expanded row
  DeviceArray<uint16_t> cache, weights, q, kv_new, pe_new, rows, expanded;
  DeviceArray<int32_t> block_table, workspace;
  DeviceArray<float> out, lse;
  DeviceArray<ExpandedItem> items;  // causal, then one a chunk
  Blas& blas;
  cudaStream_t stream;
  const int blocks = multiprocessors("bench") * 8;  // of the gathering launch

  Prefill(const Shape& shape, Blas& products, cudaStream_t on)
      : s(shape), kv(shape.heads * (nope + value)), blas(products), stream(on) {
    const auto array = [&](int64_t count, uint32_t seed, float size) {
      DeviceArray<uint16_t> a(count);
      bench::fill_normal(stream, Dtype::bf16, a.data(), a.size(), seed, size);
      return a;
    };
    const int pages = (s.context + page - 1) / page;
    cache = array(int64_t{pages} * page * row, 1, 1.0f);
    weights = array(int64_t{kv} * latent, 2, 1.0f / std::sqrt(static_cast<float>(latent)));
    q = array(int64_t{s.tokens} * s.heads * (nope + rope), 3, 1.0f);
    kv_new = array(int64_t{s.tokens} * kv, 4, 1.0f);
    pe_new = array(int64_t{s.tokens} * rope, 5, 1.0f);
    rows = DeviceArray<uint16_t>(int64_t{s.chunk} * row);
    expanded = DeviceArray<uint16_t>(int64_t{s.chunk} * kv);
    out = DeviceArray<float>(int64_t{s.tokens} * s.heads * value);
    lse = DeviceArray<float>(int64_t{s.tokens} * s.heads);
    std::vector<int32_t> table(static_cast<size_t>(pages));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(5));
    block_table = DeviceArray<int32_t>(table);
    workspace = DeviceArray<int32_t>(std::vector<int32_t>(4, 0));
    std::vector<ExpandedItem> list{{0, s.tokens, 0, s.tokens, 0}};
    for (int c = 0; c < chunks(); ++c) list.push_back({0, s.tokens, 0, length(c), ExpandedItem::everything()});
    items = DeviceArray<ExpandedItem>(list);
  }

  int chunks() const { return (s.context + s.chunk - 1) / s.chunk; }
  int length(int c) const { return std::min(s.chunk, s.context - c * s.chunk); }

  void gather(int c) {
    bench::gather_rows(stream, blocks, cache.data(), block_table.data(), c * s.chunk, length(c), rows.data());
  }
  void expand(int c) {
    blas.multiply({.rows = length(c),
                   .out = kv,
                   .in = latent,
                   .x = rows.data(),
                   .w = weights.data(),
                   .y = expanded.data(),
                   .x_row = row,
                   .w_row = latent,
                   .y_row = kv},
                  stream, "bench");
  }
  void attend(int item) {
    const int64_t keys = item == 0 ? s.tokens : length(item - 1), h = s.heads, head = nope + value;
    const uint16_t* k = item == 0 ? kv_new.data() : expanded.data();
    sm90::AttendExpandedArgs a;
    a.q = {Dtype::bf16, q.data(), {s.tokens, h, nope + rope}};
    a.k_nope = {Dtype::bf16, k, {keys, h, nope}, {kv, head, 1}};
    a.v = {Dtype::bf16, k + nope, {keys, h, value}, {kv, head, 1}};
    if (item == 0) a.k_pe = {Dtype::bf16, pe_new.data(), {keys, rope}};
    else a.k_pe = {Dtype::bf16, rows.data() + latent, {keys, rope}, {row, 1}};
    a.items = items.data() + item;
    a.item_count = 1;
    a.scale = 1 / std::sqrt(static_cast<float>(nope + rope));
    a.out = {Dtype::f32, out.data(), {s.tokens, h, value}};
    a.lse = {lse.data(), {s.tokens, h}};
    a.accumulate = item > 0;
    a.workspace = workspace.data();
    sm90::attend_expanded(stream, a);
  }
  void whole() {
    attend(0);
    for (int c = 0; c < chunks(); ++c) {
      gather(c);
      expand(c);
      attend(1 + c);
    }
  }

  /// Largest error over its bound of sampled rows against float64: entries of the product against the gathered rows of
  /// the cache, and attention over keys and values as the product left them.
  double worst() {
    std::mt19937 random(9);
    const auto real = [](uint16_t x) { return static_cast<double>(to_float(bf16{x})); };
    double most = 0;
    const auto judge = [&](double got, double want, double bound) {
      const double error = std::abs(got - want) / bound;
      most = std::isfinite(error) ? std::max(most, error) : 1e9;
    };
    const int head = static_cast<int>(random() % static_cast<uint32_t>(s.heads)), width = nope + value;
    const std::vector<int32_t> table = block_table.download();
    const std::vector<uint16_t> w = weights.download(int64_t{head} * width * latent, int64_t{width} * latent);
    std::vector<uint16_t> keys, pe = pe_new.download();  // of all parts, in their order
    const auto append = [&](const DeviceArray<uint16_t>& from, int count) {
      const size_t at = keys.size();
      keys.resize(at + static_cast<size_t>(count) * width);
      check(cudaMemcpy2D(keys.data() + at, width * 2, from.data() + head * width, static_cast<size_t>(kv) * 2,
                         width * 2, static_cast<size_t>(count), cudaMemcpyDeviceToHost),
            "bench", "copy");
    };
    check(cudaMemsetAsync(out.data(), 0xff, static_cast<size_t>(out.size()) * 4, stream), "bench", "poison");
    check(cudaMemsetAsync(lse.data(), 0xff, static_cast<size_t>(lse.size()) * 4, stream), "bench", "poison");
    attend(0);
    append(kv_new, s.tokens);
    for (int c = 0; c < chunks(); ++c) {
      check(cudaMemsetAsync(rows.data(), 0xff, static_cast<size_t>(rows.size()) * 2, stream), "bench", "poison");
      gather(c);
      expand(c);
      attend(1 + c);
      check(cudaStreamSynchronize(stream), "bench", "part");
      const size_t at = keys.size();
      append(expanded, length(c));
      for (int j = 0; j < length(c); ++j) {
        const int position = c * s.chunk + j;
        const int64_t slot = int64_t{table[static_cast<size_t>(position / page)]} * page + position % page;
        if (j % 997 != 0 && j != length(c) - 1) continue;
        const std::vector<uint16_t> cached = cache.download(slot * row, row);
        for (int e = 0; e < width; e += 5) {
          double sum = 0, magnitude = 0;
          for (int i = 0; i < latent; ++i) {
            const double x = real(cached[static_cast<size_t>(i)]) * real(w[static_cast<size_t>(e * latent + i)]);
            sum += x;
            magnitude += std::abs(x);
          }
          judge(real(keys[at + static_cast<size_t>(j * width + e)]), sum, 0x1p-8 * std::abs(sum) + 1e-6 * magnitude);
        }
      }
      const std::vector<uint16_t> gathered = rows.download(0, int64_t{length(c)} * row);
      for (int j = 0; j < length(c); ++j)
        pe.insert(pe.end(), &gathered[static_cast<size_t>(j) * row + latent],
                  &gathered[static_cast<size_t>(j) * row] + row);
    }
    check(cudaStreamSynchronize(stream), "bench", "parts");
    const double scale = 1 / std::sqrt(static_cast<float>(nope + rope));
    for (int sample = 0; sample < 6; ++sample) {
      const int64_t token = sample == 0 ? s.tokens - 1 : random() % static_cast<uint32_t>(s.tokens);
      const int64_t at = token * s.heads + head;
      const std::vector<uint16_t> query = q.download(at * (nope + rope), nope + rope);
      std::vector<double> score, o(value), magnitude(value);
      std::vector<size_t> seen;
      double high = -1e300, sum = 0;
      for (size_t j = 0; j < keys.size() / width; ++j) {
        if (j > static_cast<size_t>(token) && j < static_cast<size_t>(s.tokens)) continue;
        double dot = 0;
        for (size_t e = 0; e < nope; ++e) dot += real(query[e]) * real(keys[j * width + e]);
        for (size_t e = 0; e < rope; ++e) dot += real(query[nope + e]) * real(pe[j * rope + e]);
        seen.push_back(j);
        score.push_back(dot * scale);
        high = std::max(high, score.back());
      }
      for (size_t i = 0; i < seen.size(); ++i) {
        const double weight = std::exp(score[i] - high);
        sum += weight;
        for (size_t e = 0; e < value; ++e) {
          const double x = weight * real(keys[seen[i] * width + nope + e]);
          o[e] += x;
          magnitude[e] += std::abs(x);
        }
      }
      const std::vector<float> got = out.download(at * value, value);
      for (size_t e = 0; e < value; ++e) judge(got[e], o[e] / sum, (0x1p-8 + 4e-5) * magnitude[e] / sum + 1e-7);
      const double want = high + std::log(sum);
      judge(lse.download(at, 1)[0], want, 2e-5 * (1 + std::abs(want)));
    }
    return most;
  }
};

void measure_all(bench::Report& report) {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "bench", "stream");
  Blas blas("bench");
  for (const Shape& s :
       {Shape{4096, 61440, 128, 8192}, Shape{4096, 61440, 128, 16384}, Shape{4096, 61440, 128, 32768},
        Shape{4096, 61440, 128, 61440}, Shape{512, 61440, 128, 16384}, Shape{2048, 30000, 16, 16384}}) {
    const std::string name = std::to_string(s.tokens) + " over " + std::to_string(s.context) + ", h" +
                             std::to_string(s.heads) + ", chunks of " + std::to_string(s.chunk);
    if (!report.wants(name)) continue;
    Prefill p(s, blas, stream);
    // One run of all parts moves hundreds of megabytes: its inputs have left the caches when the next begins.
    const auto time = [&](const std::function<void(int)>& parts) {
      return bench::time_calls(stream, 1, report.replays(), parts);
    };
    const auto each_chunk = [&](void (Prefill::*part)(int), int first) {
      return time([&, part, first](int) {
               for (int c = 0; c < p.chunks(); ++c) (p.*part)(first + c);
             })
          .median;
    };
    p.whole();
    const bench::Times whole = time([&](int) { p.whole(); });
    const double causal = time([&](int) { p.attend(0); }).median, gather = each_chunk(&Prefill::gather, 0),
                 product = each_chunk(&Prefill::expand, 0), attend = each_chunk(&Prefill::attend, 1);
    const double flops = 2.0 * s.tokens * s.context * s.heads * (nope + rope + value);
    const double error = p.worst();
    report.add({{"op", "context_chunk"},
                {"shape", name},
                {"tokens", s.tokens},
                {"context", s.context},
                {"heads", s.heads},
                {"chunk", s.chunk},
                {"causal_us", bench::rounded(causal, 1)},
                {"gather_us", bench::rounded(gather, 1)},
                {"product_us", bench::rounded(product, 1)},
                {"attend_us", bench::rounded(attend, 1)},
                {"attend_tflop_per_s", bench::rounded(flops / attend * 1e-6, 1)},
                {"error_of_bound", bench::rounded(error, 3)}},
               whole, error <= 1.01);
  }
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace mla::cuda

int main(int argc, char** argv) {
  return mla::cuda::bench::run(
      argc, argv,
      {.columns = {"causal_us", "gather_us", "product_us", "attend_us", "attend_tflop_per_s", "error_of_bound"}},
      mla::cuda::measure_all);
}
