#include "ops/layer_norm/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {

void check(const LayerNormArgs& a) {
  require_view("layer_norm", "x", a.x);
  require_view("layer_norm", "y", a.y);
  require_same<Token>("layer_norm", "y", a.y, "x", a.x);
  require_same<In>("layer_norm", "y", a.y, "x", a.x);
  require_dense<In>("layer_norm", "x", a.x);
  require_dense<In>("layer_norm", "y", a.y);
  require_equal("layer_norm", "weight length", static_cast<int64_t>(a.weight.size()), "x In", a.x.extent<In>());
  require_equal("layer_norm", "bias length", static_cast<int64_t>(a.bias.size()), "x In", a.x.extent<In>());
  require_eps("layer_norm", a.eps);
}

bool writes_nothing(const LayerNormArgs& a) { return is_empty(a.y); }

}  // namespace mla::ops
