#include "backend/cpu/core/rotate.hpp"

namespace mla::cpu {

// A few hundred numbers a token: plain loops, which the compiler vectorises for the baseline.
void rotate_row(float* x, const float* cos, const float* sin, int64_t pairs, bool interleaved) {
  const int64_t first = interleaved ? 2 : 1, second = interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    float& a = x[i * first];
    float& b = x[i * first + second];
    const float rotated = a * cos[i] - b * sin[i];
    b = b * cos[i] + a * sin[i];
    a = rotated;
  }
}

}  // namespace mla::cpu
