#include "ops/gather/op.hpp"

namespace mla::ops {

Cost cost(const GatherArgs& a) {
  double rows = 0;
  for (const GatherPiece& p : a.pieces) rows += p.count;
  const double entry = static_cast<double>(a.cache.spec.entry() * static_cast<int64_t>(size_of(a.kv_c.dtype())));
  return {.bytes = rows * (a.cache.spec.token_bytes() + entry), .flops = 0};
}

}  // namespace mla::ops
