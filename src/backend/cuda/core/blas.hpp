// Matrix products by cuBLASLt, which is looked for when a stream is opened: a machine without it runs everything else.
#pragma once

#include <cublasLt.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "mla/dtype.hpp"

namespace mla::cuda {

/// y[b] = x[b] w[b]^T for b in [0, batch): x [rows, in], w [out, in], y [rows, out], each row-major with its own
/// distances of rows and of matrices, in elements. f32 sums.
///
/// fp8: x and w are e4m3 codes, batch is 1. x_scales: one for each row and 128 inputs, [ceil(in / 128), rows], rows a
/// multiple of 4. w_scales: one for each 128 x 128 block, [ceil(out / 128), ceil(in / 128) rounded up to 4]. Both on
/// the device, 16-byte aligned.
struct Product {
  int64_t rows = 0, out = 0, in = 0, batch = 1;
  Dtype dtype = Dtype::bf16;    ///< of x and w: f32, bf16 or fp8_e4m3
  Dtype y_dtype = Dtype::bf16;  ///< f32 or bf16
  const void *x = nullptr, *w = nullptr;
  void* y = nullptr;
  int64_t x_row = 0, x_matrix = 0, w_row = 0, w_matrix = 0, y_row = 0, y_matrix = 0;
  const float *x_scales = nullptr, *w_scales = nullptr;
  /// One order of summing whatever the number of rows, so that a row's bits do not depend on the others: that of the
  /// algorithm for few rows; UnsupportedError where it does not run for these. Many rows take one that gives the same
  /// bits, where there is one. Both sum a whole `in`: of few outputs that takes long.
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
  /// The same where there is an algorithm; false, and nothing queued, where there is none or no cuBLASLt that knows it.
  bool try_multiply(const Product& p, cudaStream_t stream, std::string_view op);

 private:
  using Key = std::array<int64_t, 12>;
  struct Problem;
  using Algorithm = std::optional<cublasLtMatmulAlgo_t>;  // empty: there is none
  const Algorithm& algorithm(const Product& p, int64_t rows, std::string_view op);
  // like: only one with the same bits, or that one.
  Algorithm choose(const Problem& problem, const Product& p, const Algorithm& like, std::string_view op) const;
  bool same_bits(const Product& p, const cublasLtMatmulAlgo_t& a, const cublasLtMatmulAlgo_t& b) const;
  bool launches_kernels_alone(const Problem& problem, const Product& p, const cublasLtMatmulAlgo_t& algorithm) const;
  cublasStatus_t launch(const Problem& problem, const Product& p, const cublasLtMatmulAlgo_t& algorithm,
                        cudaStream_t stream, void* workspace = nullptr) const;

  std::string missing_;  // why there is no cuBLASLt; empty when there is
  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  cudaStream_t trial_ = nullptr;  // where it is seen what an algorithm launches, and which bits it gives
  std::map<Key, Algorithm> algorithms_;
};

}  // namespace mla::cuda
