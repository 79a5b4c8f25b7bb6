// Codes of weights as the bf16 numbers they stand for, by integer operations and a product: exact.
#pragma once

#include <cstdint>

namespace mla::cuda::sm90 {

__device__ __forceinline__ uint32_t multiply_pair(uint32_t x, uint32_t factor) {
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(factor), "r"(0x80008000u));  // plus -0
  return y;
}

// e4m3 codes as bf16, two a word, each code the upper half's byte before. Their bits are those of bf16 numbers 2^120
// times smaller, subnormal ones too.
__device__ __forceinline__ uint32_t widen_bytes_e4m3(uint32_t x) {
  return multiply_pair((x & 0x80008000u) | (x >> 4 & 0x07f007f0u), 0x7b807b80u);
}
__device__ __forceinline__ void widen_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
  low = widen_bytes_e4m3(__byte_perm(codes, 0, 0x1404)), high = widen_bytes_e4m3(__byte_perm(codes, 0, 0x3424));
}
// The lower two of four codes, or the upper two.
__device__ __forceinline__ uint32_t widen_two_e4m3(uint32_t codes, int upper) {
  return widen_bytes_e4m3(__byte_perm(codes, 0, upper ? 0x3424 : 0x1404));
}
// Four e2m1 codes of 16 bits, times a scale that bf16 holds: they lack 2^126.
__device__ __forceinline__ void widen_e2m1(uint32_t codes, uint32_t scale, uint32_t& low, uint32_t& high) {
  constexpr uint32_t kUp = 0x7e807e80u;  // 2^126
  const auto pair = [scale](uint32_t x) {
    return multiply_pair(multiply_pair((x & 0x00080008u) << 12 | (x & 0x00070007u) << 6, kUp), scale);
  };
  const auto apart = [](uint32_t two) { return (two & 0xf) | (two & 0xf0) << 12; };
  low = pair(apart(codes)), high = pair(apart(codes >> 8));
}

}  // namespace mla::cuda::sm90
