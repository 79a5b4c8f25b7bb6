#include <cmath>

#include "ops/norm/op.hpp"

namespace mla::ops {

void reference(const NormArgs& a, View<double, Token, In> y) {
  const int64_t n = a.x.extent<In>();
  for (int64_t t = 0; t < a.x.extent<Token>(); ++t) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(a.x(t, i)) * a.x(t, i);
    const double inverse = 1.0 / std::sqrt(sum / static_cast<double>(n) + a.eps);
    double factor = 1.0;
    if (!a.growth.positions.empty())
      factor +=
          a.growth.beta * std::log(1.0 + std::floor(static_cast<double>(a.growth.positions[t]) / a.growth.length));
    for (int64_t i = 0; i < n; ++i) y(t, i) = a.x(t, i) * inverse * a.weight[i] * factor;
  }
}

}  // namespace mla::ops
