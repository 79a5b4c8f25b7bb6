#include "ops/layer_norm/op.hpp"

namespace mla::ops {

Cost cost(const LayerNormArgs& a) {
  const double n = static_cast<double>(a.x.size());
  return {.bytes = 8 * n + 8 * static_cast<double>(a.weight.size()), .flops = 7 * n};
}

}  // namespace mla::ops
