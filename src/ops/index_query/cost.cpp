#include "ops/index_query/op.hpp"

namespace mla::ops {

Cost cost(const IndexQueryArgs& a) {
  const double rotated = a.rotates() ? 2.0 * static_cast<double>(a.table->pairs() * a.weights.size()) : 0;
  return {.bytes = 5 * static_cast<double>(a.q.size()) + 8 * static_cast<double>(a.weights.size()),
          .flops = 3 * rotated};
}

}  // namespace mla::ops
