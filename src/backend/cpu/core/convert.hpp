// Conversions of whole rows, vectorised. Bits equal those of mla/dtype.hpp.
#pragma once

#include <cstdint>

#include "mla/dtype.hpp"

namespace mla::cpu {

void convert(const float* x, bf16* y, int64_t n);
void convert(const float* x, f16* y, int64_t n);
/// y = e4m3(x / scale), saturating.
void convert(const float* x, fp8_e4m3* y, int64_t n, float scale);
void convert(const bf16* x, float* y, int64_t n);
void convert(const f16* x, float* y, int64_t n);
/// y = x * scale.
void convert(const fp8_e4m3* x, float* y, int64_t n, float scale);
/// x * scale, rounded to bf16. Only where native_bf16_dot() holds.
void convert_fp8_bf16(const fp8_e4m3* x, bf16* y, int64_t n, float scale);
/// The same without AVX-512 VBMI, which a few x86 CPUs with bf16 dot products lack.
void convert_fp8_bf16_by_words(const fp8_e4m3* x, bf16* y, int64_t n, float scale);
/// y = x * scale, n values of e2m1: the low nibbles of the first (n + 1) / 2 bytes, then their high nibbles.
void convert_e2m1(const uint8_t* x, const float* scale, float* y, int64_t n);

/// Of n numbers, as cache/codec.hpp's largest_magnitude: NaN does not count, infinity counts as the largest finite
/// number.
float largest_magnitude(const float* x, int64_t n);

}  // namespace mla::cpu
