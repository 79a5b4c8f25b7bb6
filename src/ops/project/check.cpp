#include "ops/project/op.hpp"
#include "ops/quantize/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {

void check(const ProjectArgs& a) {
  if (!a.weights) throw ShapeError("project: no weights");
  require_view("project", "x", a.x);
  require_equal("project", "x Head", a.x.extent<Head>(), "weights heads", a.weights->heads);
  require_equal("project", "x In", a.x.extent<In>(), "weights in", a.weights->in);
  require_dense<In>("project", "x", a.x);
  require_dtype("project", "x", a.x.dtype(), {Dtype::f32, Dtype::bf16});
  if (a.activations != Activations::plain && a.weights->format != WeightFormat::fp8)
    throw UnsupportedError("project: activations " + std::string(to_string(a.activations)) +
                           " are for weights in fp8, these are " + std::string(to_string(a.weights->format)));
  if (a.quantized) {
    check_quantized_heads("project", a.quantized, 0, a.weights->heads, a.weights->out);
  } else {
    require_view("project", "y", a.y);
    require_equal("project", "y Head", a.y.extent<Head>(), "weights heads", a.weights->heads);
    require_equal("project", "y Out", a.y.extent<Out>(), "weights out", a.weights->out);
    require_dense<Out>("project", "y", a.y);
    require_dtype("project", "y", a.y.dtype(), {Dtype::f32, Dtype::bf16});
  }
  if (a.rows < 0) throw ShapeError("project: rows is " + std::to_string(a.rows) + ", must not be negative");
  auto rows = [&](const char* name, std::span<const int32_t> list, int64_t extent, bool skips) {
    if (list.empty()) return require_range("project", "rows", a.rows, 0, extent + 1);
    require_equal("project", std::string(name) + "_rows length", static_cast<int64_t>(list.size()), "rows", a.rows);
    for (int32_t r : list)
      if (r >= 0 || !skips) require_range("project", std::string(name) + "_rows entry", r, 0, extent);
  };
  rows("x", a.x_rows, a.x.extent<Token>(), false);
  rows("y", a.y_rows, a.quantized ? a.quantized.tokens : a.y.extent<Token>(), true);
  if (!a.scratch.data && a.rows > 0) throw ShapeError("project: no scratch");
}

}  // namespace mla::ops
