// Products of a few rows with up to 64 columns in f32, on every instruction set.
#pragma once

#include <cstdint>

namespace mla::cpu {

/// Output columns that are multiplied together; weights are laid out, and sums have room, for whole tiles.
constexpr int64_t kTileColumns = 64;

/// sums[r][c] (+)= x[r] . w[.., c] over `inputs` rows of w, for 64 columns. A sum adds its inputs in order, one
/// rounding each where the CPU has fused multiply-adds; what was there is added last. A row's bits depend on that row
/// alone.
void product_f32(const float* x, int64_t x_stride, int64_t rows, const float* w, int64_t w_stride, int64_t inputs,
                 float* sums, int64_t sums_stride, bool accumulate);

}  // namespace mla::cpu
