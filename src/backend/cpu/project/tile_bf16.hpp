// Products of a few rows with 64 columns, by bf16 dot products (core/bf16_dot.hpp). Only where native_bf16_dot() holds.
//
// A tile holds weights as the instruction wants them: [pairs of inputs][64 columns][2].
#pragma once

#include <cstdint>

#include "backend/cpu/project/tile_f32.hpp"
#include "mla/dtype.hpp"

namespace mla::cpu {

/// e4m3 codes [pairs, 64, 2] times a scale, rounded to bf16. No code is NaN.
void fp8_tile(const uint8_t* codes, float scale, int64_t pairs, bf16* tile);
/// e2m1 codes without their scales; codes [pairs, 64], the first input of a pair in the low nibble.
void e2m1_tile(const uint8_t* codes, int64_t pairs, bf16* tile);
/// sums[r][c] (+)= (x[r] . tile[.., c]) * scale[c] over the tile's inputs; scale null: 1. A row's bits depend on that
/// row alone.
void tile_product(const bf16* x, int64_t x_stride, int64_t rows, const bf16* tile, int64_t pairs, const float* scale,
                  float* sums, int64_t sums_stride, bool accumulate);

}  // namespace mla::cpu
