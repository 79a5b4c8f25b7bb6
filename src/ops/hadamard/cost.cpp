#include <bit>

#include "ops/hadamard/op.hpp"

namespace mla::ops {

Cost cost(const HadamardArgs& a) {
  auto of = [](const auto& x) -> Cost {
    if (!x) return {};
    const double n = static_cast<double>(x.size());
    const int stages = std::bit_width(static_cast<uint64_t>(x.template extent<IndexDim>())) - 1;
    return {.bytes = 8 * n, .flops = n * (stages + 1)};
  };
  Cost c = of(a.q);
  return c += of(a.k);
}

}  // namespace mla::ops
