// Values of tensors that are stored in other forms, rounded once.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "core/round_once.hpp"
#include "mla/error.hpp"
#include "mla/weights.hpp"

namespace mla {
namespace {

// The nearest of all bf16 around x, by distance in float64; ties to the one with an even last bit.
float nearest_by_search(double x) {
  const uint16_t near = to_bf16(static_cast<float>(x)).bits;
  uint16_t best = near;
  const auto away = [&](uint16_t b) { return std::fabs(static_cast<double>(to_float(bf16{b})) - x); };
  for (int step : {-1, 1}) {
    const uint16_t other = static_cast<uint16_t>(near + step);
    if (away(other) < away(best) || (away(other) == away(best) && other % 2 == 0)) best = other;
  }
  return to_float(bf16{best});
}

TEST(RoundOnce, ABorderThatF32WouldMoveOnto) {
  const double border = 1 + 0x1p-8;  // between 1 and 1 + 2^-7: even is 1
  EXPECT_EQ(to_float(nearest_bf16(border)), 1.0f);
  EXPECT_EQ(to_float(nearest_bf16(border + 0x1p-40)), 1.0f + 0x1p-7f);
  EXPECT_EQ(to_float(to_bf16(static_cast<float>(border + 0x1p-40))), 1.0f);  // twice: the wrong one
  EXPECT_EQ(to_float(nearest_bf16(-border - 0x1p-40)), -1.0f - 0x1p-7f);
  const double odd = 1 + 3 * 0x1p-8;  // between 1 + 2^-7 and 1 + 2^-6
  EXPECT_EQ(to_float(nearest_bf16(odd - 0x1p-40)), 1.0f + 0x1p-7f);
  EXPECT_EQ(to_float(nearest_bf16(odd)), 1.0f + 0x1p-6f);
}

TEST(RoundOnce, TheNearestEverywhere) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 200000; ++i) {
    const double mantissa = 1 + static_cast<double>(random() % 256) / 256 +
                            std::ldexp(static_cast<double>(static_cast<int64_t>(random() % 65) - 32), -40);
    const double x = std::ldexp(mantissa, static_cast<int>(random() % 200) - 100) * (random() % 2 ? 1 : -1);
    ASSERT_EQ(to_float(nearest_bf16(x)), nearest_by_search(x)) << x;
  }
}

TEST(RoundOnce, EdgesOfTheRange) {
  EXPECT_EQ(nearest_bf16(0.0).bits, 0);
  EXPECT_EQ(nearest_bf16(-0.0).bits, 0x8000);
  EXPECT_TRUE(std::isnan(to_float(nearest_bf16(NAN))));
  EXPECT_EQ(nearest_bf16(INFINITY).bits, 0x7f80);
  EXPECT_EQ(nearest_bf16(1e300).bits, 0x7f80);
  EXPECT_EQ(nearest_bf16(-1e300).bits, 0xff80);
  EXPECT_EQ(nearest_bf16(0x1.fep127).bits, 0x7f7f);   // the largest
  EXPECT_EQ(nearest_bf16(0x1.fefp127).bits, 0x7f7f);  // below the border to infinity
  EXPECT_EQ(nearest_bf16(0x1.ffp127).bits, 0x7f80);   // at it
  EXPECT_EQ(nearest_bf16(0x1p-133).bits, 1);          // the smallest subnormal
  EXPECT_EQ(nearest_bf16(0x1p-134).bits, 0);          // half of it: even
  EXPECT_EQ(nearest_bf16(0x1.0000001p-134).bits, 1);
  EXPECT_EQ(nearest_bf16(1e-300).bits, 0);
}

// A scale of 24 bits times a code of 4: in bf16 once, not by way of f32.
TEST(HostTensor, ScaledCodesRoundOnce) {
  const uint8_t codes[] = {0x39, 0xb9};  // 1.125, -1.125
  HostTensor t{.name = "w", .dtype = Dtype::fp8_e4m3, .shape = {1, 2}};
  t.data = reinterpret_cast<const std::byte*>(codes);
  int differ = 0;
  for (uint32_t m = 0; m < (1u << 23); m += 7) {
    const float scale = std::bit_cast<float>(0x3f800000u + m);
    const double exact = 1.125 * static_cast<double>(scale);
    const float twice = to_float(to_bf16(static_cast<float>(exact))), once = nearest_by_search(exact);
    if (twice == once) continue;
    ++differ;
    t.block_scales = {scale}, t.block_rows = 1, t.block_cols = 2;
    EXPECT_EQ(t.to_f32(Dtype::bf16), (std::vector<float>{once, -once})) << exact;
    EXPECT_EQ(t.to_f32()[0], static_cast<float>(exact));
  }
  EXPECT_GT(differ, 0);
}

TEST(HostTensor, PlainValuesRoundToo) {
  const float x[] = {1 + 0x1p-8f, 1 + 0x1.8p-7f, 3};
  const HostTensor t{.name = "w", .dtype = Dtype::f32, .shape = {3}, .data = reinterpret_cast<const std::byte*>(x)};
  EXPECT_EQ(t.to_f32(), (std::vector<float>{x[0], x[1], x[2]}));
  EXPECT_EQ(t.to_f32(Dtype::bf16), (std::vector<float>{1, 1 + 0x1p-6f, 3}));
  EXPECT_THROW(t.to_f32(Dtype::f16), UnsupportedError);
}

}  // namespace
}  // namespace mla
