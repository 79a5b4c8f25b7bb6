#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/attention_row.hpp"
#include "ops/merge/op.hpp"

namespace mla::ops {
namespace {

constexpr double kEmpty = -std::numeric_limits<double>::infinity();

double usable(float lse) { return std::isnan(lse) || lse == std::numeric_limits<float>::infinity() ? kEmpty : lse; }

/// Parts i of one row: lse(i) and out(i, d); writes the join to to(d) and returns its lse.
template <class Lse, class Part, class To>
double join(int64_t parts, int64_t width, Lse&& lse, Part&& part, To&& to) {
  double m = kEmpty;
  for (int64_t i = 0; i < parts; ++i) {
    if (nan_part(
            lse(i), [&](int64_t d) { return part(i, d); }, width)) {
      for (int64_t d = 0; d < width; ++d) to(d, AttentionRow::kNaN);
      return AttentionRow::kNaN;
    }
    m = std::max(m, usable(lse(i)));
  }
  double sum = 0;
  for (int64_t i = 0; i < parts; ++i) sum += m == kEmpty ? 0 : std::exp(usable(lse(i)) - m);
  for (int64_t d = 0; d < width; ++d) {
    double x = 0;
    for (int64_t i = 0; i < parts; ++i)
      if (usable(lse(i)) != kEmpty) x += std::exp(usable(lse(i)) - m) * part(i, d);
    to(d, m == kEmpty ? 0.0 : x / sum);
  }
  return m == kEmpty ? kEmpty : m + std::log(sum);
}

}  // namespace

void reference(const MergeArgs& a, View<double, Token, Head, Value> out, View<double, Token, Head> lse) {
  for (int64_t t = 0; t < a.other.extent<Token>(); ++t) {
    const int64_t row = a.rows.empty() ? t : a.rows[t];
    for (int64_t h = 0; h < a.out.extent<Head>(); ++h)
      lse(row, h) = join(
          2, a.out.extent<Value>(), [&](int64_t i) { return i ? a.other_lse(t, h) : a.lse(row, h); },
          [&](int64_t i, int64_t d) { return i ? a.other(t, h, d) : a.out(row, h, d); },
          [&](int64_t d, double x) { out(row, h, d) = x; });
  }
}

void reference(const MergeSplitsArgs& a, View<double, Token, Head, Value> out, View<double, Token, Head> lse) {
  for (const SplitRows& s : a.items)
    for (int64_t r = 0; r < s.rows; ++r)
      for (int64_t h = 0; h < a.out.extent<Head>(); ++h) {
        auto at = [&](int64_t i) { return s.partial + i * s.rows + r; };
        lse(s.row + r, h) = join(
            s.splits, a.out.extent<Value>(), [&](int64_t i) { return a.partial_lse(at(i), h); },
            [&](int64_t i, int64_t d) { return a.partial_out(at(i), h, d); },
            [&](int64_t d, double x) { out(s.row + r, h, d) = x; });
      }
}

}  // namespace mla::ops
