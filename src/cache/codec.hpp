// What the formats' codecs share: unaligned element access and the scales of quantised groups.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "mla/dtype.hpp"

namespace mla::cache {

template <class T>
T get(const std::byte* base, int64_t index) {
  T x;
  std::memcpy(&x, base + static_cast<size_t>(index) * sizeof(T), sizeof(T));
  return x;
}
template <class T>
void put(std::byte* base, int64_t index, T x) {
  std::memcpy(base + static_cast<size_t>(index) * sizeof(T), &x, sizeof(T));
}

/// Largest magnitude; NaN elements do not count, infinities count as the largest finite number so that scales stay finite.
inline float largest_magnitude(const float* x, int64_t n) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float a = std::fabs(x[i]);
    if (a > largest) largest = a;
  }
  return std::isinf(largest) ? 0x1.fffffep127f : largest;
}

/// Exponent e of the smallest power of two with 2^e >= x; x positive, normal and finite. Exact: reads the bits.
inline int ceil_log2(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  return static_cast<int>(u >> 23) - 127 + ((u & 0x7fffffu) != 0);
}

/// 2^e as f32, e in [-126, 127].
inline float power_of_two(int e) { return std::bit_cast<float>(static_cast<uint32_t>(e + 127) << 23); }

}  // namespace mla::cache
