// Activations fp8_128 on the device: a product's inputs as codes and scales, or as what those stand for.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "mla/dtype.hpp"
#include "mla/view.hpp"

namespace mla::cuda::generic {

/// Rows of a product's inputs, bits as ops/project/activations.hpp has them. Exactly one of codes and values is
/// written.
struct ActivationRows {
  AnyView<Token, Head, In> x;       ///< f32 or bf16, In dense
  const int32_t* x_rows = nullptr;  ///< device: rows to read; null: in order
  int64_t rows = 0;
  int64_t padded = 0;        ///< rows written, `rows` or more; those past `rows` are codes of zeros
  uint8_t* codes = nullptr;  ///< e4m3 [padded, Head, In]
  float* scales = nullptr;   ///< with codes: [Head, ceil(In / 128), padded]; NaN of a group that holds one
  void* values = nullptr;    ///< [padded, Head, In] of value_dtype, f32 or bf16: code times scale, rounded to it
  Dtype value_dtype = Dtype::bf16;
  bool overlap = false;  ///< may start while earlier kernels end: on Hopper
};
void quantise_activations(cudaStream_t stream, const ActivationRows& a);

}  // namespace mla::cuda::generic
