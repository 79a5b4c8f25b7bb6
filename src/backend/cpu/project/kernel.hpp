// One oneDNN matrix product of fixed shape: x [rows, in] times a packed panel [in, out], for a few fixed numbers of
// rows.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>

#include "mla/dtype.hpp"

namespace mla::cpu {

/// Row blocks that products are cut into: fine enough that padding to one costs less than a third. Unused rows are
/// zero.
constexpr std::array<int64_t, 10> kRowBlocks{1, 2, 4, 8, 12, 16, 24, 32, 48, 64};
/// How a panel's weights lie in memory.
enum class PanelLayout : uint8_t {
  packed,  ///< as oneDNN likes it best: made once by pack(), bound once
  rows,    ///< [in, out] row-major: any memory, bound at each call
};
/// Shared by all panels of its shape; made once, never changed after. Thread-safe.
class PanelKernel {
 public:
  /// operands: f32, or bf16 where bf16_products().
  static const PanelKernel& get(int64_t in, int64_t out, Dtype operands, PanelLayout layout = PanelLayout::packed);
  ~PanelKernel();

  size_t packed_bytes() const;
  /// Lays out row-major [out, in] f32 weights, rounding to the operand dtype, in `packed`, which the result refers to.
  dnnl::memory pack(const float* weights, std::byte* packed) const;
  /// y [rows, out] f32, dense; x [rows, in] dense in the operand dtype; rows is kRowBlocks[block]. `slot` is a hint:
  /// calls with different slots do not contend.
  void run(size_t block, const void* x, const dnnl::memory& packed, float* y, int slot) const;
  /// The same with weights [in, out] in the operand dtype, for PanelLayout::rows.
  void run(size_t block, const void* x, const void* weights, float* y, int slot) const;
  /// A row's bits are the same at every position of every block.
  bool uniform() const;
  /// A row's bits are the same at every position of this block.
  bool uniform(size_t block) const;

 private:
  struct State;
  explicit PanelKernel(std::unique_ptr<State> state);
  void find_uniform(Dtype operands, PanelLayout layout);
  void execute(size_t block, const void* x, dnnl_memory_t packed, const void* rows, float* y, int slot) const;
  std::unique_ptr<State> state_;
};

/// oneDNN multiplies bf16 with this CPU's own instruction.
bool bf16_products();

}  // namespace mla::cpu
