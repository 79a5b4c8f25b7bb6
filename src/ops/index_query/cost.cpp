#include "ops/index_query/op.hpp"

namespace mla::ops {

Cost cost(const IndexQueryArgs& a) {
  return {.bytes = 5 * static_cast<double>(a.q.size()) + 8 * static_cast<double>(a.weights.size()), .flops = 0};
}

}  // namespace mla::ops
