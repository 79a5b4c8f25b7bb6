// Two partial softmaxes of a row and their join (docs/math.md, "Merging partial softmaxes").
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "backend/cpu/core/weighted.hpp"

namespace mla::cpu {

constexpr float kEmptyLse = -std::numeric_limits<float>::infinity();

/// What came from outside as +inf or NaN counts as empty. A NaN row's lse is to be asked for before (nan_row).
inline float usable_lse(float lse) { return lse < std::numeric_limits<float>::infinity() ? lse : kEmptyLse; }

/// A part that is NaN makes its row NaN. Attention's NaN rows are NaN throughout, lse included; beside any other output
/// a NaN lse counts as empty.
inline bool nan_row(const float* out, float lse, int64_t width) {
  return std::isnan(lse) && width > 0 && std::isnan(out[0]);
}

/// The larger; NaN if either is.
inline float larger(float a, float b) { return std::isnan(a) || b <= a ? a : b; }

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

/// Joins the part (other, other_lse) of a row into (out, lse).
inline void join_part(float* out, float& lse, const float* other, float other_lse, int64_t width) {
  if (nan_row(out, lse, width)) return;
  if (nan_row(other, other_lse, width)) {
    std::copy_n(other, width, out);
    lse = other_lse;
    return;
  }
  const MergeWeights w = merge_weights(lse, other_lse);
  lse = w.lse;
  if (w.a == 0 && w.b == 0) std::fill_n(out, width, 0.0f);
  else if (w.b == 0) return;
  else if (w.a == 0) std::copy_n(other, width, out);
  else set_weighted(out, w.a, out, w.b, other, width);
}

/// A sink's share leaves a finished row: out *= e^lse / (e^lse + e^sink).
inline void apply_sink(float* out, int64_t width, float lse, float sink) {
  const float kept = lse == kEmptyLse ? 1.0f : 1.0f / (1.0f + std::exp(sink - lse));
  if (kept == 0.0f) std::fill_n(out, width, 0.0f);
  else if (kept != 1.0f)
    for (int64_t d = 0; d < width; ++d) out[d] *= kept;
}

}  // namespace mla::cpu
