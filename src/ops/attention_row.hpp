// One row of attention in float64: what the references share, NaN and infinity included (docs/numerics.md).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace mla::ops {

/// A part that is NaN makes its row NaN. Attention's NaN rows are NaN throughout, lse included; beside any other output
/// a NaN lse counts as empty.
template <class Out>
bool nan_part(double lse, Out&& out, int64_t width) {
  return std::isnan(lse) && width > 0 && std::isnan(out(int64_t{0}));
}

/// Keys 0 to count - 1, all of them visible: score(j) is q . k_j times the scale, value(j, d) the value row's element
/// d.
struct AttentionRow {
  static constexpr double kNone = -std::numeric_limits<double>::infinity();
  static constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

  std::vector<double> out;
  double lse = kNone, max = kNone;

  /// `query`: the row's query holds neither NaN nor +inf.
  template <class Score, class Value>
  AttentionRow(bool query, int64_t count, int64_t width, Score&& score, Value&& value)
      : out(static_cast<size_t>(width)) {
    if (count <= 0) return;
    std::vector<double> p(static_cast<size_t>(count));
    bool usable = query;
    for (int64_t j = 0; j < count; ++j) {
      double s = score(j);
      if (std::abs(s) > std::numeric_limits<float>::max()) s = std::copysign(kNone, s);  // as f32 holds it
      usable = usable && s < std::numeric_limits<double>::infinity();
      for (int64_t d = 0; d < width && usable; ++d) usable = std::isfinite(value(j, d));
      p[j] = s;
      max = std::max(max, s);
    }
    if (!usable) {
      std::fill(out.begin(), out.end(), kNaN);
      lse = max = kNaN;
      return;
    }
    if (max == kNone) return;  // every key is masked
    double sum = 0;
    for (int64_t j = 0; j < count; ++j) {
      const double e = std::exp(p[j] - max);
      sum += e;
      for (int64_t d = 0; d < width; ++d) out[d] += e * value(j, d);
    }
    for (double& x : out) x /= sum;
    lse = max + std::log(sum);
  }
};

}  // namespace mla::ops
