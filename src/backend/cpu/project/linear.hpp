// What the kinds of weights share: how a product is cut, and how rows reach a panel and leave it.
#pragma once

#include <span>

#include "backend/cpu/project/kernel.hpp"
#include "backend/cpu/quantize/kernel.hpp"
#include "mla/weights.hpp"
#include "ops/project/op.hpp"

namespace mla::cpu {

constexpr int64_t kPanel = 256;  // output columns that share a pack; a multiple of every group of a quantised output
constexpr int64_t kMaxRows = kRowBlocks.back();
// Inputs of quantised weights that are staged together, and so the most whose activations are quantised at once: a
// multiple of every group.
constexpr int64_t kActivationPart = 512;

inline size_t round_up(size_t n) { return (n + 63) / 64 * 64; }

/// Rows [first, first + rows) of a product, in kRowBlocks[block] rows.
struct RowBlock {
  int64_t first, rows;
  size_t block;
  int64_t padded() const { return kRowBlocks[block]; }
};

class CpuLinear : public Linear {
 public:
  bool native_bf16 = false;     ///< operands reach oneDNN as bf16; otherwise as f32 values that are exact in dtype
  bool uniform = true;          ///< all kernels are
  size_t invariant_block = 0;   ///< uniform in all kernels
  int64_t panels_per_head = 0;  ///< of at most kPanel columns

  size_t operand_bytes() const { return native_bf16 ? 2 : 4; }
  /// Scratch that one worker needs.
  virtual size_t scratch() const = 0;
  /// y of panels [first_panel, last_panel) of a head for one row block. `slot`: the worker.
  virtual void multiply(const ops::ProjectArgs& a, int64_t head, int64_t first_panel, int64_t last_panel,
                        const RowBlock& rows, const QuantizedWriter& quantized, std::byte* scratch, int slot) const = 0;

 protected:
  /// Sets what depends on the kernels that the products will run.
  void use(std::span<const PanelKernel* const> kernels);
  /// Columns [begin, begin + count) of x's rows, in the operand dtype, `pitch` elements apart; the rest is zero,
  /// missing rows too.
  void stage(const ops::ProjectArgs& a, int64_t head, const RowBlock& rows, int64_t begin, int64_t count, int64_t pitch,
             std::byte* to) const;
  /// Stores a product's rows, `pitch` elements apart, as columns [first, first + width) of y, or of the quantised
  /// output.
  void store(const ops::ProjectArgs& a, int64_t head, const RowBlock& rows, int64_t first, int64_t width, int64_t pitch,
             const QuantizedWriter& quantized, const float* from) const;
};

}  // namespace mla::cpu
