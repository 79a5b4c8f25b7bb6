#include <vector>

#include "ops/project/activations.hpp"
#include "ops/project/op.hpp"

namespace mla::ops {

void reference(const ProjectArgs& a, std::span<const float> weights, View<double, Token, Head, Out> y) {
  const int64_t heads = a.weights->heads, in = a.weights->in, out = a.weights->out;
  std::vector<float> x(static_cast<size_t>(in));
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t k = 0; k < in; ++k) x[k] = a.x(a.x_rows.empty() ? i : a.x_rows[i], h, k);
      if (a.activations == Activations::fp8_128) through_fp8(x.data(), x.data(), in);
      for (int64_t o = 0; o < out; ++o) {
        double sum = 0;
        for (int64_t k = 0; k < in; ++k) sum += static_cast<double>(x[k]) * weights[(h * out + o) * in + k];
        y(i, h, o) = sum;
      }
    }
}

}  // namespace mla::ops
