#include "ops/cast/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {

void check(const CastArgs& a) {
  require_view("cast", "x", a.x);
  require_view("cast", "y", a.y);
  require_same<Head>("cast", "x", a.x, "y", a.y);
  require_same<In>("cast", "x", a.x, "y", a.y);
  require_dtype("cast", "x", a.x.dtype(), {Dtype::f32, Dtype::bf16, Dtype::f16});
  require_dense<In>("cast", "x", a.x);
  if (a.y.stride<Token>() != 1) require_dense<In>("cast", "y", a.y);
  if (a.scales) {
    require_view("cast", "scales", a.scales);
    require_same<Head>("cast", "scales", a.scales, "y", a.y);
  }
  const int64_t rows = rows_of(a);
  for (int32_t row : a.y_rows)
    if (row >= 0) require_range("cast", "y_rows entry", row, 0, a.y.extent<Token>());
  if (a.x_rows.empty()) {
    require_range("cast", a.y_rows.empty() ? "y Token" : "y_rows length", rows, 0, a.x.extent<Token>() + 1);
  } else {
    require_equal("cast", "x_rows length", static_cast<int64_t>(a.x_rows.size()),
                  a.y_rows.empty() ? "y Token" : "y_rows length", rows);
    for (int32_t row : a.x_rows) require_range("cast", "x_rows entry", row, 0, a.x.extent<Token>());
  }
  if (a.through_e4m3 && a.y.dtype() == Dtype::fp8_e4m3)
    throw ShapeError("cast: y is fp8_e4m3, through_e4m3 is for the codes' values in another dtype");
  if (!(a.scale > 0)) throw ShapeError("cast: scale is " + std::to_string(a.scale) + ", must be above 0");
}

bool writes_nothing(const CastArgs& a) { return is_empty(a.y); }

}  // namespace mla::ops
