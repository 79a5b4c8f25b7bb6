// Products of rows with quantised weights, which are read as they are: y[n, h, o] = sum over i of
// x[n, h, i] * value(w[h, o, i]).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "mla/weights.hpp"

namespace mla::cuda::sm90 {

struct QuantisedProduct {
  const uint8_t* codes = nullptr;          ///< [heads, out, in], 16-byte aligned: e4m3, or e2m1 two a byte, low first
  bool e4m3 = true;                        ///< none of them NaN
  const float* scales = nullptr;           ///< [heads, row_blocks, scale_stride], or one
  int64_t scale_rows = 0, scale_cols = 0;  ///< under one scale; 0: one for all. e2m1: powers of two, 1 x 32
  int64_t row_blocks = 1, scale_stride = 1;
  const void* x = nullptr;          ///< bf16, or, with e4m3 weights, e4m3 codes without NaN; rows 16-byte aligned
  const float* x_scales = nullptr;  ///< of codes, NaN where a group has one: [heads, in / 128, x_scale_row]
  int64_t x_scale_row = 0;          ///< rows or more
  int64_t x_row = 0, x_head = 0;    ///< elements from one to the next
  const int32_t* x_rows = nullptr;  ///< device: rows of x; null: in order
  void* y = nullptr;
  Dtype y_dtype = Dtype::f32;  ///< f32 or bf16
  int64_t y_row = 0, y_head = 0;
  const int32_t* y_rows = nullptr;  ///< device: rows of y, below 0: nowhere; null: in order
  int64_t rows = 0, heads = 1, out = 0, in = 0;
};

/// For messages.
inline std::string shape_of(const QuantisedProduct& a) {
  return "rows " + std::to_string(a.rows) + ", heads " + std::to_string(a.heads) + ", out " + std::to_string(a.out) +
         ", in " + std::to_string(a.in);
}

/// Multiples of 128 inputs; fp8 with one scale, or blocks of a multiple of 32 outputs and of 128 inputs.
bool serves_quantised(const Linear& w, Dtype y);
/// Weights straight to registers, once for every 8 to 32 rows.
void multiply_few_rows(const QuantisedProduct& a, int multiprocessors, cudaStream_t stream);
/// Weights through shared memory, once for every 32, 64 or 128 rows, which are bf16 and in order (no x_rows). heads out
/// below 2^31.
void multiply_many_rows(const QuantisedProduct& a, int multiprocessors, cudaStream_t stream);

}  // namespace mla::cuda::sm90
