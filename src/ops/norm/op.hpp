// norm: RMSNorm, y = x / sqrt(mean(x^2) + eps) * weight, each row by itself, in f32.
#pragma once

#include <span>

#include "mla/view.hpp"
#include "ops/cost.hpp"

namespace mla::ops {

struct NormArgs {
  AnyView<Token, In> x;           ///< f32 or bf16
  std::span<const float> weight;  ///< [In]
  double eps = 1e-6;
  AnyMutableView<Token, In> y;  ///< dtype of x; may be x itself
};

void check(const NormArgs& a);
Cost cost(const NormArgs& a);
/// float64, the definition.
void reference(const NormArgs& a, View<double, Token, In> y);

}  // namespace mla::ops
