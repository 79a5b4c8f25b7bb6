#include "ops/project/op.hpp"
#include "ops/quantize/op.hpp"

namespace mla::ops {

Cost cost(const ProjectArgs& a) {
  const double rows = static_cast<double>(a.rows), heads = static_cast<double>(a.weights->heads),
               in = static_cast<double>(a.weights->in), out = static_cast<double>(a.weights->out);
  const double written = a.quantized ? quantized_bytes(a.quantized, a.rows)
                                     : rows * heads * out * static_cast<double>(size_of(a.y.dtype()));
  const Linear& w = *a.weights;
  return {.bytes = weight_bytes(w.format, w.dtype, w.heads, w.out, w.in, w.block_rows, w.block_cols) +
                   rows * heads * in * static_cast<double>(size_of(a.x.dtype())) + written,
          .flops = 2 * rows * heads * in * out};
}

}  // namespace mla::ops
