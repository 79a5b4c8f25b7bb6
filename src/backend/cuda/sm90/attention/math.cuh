// Arithmetic that both kernels share.
#pragma once

#include "backend/cuda/core/static_for.cuh"
#include "backend/cuda/core/wgmma.cuh"
#include "backend/cuda/sm90/attention/schedule.cuh"

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

/// Two bf16 as f16, saturating; infinities stay.
__device__ inline uint32_t half_of_bf16(uint32_t two) {
  const float2 v = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(two));
  const auto clamp = [](float x) { return fabsf(x) > 65504.0f && fabsf(x) < INFINITY ? copysignf(65504.0f, x) : x; };
  return Pack<__half>::two(clamp(v.x), clamp(v.y));
}

/// Rounds bf16 queries in shared memory to f16, saturating; by `count` threads in a row, who have this barrier.
template <class T, int barrier = math_barrier, int count = math_threads>
__device__ void convert_queries(const Params& p, char* q, int bytes) {
  if constexpr (sizeof(T) == 2 && !__is_same(T, __nv_bfloat16)) {
    if (p.q_f16) return;
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

// ---- Keys that only some of a tile's rows see. The others' probability of 0 must not meet what is no number: such
// elements become 0 before values are multiplied. Rows that see the key are NaN all the same, by its score: the values
// are part of it. Scores of the block are done by then.

/// Two 16-bit elements, infinities and NaN zeroed.
template <class T>
__device__ inline uint32_t numbers_of(uint32_t two) {
  constexpr uint32_t exponent = sizeof(T) == 2 && __is_same(T, __nv_bfloat16) ? 0x7f80 : 0x7c00;
  if ((two & exponent) == exponent) two &= 0xffff0000u;
  if ((two & exponent << 16) == exponent << 16) two &= 0xffffu;
  return two;
}
/// Four e4m3, NaN zeroed: it has no infinities.
__device__ inline uint32_t numbers_of_e4m3(uint32_t four) { return four & ~__vcmpeq4(four & 0x7f7f7f7fu, 0x7f7f7f7fu); }
__device__ inline float number_of(float x) { return fabsf(x) < INFINITY ? x : 0.0f; }

/// Where they begin in an item: positions from there on are hidden from the tile's first row.
__device__ inline int hidden_from(const Params& p, const Item& it) {
  return min(it.context + p.by_heads.divide(it.first_row) + 1, it.positions);
}
/// Of rows [first, last) of four boxes of 64 rows x 128 bytes; by the 128 threads that call it.
template <class T>
__device__ inline void zero_nonfinite(char* boxes, int first, int last) {
#pragma unroll 1
  for (int at = first * 8 + threadIdx.x % 128; at < last * 8; at += 128)
#pragma unroll 1
    for (int box = 0; box < 4; ++box) {
      uint4& v = *reinterpret_cast<uint4*>(boxes + box * (block_tokens * 128) + at * 16);
      v = {numbers_of<T>(v.x), numbers_of<T>(v.y), numbers_of<T>(v.z), numbers_of<T>(v.w)};
    }
  fence_async_proxy();
}
/// Of one row's 512 e4m3: each fourth 16 bytes from `at` on, which the thread itself has multiplied; before a barrier.
__device__ inline void zero_nan_codes(char* at) {
#pragma unroll 1
  for (int box = 0; box < 8; ++box) {
    uint4& v = *reinterpret_cast<uint4*>(at + box * 64);
    v = {numbers_of_e4m3(v.x), numbers_of_e4m3(v.y), numbers_of_e4m3(v.z), numbers_of_e4m3(v.w)};
  }
  fence_async_proxy();  // before a later copy to the same place
}

/// A scale that the device alone knows, once the grids before are complete. Not kept in a register.
__device__ inline float given(const float* scale) {
  float x = 1;
  if (scale) asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(scale));
  return x;
}

/// Is a (token, head) row NaN though all its logits are -inf? A +inf in its query makes it so, whatever its keys'
/// signs.
__device__ inline bool lost_to_query(const Params& p, int64_t row) {
  const auto* q = static_cast<const uint16_t*>(p.q) + row * p.q_width;
  const unsigned infinity = p.q_f16 ? 0x7c00 : 0x7f80;
  bool found = false;
#pragma unroll 1
  for (int i = 0; i < p.q_width; ++i) found |= q[i] == infinity || (q[i] & 0x7fffu) > infinity;  // or NaN
  return found;
}

}  // namespace mla::cuda::latent
