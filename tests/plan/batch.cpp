// Batch validation, the decode/prefill split and the reorder helper.
#include "mla/batch.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

namespace mla {
namespace {

struct Arrays {
  std::vector<int32_t> starts{0, 2, 3}, lengths{5, 9}, table{0, 1, 2, 3, 4, 5}, slots{3, 4, -1};
  Batch batch() const { return {starts, lengths, {table.data(), {2, 3}}, slots}; }
};

std::string violation(const Arrays& a, int64_t pages = 6, int64_t page_size = 4) {
  try {
    validate(a.batch(), pages, page_size);
  } catch (const BatchError& e) {
    return e.what();
  }
  return "valid";
}

TEST(Batch, ValidOnesPass) {
  Arrays a;
  EXPECT_EQ(violation(a), "valid");
  a.table[2] = std::numeric_limits<int32_t>::min();  // past request 0's two pages: never looked at
  EXPECT_EQ(violation(a), "valid");
  a.starts = {0, 0, 1};
  a.slots = {7};
  a.table[0] = -5;  // request 0 has nothing to do
  EXPECT_EQ(violation(a), "valid");
}

TEST(Batch, EachViolationIsNamed) {
  const auto broken = [](auto&& breaks) {
    Arrays a;
    breaks(a);
    return violation(a);
  };
  EXPECT_EQ(broken([](Arrays& a) { a.starts = {0, 2}; }), "batch: query_start_loc has 2 entries, 2 requests need 3");
  EXPECT_EQ(broken([](Arrays& a) { a.starts[0] = 1; }), "batch: query_start_loc[0] is 1, must be 0");
  EXPECT_EQ(broken([](Arrays& a) { a.starts = {0, 4, 3}; }), "batch: request 1: query_start_loc falls from 4 to 3");
  EXPECT_EQ(broken([](Arrays& a) { a.lengths[1] = -1; }), "batch: request 1: seq_len is -1, must not be negative");
  EXPECT_EQ(broken([](Arrays& a) { a.lengths[0] = 1; }), "batch: request 0: seq_len is 1, below its 2 new tokens");
  EXPECT_EQ(broken([](Arrays& a) { a.lengths[1] = 13; }),
            "batch: request 1: seq_len 13 needs 4 pages of 4, block table has 3");
  EXPECT_EQ(broken([](Arrays& a) { a.lengths[1] = std::numeric_limits<int32_t>::max(); }),
            "batch: request 1: seq_len 2147483647 needs 536870912 pages of 4, block table has 3");
  EXPECT_EQ(broken([](Arrays& a) { a.table[4] = 6; }), "batch: request 1: block_table[1] is 6, the cache has 6 pages");
  EXPECT_EQ(broken([](Arrays& a) { a.table[1] = -1; }),
            "batch: request 0: block_table[1] is -1, the cache has 6 pages");
  EXPECT_EQ(broken([](Arrays& a) { a.slots.pop_back(); }), "batch: slot_mapping has 2 entries, the batch has 3 tokens");
  EXPECT_EQ(broken([](Arrays& a) { a.slots[1] = 24; }), "batch: slot_mapping[1] is 24, the cache has 24 slots");
}

TEST(Batch, CachesThatCannotBe) {
  const Arrays a;
  for (const auto& [pages, page_size] :
       std::vector<std::pair<int64_t, int64_t>>{{-1, 4},
                                                {6, 0},
                                                {6, -1},
                                                {std::numeric_limits<int64_t>::max(), 64},
                                                {6, std::numeric_limits<int64_t>::max()}})
    EXPECT_EQ(violation(a, pages, page_size), "batch: a cache of " + std::to_string(pages) + " pages of " +
                                                  std::to_string(page_size) + " cannot be, slots go up to 2147483647");
}

TEST(Batch, BlockTableWithTooFewRows) {
  Arrays a;
  const Batch b{a.starts, a.lengths, {a.table.data(), {1, 6}}, a.slots};
  EXPECT_THROW(validate(b, 6, 4), BatchError);
}

DecodePrefillSplit split(std::vector<int32_t> lens, int64_t threshold, bool uniform,
                         std::vector<uint8_t> prefilling = {}) {
  std::vector<int32_t> starts(lens.size() + 1);
  std::partial_sum(lens.begin(), lens.end(), starts.begin() + 1);
  return split_decodes_and_prefills(starts, {.threshold = threshold,
                                             .require_uniform = uniform,
                                             .treat_short_extends_as_decodes = prefilling.empty(),
                                             .is_prefilling = prefilling});
}

TEST(Split, DecodesFirst) {
  EXPECT_EQ(split({2, 2, 1, 3, 2, 1, 2}, 3, false), (DecodePrefillSplit{7, 0, 13, 0}));
  EXPECT_EQ(split({2, 2, 1, 3, 2, 1, 2}, 3, true), (DecodePrefillSplit{2, 5, 4, 9}));
  EXPECT_EQ(split({2, 1, 3, 4, 5, 6, 7, 8}, 4, false), (DecodePrefillSplit{4, 4, 10, 26}));
  EXPECT_EQ(split({2, 2, 2, 0}, 4, true), (DecodePrefillSplit{4, 0, 6, 0}));
  EXPECT_EQ(split({5, 1, 1}, 4, false), (DecodePrefillSplit{0, 3, 0, 7}));
  EXPECT_EQ(split({1, 1, 1}, 1, true), (DecodePrefillSplit{3, 0, 3, 0}));
  EXPECT_EQ(split({}, 1, false), (DecodePrefillSplit{}));
  EXPECT_EQ(split({3, 3, 3}, 4, true), (DecodePrefillSplit{3, 0, 9, 0}));
  EXPECT_EQ(split({1, 1, 1, 9}, 4, false, {0, 0, 1, 1}), (DecodePrefillSplit{2, 2, 2, 10}));
}

TEST(Split, BadArguments) {
  EXPECT_THROW(split_decodes_and_prefills({}, {}), BatchError);
  const std::vector<int32_t> starts{0, 1};
  EXPECT_THROW(split_decodes_and_prefills(starts, {.treat_short_extends_as_decodes = false}), BatchError);
}

// Every arrangement of up to seven requests: the swaps do their work, and no fewer could: each swap brings at most one
// decode forward.
TEST(Reorder, MinimalSwaps) {
  for (int n = 0; n <= 7; ++n)
    for (int mask = 0; mask < 1 << n; ++mask) {
      std::vector<int32_t> lens(n);
      int64_t misplaced = 0, decodes = 0;
      for (int i = 0; i < n; ++i) decodes += (lens[i] = mask >> i & 1 ? 9 : 1) == 1;
      for (int i = 0; i < decodes; ++i) misplaced += lens[i] == 9;
      const auto swaps = reorder_swaps(lens, 4);
      EXPECT_EQ(static_cast<int64_t>(swaps.size()), misplaced);
      for (auto [a, b] : swaps) std::swap(lens[a], lens[b]);
      EXPECT_TRUE(std::is_sorted(lens.begin(), lens.end()));
    }
}

}  // namespace
}  // namespace mla
