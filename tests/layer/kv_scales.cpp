// Static scales of arrays on the device that this program is for: those of the same numbers in f32 on the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cases/compare.hpp"
#include "mla/mla.hpp"
#include "support/device.hpp"
#include "support/message.hpp"

namespace mla::test {
namespace {

// Rows of [tokens, heads, width] with `gap` elements behind each head's, which hold infinities: never read.
struct Rows {
  Dtype dtype;
  int64_t tokens, heads, width, gap;
  std::vector<std::byte> bytes;
  Buffer device;

  Rows(Dtype t, int64_t rows, int64_t n, int64_t w, int64_t more)
      : dtype(t), tokens(rows), heads(n), width(w), gap(more) {
    bytes.resize(static_cast<size_t>(tokens * heads * (width + gap)) * size_of(t));
    for (int64_t i = 0; i < tokens * heads * (width + gap); ++i)
      store_float(t, bytes.data(), i, std::numeric_limits<float>::infinity());
  }
  void set(int64_t token, int64_t head, int64_t i, float x) {
    store_float(dtype, bytes.data(), (token * heads + head) * (width + gap) + i, x);
  }
  float at(int64_t token, int64_t head, int64_t i) const {
    return load_float(dtype, bytes.data(), (token * heads + head) * (width + gap) + i);
  }
  void fill(cases::Random& random) {
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < width; ++i) set(t, h, i, static_cast<float>(random.normal() * 3));
  }
  float largest() const {
    float most = 0;
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < width; ++i)
          if (std::fabs(at(t, h, i)) > most) most = std::fabs(at(t, h, i));
    return most;
  }
  AnyView<Token, Head, QueryKey> q() {
    device = Buffer::copy_of(bytes.data(), bytes.size(), kDevice);
    return {dtype, device.data(), {tokens, heads, width}, {heads * (width + gap), width + gap, 1}};
  }
  AnyView<Token, Latent> kv_c() {
    device = Buffer::copy_of(bytes.data(), bytes.size(), kDevice);
    return {dtype, device.data(), {tokens, width}, {width + gap, 1}};
  }
};

class KvScalesOf : public testing::Test {
 protected:
  ThreadPool pool_{2};
  Stream stream_ = stream_on_device(pool_);
};

TEST_F(KvScalesOf, ArraysOfEveryDtypeWhereTheyLie) {
  cases::Random random(3);
  for (Dtype q_dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
    for (Dtype kv_dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
      for (const auto& [tokens, width, gap] : {std::tuple{1, 8, 0}, std::tuple{37, 192, 0}, std::tuple{5, 192, 8},
                                               std::tuple{9, 20, 3}, std::tuple{700, 576, 0}, std::tuple{3, 7, 0}}) {
        Rows q(q_dtype, tokens, 3, width, gap), kv(kv_dtype, tokens, 1, width, gap);
        q.fill(random), kv.fill(random);
        q.set(0, 1, width / 2, NAN);
        // The last that is read.
        if (random.integer(0, 1) == 0) q.set(tokens - 1, 2, width - 1, -50), kv.set(tokens - 1, 0, width - 1, 40);
        const KvScales s = calc_kv_scales(stream_, q.q(), kv.kv_c());
        EXPECT_EQ(s.q_scale, q.largest() / 200.0f) << tokens << " x " << width;
        EXPECT_EQ(s.k_scale, kv.largest() / 200.0f) << tokens << " x " << width;
        EXPECT_EQ(s.v_scale, kv.largest() / 100.0f) << tokens << " x " << width;
      }
}

TEST_F(KvScalesOf, NothingAndZeros) {
  Rows kv(Dtype::f16, 2, 1, 8, 0);
  for (int64_t t = 0; t < 2; ++t)
    for (int64_t i = 0; i < 8; ++i) kv.set(t, 0, i, i == 3 ? NAN : -0.0f);
  const KvScales s = calc_kv_scales(stream_, {}, kv.kv_c());
  EXPECT_EQ(s.q_scale, 1);
  EXPECT_EQ(s.k_scale, 1);
  EXPECT_EQ(s.v_scale, 1);
}

TEST_F(KvScalesOf, WhatHasNoScaleIsNamed) {
  cases::Random random(4);
  Rows q(Dtype::bf16, 4, 2, 16, 0), kv(Dtype::bf16, 4, 1, 16, 0);
  q.fill(random), kv.fill(random);
  kv.set(2, 0, 5, -INFINITY);
  const auto refusal = [&] { return message_of([&] { calc_kv_scales(stream_, q.q(), kv.kv_c()); }); };
  EXPECT_EQ(refusal(), kOnGpu ? "calc_kv_scales: kv_c holds an infinity" : "calc_kv_scales: kv_c [2, 5] is infinite");
  q.set(3, 1, 0, INFINITY);
  EXPECT_EQ(refusal(), kOnGpu ? "calc_kv_scales: q holds an infinity" : "calc_kv_scales: q [3, 1, 0] is infinite");
  EXPECT_EQ(message_of([&] {
              calc_kv_scales(stream_, {}, AnyView<Token, Latent>(Dtype::fp8_e4m3, &q, {1, 1}));
            }),
            "calc_kv_scales: kv_c is fp8_e4m3, allowed: f32 bf16 f16");
  EXPECT_EQ(message_of([&] {
              calc_kv_scales(stream_, {}, AnyView<Token, Latent>(Dtype::f32, nullptr, {1, 1}));
            }),
            "calc_kv_scales: kv_c has no data");
  q.fill(random), kv.fill(random);
  EXPECT_EQ(message_of([&] { calc_kv_scales(stream_, q.q(), kv.kv_c(), {.k = 0}); }),
            "calc_kv_scales: constant k is 0.000000, must be finite and above 0");
}

}  // namespace
}  // namespace mla::test
