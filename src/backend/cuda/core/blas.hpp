// Matrix products by cuBLASLt, which is looked for when a stream is opened: a machine without it runs everything else.
#pragma once

#include <cublasLt.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "mla/dtype.hpp"

namespace mla::cuda {

/// y[b] = x[b] w[b]^T for b in [0, batch): x [rows, in], w [out, in], y [rows, out], each row-major with its own
/// distances of rows and of matrices, in elements. f32 sums.
struct Product {
  int64_t rows = 0, out = 0, in = 0, batch = 1;
  Dtype dtype = Dtype::bf16;    ///< of x and w: f32 or bf16
  Dtype y_dtype = Dtype::bf16;  ///< f32 or bf16
  const void *x = nullptr, *w = nullptr;
  void* y = nullptr;
  int64_t x_row = 0, x_matrix = 0, w_row = 0, w_matrix = 0, y_row = 0, y_matrix = 0;
  /// One algorithm whatever the number of rows, so that a row's bits do not depend on the others.
  bool invariant = false;
};

class Blas {
 public:
  explicit Blas(std::string_view device);
  ~Blas();
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;

  /// Queues the product. DeviceError when cuBLASLt is missing or refuses; UnsupportedError when it has no algorithm.
  void multiply(const Product& p, cudaStream_t stream, std::string_view op);

 private:
  using Key = std::array<int64_t, 12>;
  struct Problem;
  cublasLtMatmulAlgo_t choose(const Problem& problem, const Product& p, std::string_view op);

  std::string missing_;  // why there is no cuBLASLt; empty when there is
  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  std::map<Key, cublasLtMatmulAlgo_t> algorithms_;
};

}  // namespace mla::cuda
