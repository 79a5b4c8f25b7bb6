#include "ops/cast/op.hpp"

namespace mla::ops {

void reference(const CastArgs& a, std::span<float> y) {
  const int64_t heads = a.y.extent<Head>(), width = a.y.extent<In>();
  for (int64_t t = 0; t < rows_of(a); ++t) {
    const int64_t from = a.x_rows.empty() ? t : a.x_rows[t], to = a.y_rows.empty() ? t : a.y_rows[t];
    if (to < 0) continue;
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t d = 0; d < width; ++d) {
        std::byte element[4];
        const float x = a.x(from, h, d) / (a.scales ? a.scales(h) : a.scale);
        store_float(a.y.dtype(), element, 0, a.through_e4m3 ? to_float(to_fp8_e4m3(x)) : x);
        y[static_cast<size_t>((to * heads + h) * width + d)] = load_float(a.y.dtype(), element, 0);
      }
  }
}

}  // namespace mla::ops
