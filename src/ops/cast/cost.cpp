#include "ops/cast/op.hpp"

namespace mla::ops {

Cost cost(const CastArgs& a) {
  return {.bytes = static_cast<double>(a.y.size()) * static_cast<double>(size_of(a.x.dtype()) + size_of(a.y.dtype())),
          .flops = 0};
}

}  // namespace mla::ops
