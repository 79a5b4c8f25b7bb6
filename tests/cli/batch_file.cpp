// Batches of lengths alone: which are refused, and what a plan sees of the others.
#include "cli/batch_file.hpp"

#include <gtest/gtest.h>

#include <limits>

#include "mla/error.hpp"

namespace mla::cli {
namespace {

std::string refusal(const BatchLengths& lengths) {
  try {
    BatchOfLengths made(lengths, 64);
  } catch (const InputError& e) {
    return e.what();
  }
  return "made";
}

TEST(BatchOfLengths, LengthsThatAreRefused) {
  EXPECT_EQ(refusal({{1, kMostTokens + 1}, {0, 0}}), "request 1: length is 268435457, allowed 0 to 268435456");
  EXPECT_EQ(refusal({{1}, {kMostTokens + 1}}), "request 0: length is 268435457, allowed 0 to 268435456");
  EXPECT_EQ(refusal({{1}, {std::numeric_limits<int64_t>::max()}}),
            "request 0: length is 9223372036854775807, allowed 0 to 268435456");
  EXPECT_EQ(refusal({{-1}, {0}}), "request 0: length is -1, allowed 0 to 268435456");
  EXPECT_EQ(refusal({{1}, {0, 0}}), "contexts has 2 entries, queries has 1");
}

TEST(BatchOfLengths, RowsShareThePagesOfTheLongest) {
  const BatchOfLengths made({{1, 20, 0}, {70, 0, 64}}, 64);
  EXPECT_EQ(made.pages(), 2);
  const Batch b = made.batch();
  EXPECT_EQ(b.requests(), 3);
  EXPECT_EQ(b.tokens(), 21);
  for (int64_t r = 0; r < 3; ++r)
    for (int32_t page = 0; page < 2; ++page) EXPECT_EQ(b.block_table(r, page), page);
  EXPECT_EQ(BatchOfLengths({{}, {}}, 64).pages(), 1);
}

}  // namespace
}  // namespace mla::cli
