#include <string>

#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/generic/project/sum_slices.hpp"

namespace mla::cuda::generic {
namespace {

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    sum_kernel(const float* slices, int64_t count, int64_t slice, int64_t rows, int64_t out, T* y, int64_t y_row) {
  const int64_t all = rows * out;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x; i < all;
       i += static_cast<int64_t>(gridDim.x) * kBlockThreads) {
    float sum = slices[i];
    for (int64_t s = 1; s < count; ++s) sum += slices[s * slice + i];
    y[i / out * y_row + i % out] = narrow<T>(sum);
  }
}

}  // namespace

void sum_slices(const Queue& queue, const SumSlices& s) {
  const int64_t rows = s.y.extent<Token>(), out = s.y.extent<Out>();
  const LaunchConfig config = strided(rows * out, kBlockThreads, int64_t{16} * queue.multiprocessors());
  const std::string shape =
      "rows " + std::to_string(rows) + ", out " + std::to_string(out) + ", slices " + std::to_string(s.count);
  const auto go = [&]<class T>(T* y) {
    launch(sum_kernel<T>, config, queue.stream(), "project", "sum of slices", shape, s.slices, s.count,
           s.most_rows * out, rows, out, y, s.y.stride<Token>());
  };
  if (s.y.dtype() == Dtype::f32) go(static_cast<float*>(s.y.data()));
  else go(static_cast<bf16*>(s.y.data()));
}

}  // namespace mla::cuda::generic
