// Conversions of whole rows, vectorised. Bits equal those of mla/dtype.hpp.
#pragma once

#include <cstdint>

#include "mla/dtype.hpp"

namespace mla::cpu {

void convert(const float* x, bf16* y, int64_t n);
void convert(const bf16* x, float* y, int64_t n);
void convert(const fp8_e4m3* x, float* y, int64_t n, float scale);
/// x * scale, rounded to bf16. Only where native_bf16_dot() holds.
void convert_fp8_bf16(const fp8_e4m3* x, bf16* y, int64_t n, float scale);

}  // namespace mla::cpu
