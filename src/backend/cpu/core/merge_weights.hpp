// The weights of two partial softmaxes in their join (docs/math.md, "Merging partial softmaxes").
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

namespace mla::cpu {

constexpr float kEmptyLse = -std::numeric_limits<float>::infinity();

/// What came from outside as +inf or NaN counts as empty.
inline float usable_lse(float lse) { return lse < std::numeric_limits<float>::infinity() ? lse : kEmptyLse; }

struct MergeWeights {
  float a = 0, b = 0;  ///< a part of weight 0 is not to be read
  float lse = kEmptyLse;
};

inline MergeWeights merge_weights(float lse_a, float lse_b) {
  const float a = usable_lse(lse_a), b = usable_lse(lse_b), m = std::max(a, b);
  if (m == kEmptyLse) return {};
  const float wa = std::exp(a - m), wb = std::exp(b - m), sum = wa + wb;
  return {wa / sum, wb / sum, m + std::log(sum)};
}

}  // namespace mla::cpu
