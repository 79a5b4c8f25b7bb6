#include "ops/rope/op.hpp"

namespace mla::ops {

Cost cost(const RopeArgs& a) {
  if (!a.table->rotates()) return {};
  const double n = static_cast<double>((a.q ? a.q.size() : 0) + (a.k ? a.k.size() : 0));
  return {.bytes = 8 * n, .flops = 3 * n};
}

}  // namespace mla::ops
