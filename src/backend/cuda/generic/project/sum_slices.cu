#include <string>

#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/generic/project/sum_slices.hpp"

namespace mla::cuda::generic {
namespace {

/// n neighbouring sums a thread.
template <class T, int n>
__global__ void __launch_bounds__(kBlockThreads)
    sum_kernel(const float* slices, int64_t count, int64_t slice, int64_t rows, int64_t out, T* y, int64_t y_row) {
  const int64_t all = rows * out / n;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x; i < all;
       i += static_cast<int64_t>(gridDim.x) * kBlockThreads) {
    const float* const at = slices + i * n;
    auto sum = *reinterpret_cast<const Pack<float, n>*>(at);
    for (int64_t s = 1; s < count; ++s) {
      const auto next = *reinterpret_cast<const Pack<float, n>*>(at + s * slice);
#pragma unroll
      for (int e = 0; e < n; ++e) sum.at[e] += next.at[e];
    }
    Pack<T, n> narrowed;
#pragma unroll
    for (int e = 0; e < n; ++e) narrowed.at[e] = narrow<T>(sum.at[e]);
    *reinterpret_cast<Pack<T, n>*>(y + i * n / out * y_row + i * n % out) = narrowed;
  }
}

}  // namespace

void sum_slices(const Queue& queue, const SumSlices& s) {
  const int64_t rows = s.y.extent<Token>(), out = s.y.extent<Out>();
  const std::string shape =
      "rows " + std::to_string(rows) + ", out " + std::to_string(out) + ", slices " + std::to_string(s.count);
  const auto go = [&]<class T>(T* y) {
    constexpr int n = 4;
    const auto at = reinterpret_cast<uintptr_t>(y);
    const bool wide = out % n == 0 && s.y.stride<Token>() % n == 0 && at % (n * sizeof(T)) == 0 &&
                      reinterpret_cast<uintptr_t>(s.slices) % (n * sizeof(float)) == 0;
    launch(wide ? sum_kernel<T, n> : sum_kernel<T, 1>,
           strided(rows * out / (wide ? n : 1), kBlockThreads, int64_t{16} * queue.multiprocessors()), queue.stream(),
           "project", "sum of slices", shape, s.slices, s.count, s.most_rows * out, rows, out, y, s.y.stride<Token>());
  };
  if (s.y.dtype() == Dtype::f32) go(static_cast<float*>(s.y.data()));
  else go(static_cast<bf16*>(s.y.data()));
}

}  // namespace mla::cuda::generic
