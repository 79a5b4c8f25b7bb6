// Where operands lie, for kernels that move several elements at once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mla::cuda {

/// An address and two strides, of elements of so many bytes, at multiples of `to` bytes.
inline bool aligned(const void* data, int64_t stride_a, int64_t stride_b, size_t size, uint64_t to = 16) {
  const auto bytes = [&](int64_t stride) { return static_cast<uint64_t>(stride) * size; };
  return ((reinterpret_cast<uintptr_t>(data) | bytes(stride_a) | bytes(stride_b)) & (to - 1)) == 0;
}

}  // namespace mla::cuda
