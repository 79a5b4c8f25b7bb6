// quantize: f32 or bf16 rows to a quantised output (mla/quant.hpp has formats and formulas). Serves outputs whose
// groups span heads; where they do not, `project` and `attend_expanded` quantise the heads they finish themselves.
//
// quantize_padding: zeros into the scales' padding, for calls whose rows are written by another op.
#pragma once

#include <string_view>

#include "mla/quant.hpp"
#include "mla/view.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"

namespace mla::ops {

struct QuantizeArgs {
  AnyView<Token, HeadValue> x;  ///< f32 or bf16, HeadValue dense
  /// Rows of x, which go to the same rows of y; below 0: none. Empty: all of x.
  List<int32_t> rows;
  QuantizedView y;  ///< its scales' padding is written, too
};

/// Rows that are read, or of `rows` passed over.
inline int64_t rows_of(const QuantizeArgs& a) {
  return a.rows.empty() ? a.x.extent<Token>() : static_cast<int64_t>(a.rows.size());
}

struct QuantizePaddingArgs {
  QuantizedView y;
  int64_t rows = 0;  ///< rows in use: their places past the last group are cleared too
};

void check(const QuantizeArgs& a);
bool writes_nothing(const QuantizeArgs& a);
Cost cost(const QuantizeArgs& a);
/// The same bytes, written to another view of a.y's shape.
void reference(const QuantizeArgs& a, const QuantizedView& y);

void check(const QuantizePaddingArgs& a);
bool writes_nothing(const QuantizePaddingArgs& a);
Cost cost(const QuantizePaddingArgs& a);
void reference(const QuantizePaddingArgs& a, const QuantizedView& y);

/// Shared by the ops that write to a quantised output: spec, pointers, strides, and room for `rows` rows of `width`.
void check_quantized(std::string_view op, const QuantizedView& y, int64_t rows, int64_t width);
/// The same for an op that finishes one head of `value` elements at a time; UnsupportedError when groups span heads.
void check_quantized_heads(std::string_view op, const QuantizedView& y, int64_t rows, int64_t heads, int64_t value);

/// Bytes of `rows` rows of codes and scales.
double quantized_bytes(const QuantizedView& y, int64_t rows);

}  // namespace mla::ops
