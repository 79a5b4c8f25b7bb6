// Weights in quantised formats, as every backend is given them, and the conversions of their elements.
//
// fp8: one scale for the tensor, or one for each block of a head's matrix; s = 448 / max(amax, 1e-10), code = e4m3(w s)
// saturating, value = code * (1 / s).
// mxfp4: groups of 32 along the reduction (the last may be shorter) with scale 2^(floor(log2 amax) - 2), kept within
// e8m0's 2^-127 to 2^127; code = e2m1(w / scale), nearest even, saturating at 6. Source: OCP Microscaling Formats 1.0.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "mla/quant.hpp"
#include "mla/weights.hpp"

namespace mla {

constexpr int64_t kMxGroup = 32;

/// 2^(code - 127); 255 is NaN.
constexpr float e8m0_value(uint8_t code) {
  return std::bit_cast<float>(code == 255 ? 0x7fc00000u : code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23);
}
/// The scale of a group of e2m1 codes with this largest magnitude.
uint8_t mx_scale(float amax);

struct QuantisedWeights {
  WeightFormat format = WeightFormat::fp8;
  int64_t heads = 1, out = 0, in = 0;
  int64_t block_rows = 0, block_cols = 0;  ///< of a head's [out, in] under one scale; 0: one scale for the tensor
  std::vector<uint8_t> codes;              ///< [heads, out, in], one a byte
  std::vector<float> scales;               ///< [heads, ceil(out / block_rows), ceil(in / block_cols)], or one

  int64_t row_blocks() const { return block_rows == 0 ? 1 : (out + block_rows - 1) / block_rows; }
  int64_t col_blocks() const { return block_rows == 0 ? 1 : (in + block_cols - 1) / block_cols; }
  float scale(int64_t head, int64_t o, int64_t i) const {
    return block_rows == 0 ? scales[0] : scales[(head * row_blocks() + o / block_rows) * col_blocks() + i / block_cols];
  }
  float value(int64_t head, int64_t o, int64_t i) const {
    const uint8_t code = codes[(head * out + o) * in + i];
    return (format == WeightFormat::fp8 ? to_float(fp8_e4m3{code}) : from_e2m1(code)) * scale(head, o, i);
  }
};

/// Quantises finite weights [heads, out, in]. block_rows and block_cols: fp8 only; 0 for one scale.
QuantisedWeights quantise(std::span<const float> weights, int64_t heads, int64_t out, int64_t in, WeightFormat format,
                          int64_t block_rows = 0, int64_t block_cols = 0);
/// What the codes stand for, rounded to the dtype that products take: [heads, out, in].
std::vector<float> dequantise(const QuantisedWeights& weights, Dtype dtype);

}  // namespace mla
