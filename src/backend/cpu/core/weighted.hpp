// Weighted sums of rows: what merging partial results does with all but their lse. A product is rounded before it is
// added, on every instruction set.
#pragma once

#include <cstdint>

namespace mla::cpu {

/// to += w x, n numbers.
void add_weighted(float* to, float w, const float* x, int64_t n);
/// to = a x + b y. to may be x or y.
void set_weighted(float* to, float a, const float* x, float b, const float* y, int64_t n);

}  // namespace mla::cpu
