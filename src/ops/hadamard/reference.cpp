#include <bit>
#include <cmath>

#include "ops/hadamard/op.hpp"

namespace mla::ops {

void reference(const HadamardArgs& a, View<double, Token, IndexHead, IndexDim> q, View<double, Token, IndexDim> k) {
  auto rotate = [](int64_t n, auto&& in, auto&& out) {
    for (int64_t i = 0; i < n; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < n; ++j)
        sum += std::popcount(static_cast<uint64_t>(i & j)) % 2 == 0 ? in(j) : -static_cast<double>(in(j));
      out(i) = sum / std::sqrt(static_cast<double>(n));
    }
  };
  if (a.q)
    for (int64_t t = 0; t < a.q.extent<Token>(); ++t)
      for (int64_t h = 0; h < a.q.extent<IndexHead>(); ++h)
        rotate(
            a.q.extent<IndexDim>(), [&](int64_t i) { return a.q(t, h, i); },
            [&](int64_t i) -> double& { return q(t, h, i); });
  if (a.k)
    for (int64_t t = 0; t < a.k.extent<Token>(); ++t)
      rotate(
          a.k.extent<IndexDim>(), [&](int64_t i) { return a.k(t, i); }, [&](int64_t i) -> double& { return k(t, i); });
}

}  // namespace mla::ops
