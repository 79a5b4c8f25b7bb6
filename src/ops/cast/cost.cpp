#include "ops/cast/op.hpp"

namespace mla::ops {

Cost cost(const CastArgs& a) {
  const int64_t elements = rows_of(a) * a.y.extent<Head>() * a.y.extent<In>();
  return {.bytes = static_cast<double>(elements) * static_cast<double>(size_of(a.x.dtype()) + size_of(a.y.dtype())),
          .flops = 0};
}

}  // namespace mla::ops
