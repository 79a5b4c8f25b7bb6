// expand on Hopper: the product's sums become codes in registers, and no array of products is written.
//
// Both are D = A B^T with rows of D and columns of D as the codes lie in memory: latent rows by a head's outputs for
// keys, a head's outputs by latent rows for values, which thereby have the rows innermost.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mla/view.hpp"

namespace mla::cuda::sm90 {

struct ExpandCodes {
  const void* x = nullptr;  ///< bf16 [rows, latent], 16-byte aligned; x_row elements apart, a multiple of 8
  int64_t x_row = 0;
  const void* weights = nullptr;  ///< bf16 [heads, nope + value, latent]
  int64_t latent = 0;
  AnyMutableView<Key, Head, Nope> keys;
  AnyMutableView<Key, Head, Value> values;
  View<const float, Head> key_scales, value_scales;  ///< device; without data: 1
};

void expand(cudaStream_t stream, const ExpandCodes& a, int multiprocessors);

}  // namespace mla::cuda::sm90
