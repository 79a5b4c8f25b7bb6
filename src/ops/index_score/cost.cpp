#include "ops/index_score/op.hpp"

namespace mla::ops {

Cost cost(const IndexScoreArgs& a) {
  const double heads = static_cast<double>(a.q.extent<IndexHead>()), dim = static_cast<double>(a.q.extent<IndexDim>()),
               size = static_cast<double>(size_of(a.q.dtype()));
  Cost c;
  for (const IndexItem& item : a.items) {
    const IndexItem i = clipped(item, a.first, a.scores.extent<Key>());
    double pairs = 0;
    for (int64_t r = 0; r < i.q_count; ++r) pairs += i.columns(r);
    const double keys = i.q_count > 0 ? i.columns(i.q_count - 1) : 0;
    c += {.bytes = keys * a.cache.spec.token_bytes() + i.q_count * heads * (dim * size + 4) + 4 * pairs,
          .flops = 2 * pairs * heads * (dim + 1)};
  }
  return c;
}

}  // namespace mla::ops
