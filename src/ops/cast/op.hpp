// cast: copies rows to another dtype and layout, y = x / scale. Places the rotated part of latent queries, the shared
// rope keys of the expanded path, and quantises by scales that are known beforehand (saturating): fp8 queries, and keys
// and values of the expanded path, these with the rows innermost.
#pragma once

#include <span>

#include "mla/view.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"

namespace mla::ops {

struct CastArgs {
  AnyView<Token, Head, In> x;         ///< f32, bf16 or f16, In dense
  List<int32_t> x_rows;               ///< row of x for each row; empty: 0, 1, ...
  AnyMutableView<Token, Head, In> y;  ///< In or Token dense
  float scale = 1.0f;                 ///< above 0
  View<const float, Head> scales;     ///< with data: one a head, above 0, in place of scale
  /// y, of another dtype than e4m3, takes what e4m3 codes of x / scale stand for: all its dtypes hold that exactly.
  bool through_e4m3 = false;
  List<int32_t> y_rows;  ///< row of y for each row; below 0: nowhere; empty: all of y, in order
};

/// Rows that are read.
inline int64_t rows_of(const CastArgs& a) {
  return a.y_rows.empty() ? a.y.extent<Token>() : static_cast<int64_t>(a.y_rows.size());
}
void check(const CastArgs& a);
bool writes_nothing(const CastArgs& a);
Cost cost(const CastArgs& a);
/// What y must hold, bit for bit, as f32 [Token, Head, In] flat; of rows that nothing goes to, left as it is.
void reference(const CastArgs& a, std::span<float> y);

}  // namespace mla::ops
