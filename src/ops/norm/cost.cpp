#include "ops/norm/op.hpp"

namespace mla::ops {

Cost cost(const NormArgs& a) {
  const double n = static_cast<double>(a.x.size());
  return {.bytes = 2 * n * static_cast<double>(size_of(a.x.dtype())) + 4 * static_cast<double>(a.weight.size()),
          .flops = 4 * n};
}

}  // namespace mla::ops
