// Times prefill over cached context, part by part and as a whole: new tokens of one request attend their cached context
// chunk by chunk. A chunk is gathered from the paged cache, expanded by the kv_up product (cuBLASLt) and attended,
// merging into what the chunks before it left; the first part is the causal attention among the new tokens.
//   context_chunk_bench [file.json]     cuBLASLt is looked for where the loader looks, or at $MLA_CUBLASLT
#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <string>

#include "backend/cuda/sm90/attend_expanded/attend_expanded.hpp"
#include "cuda/device.hpp"

namespace mla::cuda {
namespace {

using namespace test;

constexpr int nope = 128, rope = 64, value = 128, latent = 512, row = latent + rope, page = 64;
constexpr int replays = 12;
// FlashAttention-3 at 128 heads, causal 8K and 16K, on another H200 (keys concatenated beforehand).
constexpr double peer_tflops[2] = {609, 669};

struct Shape {
  int tokens, context, heads, chunk;
};

// ---- cuBLASLt ------------------------------------------------------------------------------------------------------

/// out[rows, n] = a[rows, k (stride lda)] w[n, k]^T, bf16 in and out, f32 sums.
class Product {
 public:
  Product() {
    const char* named = std::getenv("MLA_CUBLASLT");
    for (const char* name : {named, "libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"})
      if (name && !library_) library_ = dlopen(name, RTLD_NOW);
    if (!library_) throw DeviceError("bench: no libcublasLt found: give its path as MLA_CUBLASLT");
    expect(entry<decltype(&cublasLtCreate)>("cublasLtCreate")(&handle_), "cublasLtCreate");
    workspace_ = DeviceArray<uint8_t>(workspace_bytes);
  }
  void operator()(cudaStream_t stream, const uint16_t* a, int lda, int rows, const uint16_t* w, int n, int k,
                  uint16_t* out) {
    Plan& plan = planned(lda, rows, n, k);
    const float one = 1, zero = 0;
    static const auto matmul = entry<decltype(&cublasLtMatmul)>("cublasLtMatmul");
    expect(matmul(handle_, plan.op, &one, w, plan.w, a, plan.a, &zero, out, plan.out, out, plan.out, &plan.algo,
                  workspace_.data(), workspace_bytes, stream),
           "cublasLtMatmul");
  }

