// Memory-bound: rows of up to 1024 stay in a warp's registers, where distances below a lane's elements are its own and
// the others go by shuffles. Longer rows, which no model has, are walked in memory by a block.
#include <cmath>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"

namespace mla::cuda {
namespace generic {
namespace {

struct HadamardRows {
  float* x = nullptr;
  int64_t token = 0, head = 0;
  uint32_t heads = 1, rows = 0;  // rows of all tokens and heads
  int32_t width = 0;
  float factor = 1;
  __device__ float* row(uint32_t r) const {
    const uint32_t t = r / heads;
    return x + t * token + (r - t * heads) * head;
  }
};

template <int n, bool wide>
__global__ void __launch_bounds__(kBlockThreads) lanes_kernel(HadamardRows a) {
  const int lane = static_cast<int>(threadIdx.x % 32), i = n * lane;
  const uint32_t r = blockIdx.x * (kBlockThreads / 32) + threadIdx.x / 32;
  if (r >= a.rows) return;
  float* const row = a.row(r);
  float x[n] = {};
  if (i < a.width) load<wide>(row + i, x);
#pragma unroll
  for (int d = 1; d < n; d *= 2)
#pragma unroll
    for (int e = 0; e < n; ++e)
      if ((e & d) == 0) {
        const float low = x[e], high = x[e + d];
        x[e] = low + high;
        x[e + d] = low - high;
      }
  for (int d = 1; d * n < a.width; d *= 2)
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const float other = __shfl_xor_sync(0xffffffffu, x[e], d);
      x[e] = (lane & d) == 0 ? x[e] + other : other - x[e];
    }
#pragma unroll
  for (int e = 0; e < n; ++e) x[e] *= a.factor;
  if (i < a.width) store<wide>(x, row + i);
}

__global__ void __launch_bounds__(kBlockThreads) block_kernel(HadamardRows a) {
  float* const row = a.row(blockIdx.x);
  for (int d = 1; d < a.width; d *= 2) {
    for (int p = static_cast<int>(threadIdx.x); p < a.width / 2; p += kBlockThreads) {
      const int i = p / d * 2 * d + p % d;
      const float low = row[i], high = row[i + d];
      row[i] = low + high;
      row[i + d] = low - high;
    }
    __syncthreads();
  }
  for (int i = static_cast<int>(threadIdx.x); i < a.width; i += kBlockThreads) row[i] *= a.factor;
}

void rotate(const Queue& queue, HadamardRows a, int64_t rows) {
  if (rows == 0) return;
  const std::string what = "rows " + std::to_string(rows) + ", width " + std::to_string(a.width);
  if (rows > INT32_MAX) throw ShapeError("hadamard: too many rows for one call (" + what + ")");
  a.rows = static_cast<uint32_t>(rows);
  a.factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(a.width)));
  const auto run = [&](auto* kernel, int64_t blocks) {
    launch(kernel, {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kBlockThreads)}, queue.stream(),
           "hadamard", "hadamard kernel", what, a);
  };
  const int64_t blocks = (rows + kBlockThreads / 32 - 1) / (kBlockThreads / 32);
  const bool wide = reinterpret_cast<uintptr_t>(a.x) % 16 == 0 && a.token % 4 == 0 && a.head % 4 == 0;
  if (a.width <= 32) run(lanes_kernel<1, false>, blocks);
  else if (a.width <= 128 && wide) run(lanes_kernel<4, true>, blocks);
  else if (a.width <= 128) run(lanes_kernel<4, false>, blocks);
  else if (a.width <= 1024) run(lanes_kernel<32, false>, blocks);
  else run(block_kernel, rows);
}

}  // namespace
}  // namespace generic

void hadamard(Stream& stream, const ops::HadamardArgs& a) {
  generic::HadamardRows rows;
  if (a.q) {
    rows.x = a.q.data();
    rows.token = a.q.stride<Token>();
    rows.head = a.q.stride<IndexHead>();
    rows.heads = static_cast<uint32_t>(a.q.extent<IndexHead>());
    rows.width = static_cast<int32_t>(a.q.extent<IndexDim>());
    generic::rotate(stream.queue(), rows, a.q.extent<Token>() * a.q.extent<IndexHead>());
  }
  if (a.k) {
    rows = {};
    rows.x = a.k.data();
    rows.token = a.k.stride<Token>();
    rows.width = static_cast<int32_t>(a.k.extent<IndexDim>());
    generic::rotate(stream.queue(), rows, a.k.extent<Token>());
  }
}

}  // namespace mla::cuda
