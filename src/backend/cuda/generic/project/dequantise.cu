#include <string>

#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/generic/project/dequantise.hpp"
#include "mla/quant.hpp"

namespace mla::cuda::generic {
namespace {

constexpr int kThreads = 256;

// A value is code times scale in f32, rounded to T: what every backend multiplies.
template <class T>
__global__ void dequantise_kernel(const uint8_t* codes, const float* scales, T* to, int64_t heads, int64_t out,
                                  int64_t in, int64_t first, int64_t count, int64_t block_rows, int64_t block_cols,
                                  int64_t row_blocks, int64_t scale_stride, bool e4m3) {
  const int64_t total = heads * count * in, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) {
    const int64_t c = i % in, o = i / in % count + first, h = i / in / count;
    const int64_t at = (h * out + o) * in + c;
    const uint8_t code = e4m3 ? codes[at] : codes[at / 2] >> (at % 2 * 4) & 15;
    const float scale =
        block_rows == 0 ? scales[0] : scales[(h * row_blocks + o / block_rows) * scale_stride + c / block_cols];
    to[i] = from_float<T>((e4m3 ? widen(fp8_e4m3{code}) : from_e2m1(code)) * scale);
  }
}

}  // namespace

void dequantise(const Queue& queue, const QuantisedLinear& w, int64_t first, int64_t count, void* to) {
  const int64_t total = w.heads * count * w.in;
  if (total == 0) return;
  const LaunchConfig config = strided(total, kThreads, int64_t{queue.multiprocessors()} * 64);
  const std::string shape =
      "heads " + std::to_string(w.heads) + ", outputs " + std::to_string(count) + ", in " + std::to_string(w.in);
  for_activation(w.dtype, [&](auto element) {
    using T = decltype(element);
    launch(dequantise_kernel<T>, config, queue.stream(), "project", "dequantise", shape, w.codes.as<const uint8_t>(),
           w.scales.as<const float>(), static_cast<T*>(to), w.heads, w.out, w.in, first, count, w.scale_rows,
           w.scale_cols, w.row_blocks, w.scale_stride, w.format == WeightFormat::fp8);
  });
}

}  // namespace mla::cuda::generic
