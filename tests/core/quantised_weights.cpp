// Quantised weights: every e8m0 scale, and what a matrix becomes, by definitions written out here.
#include "core/quantised_weights.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "cases/compare.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

// The nearest value by search, the even code in a tie.
uint8_t nearest(float x) {
  int best = 0;
  for (int code = 0; code < 8; ++code) {
    const double d = std::fabs(std::fabs(x) - static_cast<double>(from_e2m1(static_cast<uint8_t>(code)))),
                 least = std::fabs(std::fabs(x) - static_cast<double>(from_e2m1(static_cast<uint8_t>(best))));
    if (d < least || (d == least && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best | (std::signbit(x) ? 8 : 0));
}

TEST(E8m0, AllCodes) {
  for (int code = 0; code < 255; ++code)
    EXPECT_EQ(static_cast<double>(e8m0_value(static_cast<uint8_t>(code))), std::exp2(code - 127)) << code;
  EXPECT_TRUE(std::isnan(e8m0_value(255)));
}

TEST(E8m0, ScaleOfAGroup) {
  for (int e = -149; e <= 127; ++e) {
    const int expected = std::min(254, std::max(0, e - 2 + 127));
    const float power = static_cast<float>(std::exp2(e));
    EXPECT_EQ(mx_scale(power), expected) << e;
    if (e < -126) continue;
    EXPECT_EQ(mx_scale(std::nextafter(power * 2, 0.0f)), expected) << e;
  }
  EXPECT_EQ(mx_scale(0), 0);
}

struct Matrix {
  int64_t heads, out, in;
  std::vector<float> values;
  Matrix(int64_t h, int64_t o, int64_t i, uint64_t seed) : heads(h), out(o), in(i), values(h * o * i) {
    cases::Random random(seed);
    random.fill_normal(values);
    // Blocks of very different size, and zeros.
    for (size_t j = 0; j < values.size(); ++j)
      values[j] *= static_cast<float>(std::exp2(static_cast<int>(j / 40 % 13) - 6)) * (j % 11 == 3 ? 0.0f : 1.0f);
  }
  float at(int64_t h, int64_t o, int64_t i) const { return values[(h * out + o) * in + i]; }
};

TEST(Quantise, OneFp8ScaleForTheTensor) {
  Matrix m(3, 5, 7, 1);
  m.values[50] = -96;
  const QuantisedWeights q = quantise(m.values, 3, 5, 7, WeightFormat::fp8);
  const float s = 448.0f / 96.0f;
  ASSERT_EQ(q.scales, std::vector<float>{1.0f / s});
  for (int64_t h = 0; h < 3; ++h)
    for (int64_t o = 0; o < 5; ++o)
      for (int64_t i = 0; i < 7; ++i)
        EXPECT_EQ(q.value(h, o, i), to_float(to_fp8_e4m3(m.at(h, o, i) * s)) * (1.0f / s));
  EXPECT_EQ(q.codes[50], 0xfe);  // -448
  EXPECT_NEAR(q.value(1, 2, 1), -96, 1e-5);
  // Nothing but zeros: the floor of 1e-10 keeps the scale finite.
  const QuantisedWeights zero = quantise(std::vector<float>(6), 1, 2, 3, WeightFormat::fp8);
  EXPECT_TRUE(std::isfinite(zero.scales[0]));
  EXPECT_EQ(dequantise(zero, Dtype::f32), std::vector<float>(6));
}

TEST(Quantise, Fp8BlocksWithPartialEdges) {
  const Matrix m(2, 7, 10, 2);
  const QuantisedWeights q = quantise(m.values, 2, 7, 10, WeightFormat::fp8, 3, 4);
  ASSERT_EQ(q.scales.size(), 2u * 3 * 3);
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t o = 0; o < 7; ++o)
      for (int64_t i = 0; i < 10; ++i) {
        float amax = 0;
        for (int64_t r = o / 3 * 3; r < std::min<int64_t>(7, o / 3 * 3 + 3); ++r)
          for (int64_t c = i / 4 * 4; c < std::min<int64_t>(10, i / 4 * 4 + 4); ++c)
            amax = std::max(amax, std::fabs(m.at(h, r, c)));
        const float s = 448.0f / std::max(amax, 1e-10f);
        EXPECT_EQ(q.value(h, o, i), to_float(to_fp8_e4m3(m.at(h, o, i) * s)) * (1.0f / s)) << h << o << i;
        EXPECT_LE(std::fabs(q.value(h, o, i) - m.at(h, o, i)),
                  std::max(0x1.01p-4f * std::fabs(m.at(h, o, i)), 0x1.01p-10f / s));
      }
}

TEST(Quantise, Mxfp4GroupsAlongTheReduction) {
  for (int64_t in : {1, 31, 32, 33, 70}) {
    const Matrix m(2, 3, in, 3);
    const QuantisedWeights q = quantise(m.values, 2, 3, in, WeightFormat::mxfp4);
    const int64_t groups = (in + 31) / 32;
    ASSERT_EQ(q.scales.size(), static_cast<size_t>(2 * 3 * groups));
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t o = 0; o < 3; ++o)
        for (int64_t i = 0; i < in; ++i) {
          float amax = 0;
          for (int64_t c = i / 32 * 32; c < std::min(in, i / 32 * 32 + 32); ++c)
            amax = std::max(amax, std::fabs(m.at(h, o, c)));
          const double scale = amax == 0 ? std::exp2(-127) : std::exp2(std::floor(std::log2(amax)) - 2);
          EXPECT_EQ(static_cast<double>(q.scale(h, o, i)), scale);
          EXPECT_EQ(q.value(h, o, i), from_e2m1(nearest(static_cast<float>(m.at(h, o, i) / scale))) * scale);
        }
  }
}

TEST(Quantise, ValuesRoundToTheProductsDtype) {
  const Matrix m(1, 4, 40, 4);
  for (WeightFormat f : {WeightFormat::fp8, WeightFormat::mxfp4}) {
    const QuantisedWeights q = quantise(m.values, 1, 4, 40, f);
    const std::vector<float> exact = dequantise(q, Dtype::f32), rounded = dequantise(q, Dtype::bf16);
    for (size_t i = 0; i < exact.size(); ++i) {
      EXPECT_EQ(exact[i], q.value(0, static_cast<int64_t>(i) / 40, static_cast<int64_t>(i) % 40));
      EXPECT_EQ(rounded[i], to_float(to_bf16(exact[i])));
    }
    // Two bits of mantissa times a power of two.
    if (f == WeightFormat::mxfp4) {
      EXPECT_EQ(rounded, exact);
    }
  }
}

TEST(WeightFormats, NamesAndBytes) {
  for (WeightFormat f : {WeightFormat::plain, WeightFormat::fp8, WeightFormat::mxfp4})
    EXPECT_EQ(parse_weight_format(to_string(f)), f);
  EXPECT_THROW(parse_weight_format("int4"), InputError);
  EXPECT_EQ(weight_bytes(WeightFormat::plain, Dtype::bf16, 16, 512, 128), 2.0 * 16 * 512 * 128);
  EXPECT_EQ(weight_bytes(WeightFormat::fp8, Dtype::bf16, 16, 512, 128), 16.0 * 512 * 128 + 4);
  EXPECT_EQ(weight_bytes(WeightFormat::fp8, Dtype::bf16, 2, 200, 130, 128, 128), 2.0 * 200 * 130 + 4 * 2 * 2 * 2);
  EXPECT_EQ(weight_bytes(WeightFormat::mxfp4, Dtype::bf16, 16, 512, 128), 16 * 512 * (64 + 4.0));
}

}  // namespace
}  // namespace mla
