// What the kinds of weights share: how a product is cut, and how rows reach a panel and leave it.
#pragma once

#include "backend/cpu/project/tile_f32.hpp"
#include "backend/cpu/quantize/kernel.hpp"
#include "mla/weights.hpp"
#include "ops/project/op.hpp"

namespace mla::cpu {

// Output columns that are summed before they are stored: whole tiles, and a multiple of every group of a quantised
// output.
constexpr int64_t kPanel = 256;
static_assert(kPanel % kTileColumns == 0);
constexpr int64_t kMaxRows = 64;    // of a task
constexpr int64_t kMostRows = 256;  // of a task of weights that say so
// Inputs of quantised weights that are staged together, and so the most whose activations are quantised at once: a
// multiple of every group.
constexpr int64_t kActivationPart = 512;

inline size_t round_up(size_t n) { return (n + 63) / 64 * 64; }

/// Rows [first, first + rows) of a product, at most most_rows() of its weights.
struct RowBlock {
  int64_t first, rows;
};

class CpuLinear : public Linear {
 public:
  bool native_bf16 = false;  ///< operands are multiplied as bf16; otherwise as f32 values that are exact in dtype

  size_t operand_bytes() const { return native_bf16 ? 2 : 4; }
  /// Rows of a task at most: kMaxRows, or up to kMostRows.
  virtual int64_t most_rows() const { return kMaxRows; }
  /// Columns that a task's are a multiple of, where outputs are plain: kPanel, or a tile.
  virtual int64_t unit() const { return kPanel; }
  /// Scratch that one worker needs.
  virtual size_t scratch() const = 0;
  /// y of columns [begin, end) of a head for one row block; begin is a multiple of what a task's are. A row's bits
  /// depend on that row alone.
  virtual void multiply(const ops::ProjectArgs& a, int64_t head, int64_t begin, int64_t end, const RowBlock& rows,
                        const QuantizedWriter& quantized, std::byte* scratch) const = 0;

 protected:
  /// Columns [begin, begin + count) of x's rows, in the operand dtype, `pitch` elements apart; the rest is zero.
  void stage(const ops::ProjectArgs& a, int64_t head, const RowBlock& rows, int64_t begin, int64_t count, int64_t pitch,
             std::byte* to) const;
  /// Stores a product's rows, `pitch` elements apart, as columns [first, first + width) of y, or of the quantised
  /// output.
  void store(const ops::ProjectArgs& a, int64_t head, const RowBlock& rows, int64_t first, int64_t width, int64_t pitch,
             const QuantizedWriter& quantized, const float* from) const;
};

}  // namespace mla::cpu
