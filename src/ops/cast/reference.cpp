#include "ops/cast/op.hpp"

namespace mla::ops {

void reference(const CastArgs& a, std::span<float> y) {
  size_t i = 0;
  for (int64_t t = 0; t < a.y.extent<Token>(); ++t)
    for (int64_t h = 0; h < a.y.extent<Head>(); ++h)
      for (int64_t d = 0; d < a.y.extent<In>(); ++d) {
        std::byte element[4];
        const float x = a.x(a.x_rows.empty() ? t : a.x_rows[t], h, d) / (a.scales ? a.scales(h) : a.scale);
        store_float(a.y.dtype(), element, 0, a.through_e4m3 ? to_float(to_fp8_e4m3(x)) : x);
        y[i++] = load_float(a.y.dtype(), element, 0);
      }
}

}  // namespace mla::ops
