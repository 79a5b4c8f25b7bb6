// How a row of attention by products of e4m3 codes is judged, in tests and benches alike.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace mla::cuda::test {

/// A row in float64, and how far a kernel may be from it.
///
/// A weight w_j (1 at the row's largest score) is rounded to e4m3: by at most 2^-4 of itself, or 2^-17, half the step
/// below the normal numbers where the largest weight is 2^7 or more. Scores are sums that tensor cores cut off 2^-13
/// below the largest addend, 33 a step of 32 products: together within 2^-10 (4 + |score|). Roundings are of either
/// sign and of one key each, so by Hoeffding's inequality their sum exceeds 6 times the root of the summed squares of
/// their bounds in one of 3e7 elements. Their mean is below 2^-7 of the result. Sums of `steps` products in tensor
/// cores lose as scores do, 33 cuts a step of either sign, and a part towards zero.
struct Fp8Row {
  std::vector<double> out, out_bound;
  double lse = -std::numeric_limits<double>::infinity(), lse_bound = 0;

  /// scores: of the keys that are seen. value(j, e). unit: of the outputs' rounding.
  template <class Value>
  Fp8Row(const std::vector<double>& scores, int width, Value&& value, double steps, double unit)
      : out(static_cast<size_t>(width)), out_bound(static_cast<size_t>(width)) {
    if (scores.empty()) return;
    const double high = *std::max_element(scores.begin(), scores.end());
    std::vector<double> noise(out.size()), squares(out.size());
    double sum = 0, lse_noise = 0;
    for (size_t j = 0; j < scores.size(); ++j) {
      const double w = std::exp(scores[j] - high), score_error = 0x1p-10 * (4 + std::abs(scores[j]));
      const double error = (0x1p-4 + score_error) * w + 0x1p-17;
      sum += w;
      lse_noise += score_error * score_error * w * w;
      for (size_t e = 0; e < out.size(); ++e) {
        const double v = value(static_cast<int64_t>(j), static_cast<int64_t>(e));
        out[e] += w * v;
        noise[e] += error * error * v * v;
        squares[e] += w * w * v * v;
      }
    }
    lse = high + std::log(sum);
    lse_bound = 6 * std::sqrt(lse_noise) / sum + 2e-5 * (1 + std::abs(lse));
    for (size_t e = 0; e < out.size(); ++e) {
      out[e] /= sum;
      const double typical = std::abs(out[e]) + 6 * std::sqrt(squares[e]) / sum;
      out_bound[e] = 6 * std::sqrt(noise[e]) / sum + (0x1p-7 + unit + steps * 0x1p-14) * std::abs(out[e]) +
                     6 * std::sqrt(33 * steps) * 0x1p-13 * typical + 1e-6;
    }
  }
};

}  // namespace mla::cuda::test
