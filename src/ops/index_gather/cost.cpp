#include "ops/index_gather/op.hpp"

namespace mla::ops {

Cost cost(const IndexGatherArgs& a) {
  double rows = 0;
  for (const GatherPiece& p : a.pieces) rows += p.count;
  const bool codes = a.keys.dtype() == Dtype::fp8_e4m3;
  const double row = static_cast<double>(a.cache.spec.dim * static_cast<int64_t>(size_of(a.keys.dtype())));
  return {.bytes = rows * (a.cache.spec.token_bytes() + row + (codes ? 4 : 0)), .flops = 0};
}

}  // namespace mla::ops
