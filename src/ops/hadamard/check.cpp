#include "ops/hadamard/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {

void check(const HadamardArgs& a) {
  auto dims = [](const char* name, const auto& x) {
    require_dense<IndexDim>("hadamard", name, x);
    const int64_t n = x.template extent<IndexDim>();
    if (n < 1 || (n & (n - 1)) != 0)
      throw ShapeError("hadamard: " + std::string(name) + " IndexDim is " + std::to_string(n) +
                       ", must be a power of two");
  };
  require_view("hadamard", "q", a.q);
  require_view("hadamard", "k", a.k);
  if (a.q) dims("q", a.q);
  if (a.k) dims("k", a.k);
}

bool writes_nothing(const HadamardArgs& a) { return is_empty(a.q) && is_empty(a.k); }

}  // namespace mla::ops
