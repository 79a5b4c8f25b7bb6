// Indexer queries that are rotated on the way to their codes, beside rope and codes one after the other.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "backend/run.hpp"
#include "cases/padded.hpp"

namespace mla::test {

/// The same bits, queries left alone, and codes next to the reference's, whose rotation is float64's.
inline void expect_rotated_index_queries(Stream& stream, int64_t tokens, int64_t heads, int64_t dim, int64_t rope,
                                         bool interleaved, int64_t gap, cases::Random& random) {
  using cases::Padded;
  const std::string where = "dim " + std::to_string(dim) + " rope " + std::to_string(rope) + " gap " +
                            std::to_string(gap) + (interleaved ? " interleaved" : " neox");
  constexpr int64_t kPositions = 1000;
  std::vector<int32_t> positions(static_cast<size_t>(tokens));
  for (int32_t& p : positions) p = static_cast<int32_t>(random.integer(0, kPositions - 1));
  positions.front() = 0, positions.back() = kPositions - 1;
  const RopeConfig config{.interleaved = interleaved};
  const RotaryTable table(config, rope, kPositions, stream.device()), on_host(config, rope, kPositions);
  Padded<Token, IndexHead, IndexDim> q(Dtype::f32, {tokens, heads, dim}, gap);
  Padded<Token, IndexHead> weights(Dtype::f32, {tokens, heads}, gap);
  q.fill_normal(random), weights.fill_normal(random);
  const Padded<Token, IndexHead, IndexDim> before = q;
  Padded<Token, IndexHead, IndexDim> codes(Dtype::fp8_e4m3, {tokens, heads, dim}, gap), expected = codes, right = codes;
  Padded<Token, IndexHead> scaled(Dtype::f32, {tokens, heads}, gap), expected_scaled = scaled, right_scaled = scaled;
  const ops::IndexQueryArgs args{.q = q.view(),
                                 .weights = weights.view(),
                                 .codes = codes.view<fp8_e4m3>(),
                                 .scaled_weights = scaled.view(),
                                 .table = &table,
                                 .positions = positions};
  ops::run(stream, args);
  stream.synchronize();
  EXPECT_EQ(q.bytes(), before.bytes()) << where;

  ops::IndexQueryArgs reference = args;
  reference.table = &on_host;
  reference.codes = right.view<fp8_e4m3>(), reference.scaled_weights = right_scaled.view();
  ops::reference(reference);
  EXPECT_EQ(scaled.bytes(), right_scaled.bytes()) << where;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t d = 0; d < dim; ++d) {
        const float got = to_float(args.codes(t, h, d)), want = to_float(reference.codes(t, h, d));
        ASSERT_LE(std::fabs(got - want), std::fabs(want) / 8 + 0x1p-9f) << where;  // a code apart at most
      }

  ops::run(stream, ops::RopeArgs{.q = AnyMutableView<Token, Head, Rope>(Dtype::f32, q.view().data(),
                                                                        {tokens, heads, rope}, q.view().strides()),
                                 .k = {},
                                 .positions = positions,
                                 .table = &table});
  ops::IndexQueryArgs apart = args;
  apart.table = nullptr, apart.positions = {};
  apart.codes = expected.view<fp8_e4m3>(), apart.scaled_weights = expected_scaled.view();
  ops::run(stream, apart);
  stream.synchronize();
  EXPECT_EQ(codes.bytes(), expected.bytes()) << where;
  EXPECT_EQ(scaled.bytes(), expected_scaled.bytes()) << where;
}

}  // namespace mla::test
