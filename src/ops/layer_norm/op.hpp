// layer_norm: LayerNorm with bias, y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, each row by itself, in f32;
// var divides by the row's length. Norms the sparse indexer's keys (Ba et al., 1607.06450).
#pragma once

#include <span>

#include "mla/view.hpp"
#include "ops/cost.hpp"

namespace mla::ops {

struct LayerNormArgs {
  View<const float, Token, In> x;
  std::span<const float> weight, bias;  ///< [In]
  double eps = 1e-6;
  View<float, Token, In> y;  ///< may be x itself
};

void check(const LayerNormArgs& a);
bool writes_nothing(const LayerNormArgs& a);
Cost cost(const LayerNormArgs& a);
/// float64, the definition.
void reference(const LayerNormArgs& a, View<double, Token, In> y);

}  // namespace mla::ops
