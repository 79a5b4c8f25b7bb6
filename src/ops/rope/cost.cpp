#include "ops/rope/op.hpp"

namespace mla::ops {

Cost cost(const RopeArgs& a) {
  if (!a.table->rotates()) return {};
  Cost c;
  auto add = [&](const auto& x) {
    if (x)
      c += {.bytes = 2.0 * static_cast<double>(x.size()) * static_cast<double>(size_of(x.dtype())),
            .flops = 3.0 * static_cast<double>(x.size())};
  };
  add(a.q);
  add(a.k);
  return c;
}

}  // namespace mla::ops
