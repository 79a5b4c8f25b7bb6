// Views: what compiles and what must not, addresses, slices, run-time dtypes.
#include "mla/view.hpp"

#include <gtest/gtest.h>

namespace mla {
namespace {

// A dimension is part of the type: views of other dimensions, or in another order, do not convert.
static_assert(std::is_convertible_v<View<float, Token, Head>, View<const float, Token, Head>>);
static_assert(!std::is_convertible_v<View<const float, Token, Head>, View<float, Token, Head>>);
static_assert(!std::is_convertible_v<View<float, Token, Head>, View<float, Head, Token>>);
static_assert(!std::is_convertible_v<View<float, Token, Latent>, View<const float, Token, Rope>>);
static_assert(!std::is_convertible_v<View<float, Token>, View<bf16, Token>>);
static_assert(std::is_convertible_v<View<float, Token, Head>, AnyView<Token, Head>>);
static_assert(std::is_convertible_v<View<float, Token, Head>, AnyMutableView<Token, Head>>);
static_assert(!std::is_convertible_v<View<const float, Token, Head>, AnyMutableView<Token, Head>>);
static_assert(std::is_convertible_v<AnyMutableView<Token, Head>, AnyView<Token, Head>>);
static_assert(!std::is_convertible_v<AnyView<Token, Head>, AnyMutableView<Token, Head>>);
static_assert(!std::is_convertible_v<AnyView<Token, Head>, AnyView<Token, Latent>>);

TEST(View, ExtentsStridesAddresses) {
  float data[24];
  for (int i = 0; i < 24; ++i) data[i] = static_cast<float>(i);
  const View<float, Token, Head, Value> v(data, {2, 3, 4});
  EXPECT_EQ(v.extent<Head>(), 3);
  EXPECT_EQ(v.stride<Token>(), 12);
  EXPECT_EQ(v.size(), 24);
  EXPECT_TRUE(v.dense());
  EXPECT_EQ(v(1, 2, 3), 23.0f);
  const View<const float, Token, Head> strided(data, {2, 3}, {12, 4});
  EXPECT_FALSE(strided.dense());
  EXPECT_EQ(strided(1, 1), 16.0f);
}

TEST(View, Slices) {
  float data[24] = {};
  const View<float, Token, Head, Value> v(data, {2, 3, 4});
  const auto s = v.slice<Head>(1, 2).slice<Value>(3, 1);
  EXPECT_EQ(&s(1, 1, 0), &v(1, 2, 3));
  EXPECT_EQ(s.extent<Head>(), 2);
  EXPECT_EQ(v.slice<Token>(2, 0).size(), 0);
  try {
    v.slice<Head>(2, 2);
    FAIL();
  } catch (const ShapeError& e) {
    EXPECT_STREQ(e.what(), "slice of Head [2, 4) leaves its extent 3");
  }
  EXPECT_THROW(v.slice<Value>(-1, 1), ShapeError);
  EXPECT_THROW(v.slice<Value>(0, -1), ShapeError);
}

TEST(View, RuntimeDtype) {
  bf16 data[6];
  for (int i = 0; i < 6; ++i) data[i] = to_bf16(static_cast<float>(i));
  const AnyMutableView<Token, In> v(Dtype::bf16, data, {2, 3});
  EXPECT_EQ(v(1, 2), 5.0f);
  EXPECT_EQ(v.at(1, 0), data + 3);
  EXPECT_EQ(v.as<bf16>()(0, 1).bits, data[1].bits);
  EXPECT_EQ(v.slice<Token>(1, 1)(0, 1), 4.0f);
  const AnyView<Token, In> read = v;
  try {
    read.as<float>();
    FAIL();
  } catch (const ShapeError& e) {
    EXPECT_STREQ(e.what(), "view holds bf16, read as f32");
  }
}

}  // namespace
}  // namespace mla
