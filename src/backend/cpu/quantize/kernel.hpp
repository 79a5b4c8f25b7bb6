// The inner step of every op that writes a quantised output: a tile of f32, some rows by some columns, to codes and
// scales.
#pragma once

#include "mla/quant.hpp"

namespace mla::cpu {

/// A quantised output with the numbers of its layout at hand; made once a call. Nothing is done with spec none.
class QuantizedWriter {
 public:
  explicit QuantizedWriter(const QuantizedView& y);

  /// `rows` rows of columns [column, column + n): row r of the tile is x + r * stride and goes to token row list[r], or
  /// first + r without a list; one below 0 goes nowhere. column is a multiple of the spec's group, and n is too unless
  /// the rows end there. Bits equal ops/quantize/codec.hpp's. Tiles of one output may be written at the same time.
  void write(int64_t first, const int32_t* list, int64_t rows, int64_t column, const float* x, int64_t stride,
             int64_t n) const;
  explicit operator bool() const { return static_cast<bool>(y_); }
  /// Where a scale lies, as QuantizedView::scale; padding's places too.
  std::byte* scale(int64_t row, int64_t group) const { return scale_in(scales_of(row), group); }

 private:
  std::byte* scales_of(int64_t row) const {
    return y_.scales + (e2m1_ ? (row >> 7) * tiles_ + (row & 31) * 16 + (row >> 5 & 3) * 4 : row * row_);
  }
  // In every layout four groups have one step from each to the next, and so have fours.
  std::byte* scale_in(std::byte* row, int64_t group) const { return row + (group >> 2) * four_ + (group & 3) * step_; }

  QuantizedView y_;
  bool e2m1_ = false;
  int64_t size_ = 0;                       // of a group
  int64_t row_ = 0, step_ = 0, four_ = 0;  // bytes from a scale to the next row's, the next group's, the fourth next's
  int64_t tiles_ = 0;                      // e2m1: bytes from 128 rows to the next
};

}  // namespace mla::cpu
