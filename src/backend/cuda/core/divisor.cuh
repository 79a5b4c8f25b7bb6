// Division by a number that the host knows, as a multiplication.
#pragma once

#include <cstdint>

namespace mla::cuda {

/// Of numbers in [0, 2^31), by a number in [1, 2^31].
struct Divisor {
  uint32_t multiplier = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t d) {
    uint32_t log = 0;
    while ((uint64_t{1} << log) < d) ++log;
    shift = log;
    multiplier = static_cast<uint32_t>((uint64_t{1} << (31 + log)) / d + 1);
  }
  __device__ int divide(int n) const {  // n * multiplier / 2^(31 + shift)
    return static_cast<int>(__umulhi(2 * static_cast<uint32_t>(n), multiplier) >> shift);
  }
};

}  // namespace mla::cuda
