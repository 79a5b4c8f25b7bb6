#include "ops/norm/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {

void check(const NormArgs& a) {
  require_same<Token>("norm", "y", a.y, "x", a.x);
  require_same<In>("norm", "y", a.y, "x", a.x);
  require_dense<In>("norm", "x", a.x);
  require_dense<In>("norm", "y", a.y);
  require_equal("norm", "weight length", static_cast<int64_t>(a.weight.size()), "x In", a.x.extent<In>());
}

}  // namespace mla::ops
