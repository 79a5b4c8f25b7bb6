// Every code of every dtype, both ways, against an oracle that works in float64 from the formats' definitions.
#include "mla/dtype.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "mla/error.hpp"

namespace mla {
namespace {

struct Layout {
  int exponent_bits, mantissa_bits;
  bool infinities;  ///< false: only the all-ones code is NaN (OCP e4m3)
};

double decode(uint32_t code, const Layout& f) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1, top = (1 << f.exponent_bits) - 1;
  const int exponent = static_cast<int>(code >> f.mantissa_bits) & top;
  const uint32_t mantissa = code & ((1u << f.mantissa_bits) - 1);
  const double sign = code >> (f.exponent_bits + f.mantissa_bits) & 1 ? -1.0 : 1.0;
  if (f.infinities && exponent == top) return mantissa ? NAN : sign * INFINITY;
  if (!f.infinities && exponent == top && mantissa == (1u << f.mantissa_bits) - 1) return NAN;
  const double fraction = static_cast<double>(mantissa) / (1 << f.mantissa_bits);
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias));
}

constexpr Layout kBf16{8, 7, true}, kF16{5, 10, true}, kE4m3{4, 3, false};

template <class T>
void every_code(const Layout& f, uint32_t codes) {
  for (uint32_t code = 0; code < codes; ++code) {
    const T x{static_cast<decltype(T::bits)>(code)};
    const double expected = decode(code, f);
    const float got = to_float(x);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(got)) << code;
      EXPECT_TRUE(std::isnan(to_float(from_float<T>(got)))) << code;
      continue;
    }
    EXPECT_EQ(static_cast<double>(got), expected) << code;
    EXPECT_EQ(std::signbit(got), std::signbit(expected)) << code;
    EXPECT_EQ(from_float<T>(got).bits, x.bits) << code;
  }
}

TEST(Dtype, EveryCodeDecodesAndComesBack) {
  every_code<bf16>(kBf16, 1 << 16);
  every_code<f16>(kF16, 1 << 16);
  every_code<fp8_e4m3>(kE4m3, 1 << 8);
}

// Between any two neighbours: just below the middle goes down, just above goes up, the middle itself to the even code.
template <class T>
void rounding_between(const Layout& f, uint32_t positive_codes) {
  for (uint32_t code = 0; code + 1 < positive_codes; ++code) {
    const double low = decode(code, f), high = decode(code + 1, f);
    if (!std::isfinite(high)) break;
    const float middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(static_cast<double>(middle), (low + high) / 2);
    for (float sign : {1.0f, -1.0f}) {
      const auto bits = [&](float x) { return from_float<T>(sign * x).bits & (positive_codes - 1); };
      EXPECT_EQ(bits(std::nextafterf(middle, 0.0f)), code);
      EXPECT_EQ(bits(std::nextafterf(middle, INFINITY)), code + 1);
      EXPECT_EQ(bits(middle), code + (code & 1));
    }
  }
}

TEST(Dtype, RoundsToNearestEven) {
  rounding_between<bf16>(kBf16, 1 << 15);
  rounding_between<f16>(kF16, 1 << 15);
  rounding_between<fp8_e4m3>(kE4m3, 1 << 7);
}

TEST(Dtype, EndsOfTheRange) {
  EXPECT_EQ(to_f16(65519.99f).bits, 0x7bff);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_f16(-INFINITY).bits, 0xfc00);
  EXPECT_EQ(to_bf16(3.4e38f).bits, 0x7f80);  // above the largest bf16's rounding border
  for (float x : {448.0f, 464.0f, 1e9f, INFINITY}) {
    EXPECT_EQ(to_fp8_e4m3(x).bits, 0x7e) << x;
    EXPECT_EQ(to_fp8_e4m3(-x).bits, 0xfe) << x;
  }
  EXPECT_EQ(to_fp8_e4m3(0x1p-10f).bits, 0);  // a tie with zero
  EXPECT_EQ(to_fp8_e4m3(0x1.000002p-10f).bits, 1);
  EXPECT_EQ(to_f16(0x1p-25f).bits, 0);
  EXPECT_EQ(to_f16(-0.0f).bits, 0x8000);
  EXPECT_TRUE(std::isnan(to_float(to_fp8_e4m3(NAN))));
}

TEST(Dtype, RuntimeAccessAndNames) {
  for (Dtype t : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3}) {
    std::vector<std::byte> memory(8);
    store_float(t, memory.data(), 1, -1.5f);
    EXPECT_EQ(load_float(t, memory.data(), 1), -1.5f);
    EXPECT_EQ(load_float(t, memory.data(), 0), 0.0f);
    EXPECT_EQ(parse_dtype(to_string(t)), t);
  }
  EXPECT_EQ(parse_dtype("fp8"), Dtype::fp8_e4m3);
  EXPECT_THROW(parse_dtype("int4"), InputError);
}

}  // namespace
}  // namespace mla
