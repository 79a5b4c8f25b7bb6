#include <vector>

#include "ops/quantize/codec.hpp"
#include "ops/quantize/op.hpp"

namespace mla::ops {

void reference(const QuantizeArgs& a, const QuantizedView& y) {
  const int64_t width = y.width, size = y.spec.group_size();
  std::vector<float> x(static_cast<size_t>(width));
  for (int64_t n = 0; n < rows_of(a); ++n) {
    const int64_t t = a.rows.empty() ? n : a.rows[n];
    if (t < 0) continue;
    for (int64_t i = 0; i < width; ++i) x[i] = a.x(t, i);
    if (y.spec.kind == OutputKind::fp8) cache::encode_e4m3(x.data(), y.codes(t), width, y.spec.scale);
    for (int64_t g = 0; g < y.spec.groups(width); ++g)
      encode_group(y.spec, &x[g * size], std::min(size, width - g * size), y.codes(t) + y.spec.row_bytes(g * size),
                   y.scale(t, g));
  }
  reference(QuantizePaddingArgs{a.y, a.x.extent<Token>()}, y);
}

void reference(const QuantizePaddingArgs& a, const QuantizedView& y) {
  const int64_t groups = y.spec.groups(y.width);
  if (groups == 0) return;
  auto clear = [&](int64_t row, int64_t group) { store_scale(y.spec, {}, y.scale(row, group)); };
  for (int64_t g = 0; g < padded_groups(y); ++g)
    for (int64_t t = y.tokens; t < padded_tokens(y); ++t) clear(t, g);
  for (int64_t g = groups; g < padded_groups(y); ++g)
    for (int64_t t = 0; t < a.rows; ++t) clear(t, g);
}

}  // namespace mla::ops
