#include "backend/cuda/core/reciprocal.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "mla/dtype.hpp"

namespace mla::cuda {
namespace {

float product(float x, const Reciprocal& r) { return std::fma(x, r.high, x * r.low); }

// What e4m3 makes of a positive number of any exponent: five leading bits, and whether others follow.
uint32_t seen(float q) {
  const uint32_t u = std::bit_cast<uint32_t>(q);
  return u >> 19 << 1 | ((u & 0x7ffffu) != 0 ? 1u : 0u);
}

// Every bf16 mantissa over s.
int wrong(float s) {
  const Reciprocal r(s);
  int n = 0;
  for (uint32_t m = 0; m < 128; ++m) {
    const float x = std::bit_cast<float>(0x3f800000u | m << 16);
    n += seen(product(x, r)) != seen(x / s);
  }
  return n;
}

// Quotients can differ where x / s lies within some units in the last place of five bits alone, k: for the few s about
// x / k. Those are all tried, and others.
TEST(Reciprocal, GivesTheCodesOfTheQuotients) {
  int64_t bad = 0;
  const auto about = [&](float s) {
    for (uint32_t u = std::bit_cast<uint32_t>(s) - 12, i = 0; i < 25; ++i, ++u) bad += wrong(std::bit_cast<float>(u));
  };
  for (int x = 128; x < 256; ++x)
    for (int k = 16; k <= 32; ++k) about(static_cast<float>(x) / static_cast<float>(k));
  for (float s : {1.0f, 2.0f, 0x1p-60f, 0x1p60f}) about(s);
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i)
    bad += wrong(std::bit_cast<float>(0x3f800000u | static_cast<uint32_t>(random() >> 9)));
  EXPECT_EQ(bad, 0);
}

TEST(Reciprocal, EndsOfTheRange) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (float s : {0x1p-60f, 0.05f, 1.0f, 3.0f, 0x1p60f}) {
    ASSERT_TRUE(Reciprocal::serves(s));
    const Reciprocal r(s);
    for (float x : {kInf, -kInf, 0x1.fep127f, 0x1p-126f, -0x1p-133f, 0.0f, -448.0f * s, 464.0f * s, 0x1p-10f * s}) {
      const float rounded = to_float(to_bf16(x));
      EXPECT_EQ(to_float(to_fp8_e4m3(product(rounded, r))), to_float(to_fp8_e4m3(rounded / s))) << rounded << " " << s;
    }
    EXPECT_TRUE(std::isnan(product(std::nanf(""), r)));
  }
  for (float s : {0.0f, 0x1p-61f, 0x1p61f, kInf, -1.0f, std::nanf("")}) EXPECT_FALSE(Reciprocal::serves(s));
}

}  // namespace
}  // namespace mla::cuda
