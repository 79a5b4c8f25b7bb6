// The inner step of every op that writes a quantised output: a part of one row, from f32 to codes and scales.
#pragma once

#include "mla/quant.hpp"

namespace mla::cpu {

/// Elements [column, column + n) of a token's row. column is a multiple of the spec's group, and n is too unless the
/// row ends there. Bits equal ops/quantize/codec.hpp's. Parts of one row may be written at the same time.
void quantize_part(const QuantizedView& y, int64_t row, int64_t column, const float* x, int64_t n);

}  // namespace mla::cpu
