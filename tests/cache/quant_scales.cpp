// Static scales from activations.
#include "mla/quant_scales.hpp"

#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <vector>

#include "cases/compare.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

struct Activations {
  std::vector<float> q = std::vector<float>(2 * 3 * 8), kv = std::vector<float>(2 * 12);
  // Rows lie apart; what is between them must not be read.
  View<const float, Token, Head, QueryKey> q_view() const { return {q.data(), {2, 2, 6}, {24, 8, 1}}; }
  View<const float, Token, Latent> kv_view() const { return {kv.data(), {2, 10}, {12, 1}}; }
};

TEST(QuantScales, LargestMagnitudesOverTheConstants) {
  Activations a;
  a.q[24 + 8 + 5] = -50;  // the last element that is read
  a.kv[12 + 9] = 30;
  a.kv[0] = -4;
  const KvScales s = calc_kv_scales(a.q_view(), a.kv_view());
  EXPECT_EQ(s.q_scale, 50.0f / 200.0f);
  EXPECT_EQ(s.k_scale, 30.0f / 200.0f);
  EXPECT_EQ(s.v_scale, 30.0f / 100.0f);
  const KvScales other = calc_kv_scales(a.q_view(), a.kv_view(), {.q = 448, .k = 7, .v = 0.5f});
  EXPECT_EQ(other.q_scale, 50.0f / 448.0f);
  EXPECT_EQ(other.k_scale, 30.0f / 7.0f);
  EXPECT_EQ(other.v_scale, 60.0f);
}

TEST(QuantScales, AgreesWithAPlainMaximum) {
  cases::Random random(5);
  for (int i = 0; i < 50; ++i) {
    Activations a;
    random.fill_normal(a.q, 3.0f);
    random.fill_normal(a.kv, 0.1f);
    float q = 0, kv = 0;
    for (int64_t t = 0; t < 2; ++t)
      for (int64_t h = 0; h < 2; ++h)
        for (int64_t d = 0; d < 6; ++d) q = std::max(q, std::fabs(a.q[t * 24 + h * 8 + d]));
    for (int64_t t = 0; t < 2; ++t)
      for (int64_t d = 0; d < 10; ++d) kv = std::max(kv, std::fabs(a.kv[t * 12 + d]));
    const KvScales s = calc_kv_scales(a.q_view(), a.kv_view());
    EXPECT_EQ(s.q_scale, q / 200);
    EXPECT_EQ(s.k_scale, kv / 200);
    EXPECT_EQ(s.v_scale, kv / 100);
  }
}

TEST(QuantScales, NanDoesNotCountAndPaddingIsNotRead) {
  Activations a;
  a.q.assign(a.q.size(), INFINITY);
  a.kv.assign(a.kv.size(), INFINITY);
  for (int64_t t = 0; t < 2; ++t) {
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t d = 0; d < 6; ++d) a.q[t * 24 + h * 8 + d] = NAN;
    for (int64_t d = 0; d < 10; ++d) a.kv[t * 12 + d] = NAN;
  }
  EXPECT_EQ(calc_kv_scales(a.q_view(), a.kv_view()).q_scale, 1);
  a.q[3] = 2;
  a.kv[12] = -1;
  const KvScales s = calc_kv_scales(a.q_view(), a.kv_view());
  EXPECT_EQ(s.q_scale, 0.01f);
  EXPECT_EQ(s.k_scale, 1.0f / 200);
}

TEST(QuantScales, NothingSeenGivesOne) {
  const Activations zeros;
  for (const KvScales& s : {calc_kv_scales(zeros.q_view(), zeros.kv_view()), calc_kv_scales({}, {})}) {
    EXPECT_EQ(s.q_scale, 1);
    EXPECT_EQ(s.k_scale, 1);
    EXPECT_EQ(s.v_scale, 1);
  }
  Activations tiny;
  tiny.q[0] = FLT_TRUE_MIN;
  EXPECT_EQ(calc_kv_scales(tiny.q_view(), tiny.kv_view()).q_scale, FLT_MIN);
}

std::string refusal(const Activations& a, const KvScaleConstants& constants = {}) {
  try {
    calc_kv_scales(a.q_view(), a.kv_view(), constants);
  } catch (const InputError& e) {
    return e.what();
  }
  return "accepted";
}

TEST(QuantScales, InfinityAndConstantsAreNamed) {
  Activations a;
  a.kv[12 + 3] = -INFINITY;
  EXPECT_EQ(refusal(a), "calc_kv_scales: kv_c [1, 3] is infinite");
  a.q[24 + 2] = INFINITY;
  EXPECT_EQ(refusal(a), "calc_kv_scales: q [1, 0, 2] is infinite");
  EXPECT_EQ(refusal({}, {.k = 0}), "calc_kv_scales: constant k is 0.000000, must be finite and above 0");
  EXPECT_EQ(refusal({}, {.v = NAN}), "calc_kv_scales: constant v is nan, must be finite and above 0");
  EXPECT_EQ(refusal({}, {.q = INFINITY}), "calc_kv_scales: constant q is inf, must be finite and above 0");
}

}  // namespace
}  // namespace mla
