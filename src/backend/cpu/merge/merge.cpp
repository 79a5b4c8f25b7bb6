// Memory-bound: each row of O is read once from every part and written once.
#include <algorithm>
#include <cmath>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/merge_weights.hpp"

namespace mla::cpu {

void merge(Stream& stream, const ops::MergeArgs& a) {
  const int64_t heads = a.out.extent<Head>(), width = a.out.extent<Value>();
  stream.pool().run(a.other.extent<Token>(), [&](int64_t t, int) {
    const int64_t row = a.rows.empty() ? t : a.rows[t];
    for (int64_t h = 0; h < heads; ++h) {
      join_part(&a.out(row, h, 0), a.lse(row, h), &a.other(t, h, 0), a.other_lse(t, h), width);
    }
  });
}

void merge_splits(Stream& stream, const ops::MergeSplitsArgs& a) {
  const int64_t heads = a.out.extent<Head>(), width = a.out.extent<Value>();
  // One task an item and head: items are few and rows of one request share their partials' pages.
  stream.pool().run(static_cast<int64_t>(a.items.size()) * heads, [&](int64_t task, int) {
    const SplitRows& s = a.items[task / heads];
    const int64_t h = task % heads;
    for (int32_t r = 0; r < s.rows; ++r) {
      float m = kEmptyLse, sum = 0;
      const float* nan = nullptr;
      auto at = [&](int64_t i) { return s.partial + i * s.rows + r; };
      auto lse = [&](int64_t i) { return usable_lse(a.partial_lse(at(i), h)); };
      for (int32_t i = 0; i < s.splits; ++i) {
        const float* part = &a.partial_out(at(i), h, 0);
        if (nan_row(part, a.partial_lse(at(i), h), width)) nan = part;
        m = std::max(m, lse(i));
      }
      float* out = &a.out(s.row + r, h, 0);
      if (nan) {
        std::copy_n(nan, width, out);
        a.lse(s.row + r, h) = nan[0];
        continue;
      }
      std::fill_n(out, width, 0.0f);
      a.lse(s.row + r, h) = kEmptyLse;
      if (m == kEmptyLse) continue;
      for (int32_t i = 0; i < s.splits; ++i) sum += std::exp(lse(i) - m);
      for (int32_t i = 0; i < s.splits; ++i) {
        if (lse(i) == kEmptyLse) continue;
        const float w = std::exp(lse(i) - m) / sum;
        const float* part = &a.partial_out(at(i), h, 0);
        add_weighted(out, w, part, width);
      }
      a.lse(s.row + r, h) = m + std::log(sum);
    }
  });
}

}  // namespace mla::cpu
