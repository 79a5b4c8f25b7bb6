#include <cmath>

#include "ops/layer_norm/op.hpp"

namespace mla::ops {

void reference(const LayerNormArgs& a, View<double, Token, In> y) {
  const int64_t n = a.x.extent<In>();
  for (int64_t t = 0; t < a.x.extent<Token>(); ++t) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; ++i) sum += a.x(t, i);
    const double mean = sum / static_cast<double>(n);
    for (int64_t i = 0; i < n; ++i) squares += (a.x(t, i) - mean) * (a.x(t, i) - mean);
    const double inverse = 1.0 / std::sqrt(squares / static_cast<double>(n) + a.eps);
    for (int64_t i = 0; i < n; ++i) y(t, i) = (a.x(t, i) - mean) * inverse * a.weight[i] + a.bias[i];
  }
}

}  // namespace mla::ops
