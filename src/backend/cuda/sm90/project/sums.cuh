// How kernels here end: sums of a cluster's CTAs are added in the order of their ranks and stored.
#pragma once

#include "backend/cuda/core/cluster.cuh"
#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/mma.cuh"
#include "backend/cuda/sm90/project/quantised.hpp"

namespace mla::cuda::sm90 {

/// The first n of kWide outputs, in one store where they lie so.
template <class T, int kWide>
__device__ __forceinline__ void store_outputs(T* y, const float (&sums)[kWide], int n) {
  Pack<T, kWide> all;
#pragma unroll
  for (int k = 0; k < kWide; ++k) all.at[k] = narrow<T>(sums[k]);
  if (n >= kWide && reinterpret_cast<uintptr_t>(y) % sizeof all == 0) {
    *reinterpret_cast<Pack<T, kWide>*>(y) = all;
  } else {
#pragma unroll
    for (int k = 0; k < kWide; ++k)
      if (k < n) y[k] = all.at[k];
  }
}

/// `sums`: [rows][pitch] in shared memory, at the same place in every CTA of the cluster, each CTA's own; `rank`: of
/// this CTA. Each stores a part of the rows' outputs, by its first kThreads threads; others' sums are complete, and
/// stay until all are done.
template <int kRows, int kOuts, int kPitch, int kThreads>
__device__ __forceinline__ void store_sums(const QuantisedProduct& a, const float* sums, int rank, int cluster,
                                           int64_t head, int64_t first_row, int64_t first_out) {
  constexpr int kWide = kPitch % 4 == 0 ? 4 : 2;
  const int rows = static_cast<int>(min(a.rows - first_row, int64_t{kRows})),
            outs = static_cast<int>(min(a.out - first_out, int64_t{kOuts}));
  for (int e = (rank * kThreads + static_cast<int>(threadIdx.x)) * kWide; e < rows * kOuts;
       e += cluster * kThreads * kWide) {
    const int n = e / kOuts, o = e % kOuts;
    const int64_t to = a.y_rows ? a.y_rows[first_row + n] : first_row + n;
    if (o >= outs || to < 0) continue;
    const float* const at = sums + n * kPitch + o;
    float sum[kWide];
#pragma unroll
    for (int k = 0; k < kWide; ++k) sum[k] = cluster > 1 ? 0.0f : at[k];
    for (int c = 0; c < cluster && cluster > 1; ++c) {
      const uint32_t there = map_to_cta(shared_address(at), static_cast<uint32_t>(c));
#pragma unroll
      for (int k = 0; k < kWide; ++k) sum[k] += __uint_as_float(load_remote(there + 4 * static_cast<uint32_t>(k)));
    }
    const int64_t offset = to * a.y_row + head * a.y_head + first_out + o;
    if (a.y_dtype == Dtype::bf16) store_outputs(static_cast<bf16*>(a.y) + offset, sum, outs - o);
    else store_outputs(static_cast<float*>(a.y) + offset, sum, outs - o);
  }
}

}  // namespace mla::cuda::sm90
