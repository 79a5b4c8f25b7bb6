#include "ops/expand/op.hpp"

namespace mla::ops {

Cost cost(const ExpandArgs& a) {
  const Linear& w = *a.weights;
  const double rows = static_cast<double>(rows_of(a)), in = static_cast<double>(w.in), out = static_cast<double>(w.out);
  return {.bytes = weight_bytes(w.format, w.dtype, w.heads, w.out, w.in, w.block_rows, w.block_cols) +
                   rows * in * static_cast<double>(size_of(a.x.dtype())) + rows * out,
          .flops = 2 * rows * in * out};
}

}  // namespace mla::ops
