#include "ops/quantize/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {

void check_quantized(std::string_view op, const QuantizedView& y, int64_t rows, int64_t width) {
  y.spec.validate();
  auto fail = [&](const std::string& why) {
    throw ShapeError(std::string(op) + ": output " + to_string(y.spec) + " " + why);
  };
  if (!y) fail("is not a quantised one");
  require_equal(op, "output width", y.width, "Head * Value", width);
  if (y.tokens < 0) fail("has " + std::to_string(y.tokens) + " tokens, must not be negative");
  if (rows > y.tokens) fail("has room for " + std::to_string(y.tokens) + " tokens, there are " + std::to_string(rows));
  if (y.row_stride < y.spec.row_bytes(width))
    fail("has row stride " + std::to_string(y.row_stride) + ", a row takes " + std::to_string(y.spec.row_bytes(width)) +
         " bytes");
  if (y.tokens > 0 && width > 0 && !y.data) fail("has no data");
  if (y.spec.scale_bytes(y.tokens, width) == 0) return;
  if (!y.scales) fail("has no scales");
  if (const uintptr_t past = reinterpret_cast<uintptr_t>(y.scales) % 4; past != 0)
    fail("has scales at an address that is " + std::to_string(past) + " past a multiple of 4");
}

void check_quantized_heads(std::string_view op, const QuantizedView& y, int64_t rows, int64_t heads, int64_t value) {
  check_quantized(op, y, rows, heads * value);
  if (!y.spec.groups_within(value))
    throw UnsupportedError(std::string(op) + ": output " + to_string(y.spec) + " has groups of " +
                           std::to_string(y.spec.group_size()) + " that span heads of " + std::to_string(value) +
                           "; quantize takes whole rows");
}

void check(const QuantizeArgs& a) {
  require_view("quantize", "x", a.x);
  require_dense<HeadValue>("quantize", "x", a.x);
  require_dtype("quantize", "x", a.x.dtype(), {Dtype::f32, Dtype::bf16});
  for (const int32_t row : a.rows)
    if (row >= 0) require_range("quantize", "rows entry", row, 0, a.x.extent<Token>());
  check_quantized("quantize", a.y, a.x.extent<Token>(), a.x.extent<HeadValue>());
}

void check(const QuantizePaddingArgs& a) { check_quantized("quantize_padding", a.y, a.rows, a.y.width); }

bool writes_nothing(const QuantizeArgs& a) { return a.y.tokens == 0 || a.y.width == 0; }

bool writes_nothing(const QuantizePaddingArgs& a) { return a.y.tokens == 0 || a.y.width == 0; }

}  // namespace mla::ops
