#include "ops/norm/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {

void check(const NormArgs& a) {
  require_view("norm", "x", a.x);
  require_view("norm", "y", a.y);
  require_same<Token>("norm", "y", a.y, "x", a.x);
  require_same<In>("norm", "y", a.y, "x", a.x);
  require_dtype("norm", "x", a.x.dtype(), {Dtype::f32, Dtype::bf16});
  require_dtype("norm", "y", a.y.dtype(), {a.x.dtype()});
  require_dense<In>("norm", "x", a.x);
  require_dense<In>("norm", "y", a.y);
  require_equal("norm", "weight length", static_cast<int64_t>(a.weight.size()), "x In", a.x.extent<In>());
  require_eps("norm", a.eps);
  if (a.growth.positions.empty()) return;
  require_equal("norm", "positions", static_cast<int64_t>(a.growth.positions.size()), "x Token", a.x.extent<Token>());
  require_range("norm", "growth length", a.growth.length, 1, int64_t{1} << 31);
  for (int32_t p : a.growth.positions) require_range("norm", "position", p, 0, int64_t{1} << 31);
}

bool writes_nothing(const NormArgs& a) { return is_empty(a.y); }

}  // namespace mla::ops
