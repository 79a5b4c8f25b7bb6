// Arithmetic that both kernels of attend_latent share.
#pragma once

#include "backend/cuda/core/wgmma.cuh"
#include "backend/cuda/sm90/attend_latent/schedule.cuh"

namespace mla::cuda::latent {

// Named barriers: all math threads; then the wide kernel's, of each half of them, of the warpgroup that makes
// scores, and of all three.
constexpr int math_threads = 256, math_barrier = 1, half_barrier = 2, scores_barrier = 4, merge_barrier = 5;

template <class T>
struct Pack;
template <>
struct Pack<__nv_bfloat16> {
  static __device__ uint32_t two(float a, float b) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<const uint32_t&>(v);
  }
};
template <>
struct Pack<__half> {
  static __device__ uint32_t two(float a, float b) {
    const __half2 v = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t&>(v);
  }
};

/// Two bf16 as f16, saturating.
__device__ inline uint32_t half_of_bf16(uint32_t two) {
  const float2 v = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(two));
  const auto clamp = [](float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; };
  return Pack<__half>::two(clamp(v.x), clamp(v.y));
}

/// Rounds bf16 queries in shared memory to f16, saturating; by `count` threads in a row, who have this barrier.
template <class T, int barrier = math_barrier, int count = math_threads>
__device__ void convert_queries(char* q, int bytes) {
  if constexpr (sizeof(T) == 2 && !__is_same(T, __nv_bfloat16)) {
    for (int at = threadIdx.x % count * 4; at < bytes; at += count * 4) {
      auto& two = *reinterpret_cast<uint32_t*>(q + at);
      two = half_of_bf16(two);
    }
    fence_async_proxy();
    barrier_sync(barrier, count);
  }
}

/// Maxima move only when a row's maximum grew by more than this (log2): probabilities stay below 2^8.
constexpr float lazy_growth = 8.0f;

}  // namespace mla::cuda::latent
