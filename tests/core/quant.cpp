// e2m1 at every border, the formats' names and sizes, and scale layouts against places computed by hand.
#include "mla/quant.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include "mla/error.hpp"
#include "support/quantised.hpp"

namespace mla {
namespace {

TEST(E2m1, EveryCodeDecodesAndComesBack) {
  for (int code = 0; code < 16; ++code) {
    const int exponent = code >> 1 & 3, mantissa = code & 1;
    const double magnitude = exponent == 0 ? mantissa * 0.5 : std::ldexp(1 + mantissa * 0.5, exponent - 1);
    const float x = from_e2m1(static_cast<uint8_t>(code));
    EXPECT_EQ(std::fabs(static_cast<double>(x)), magnitude) << code;
    EXPECT_EQ(std::signbit(x), code >= 8) << code;
    EXPECT_EQ(to_e2m1(x), code);
  }
}

// All 2^32 floats, run by run: the last one of each run is a tie that goes to its even code, or the one before a tie
// that does not; above infinity NaN, which has no sign.
TEST(E2m1, EveryFloat) {
  auto before = [](float x) { return std::bit_cast<uint32_t>(x) - 1; };
  auto at = [](float x) { return std::bit_cast<uint32_t>(x); };
  const uint32_t last[] = {at(0.25f), before(0.75f), at(1.25f), before(1.75f),
                           at(2.5f),  before(3.5f),  at(5.0f),  0x7f800000};
  uint32_t first = 0;
  for (uint32_t code = 0; code < 8; first = last[code++] + 1) {
    uint32_t wrong = 0;
    for (uint32_t bits = first; bits <= last[code]; ++bits)
      wrong |= (to_e2m1(std::bit_cast<float>(bits)) ^ code) |
               (to_e2m1(std::bit_cast<float>(bits | 0x80000000u)) ^ (code | 8u));
    EXPECT_EQ(wrong, 0u) << code;
  }
  uint32_t wrong = 0;
  for (uint32_t bits = first; bits <= 0x7fffffffu; ++bits)
    wrong |= (to_e2m1(std::bit_cast<float>(bits)) ^ 7u) | (to_e2m1(std::bit_cast<float>(bits | 0x80000000u)) ^ 7u);
  EXPECT_EQ(wrong, 0u);
}

// Against a search for the nearest code: the first, the second and the last of the numbers that share upper 20 bits,
// both signs and every exponent, infinities and NaN among them.
TEST(E2m1, RoundsToTheNearest) {
  int64_t wrong = 0;
  for (uint64_t high = 0; high < uint64_t{1} << 20; ++high)
    for (uint32_t low : {0x000u, 0x001u, 0xfffu}) {
      const float x = std::bit_cast<float>(static_cast<uint32_t>(high << 12) | low);
      if (to_e2m1(x) != test::plain_e2m1(x) && wrong++ < 5)
        ADD_FAILURE() << x << " became " << int{to_e2m1(x)} << ", nearest is " << int{test::plain_e2m1(x)};
    }
  EXPECT_EQ(wrong, 0);
}

TEST(E2m1, TiesAndEnds) {
  const std::pair<float, int> ties[] = {{0.25f, 0}, {0.75f, 2}, {1.25f, 2}, {1.75f, 4},
                                        {2.5f, 4},  {3.5f, 6},  {5.0f, 6}};
  for (const auto& [x, code] : ties) {
    EXPECT_EQ(to_e2m1(x), code) << x;
    EXPECT_EQ(to_e2m1(-x), code + 8) << x;
  }
  EXPECT_EQ(to_e2m1(std::nextafterf(5.0f, 6.0f)), 7);
  EXPECT_EQ(to_e2m1(INFINITY), 7);
  EXPECT_EQ(to_e2m1(-1e30f), 15);
  EXPECT_EQ(to_e2m1(NAN), 7);
  EXPECT_EQ(to_e2m1(-NAN), 7);
  EXPECT_EQ(to_e2m1(-0.0f), 8);
}

TEST(OutputSpec, NamesParseAndDiffer) {
  std::set<std::string> names;
  for (const OutputSpec& spec : output_specs()) {
    spec.validate();
    EXPECT_TRUE(names.insert(to_string(spec)).second) << to_string(spec);
    EXPECT_TRUE(parse_output_spec(to_string(spec)).same_format(spec));
  }
  EXPECT_EQ(names.size(), 18u);
  for (const char* name :
       {"none", "fp8", "fp8_128", "fp8_64_column", "fp8_128_ue8m0_tma", "fp8_64_packed", "nvfp4", "mxfp4"})
    EXPECT_EQ(to_string(parse_output_spec(name)), name);
  EXPECT_THROW(parse_output_spec("fp8_32"), InputError);
  EXPECT_THROW(parse_output_spec(""), InputError);
  OutputSpec other = parse_output_spec("fp8");
  other.scale = 3;
  EXPECT_TRUE(other.same_format(parse_output_spec("fp8")));  // a layer's number, not a format's
  EXPECT_FALSE(other.same_format(parse_output_spec("none")));
}

TEST(OutputSpec, ImpossibleOnesAreNamed) {
  auto refusal = [](const OutputSpec& spec) -> std::string {
    try {
      spec.validate();
    } catch (const Error& e) {
      return e.what();
    }
    return "valid";
  };
  OutputSpec groups{.kind = OutputKind::fp8_groups, .group = 32};
  EXPECT_EQ(refusal(groups), "output: group is 32; 64 and 128 are supported");
  groups = {.kind = OutputKind::fp8_groups, .form = ScaleForm::packed_ue8m0};
  EXPECT_EQ(refusal(groups), "output: packed ue8m0 scales are row-major; tma_aligned is supported");
  groups.layout = ScaleLayout::column_major;
  EXPECT_EQ(refusal(groups), "output: packed ue8m0 scales are column-major; tma_aligned is supported");
  EXPECT_EQ(refusal({.kind = OutputKind::fp8, .scale = 0}), "output: scale is 0.000000, must be finite and above 0");
  EXPECT_EQ(refusal({.kind = OutputKind::fp8, .scale = NAN}), "output: scale is nan, must be finite and above 0");
  EXPECT_EQ(refusal({.kind = OutputKind::nvfp4, .global_scale = INFINITY}),
            "output: global_scale is inf, must be finite and above 0");
  EXPECT_EQ(refusal({.kind = OutputKind::nvfp4, .scale = -1}), "valid");  // not read
}

TEST(OutputSpec, SizesByHand) {
  auto spec = [](const char* name) { return parse_output_spec(name); };
  EXPECT_EQ(spec("fp8").data_bytes(5, 300), 1500);
  EXPECT_EQ(spec("fp8").scale_bytes(5, 300), 0);
  EXPECT_EQ(spec("fp8_128").scale_bytes(5, 300), 5 * 3 * 4);
  EXPECT_EQ(spec("fp8_64_column").scale_bytes(5, 300), 5 * 5 * 4);
  EXPECT_EQ(spec("fp8_128_tma").scale_bytes(5, 300), 3 * 8 * 4);
  EXPECT_EQ(spec("fp8_64_packed").scale_bytes(5, 300), 2 * 8 * 4);  // five groups: two words a row
  EXPECT_EQ(spec("nvfp4").data_bytes(5, 301), 5 * 151);
  EXPECT_EQ(spec("nvfp4").scale_bytes(129, 300), 2 * 5 * 512);
  EXPECT_EQ(spec("nvfp4").scale_bytes(0, 300), 0);
  EXPECT_EQ(spec("mxfp4").data_bytes(5, 301), 5 * 151);
  EXPECT_EQ(spec("mxfp4").scale_bytes(129, 300), 2 * 3 * 512);  // ten groups of 32: three tiles
  EXPECT_EQ(spec("mxfp4").scale_bytes(0, 300), 0);
  EXPECT_EQ(spec("none").data_bytes(5, 300), 6000);
}

TEST(OutputSpec, ScalePlacesByHand) {
  auto place = [](const char* name, int64_t row, int64_t group) {
    return parse_output_spec(name).scale_offset(/*tokens=*/130, /*width=*/1280, row, group);
  };
  EXPECT_EQ(place("fp8_128", 3, 7), (3 * 10 + 7) * 4);
  EXPECT_EQ(place("fp8_64", 3, 7), (3 * 20 + 7) * 4);
  EXPECT_EQ(place("fp8_128_column", 3, 7), (7 * 130 + 3) * 4);
  EXPECT_EQ(place("fp8_128_tma", 3, 7), (7 * 132 + 3) * 4);
  EXPECT_EQ(place("fp8_128_packed", 3, 7), (1 * 132 + 3) * 4 + 3);
  EXPECT_EQ(place("nvfp4", 0, 0), 0);
  EXPECT_EQ(place("nvfp4", 1, 2), 16 + 2);
  EXPECT_EQ(place("nvfp4", 33, 2), 16 + 4 + 2);
  EXPECT_EQ(place("nvfp4", 127, 3), 31 * 16 + 12 + 3);
  EXPECT_EQ(place("nvfp4", 0, 4), 512);
  EXPECT_EQ(place("nvfp4", 129, 9), (20 + 2) * 512 + 16 + 1);  // 1280 / 64 = 20 tiles a row of them
  EXPECT_EQ(place("mxfp4", 33, 2), 16 + 4 + 2);
  EXPECT_EQ(place("mxfp4", 129, 9), (10 + 2) * 512 + 16 + 1);  // 1280 / 128 = 10
}

}  // namespace
}  // namespace mla
