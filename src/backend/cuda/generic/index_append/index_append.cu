// Memory-bound: a warp a token.
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/index_row.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/core/queue.hpp"

namespace mla::cuda {
namespace generic {
namespace {

template <class T, bool wide>
__global__ void __launch_bounds__(kBlockThreads)
    index_append_kernel(const float* keys, int64_t stride, const int32_t* slots, int64_t tokens, IndexMemory cache) {
  take_turn();
  constexpr int n = wide ? 4 : 1;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kBlockThreads / 32) + threadIdx.x / 32;
  if (token >= tokens) return;
  const int32_t slot = slots[token];
  if (slot < 0) return;
  const IndexRow<T> row = IndexRow<T>::at(cache, slot);
  const float* const from = keys + token * stride;
  if constexpr (dtype_of<T>::value == Dtype::fp8_e4m3) {
    const float scale = quantise_row<wide, n>([from](int i, float(&x)[n]) { load<wide>(from + i, x); }, row.row(),
                                              cache.dim, cache.powers_of_two, lane);
    if (lane == 0) row.set_scale(scale);
  } else {
    for (int i = n * lane; i < cache.dim; i += 32 * n) {
      float x[n];
      T y[n];
      load<wide>(from + i, x);
      narrow_all(x, y);
      store<wide>(y, row.row() + i);
    }
  }
}

}  // namespace
}  // namespace generic

void index_append(Stream& stream, const ops::IndexAppendArgs& a) {
  const Queue& queue = stream.queue();
  const int64_t tokens = static_cast<int64_t>(a.slots.size()), warps = kBlockThreads / 32,
                blocks = (tokens + warps - 1) / warps, stride = a.keys.stride<Token>();
  if (tokens == 0) return;
  const IndexMemory cache("index_append", a.cache);
  const std::string what = "tokens " + std::to_string(tokens) + ", dim " + std::to_string(cache.dim);
  if (blocks > INT32_MAX) throw ShapeError("index_append: too many rows for one call (" + what + ")");
  const bool wide = cache.wide(4) && reinterpret_cast<uintptr_t>(a.keys.data()) % 16 == 0 && stride % 4 == 0;
  const auto run = [&](auto* kernel) {
    launch(kernel,
           {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kBlockThreads), .overlap = queue.hopper()},
           queue.stream(), "index_append", "index_append_kernel", what, a.keys.data(), stride,
           queue.reads(a.slots, "index_append", "slots"), tokens, cache);
  };
  using namespace generic;
  switch (cache.format) {
    case IndexCacheFormat::f32: return run(wide ? index_append_kernel<float, true> : index_append_kernel<float, false>);
    case IndexCacheFormat::bf16: return run(wide ? index_append_kernel<bf16, true> : index_append_kernel<bf16, false>);
    case IndexCacheFormat::fp8:
      return run(wide ? index_append_kernel<fp8_e4m3, true> : index_append_kernel<fp8_e4m3, false>);
  }
}

}  // namespace mla::cuda
