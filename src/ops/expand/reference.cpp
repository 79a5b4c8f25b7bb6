#include "ops/expand/op.hpp"

namespace mla::ops {

void reference(const ExpandArgs& a, std::span<const float> weights, View<double, Key, Head, Nope> keys,
               View<double, Key, Head, Value> values) {
  const int64_t in = a.weights->in, nope = keys.extent<Nope>(), width = nope + values.extent<Value>();
  for (int64_t i = 0; i < rows_of(a); ++i)
    for (int64_t h = 0; h < keys.extent<Head>(); ++h)
      for (int64_t o = 0; o < width; ++o) {
        double sum = 0;
        for (int64_t k = 0; k < in; ++k)
          sum += static_cast<double>(a.x(a.x_rows.empty() ? i : a.x_rows[i], k)) * weights[(h * width + o) * in + k];
        if (o < nope) keys(i, h, o) = a.key_scales ? sum / a.key_scales(h) : sum;
        else values(i, h, o - nope) = a.value_scales ? sum / a.value_scales(h) : sum;
      }
}

}  // namespace mla::ops