 private:
  static constexpr size_t workspace_bytes = 32 << 20;
  struct Plan {
    int lda, rows, n, k;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t w, a, out;
    cublasLtMatmulAlgo_t algo;
  };
  template <class F>
  F entry(const char* name) {
    void* found = dlsym(library_, name);
    if (!found) throw DeviceError(std::string("bench: libcublasLt has no ") + name);
    return reinterpret_cast<F>(found);
  }
  static void expect(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS)
      throw DeviceError(std::string("bench: ") + what + ": cuBLAS status " + std::to_string(static_cast<int>(status)));
  }
  Plan& planned(int lda, int rows, int n, int k) {
    for (Plan& p : plans_)
      if (p.lda == lda && p.rows == rows && p.n == n && p.k == k) return p;
    Plan p{lda, rows, n, k, {}, {}, {}, {}, {}};
    const auto layout = entry<decltype(&cublasLtMatrixLayoutCreate)>("cublasLtMatrixLayoutCreate");
    const auto u64 = [](int x) { return static_cast<uint64_t>(x); };
    expect(
        entry<decltype(&cublasLtMatmulDescCreate)>("cublasLtMatmulDescCreate")(&p.op, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "cublasLtMatmulDescCreate");
    const cublasOperation_t transposed = CUBLAS_OP_T;
    expect(entry<decltype(&cublasLtMatmulDescSetAttribute)>("cublasLtMatmulDescSetAttribute")(
               p.op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
           "cublasLtMatmulDescSetAttribute");
    // Column-major: w [k, n] transposed, a [k, rows], out [n, rows].
    expect(layout(&p.w, CUDA_R_16BF, u64(k), u64(n), k), "cublasLtMatrixLayoutCreate");
    expect(layout(&p.a, CUDA_R_16BF, u64(k), u64(rows), lda), "cublasLtMatrixLayoutCreate");
    expect(layout(&p.out, CUDA_R_16BF, u64(n), u64(rows), n), "cublasLtMatrixLayoutCreate");
    cublasLtMatmulPreference_t preference;
    expect(entry<decltype(&cublasLtMatmulPreferenceCreate)>("cublasLtMatmulPreferenceCreate")(&preference),
           "cublasLtMatmulPreferenceCreate");
    expect(entry<decltype(&cublasLtMatmulPreferenceSetAttribute)>("cublasLtMatmulPreferenceSetAttribute")(
               preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof workspace_bytes),
           "cublasLtMatmulPreferenceSetAttribute");
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    expect(entry<decltype(&cublasLtMatmulAlgoGetHeuristic)>("cublasLtMatmulAlgoGetHeuristic")(
               handle_, p.op, p.w, p.a, p.out, p.out, preference, 1, &result, &found),
           "cublasLtMatmulAlgoGetHeuristic");
    if (found == 0) throw DeviceError("bench: cuBLASLt has no algorithm for the kv_up product");
    p.algo = result.algo;
    plans_.push_back(p);
    return plans_.back();
  }

  void* library_ = nullptr;
  cublasLtHandle_t handle_ = nullptr;
  DeviceArray<uint8_t> workspace_;
  std::vector<Plan> plans_;
};

// ---- inputs --------------------------------------------------------------------------------------------------------

__global__ void fill_normal(uint16_t* data, int64_t count, uint32_t seed, float size) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t z = (static_cast<uint64_t>(seed) << 40) + static_cast<uint64_t>(i) + 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    const float a = (static_cast<float>(z & 0xffffff) + 1.0f) / 16777217.0f,
                b = static_cast<float>((z >> 24) & 0xffffff) / 16777216.0f;
    const uint32_t u = __float_as_uint(size * sqrtf(-2.0f * logf(a)) * cospif(2.0f * b));
    data[i] = static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
}

/// Rows [start, start + count) of a request's paged cache to flat rows.
__global__ void gather_rows(const uint4* cache, const int32_t* block_table, int start, int count, uint4* out) {
  constexpr int width = row * 2 / 16;
  const int64_t all = int64_t{count} * width;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < all; i += int64_t{gridDim.x} * blockDim.x) {
    const int position = start + static_cast<int>(i / width);
    out[i] = cache[(int64_t{block_table[position / page]} * page + position % page) * width + i % width];
  }
}

struct Prefill {
  Shape s;
  int kv;  // elements of an expanded row
  DeviceArray<uint16_t> cache, weights, q, kv_new, pe_new, rows, expanded;
  DeviceArray<int32_t> block_table, workspace;
  DeviceArray<float> out, lse;
  DeviceArray<ExpandedItem> items;  // causal, then one a chunk
  Product& product;
  cudaStream_t stream;

  Prefill(const Shape& shape, Product& gemm, cudaStream_t on)
      : s(shape), kv(shape.heads * (nope + value)), product(gemm), stream(on) {
    const auto array = [&](int64_t count, uint32_t seed, float size) {
      DeviceArray<uint16_t> a(count);
      fill_normal<<<1024, 256, 0, stream>>>(a.data(), count, seed, size);
      check(cudaGetLastError(), "bench", "fill");
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
    gather_rows<<<132 * 8, 256, 0, stream>>>(reinterpret_cast<const uint4*>(cache.data()), block_table.data(),
                                             c * s.chunk, length(c), reinterpret_cast<uint4*>(rows.data()));
    check(cudaGetLastError(), "bench", "gather");
  }
  void expand(int c) { product(stream, rows.data(), row, length(c), weights.data(), kv, latent, expanded.data()); }
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

  /// Median microseconds of a captured call.
  double time(const std::function<void()>& call) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "bench", "capture");
    call();
    check(cudaStreamEndCapture(stream, &graph), "bench", "capture");
    check(cudaGraphInstantiate(&exec, graph, 0), "bench", "instantiate");
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "bench", "event");
    check(cudaEventCreate(&end), "bench", "event");
    std::vector<double> us;
    for (int i = 0; i < replays + 2; ++i) {
      check(cudaEventRecord(begin, stream), "bench", "event");
      check(cudaGraphLaunch(exec, stream), "bench", "replay");
      check(cudaEventRecord(end, stream), "bench", "event");
      check(cudaEventSynchronize(end), "bench", "replay");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "bench", "event");
      if (i >= 2) us.push_back(1e3 * static_cast<double>(ms));
    }
    std::ranges::sort(us);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return us[us.size() / 2];
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

