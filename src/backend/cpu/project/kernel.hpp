// One oneDNN matrix product of fixed shape: x [rows, in] times a packed panel [in, out], for a few fixed numbers of rows.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "mla/dtype.hpp"

namespace mla::cpu {

/// Row blocks that products are cut into. A block's unused rows are zero.
constexpr std::array<int64_t, 4> kRowBlocks{1, 4, 16, 64};
/// The block that serves every row of a batch-invariant product.
constexpr int64_t kInvariantRows = 16;

/// Shared by all panels of its shape; made once, never changed after. Thread-safe.
class PanelKernel {
 public:
  /// operands: f32, or bf16 where the CPU multiplies it natively.
  static const PanelKernel& get(int64_t in, int64_t out, Dtype operands);
  ~PanelKernel();

  size_t packed_bytes() const;
  /// Lays out row-major [out, in] f32 weights, rounding to the operand dtype.
  void pack(const float* weights, std::byte* packed) const;
  /// y [rows, out] f32, dense; x [rows, in] dense in the operand dtype; rows one of kRowBlocks, at index `block`. `slot` is a hint:
  /// calls with different slots do not contend.
  void run(size_t block, const void* x, const std::byte* packed, float* y, int slot) const;

 private:
  struct State;
  explicit PanelKernel(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace mla::cpu
