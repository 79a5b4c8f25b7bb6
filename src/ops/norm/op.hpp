// norm: RMSNorm, y = x / sqrt(mean(x^2) + eps) * weight, each row by itself, in f32. Rows at positions may grow with
// them: y is then multiplied by 1 + beta ln(1 + floor(position / length)).
#pragma once

#include <span>

#include "mla/view.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"

namespace mla::ops {

/// Factors of rows by their positions; none when there are no positions.
struct RowGrowth {
  List<int32_t> positions;  ///< [Token] or empty; not negative
  double beta = 0;
  int32_t length = 1;
};

struct NormArgs {
  AnyView<Token, In> x;           ///< f32 or bf16
  std::span<const float> weight;  ///< [In]
  double eps = 1e-6;
  AnyMutableView<Token, In> y;  ///< dtype of x; may be x itself
  RowGrowth growth = {};
};

void check(const NormArgs& a);
bool writes_nothing(const NormArgs& a);
Cost cost(const NormArgs& a);
/// float64, the definition.
void reference(const NormArgs& a, View<double, Token, In> y);

}  // namespace mla::ops
