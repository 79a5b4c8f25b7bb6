// Memory-bound: a row is read, reduced in sixteen partial sums of fixed order, and read again from L1.
#include <algorithm>
#include <cmath>

#include "backend/cpu/backend.hpp"

namespace mla::cpu {

void norm(Stream& stream, const ops::NormArgs& a) {
  constexpr int64_t kElementsPerTask = 8192, kLanes = 16;
  const auto from = a.x.as<float>();
  const auto to = a.y.as<float>();
  const int64_t rows = from.extent<Token>(), n = from.extent<In>();
  const int64_t block = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, n));
  stream.pool().run((rows + block - 1) / block, [&](int64_t task, int) {
    for (int64_t t = task * block; t < std::min(rows, (task + 1) * block); ++t) {
      const float* x = &from(t, 0);
      float* y = &to(t, 0);
      float lane[kLanes] = {};
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes)
        for (int64_t l = 0; l < kLanes; ++l) lane[l] += x[i + l] * x[i + l];
      double sum = 0;
      for (float e : lane) sum += e;
      for (; i < n; ++i) sum += x[i] * x[i];
      double inverse_norm = 1.0 / std::sqrt(sum / static_cast<double>(n) + a.eps);
      if (!a.growth.positions.empty())
        inverse_norm *= 1.0 + a.growth.beta * std::log1p(a.growth.positions[t] / a.growth.length);
      const float inverse = static_cast<float>(inverse_norm);
      for (i = 0; i < n; ++i) y[i] = x[i] * inverse * a.weight[i];
    }
  });
}

}  // namespace mla::cpu
