#include "ops/quantize/codec.hpp"
#include "ops/quantize/op.hpp"

namespace mla::ops {

double quantized_bytes(const QuantizedView& y, int64_t rows) {
  const double scales = static_cast<double>(y.spec.groups(y.width)) * (scale_is_f32(y.spec) ? 4 : 1);
  return static_cast<double>(rows) * (static_cast<double>(y.spec.row_bytes(y.width)) + scales);
}

Cost cost(const QuantizeArgs& a) {
  const double numbers = static_cast<double>(rows_of(a)) * static_cast<double>(a.x.extent<HeadValue>());
  Cost c{.bytes = numbers * static_cast<double>(size_of(a.x.dtype())) + quantized_bytes(a.y, rows_of(a)), .flops = 0};
  c += cost(QuantizePaddingArgs{a.y, a.x.extent<Token>()});
  return c;
}

Cost cost(const QuantizePaddingArgs& a) {
  const int64_t groups = a.y.spec.groups(a.y.width);
  if (groups == 0) return {};
  const int64_t rows = (padded_tokens(a.y) - a.y.tokens) * padded_groups(a.y),
                places = (padded_groups(a.y) - groups) * a.rows;
  return {.bytes = static_cast<double>(rows + places) * (scale_is_f32(a.y.spec) ? 4 : 1), .flops = 0};
}

}  // namespace mla::ops
