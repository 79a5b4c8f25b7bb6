#include <cmath>

#include "ops/rope/op.hpp"

namespace mla::ops {

void reference(const RopeArgs& a, const RopeConfig& config, View<double, Token, Head, Rope> q,
               View<double, Token, Rope> k) {
  const int64_t rope = a.q ? a.q.extent<Rope>() : a.k ? a.k.extent<Rope>() : 0, pairs = rope / 2;
  const std::vector<double> frequencies = inverse_frequencies(config, rope);
  const double magnitude = rotary_magnitude(config);
  auto rotate = [&](size_t t, auto&& in, auto&& out) {
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t first = config.interleaved ? 2 * i : i, second = config.interleaved ? 2 * i + 1 : i + pairs;
      const double angle = a.positions[t] * frequencies[i], c = std::cos(angle) * magnitude,
                   s = std::sin(angle) * magnitude;
      const double x = in(first), y = in(second);
      out(first) = config.rotate ? x * c - y * s : x;
      out(second) = config.rotate ? y * c + x * s : y;
    }
  };
  for (size_t t = 0; t < a.positions.size(); ++t) {
    const int64_t row = static_cast<int64_t>(t);
    if (a.q)
      for (int64_t h = 0; h < a.q.extent<Head>(); ++h)
        rotate(
            t, [&](int64_t i) { return a.q(row, h, i); }, [&](int64_t i) -> double& { return q(row, h, i); });
    if (a.k)
      rotate(
          t, [&](int64_t i) { return a.k(row, i); }, [&](int64_t i) -> double& { return k(row, i); });
  }
}

}  // namespace mla::ops
