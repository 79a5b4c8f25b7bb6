// What kernels bring and add up: messages that lie as rows, and terms of sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "backend/cuda/comm/signal.cuh"
#include "mla/dtype.hpp"

namespace mla::cuda::peers {

/// Bytes that lie as rows; one row: `bytes` of them.
struct Rows {
  std::byte* data;
  int64_t apart;
  int64_t row_bytes, bytes;  // of a row; of all
};
__device__ inline Rows one_row(const std::byte* data, int64_t bytes) {
  return {const_cast<std::byte*>(data), 0, bytes, bytes};
}
/// Where element i of T lies.
template <class T>
__device__ T* element(const Rows& m, int64_t i) {
  if (m.row_bytes == m.bytes) return reinterpret_cast<T*>(m.data) + i;
  const auto width = static_cast<unsigned>(m.row_bytes / int64_t{sizeof(T)}), at = static_cast<unsigned>(i);
  const unsigned row = at / width;
  return reinterpret_cast<T*>(m.data + row * m.apart) + (at - row * width);
}

__device__ inline uint64_t bits_of(const Rows& m) {
  const bool one = m.row_bytes == m.bytes;
  return reinterpret_cast<uint64_t>(m.data) | static_cast<uint64_t>(m.bytes) |
         (one ? 0 : static_cast<uint64_t>(m.row_bytes | m.apart));
}
// By the block, past the first caches: what is read may have been written by another device.
template <class T, class To, class From>
__device__ inline void copy_as(const To& to, const From& from, int64_t begin, int64_t n) {
  constexpr int kUnroll = 4;
  int64_t i = threadIdx.x;
  for (; i + (kUnroll - 1) * kPeerThreads < n; i += kUnroll * kPeerThreads) {
    T v[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) v[k] = __ldcg(from(begin + i + k * kPeerThreads));
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) *to(begin + i + k * kPeerThreads) = v[k];
  }
  for (; i < n; i += kPeerThreads) *to(begin + i) = __ldcg(from(begin + i));
}

/// f(element type) with the widest that divides all of it.
template <class F>
__device__ inline void by_width(uint64_t bits, F&& f) {
  if (bits % 16 == 0) f(uint4{});
  else if (bits % 4 == 0) f(0u);
  else f(static_cast<unsigned char>(0));
}
__device__ inline void copy_own(const Rows& from, const Rows& to, const Piece& piece) {
  by_width(bits_of(from) | bits_of(to), [&](auto x) {
    using T = decltype(x);
    constexpr int64_t kSize = sizeof(T);
    copy_as<T>([&](int64_t i) { return element<T>(to, i); }, [&](int64_t i) { return element<T>(from, i); },
               piece.begin / kSize, piece.bytes / kSize);
  });
}

/// Of a message whose bytes do not lie by eights. Rare, and kept out of the kernels' way.
__device__ __noinline__ inline uint2 load_single_bytes(Rows m, int64_t at) {
  uint64_t value = 0;
#pragma unroll 1
  for (int i = 0; i < 8 && at + i < m.bytes; ++i)
    value |= uint64_t{__ldcg(element<unsigned char>(m, at + i))} << (8 * i);
  return {static_cast<unsigned>(value), static_cast<unsigned>(value >> 32)};
}
__device__ __noinline__ inline void store_single_bytes(Rows m, int64_t at, uint2 value) {
  uint64_t left = value.x | uint64_t{value.y} << 32;
#pragma unroll 1
  for (int i = 0; i < 8 && at + i < m.bytes; ++i, left >>= 8)
    *element<unsigned char>(m, at + i) = static_cast<unsigned char>(left);
}
/// Eight bytes of a message, from its byte `at` on; bytes past its end are 0, or left alone.
__device__ inline uint2 load_bytes(const Rows& m, int64_t at) {
  return bits_of(m) % 8 == 0 ? __ldcg(element<uint2>(m, at / 8)) : load_single_bytes(m, at);
}
__device__ inline void store_bytes(const Rows& m, int64_t at, uint2 value) {
  if (bits_of(m) % 8 == 0) *element<uint2>(m, at / 8) = value;
  else store_single_bytes(m, at, value);
}

struct Messages {
  Rows send[kMostParts][kMostPeers], receive[kMostParts][kMostPeers];
};

/// T values of n bytes each: 16 bytes, or one element.
template <class T, int n>
struct alignas(n * sizeof(T)) Values {
  T v[n];
};
template <class T, int n>
__device__ Values<T, n> read_values(const T* from) {
  Values<T, n> x;
  if constexpr (sizeof x == 16) {
    const uint4 raw = __ldcg(reinterpret_cast<const uint4*>(from));
    memcpy(&x, &raw, 16);
  } else {
    x.v[0] = *static_cast<const volatile T*>(from);
  }
  return x;
}

template <class Format>
struct Number;  // Bits: as it lies in memory
template <>
struct Number<float> {
  using Bits = float;
  static __device__ float read(float x) { return x; }
  static __device__ float write(float x) { return x; }
};
template <>
struct Number<bf16> {
  using Bits = uint16_t;
  static __device__ float read(uint16_t x) { return __bfloat162float(__ushort_as_bfloat16(x)); }
  static __device__ uint16_t write(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
};
template <>
struct Number<f16> {
  using Bits = uint16_t;
  static __device__ float read(uint16_t x) { return __half2float(__ushort_as_half(x)); }
  static __device__ uint16_t write(float x) { return __half_as_ushort(__float2half_rn(x)); }
};

struct Terms {
  const std::byte* send[kMostPeers];
  int64_t sent[kMostPeers];  // bytes
  std::byte* out;
  int64_t count;  // elements
};

}  // namespace mla::cuda::peers
