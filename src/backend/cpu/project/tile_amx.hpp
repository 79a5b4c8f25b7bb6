// Products of a few rows with 64 columns in AMX's tile registers. Only where native_amx() holds.
#pragma once

#include <cstdint>

#include "mla/dtype.hpp"

namespace mla::cpu {

constexpr int64_t kAmxColumns = 16;  // of a register: their weights lie together, [pairs of inputs][16][2]

/// sums[r][c] (+)= x[r] . w[.., c] over pairs of inputs, for 64 columns: four groups, `group` elements apart. Sums of
/// even and odd inputs are rounded apart, 32 inputs at a time; a row's bits depend on that row alone.
void amx_product(const bf16* x, int64_t x_stride, int64_t rows, const bf16* w, int64_t group, int64_t pairs,
                 float* sums, int64_t sums_stride, bool accumulate);

}  // namespace mla::cpu
