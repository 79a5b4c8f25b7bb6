#include "ops/index_append/op.hpp"

namespace mla::ops {

Cost cost(const IndexAppendArgs& a) {
  const double row = 4 * static_cast<double>(a.cache.spec.dim) + a.cache.spec.token_bytes();
  return {.bytes = static_cast<double>(a.slots.size()) * row, .flops = 0};
}

}  // namespace mla::ops
