// A cache split over ranks: every rule against dealing the tokens out one by one.
#include "mla/sharding.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "support/message.hpp"

namespace mla {
namespace {

using test::message_of;

// The picture in the header, when the compiler reads it.
constexpr CacheSharding kPicture(2, 2);
static_assert(kPicture.owner(3) == 1 && kPicture.index(3) == 1 && kPicture.position(1, 3) == 7);
static_assert(kPicture.length(0, 9) == 5 && kPicture.length(1, 9) == 4 && kPicture.pages(0, 9, 4) == 2);
constexpr int32_t kTable[] = {7, 3};
static_assert(kPicture.slot(0, 8, kTable, 4) == 12 && kPicture.slot(1, 8, kTable, 4) == -1);
static_assert(kPicture.slot_position(0, 12, kTable, 4) == 8 && kPicture.slot_position(0, 16, kTable, 4) == -1);
static_assert(CacheSharding() == CacheSharding(1, 1));

constexpr int64_t kLongest = 22860;

class Sharding : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  CacheSharding sharding{std::get<0>(GetParam()), std::get<1>(GetParam())};
};

// A dealer who knows no formula: he gives the rank whose turn it is one token after another, and turns after
// `interleave`.
TEST_P(Sharding, IsWhatDealingGivesAtEveryLength) {
  const auto [ranks, interleave] = GetParam();
  constexpr int64_t kPageSizes[] = {1, 5, 64};
  std::vector<int64_t> held(ranks, 0);
  int64_t turn = 0, left = interleave;
  for (int64_t tokens = 0; tokens <= kLongest; ++tokens) {  // `tokens` are dealt, position `tokens` is the next
    int64_t sum = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      ASSERT_EQ(sharding.length(r, tokens), held[r]) << "rank " << r << ", tokens " << tokens;
      sum += held[r];
    }
    ASSERT_EQ(sum, tokens);
    for (const int64_t q : kPageSizes) {
      for (int64_t r = 0; r < ranks; ++r) {
        ASSERT_EQ(sharding.pages(r, tokens, q), (held[r] + q - 1) / q);
        ASSERT_LE(sharding.pages(r, tokens, q), sharding.pages(0, tokens, q));
      }
    }
    ASSERT_EQ(sharding.owner(tokens), turn) << tokens;
    ASSERT_EQ(sharding.index(tokens), held[turn]) << tokens;
    ASSERT_EQ(sharding.position(turn, held[turn]), tokens);
    ++held[turn];
    if (--left == 0) turn = (turn + 1) % ranks, left = interleave;
  }
}

// Pages in no order and of any size, also such that no block fits: each position has one slot on one rank, and comes
// back.
TEST_P(Sharding, SlotsHoldEachPositionOnce) {
  const auto [ranks, interleave] = GetParam();
  for (const int64_t page_size : {1, 3, 64}) {
    const int64_t tokens = 1500 + interleave / 2;
    for (int64_t r = 0; r < ranks; ++r) {
      std::vector<int32_t> table(sharding.pages(r, tokens, page_size));
      std::iota(table.rbegin(), table.rend(), 2);
      std::vector<int64_t> holds((table.size() + 2) * page_size, -1);
      int64_t next = 0;  // a rank's tokens fill its pages in order
      for (int64_t p = 0; p < tokens; ++p) {
        const int64_t slot = sharding.slot(r, p, table, page_size);
        if (sharding.owner(p) != r) {
          ASSERT_EQ(slot, -1);
          continue;
        }
        ASSERT_EQ(slot, table[next / page_size] * page_size + next % page_size);
        ASSERT_EQ(holds[slot], -1) << "two positions in slot " << slot;
        holds[slot] = p;
        ASSERT_EQ(sharding.slot_position(r, slot, table, page_size), p);
        ++next;
      }
      ASSERT_EQ(next, sharding.length(r, tokens));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Groups, Sharding, testing::Combine(testing::Range(1, 9), testing::Values(1, 2, 4, 16, 64)),
                         [](const auto& group) {
                           return "ranks" + std::to_string(std::get<0>(group.param)) + "_interleave" +
                                  std::to_string(std::get<1>(group.param));
                         });

TEST(ShardingEdges, TheLargestNumbersDoNotWrap) {
  constexpr int64_t kMost32 = std::numeric_limits<int32_t>::max(), kMost64 = std::numeric_limits<int64_t>::max();
  for (const CacheSharding& s : {CacheSharding(kMost32, kMost32), CacheSharding(8, 64), CacheSharding(1, 1)}) {
    int64_t sum = 0;
    for (int64_t r = 0; r < std::min<int64_t>(s.ranks(), 4); ++r) sum += s.length(r, kMost64);
    EXPECT_GT(sum, 0);
    const int64_t rank = s.owner(kMost64 / 2), index = s.index(kMost64 / 2);
    EXPECT_EQ(s.position(rank, index), kMost64 / 2);
    EXPECT_EQ(s.length(rank, kMost64 / 2), index);
  }
  const CacheSharding s(8, 64);
  EXPECT_EQ(message_of<InputError>([&] { s.position(0, kMost64); }).find("cache sharding: block of the index is "), 0u);
}

TEST(ShardingEdges, UnusableValuesAreNamedWithTheirLimits) {
  const CacheSharding s(4, 16);
  const std::vector<int32_t> table = {5, -1}, none;
  const auto says = [](auto&& call) { return message_of<InputError>(call); };
  EXPECT_EQ(says([] { CacheSharding(0, 1); }), "cache sharding: ranks is 0, allowed 1 to 2147483647");
  EXPECT_EQ(says([] { CacheSharding(1, 0); }), "cache sharding: interleave is 0, allowed 1 to 2147483647");
  EXPECT_EQ(says([] { CacheSharding(1, int64_t{1} << 31); }),
            "cache sharding: interleave is 2147483648, allowed 1 to 2147483647");
  EXPECT_EQ(says([&] { s.length(4, 9); }), "cache sharding: rank is 4, allowed 0 to 3");
  EXPECT_EQ(says([&] { s.position(-1, 9); }), "cache sharding: rank is -1, allowed 0 to 3");
  EXPECT_EQ(says([&] { s.owner(-1); }), "cache sharding: position is -1, must be at least 0");
  EXPECT_EQ(says([&] { s.index(-2); }), "cache sharding: position is -2, must be at least 0");
  EXPECT_EQ(says([&] { s.length(0, -3); }), "cache sharding: tokens is -3, must be at least 0");
  EXPECT_EQ(says([&] { s.position(0, -4); }), "cache sharding: index is -4, must be at least 0");
  EXPECT_EQ(says([&] { s.pages(0, 9, 0); }), "cache sharding: page_size is 0, allowed 1 to 2147483647");
  EXPECT_EQ(says([&] { s.slot(5, 0, table, 8); }), "cache sharding: rank is 5, allowed 0 to 3");
  EXPECT_EQ(says([&] { s.slot(0, 64, table, 8); }), "cache sharding: page of the position is 2, allowed 0 to 1");
  EXPECT_EQ(says([&] { s.slot(0, 8, table, 8); }), "cache sharding: page id is -1, allowed 0 to 2147483647");
  EXPECT_EQ(says([&] { s.slot(0, 0, none, 8); }), "cache sharding: page of the position is 0, the page table is empty");
  EXPECT_EQ(says([&] { s.slot_position(0, -1, table, 8); }), "cache sharding: slot is -1, must be at least 0");
}

}  // namespace
}  // namespace mla
