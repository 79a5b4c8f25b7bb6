// How answers are judged, and deterministic random inputs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cases/case.hpp"

namespace mla::cases {

/// error = max |got - exact| / rms(exact). bound = 2 * (the same of `plain`, an unoptimised computation in the same
/// precisions)
/// + 8 * unit, the unit roundoff of the coarsest rounding that `got` went through. Non-finite values must agree
/// exactly.
Verdict compare(std::span<const float> got, std::span<const double> exact, std::span<const float> plain, double unit);

/// The verdict, turned to a failure where a row of `width` elements whose exact values are the same without what was
/// planted has other bits than in the call without it.
Verdict unless_moved(Verdict v, int64_t width, std::span<const float> got, std::span<const double> exact,
                     std::span<const float> clean_got, std::span<const double> clean_exact);

/// splitmix64 streams: the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  double uniform();                         ///< [0, 1)
  int64_t integer(int64_t lo, int64_t hi);  ///< [lo, hi], both included
  float normal();
  void fill_normal(std::span<float> x, float stddev = 1.0f);

 private:
  uint64_t state_;
};

/// n values of a normal distribution of their own.
std::vector<float> random_values(int64_t n, uint64_t seed, float stddev = 1.0f);

/// x as dtype holds it, and the unit roundoff of f32 or bf16.
float stored(Dtype dtype, float x);
inline double unit_of(Dtype dtype) { return dtype == Dtype::bf16 ? 0x1p-9 : 0x1p-24; }

/// NaN or an infinity. Without `infinities`: NaN, for formats in which they saturate.
float odd_number(Random& random, bool infinities);
/// Products of these overflow f32's range, either alone is an ordinary number of its operand's dtype.
constexpr float kHugeQuery = 3.3e38f, kHugeKey = 26.0f;

/// A quiet NaN with a payload no computation makes: for poisoning what must not be read.
float poison();

}  // namespace mla::cases
