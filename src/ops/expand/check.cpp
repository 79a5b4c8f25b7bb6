#include "ops/expand/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {

void check(const ExpandArgs& a) {
  if (!a.weights) throw ShapeError("expand: no weights");
  require_view("expand", "x", a.x);
  require_view("expand", "keys", a.keys);
  require_view("expand", "values", a.values);
  const int64_t rows = rows_of(a), heads = a.keys.extent<Head>();
  require_same<Key>("expand", "values", a.values, "keys", a.keys);
  require_same<Head>("expand", "values", a.values, "keys", a.keys);
  if (a.key_scales) require_same<Head>("expand", "key_scales", a.key_scales, "keys", a.keys);
  if (a.value_scales) require_same<Head>("expand", "value_scales", a.value_scales, "keys", a.keys);
  require_equal("expand", "weights heads", a.weights->heads, "matrices", 1);
  require_equal("expand", "weights out", a.weights->out, "outputs of all heads",
                heads * (a.keys.extent<Nope>() + a.values.extent<Value>()));
  require_equal("expand", "x Latent", a.x.extent<Latent>(), "weights in", a.weights->in);
  require_dtype("expand", "x", a.x.dtype(), {Dtype::f32, Dtype::bf16});
  require_dense<Latent>("expand", "x", a.x);
  require_dtype("expand", "keys", a.keys.dtype(), {Dtype::fp8_e4m3});
  require_dtype("expand", "values", a.values.dtype(), {Dtype::fp8_e4m3});
  require_dense<Nope>("expand", "keys", a.keys);
  if (a.values.stride<Key>() != 1) require_dense<Value>("expand", "values", a.values);
  if (a.x_rows.empty()) {
    require_range("expand", "rows", rows, 0, a.x.extent<Token>() + 1);
  } else {
    require_equal("expand", "x_rows length", static_cast<int64_t>(a.x_rows.size()), "keys Key", rows);
    for (int32_t row : a.x_rows) require_range("expand", "x_rows entry", row, 0, a.x.extent<Token>());
  }
  if (rows == 0) return;
  require_view("expand", "products", a.products);
  require_equal("expand", "products Out", a.products.extent<Out>(), "weights out", a.weights->out);
  require_dtype("expand", "products", a.products.dtype(), {Dtype::f32, Dtype::bf16});
  require_dense<Out>("expand", "products", a.products);
  require_equal("expand", "products Token stride", a.products.stride<Token>(), "weights out", a.weights->out);
  if (a.products.extent<Token>() < 1) throw ShapeError("expand: products has no rows, one is needed");
  if (!a.scratch.data) throw ShapeError("expand: no scratch");
}

bool writes_nothing(const ExpandArgs& a) { return is_empty(a.keys) && is_empty(a.values); }

}  // namespace mla::ops
