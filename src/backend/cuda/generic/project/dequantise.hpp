// Weights that stay quantised on the device, and their values for a product.
#pragma once

#include <cstdint>

#include "mla/device.hpp"
#include "mla/weights.hpp"

namespace mla::cuda {
class Queue;
}  // namespace mla::cuda

namespace mla::cuda::generic {

struct QuantisedLinear final : Linear {
  int64_t scale_rows = 0, scale_cols = 0;    ///< under one scale; 0: one for the tensor
  int64_t row_blocks = 1, scale_stride = 1;  ///< of a head's scales: rows, and from one row to the next
  bool finite = true;                        ///< no code is NaN
  Buffer codes;                              ///< [heads, out, in]: e4m3, or e2m1 two a byte, the low nibble first
  Buffer scales;                             ///< f32 [heads, row_blocks, scale_stride], or one
};

/// Outputs [first, first + count) of every head in the products' dtype: [heads, count, in].
void dequantise(const Queue& queue, const QuantisedLinear& w, int64_t first, int64_t count, void* to);

}  // namespace mla::cuda::generic
