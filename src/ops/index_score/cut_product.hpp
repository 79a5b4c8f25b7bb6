// A product of rows of e4m3 as Hopper's matrix units sum it, for references: each 32 products and the sum before them
// are aligned to the largest of them and cut off 13 bits below its leading bit, towards zero; so is what comes of them.
// Observed behaviour, which NVIDIA does not document (DeepSeek-V3's report, arXiv 2412.19437, section 3.3.2, says
// "about 14 bits").
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace mla::ops {

constexpr int kCutProducts = 32, kCutBits = 13;

/// Of n numbers each, codes or codes times a scale of the row.
template <class T>
double cut_product(const T* a, const T* b, int64_t n) {
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kCutProducts) {
    const int64_t end = std::min<int64_t>(n, begin + kCutProducts);
    double largest = std::abs(sum);
    for (int64_t d = begin; d < end; ++d)
      largest = std::max(largest, std::abs(static_cast<double>(a[d]) * static_cast<double>(b[d])));
    if (!(largest > 0)) {  // zeros, or NaN, which max() leaves out
      for (int64_t d = begin; d < end; ++d) sum += static_cast<double>(a[d]) * static_cast<double>(b[d]);
      continue;
    }
    const double unit = std::ldexp(1.0, std::ilogb(largest) - kCutBits);
    double units = std::trunc(sum / unit);
    for (int64_t d = begin; d < end; ++d)
      units += std::trunc(static_cast<double>(a[d]) * static_cast<double>(b[d]) / unit);
    sum = units * unit;
    if (sum != 0 && std::isfinite(sum)) {
      const double last = std::ldexp(1.0, std::ilogb(sum) - kCutBits);
      sum = std::trunc(sum / last) * last;
    }
  }
  return sum;
}

}  // namespace mla::ops
