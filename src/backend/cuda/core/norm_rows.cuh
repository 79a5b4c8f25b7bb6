// Kernels of norm and layer_norm. Memory-bound: a row is read once, sixteen bytes a thread, and stays in registers for
// its sums and its result. The threads of a row follow from its length alone, and so do its bits.
#pragma once

#include <algorithm>
#include <string>

#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/core/queue.hpp"
#include "mla/error.hpp"

namespace mla::cuda {

/// About the mean and with bias (LayerNorm), or neither (RMSNorm).
template <class T>
struct NormRows {
  const T* x = nullptr;
  T* y = nullptr;
  int64_t x_row = 0, y_row = 0, rows = 0;
  int32_t width = 0;
  const float *weight = nullptr, *bias = nullptr;
  float eps = 0;
  // RMSNorm's rows grow with their positions; null: they do not.
  const int32_t* positions = nullptr;
  float beta = 0;
  int32_t length = 1;
};

constexpr int kNormThreads = 1024;  // a row's, at most

/// Sum over the threads along x, which are whole warps or one part of a warp that is a power of two.
__device__ inline float row_sum(float s, float* partial) {
  const int lanes = static_cast<int>(blockDim.x < 32 ? blockDim.x : 32);
  for (int d = lanes / 2; d; d /= 2) s += __shfl_xor_sync(0xffffffffu, s, d);
  if (blockDim.x <= 32) return s;
  const int warp = static_cast<int>(threadIdx.x / 32), warps = static_cast<int>(blockDim.x / 32);
  partial += threadIdx.y * 32;
  if (threadIdx.x % 32 == 0) partial[warp] = s;
  __syncthreads();
  s = static_cast<int>(threadIdx.x % 32) < warps ? partial[threadIdx.x % 32] : 0.0f;
  __syncthreads();
  return warp_sum(s);
}

/// Threads along x share a row, those along y have others. n elements a thread at a time; `rounds` of them in
/// registers, or, with 0 rounds, any number, read again for each pass.
template <class T, int n, int rounds, bool mean_and_bias>
__global__ void __launch_bounds__(kNormThreads) norm_rows_kernel(NormRows<T> a) {
  __shared__ float partial[32 * 8];
  take_turn();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool real = row < a.rows;
  const T* const from = a.x + (real ? row : 0) * a.x_row;
  T* const to = a.y + (real ? row : 0) * a.y_row;
  const int step = n * static_cast<int>(blockDim.x), start = n * static_cast<int>(threadIdx.x);
  constexpr int kept = rounds > 0 ? rounds : 1;
  T x[kept][n];
  // f(round, first element) for this thread's parts.
  const auto each = [&](auto&& f) {
    if constexpr (rounds > 0) {
#pragma unroll
      for (int k = 0; k < rounds; ++k)
        if (const int i = start + k * step; i < a.width && real) f(x[k], i);
    } else {
      for (int i = start; i < a.width && real; i += step) {
        load<(n > 1)>(from + i, x[0]);
        f(x[0], i);
      }
    }
  };
  if constexpr (rounds > 0) each([&](T(&part)[n], int i) { load<(n > 1)>(from + i, part); });
  const float inverse_width = 1.0f / static_cast<float>(a.width);
  float mean = 0, rest = 0;
  if constexpr (mean_and_bias) {
    float sum = 0;
    each([&](const T(&part)[n], int) {
#pragma unroll
      for (int e = 0; e < n; ++e) sum += widen(part[e]);
    });
    mean = row_sum(sum, partial) * inverse_width;
  }
  float squares = 0;
  each([&](const T(&part)[n], int) {
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const float c = widen(part[e]) - mean;
      squares += c * c;
      rest += c;
    }
  });
  float variance = row_sum(squares, partial) * inverse_width;
  if constexpr (mean_and_bias) {
    // What rounding left out of the mean: rows may lie far from 0.
    rest = row_sum(rest, partial) * inverse_width;
    variance = fmaxf(variance - rest * rest, 0.0f);
  }
  float inverse = 1.0f / sqrtf(variance + a.eps);
  if constexpr (!mean_and_bias)
    if (a.positions && real) inverse *= 1.0f + a.beta * log1pf(static_cast<float>(a.positions[row] / a.length));
  each([&](const T(&part)[n], int i) {
    float w[n], y[n], b[n] = {};
    load<(n > 1)>(a.weight + i, w);
    if constexpr (mean_and_bias) load<(n > 1)>(a.bias + i, b);
#pragma unroll
    for (int e = 0; e < n; ++e) {
      y[e] = widen(part[e]) * inverse * w[e];
      if constexpr (mean_and_bias) y[e] = (widen(part[e]) - mean - rest) * inverse * w[e] + b[e];
    }
    T out[n];
    narrow_all(y, out);
    store<(n > 1)>(out, to + i);
  });
}

template <bool mean_and_bias, class T>
void norm_rows(const Queue& queue, const NormRows<T>& a, std::string_view op) {
  if (a.rows == 0 || a.width == 0) return;
  constexpr int n = 16 / static_cast<int>(sizeof(T));
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const bool wide = a.width % n == 0 && a.x_row % n == 0 && a.y_row % n == 0 && aligned(a.x) && aligned(a.y) &&
                    aligned(a.weight) && aligned(a.bias);
  const int64_t parts = wide ? a.width / n : a.width;
  const bool fits = wide && parts <= 2 * kNormThreads;
  // As many threads as make two rounds of a row; a quarter or half a warp for short ones.
  int64_t threads = 256;
  if (fits)
    for (threads = 8; threads < 32 && 2 * threads < parts;) threads *= 2;
  if (fits && 2 * threads < parts) threads = ((parts + 1) / 2 + 31) / 32 * 32;
  const int64_t per_block = threads >= 256 ? 1 : threads > 32 ? 256 / threads : 128 / threads;
  const int64_t blocks = (a.rows + per_block - 1) / per_block;
  const std::string what = "rows " + std::to_string(a.rows) + ", width " + std::to_string(a.width);
  if (blocks > INT32_MAX) throw ShapeError(std::string(op) + ": too many rows for one call (" + what + ")");
  const LaunchConfig config{.grid = dim3(static_cast<unsigned>(blocks)),
                            .block = dim3(static_cast<unsigned>(threads), static_cast<unsigned>(per_block)),
                            .overlap = queue.hopper()};
  launch(!wide   ? norm_rows_kernel<T, 1, 0, mean_and_bias>
         : !fits ? norm_rows_kernel<T, n, 0, mean_and_bias>
                 : norm_rows_kernel<T, n, 2, mean_and_bias>,
         config, queue.stream(), op, "norm_rows_kernel", what, a);
}

}  // namespace mla::cuda
