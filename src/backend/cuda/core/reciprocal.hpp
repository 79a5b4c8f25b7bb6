// Division by one number for many quotients that end up as e4m3 codes: two operations each.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace mla::cuda {

/// 1 / s as a sum of two numbers. For a bf16 x, fma(x, high, x * low) is close enough to x / s, rounded to f32, to give
/// the same e4m3 code: it has the same five leading bits and is as far from what lies half way between two codes: below
/// it, at it or above it. (tests/core/reciprocal.cpp; an f32 x has too many bits for that.) low is above 0, so that
/// infinity stays infinite; it is rounded up: rounded to nearest, it fails for 1 / (2 - 2^-23). A zero may lose its
/// sign.
struct Reciprocal {
  float high = 1, low = FLT_MIN;

  Reciprocal() = default;
  explicit Reciprocal(float s) {
    const double exact = 1.0 / static_cast<double>(s);
    high = static_cast<float>(exact);
    if (static_cast<double>(high) > exact) high = std::nextafter(high, 0.0f);
    const double rest = exact - static_cast<double>(high);
    low = static_cast<float>(rest);
    if (static_cast<double>(low) < rest) low = std::nextafter(low, HUGE_VALF);
    low = std::max(low, FLT_MIN);
  }
  /// Where neither part over- or underflows.
  static constexpr bool serves(float s) { return s >= 0x1p-60f && s <= 0x1p60f; }
};

#ifdef __CUDACC__
/// Reciprocal(s), made on the device.
__device__ inline Reciprocal reciprocal_of(float s) {
  const double exact = 1.0 / static_cast<double>(s);
  Reciprocal r;
  r.high = __double2float_rz(exact);
  r.low = fmaxf(__double2float_ru(exact - static_cast<double>(r.high)), FLT_MIN);
  return r;
}
/// x over what r is the reciprocal of.
__device__ inline float over(const Reciprocal& r, float x) { return __fmaf_rn(x, r.high, __fmul_rn(x, r.low)); }
#endif

}  // namespace mla::cuda
