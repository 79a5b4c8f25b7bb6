// The one place where rotations are computed, so that rope and rope_append give equal bits.
#pragma once

#include <cstdint>

namespace mla::cpu {

/// Rotates 2 * pairs numbers in place: interleaved pairs (2i, 2i+1), or halves (i, i + pairs).
void rotate_row(float* x, const float* cos, const float* sin, int64_t pairs, bool interleaved);

}  // namespace mla::cpu
