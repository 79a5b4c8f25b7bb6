#include <algorithm>
#include <limits>
#include <vector>

#include "ops/attend_expanded/op.hpp"
#include "ops/attention_row.hpp"

namespace mla::ops {

void reference(const AttendExpandedArgs& a, View<double, Token, Head, Value> out, View<double, Token, Head> lse) {
  const int64_t nope = a.k_nope.extent<Nope>(), rope = a.k_pe.extent<Rope>(), width = a.v.extent<Value>();
  const auto scale_of = [](const View<const float, Group, Head>& x, int64_t row, int64_t head) -> double {
    return x ? x(row, head) : 1.0f;
  };
  for (size_t t = 0; t < a.items.size(); ++t) {
    const ExpandedItem& item = a.items[t];
    const ScaleRows first = a.scales.rows.empty() ? ScaleRows{} : a.scales.rows[t];
    // The row of scales of the item's row i.
    const auto group = [&](int32_t from, int64_t i) {
      return a.scales.rows.empty() ? 0 : from + i / ExpandedScales::kRows;
    };
    for (int64_t i = 0; i < item.q_count; ++i)
      for (int64_t h = 0; h < a.q.extent<Head>(); ++h) {
        const int64_t row = item.q_begin + i, count = std::min<int64_t>(item.k_count, i + item.visible + 1);
        const double q_scale = scale_of(a.scales.q, group(first.q, i), h);
        bool usable = true;
        for (int64_t d = 0; d < nope + rope; ++d)
          usable = usable && a.q(row, h, d) < std::numeric_limits<float>::infinity();
        std::vector<int64_t> seen;
        for (int64_t j = 0; j < count; ++j) {
          const int64_t column = item.mask_begin + j;
          if (!item.masked || a.mask(row, column / 32) >> column % 32 & 1) seen.push_back(item.k_begin + j);
        }
        const AttentionRow result(
            usable, std::ssize(seen), width,
            [&](int64_t n) {
              const int64_t key = seen[static_cast<size_t>(n)];
              double s = 0;
              for (int64_t d = 0; d < nope; ++d) s += static_cast<double>(a.q(row, h, d)) * a.k_nope(key, h, d);
              for (int64_t d = 0; d < rope; ++d) s += static_cast<double>(a.q(row, h, nope + d)) * a.k_pe(key, d);
              return s * q_scale * scale_of(a.scales.k, group(first.k, key - item.k_begin), h) * a.scale;
            },
            [&](int64_t n, int64_t d) {
              const int64_t key = seen[static_cast<size_t>(n)];
              return a.v(key, h, d) * scale_of(a.scales.v, group(first.k, key - item.k_begin), h);
            });
        for (int64_t d = 0; d < width; ++d) out(row, h, d) = result.out[d];
        lse(row, h) = result.lse;
      }
  }
}

}  // namespace mla::ops
