// Quantised outputs for tests: memory with sentinels, and a plain computation in two steps (f32 first, then codes) that
// shares nothing with the library: nearest codes by search, layouts by their formulas.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "mla/dtype.hpp"
#include "mla/quant.hpp"

namespace mla::test {

/// Memory of a quantised output: rows apart, bytes after the scales, every byte 0x5a.
class QuantisedMemory {
 public:
  QuantisedMemory() = default;
  QuantisedMemory(const OutputSpec& spec, int64_t tokens, int64_t width, int64_t gap = 7)
      : spec_(spec), tokens_(tokens), width_(width), stride_(spec.row_bytes(width) + gap) {
    codes.assign(static_cast<size_t>(tokens * stride_), kSentinel);
    scales.assign(static_cast<size_t>(spec.scale_bytes(tokens, width) + kGuard), kSentinel);
  }
  QuantizedView view() { return {spec_, tokens_, width_, codes.data(), stride_, scales.data()}; }

  std::vector<std::byte> codes, scales;

 private:
  static constexpr std::byte kSentinel{0x5a};
  static constexpr int64_t kGuard = 64;
  OutputSpec spec_;
  int64_t tokens_ = 0, width_ = 0, stride_ = 0;
};

/// The nearest of ascending magnitudes, ties to the even index, past the last one the last one; the index.
inline uint8_t nearest(std::span<const float> magnitudes, float x) {
  const auto above = std::lower_bound(magnitudes.begin(), magnitudes.end(), x);
  if (above == magnitudes.end()) return static_cast<uint8_t>(magnitudes.size() - 1);
  const auto i = static_cast<uint8_t>(above - magnitudes.begin());
  if (i == 0 || *above == x) return i;
  const double down = static_cast<double>(x) - magnitudes[i - 1], up = static_cast<double>(magnitudes[i]) - x;
  return down < up || (down == up && i % 2 == 1) ? i - 1 : i;
}

inline uint8_t plain_e4m3(float x) {
  static const std::vector<float> magnitudes = [] {
    std::vector<float> m;
    for (int code = 0; code < 127; ++code)
      m.push_back(static_cast<float>(code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10)));
    return m;
  }();
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  return sign | (std::isnan(x) ? 0x7f : nearest(magnitudes, std::fabs(x)));
}

inline uint8_t plain_e2m1(float x) {
  constexpr float kMagnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  if (std::isnan(x)) return 7;
  return static_cast<uint8_t>((std::signbit(x) ? 8 : 0) | nearest(kMagnitudes, std::fabs(x)));
}

/// Of a power of two, or of 0: the padding's.
inline uint8_t plain_ue8m0(float s) {
  return s == 0 ? 0 : std::isnan(s) ? 255 : static_cast<uint8_t>(127 + std::ilogb(s));
}

/// f32 rows, `width` apart, to codes and scales in rows [0, rows) of `to`, and its scales' padding.
inline void two_step(std::span<const float> x, int64_t rows, const QuantizedView& to) {
  const OutputSpec& spec = to.spec;
  const int64_t width = to.width, tokens = to.tokens, aligned = (tokens + 3) / 4 * 4;
  auto* scales = reinterpret_cast<uint8_t*>(to.scales);
  auto put = [&](int64_t at, float s) { std::memcpy(scales + at * 4, &s, 4); };
  const bool mx = spec.kind == OutputKind::mxfp4, fp4 = mx || spec.kind == OutputKind::nvfp4;
  const int64_t size = mx ? 32 : fp4 ? 16 : spec.group, n = (width + size - 1) / size;
  auto store = [&](int64_t m, int64_t k, float s) {
    if (fp4) {
      const int64_t columns = size * 4, tile = (m / 128) * ((width + columns - 1) / columns) + k / 4;
      scales[tile * 512 + (m % 32) * 16 + ((m % 128) / 32) * 4 + k % 4] = mx ? plain_ue8m0(s) : plain_e4m3(s);
    } else if (spec.form == ScaleForm::packed_ue8m0) {
      scales[((k / 4) * aligned + m) * 4 + k % 4] = plain_ue8m0(s);
    } else if (spec.layout == ScaleLayout::row_major) {
      put(m * n + k, s);
    } else {
      put(k * (spec.layout == ScaleLayout::tma_aligned ? aligned : tokens) + m, s);
    }
  };
  for (int64_t m = 0; m < rows; ++m) {
    const float* row = x.data() + m * width;
    auto* codes = reinterpret_cast<uint8_t*>(to.data + m * to.row_stride);
    if (spec.kind == OutputKind::fp8) {
      for (int64_t i = 0; i < width; ++i) codes[i] = plain_e4m3(row[i] / spec.scale);
      continue;
    }
    if (fp4) std::fill_n(codes, (width + 1) / 2, uint8_t{0});
    for (int64_t k = 0; k < n; ++k) {
      const int64_t first = k * size, last = std::min(width, first + size);
      float amax = 0;
      for (int64_t i = first; i < last; ++i)
        if (!std::isnan(row[i])) amax = std::max(amax, std::min(std::fabs(row[i]), 3.40282347e38f));
      if (mx) {
        const bool finite = std::all_of(row + first, row + last, [](float v) { return std::isfinite(v); });
        // The largest power of two of amax over that of e2m1, which is 4.
        double s = std::exp2(-127);
        while (s * 8 <= amax) s *= 2;
        store(m, k, finite ? static_cast<float>(s) : NAN);
        for (int64_t i = first; i < last && finite; ++i)
          codes[i / 2] |= static_cast<uint8_t>(plain_e2m1(static_cast<float>(row[i] / s)) << (i % 2 * 4));
      } else if (spec.kind == OutputKind::nvfp4) {
        const float wanted = spec.global_scale * amax / 6.0f, s = to_float(fp8_e4m3{plain_e4m3(wanted)});
        store(m, k, wanted);
        for (int64_t i = first; i < last && s > 0; ++i)
          codes[i / 2] |= static_cast<uint8_t>(plain_e2m1(row[i] * spec.global_scale / s) << (i % 2 * 4));
      } else {
        float s = std::max(amax, 1e-10f) / 448.0f;
        if (spec.form != ScaleForm::f32) {
          int exponent;
          const float fraction = std::frexp(s, &exponent);  // s = fraction * 2^exponent, fraction in [0.5, 1)
          s = std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
        }
        store(m, k, s);
        for (int64_t i = first; i < last; ++i) codes[i] = plain_e4m3(row[i] / s);
      }
    }
  }
  if (spec.kind == OutputKind::fp8) return;
  const bool words = fp4 || spec.form == ScaleForm::packed_ue8m0;
  const int64_t all = words ? (n + 3) / 4 * 4 : n;
  const int64_t rows_stored = fp4                                       ? (tokens + 127) / 128 * 128
                              : spec.layout == ScaleLayout::tma_aligned ? aligned
                                                                        : tokens;
  for (int64_t k = 0; k < all; ++k)
    for (int64_t m = 0; m < rows_stored; ++m)
      if (m >= tokens || (k >= n && m < rows)) store(m, k, 0);
}

}  // namespace mla::test
