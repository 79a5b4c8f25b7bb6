// Query rows of attend_expanded's kernels in a math warpgroup's registers: the softmax's state, and outputs on their
// way to memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "backend/cuda/core/warpgroup.cuh"

namespace mla::cuda::sm90 {

template <class Element>
__device__ __forceinline__ uint32_t packed(float low, float high) {
  uint32_t r;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

/// Softmax state of a thread's two rows: r / 4 and r / 4 + 8 of its warp's 16. Exponents are of 2.
struct RowState {
  float reference[2] = {-INFINITY, -INFINITY};  // what the scores are measured from; -inf: nothing seen so far
  float sum[2] = {0.0f, 0.0f};                  // of this thread's columns
};

/// Largest of a thread's scores of row h, in four chains.
template <int n>
__device__ __forceinline__ float row_maximum(const float (&s)[n], int h) {
  float high[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) high[i] = s[4 * (i / 2) + 2 * h + i % 2];
#pragma unroll
  for (int j = 2; j < n / 4; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) high[2 * (j % 2) + e] = fmaxf(high[2 * (j % 2) + e], s[4 * j + 2 * h + e]);
  return fmaxf(fmaxf(high[0], high[1]), fmaxf(high[2], high[3]));
}

/// Raises the references of rows that ask for it in one of their four threads, to the rows' maxima; `factor` is what
/// sums and outputs so far must be multiplied by, exactly 1 where nothing changes.
__device__ __forceinline__ void raise_references(RowState& state, const bool (&ask)[2], const float (&high)[2],
                                                 float (&factor)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = high[h];
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    int asked = ask[h];
    asked |= __shfl_xor_sync(~0u, asked, 1);
    asked |= __shfl_xor_sync(~0u, asked, 2);
    const float before = state.reference[h];
    const bool raise = asked && top > before;
    factor[h] = raise ? exp2_approx(before - top) : 1.0f;
    if (raise) state.reference[h] = top;
    state.sum[h] *= factor[h];
  }
}
__device__ __forceinline__ float offset_of(float reference) { return reference == -INFINITY ? 0.0f : reference; }

// A thread has columns 8 j + 2 quad + {0, 1} of its row, j = 0, 1, ...: an octet of columns is four threads'.

/// Four words of each of a row's four threads: afterwards thread t has word t of threads 0 to 3.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int quad) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = quad & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? w[i] : w[i | bit], bit);
      (upper ? w[i] : w[i | bit]) = got;
    }
  }
}

/// One row's outputs: the four threads of a row exchange columns, so that each stores 16 bytes of eight neighbouring
/// ones.
template <class Element, int n>
__device__ __forceinline__ void store_row(Element* row, const float (&o)[n], int h, float factor, bool valid) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < n / 4; j += 4) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      w[i] = packed<Element>(o[4 * (j + i) + 2 * h] * factor, o[4 * (j + i) + 2 * h + 1] * factor);
    transpose_quad(w, quad);
    if (valid) *reinterpret_cast<uint4*>(row + 8 * (j + quad)) = uint4{w[0], w[1], w[2], w[3]};
  }
}
template <int n>
__device__ __forceinline__ void store_row(float* row, const float (&o)[n], int h, float factor, bool valid) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < n / 4; ++j)
    if (valid)
      *reinterpret_cast<float2*>(row + 8 * j + 2 * quad) =
          float2{o[4 * j + 2 * h] * factor, o[4 * j + 2 * h + 1] * factor};
}

__device__ __forceinline__ float2 load_pair(const float* from) { return *reinterpret_cast<const float2*>(from); }
__device__ __forceinline__ float2 load_pair(const __nv_bfloat16* from) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from));
}
__device__ __forceinline__ float2 load_pair(const __half* from) {
  return __half22float2(*reinterpret_cast<const __half2*>(from));
}

/// o = take o + keep row, of one row that already holds outputs; where keep is 0 the row is not read.
template <class Out, int n>
__device__ __forceinline__ void merge_row(const Out* row, float (&o)[n], int h, float keep, float take) {
  constexpr int batch = 8;  // pairs asked for before the first is used
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < n / 4; j += batch) {
    float2 old[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) old[i] = keep > 0.0f ? load_pair(row + 8 * (j + i) + 2 * quad) : float2{};
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      float& a = o[4 * (j + i) + 2 * h];
      float& b = o[4 * (j + i) + 2 * h + 1];
      a = a * take + old[i].x * keep;
      b = b * take + old[i].y * keep;
    }
  }
}

}  // namespace mla::cuda::sm90
