// Activations fp8_128, group by group: what every backend's inputs must equal bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cache/codec.hpp"
#include "ops/quantize/codec.hpp"

namespace mla::ops {

constexpr int64_t kActivationGroup = 128;

/// y = what x stands for once it is quantised, code times scale: n inputs of a row, groups counted from the first. A
/// group with an infinity, which codes would saturate, is NaN.
inline void through_fp8(const float* x, float* y, int64_t n) {
  constexpr OutputSpec spec{.kind = OutputKind::fp8_groups, .group = kActivationGroup};
  for (int64_t i = 0; i < n; i += kActivationGroup) {
    const int64_t count = std::min(kActivationGroup, n - i);
    const bool infinite = std::any_of(x + i, x + i + count, [](float e) { return std::isinf(e); });
    const float scale = infinite ? std::numeric_limits<float>::quiet_NaN()
                                 : group_scale(spec, cache::largest_magnitude(x + i, count)).value;
    for (int64_t k = i; k < i + count; ++k) y[k] = to_float(to_fp8_e4m3(x[k] / scale)) * scale;
  }
}

}  // namespace mla::ops
