#include <algorithm>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/rotate.hpp"

namespace mla::cpu {

void rope(Stream& stream, const ops::RopeArgs& a) {
  if (!a.table->rotates()) return;
  constexpr int64_t kTokensPerTask = 16;
  const RotaryTable& table = *a.table;
  const auto q = a.q.as<float>();
  const auto k = a.k.as<float>();
  const int64_t tokens = static_cast<int64_t>(a.positions.size());
  stream.pool().run((tokens + kTokensPerTask - 1) / kTokensPerTask, [&](int64_t task, int) {
    for (int64_t t = task * kTokensPerTask; t < std::min(tokens, (task + 1) * kTokensPerTask); ++t) {
      const float* cos = table.cos(a.positions[t]);
      const float* sin = table.sin(a.positions[t]);
      if (q)
        for (int64_t h = 0; h < q.extent<Head>(); ++h)
          rotate_row(&q(t, h, 0), cos, sin, table.pairs(), table.interleaved());
      if (k) rotate_row(&k(t, 0), cos, sin, table.pairs(), table.interleaved());
    }
  });
}

}  // namespace mla::cpu
