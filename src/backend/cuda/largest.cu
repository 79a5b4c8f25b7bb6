// Memory-bound: a thread reads up to sixteen bytes at a time, a block raises the result once.
#include <algorithm>
#include <string>

#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"
#include "core/device_largest.hpp"

namespace mla::gpu {
namespace {

using cuda::widen;

constexpr int kThreads = 256;

// Bits of |x| order as the magnitudes do; NaN's, above infinity's, are left out.
template <class T, int n>
__global__ void __launch_bounds__(kThreads)
    largest_kernel(const T* x, int64_t count, int64_t heads, int64_t groups, int64_t row, int64_t head, int64_t element,
                   unsigned* largest) {
  constexpr unsigned kInfinity = 0x7f800000u;
  unsigned most = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t g = i % groups, h = i / groups % heads, t = i / groups / heads;
    T stored[n];
    cuda::load<n != 1>(x + t * row + h * head + g * n * element, stored);
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const unsigned bits = __float_as_uint(widen(stored[e])) & 0x7fffffffu;
      if (bits <= kInfinity) most = max(most, bits);
    }
  }
#pragma unroll
  for (int d = 16; d; d /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, d));
  __shared__ unsigned warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const unsigned other : warps) most = max(most, other);
  atomicMax(largest, most);
}

template <class T>
void run(cuda::Queue& queue, const AnyView<Token, Head, In>& x, float* largest) {
  constexpr int n = 16 / sizeof(T);
  const int64_t heads = x.extent<Head>(), width = x.extent<In>();
  const bool wide = width % n == 0 && x.stride<In>() == 1 && x.stride<Token>() % n == 0 && x.stride<Head>() % n == 0 &&
                    reinterpret_cast<uintptr_t>(x.data()) % 16 == 0;
  const int64_t groups = wide ? width / n : width, count = x.extent<Token>() * heads * groups;
  if (count == 0) return;
  cuda::launch(wide ? largest_kernel<T, n> : largest_kernel<T, 1>,
               cuda::strided(count, kThreads, int64_t{queue.multiprocessors()} * 16), queue.stream(), "largest",
               "largest_kernel",
               "rows " + std::to_string(x.extent<Token>()) + ", heads " + std::to_string(heads) + ", width " +
                   std::to_string(width),
               static_cast<const T*>(x.data()), count, heads, groups, x.stride<Token>(), x.stride<Head>(),
               x.stride<In>(), reinterpret_cast<unsigned*>(largest));
}

}  // namespace

void raise_to_largest(cuda::Queue& queue, const AnyView<Token, Head, In>& x, float* largest) {
  switch (x.dtype()) {
    case Dtype::f32: return run<float>(queue, x, largest);
    case Dtype::bf16: return run<bf16>(queue, x, largest);
    case Dtype::f16: return run<f16>(queue, x, largest);
    case Dtype::fp8_e4m3: throw UnsupportedError("largest: x is fp8_e4m3; f32, bf16 and f16 are served");
  }
}

}  // namespace mla::gpu