int main(int argc, char** argv) {
  if (!have_hopper()) {
    std::printf("no CUDA device: skipped\n");
    return 0;
  }
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "bench", "device");
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "bench", "stream");
  Product product;
  std::string json = std::string("{\n  \"device\": \"") + device.name +
                     "\",\n  \"command\": \"context_chunk_bench FILE\",\n  \"rows\": [";
  bool good = true, comma = false;
  std::printf("%6s %7s %5s %6s | %9s %9s %9s %9s | %9s %8s | %9s %9s | %6s\n", "new", "context", "heads", "chunk",
              "causal us", "gather", "product", "attend", "whole us", "TFLOP/s", "peer slow", "peer fast", "error");
  for (const Shape& s :
       {Shape{4096, 61440, 128, 8192}, Shape{4096, 61440, 128, 16384}, Shape{4096, 61440, 128, 32768},
        Shape{4096, 61440, 128, 61440}, Shape{512, 61440, 128, 16384}, Shape{2048, 30000, 16, 16384}}) {
    Prefill p(s, product, stream);
    const auto chunks = [&](void (Prefill::*part)(int), int first) {
      return p.time([&] {
        for (int c = 0; c < p.chunks(); ++c) (p.*part)(first + c);
      });
    };
    p.whole();
    const double whole = p.time([&] { p.whole(); }), causal = p.time([&] { p.attend(0); }),
                 gather = chunks(&Prefill::gather, 0), product_us = chunks(&Prefill::expand, 0),
                 attend = chunks(&Prefill::attend, 1);
    const double per_pair = 2.0 * s.heads * (nope + rope + value), n = s.tokens;
    const double flops = per_pair * n * s.context, causal_flops = per_pair * n * (n + 1) / 2;
    double peer[2];
    for (int i = 0; i < 2; ++i) peer[i] = gather + product_us + (flops + causal_flops) / peer_tflops[i] * 1e-6;
    const double error = p.worst();
    const bool ok = error <= 1.01;
    good &= ok;
    std::printf("%6d %7d %5d %6d | %9.0f %9.0f %9.0f %9.0f | %9.0f %8.1f | %9.0f %9.0f | %6.2f%s\n", s.tokens,
                s.context, s.heads, s.chunk, causal, gather, product_us, attend, whole, flops / attend * 1e-6, peer[0],
                peer[1], error, ok ? "" : " WRONG");
    std::fflush(stdout);
    char text[600];
    std::snprintf(text, sizeof text,
                  "%s\n    {\"tokens\": %d, \"context\": %d, \"heads\": %d, \"chunk\": %d, \"causal_us\": %.1f, "
                  "\"gather_us\": %.1f, \"product_us\": %.1f, \"attend_us\": %.1f, \"attend_tflops\": %.1f, "
                  "\"whole_us\": %.1f, \"peer_us\": [%.1f, %.1f], \"error_of_bound\": %.3f, \"ok\": %s}",
                  comma ? "," : "", s.tokens, s.context, s.heads, s.chunk, causal, gather, product_us, attend,
                  flops / attend * 1e-6, whole, peer[0], peer[1], error, ok ? "true" : "false");
    json += text;
    comma = true;
  }
  json += "\n  ]\n}\n";
  if (argc > 1) {
    std::FILE* f = std::fopen(argv[1], "w");
    if (!f) {
      std::fprintf(stderr, "context_chunk_bench: cannot write %s\n", argv[1]);
      return 1;
    }
    std::fputs(json.c_str(), f);
    std::fclose(f);
  }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace mla::cuda

int main(int argc, char** argv) try { return mla::cuda::main(argc, argv); } catch (const std::exception& e) {
  std::fprintf(stderr, "context_chunk_bench: %s\n", e.what());
  return 1;
}
