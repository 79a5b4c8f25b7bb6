// Batch validation, the decode/prefill split and the reorder helper.
#include "mla/batch.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "plan/internal.hpp"

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
  a.slots = {20};
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

TEST(Batch, ListsOfNothing) {
  const Arrays a;
  int32_t* const nothing = nullptr;
  const View<const int32_t, Request, Page> table(a.table.data(), {2, 3});
  const auto violation_of = [](const Batch& b) {
    try {
      validate(b, 6, 4);
    } catch (const BatchError& e) {
      return std::string(e.what());
    }
    return std::string("valid");
  };
  EXPECT_EQ(violation_of({{nothing, 3}, a.lengths, table, a.slots}), "batch: query_start_loc has no data");
  EXPECT_EQ(violation_of({a.starts, {nothing, 2}, table, a.slots}), "batch: seq_lens has no data");
  EXPECT_EQ(violation_of({a.starts, a.lengths, {nothing, {2, 3}}, a.slots}), "batch: block table has no data");
  EXPECT_EQ(violation_of({a.starts, a.lengths, table, {nothing, 3}}), "batch: slot_mapping has no data");
  EXPECT_EQ(violation_of({a.starts, a.lengths, {}, a.slots}), "batch: block table has 0 rows, 2 requests need as many");
}

// A slot is the place of its token's position in its request's own pages, or none.
TEST(Batch, SlotsThatAreNotTheTokensOwn) {
  const auto broken = [](auto&& breaks) {
    Arrays a;
    breaks(a);
    return violation(a);
  };
  EXPECT_EQ(broken([](Arrays& a) { a.slots = {3, 4, 20}; }), "valid");
  EXPECT_EQ(broken([](Arrays& a) { a.slots = {-1, -7, -1}; }), "valid");
  EXPECT_EQ(broken([](Arrays& a) { a.slots[0] = 2; }),  // its own page, another position
            "batch: request 0: slot_mapping[0] is 2, its token's position 3 is slot 3 (block_table[0] is 0, pages of "
            "4); below 0 writes nothing");
  EXPECT_EQ(broken([](Arrays& a) { a.slots[1] = 12; }),  // the other request's page
            "batch: request 0: slot_mapping[1] is 12, its token's position 4 is slot 4 (block_table[1] is 1, pages of "
            "4); below 0 writes nothing");
  EXPECT_EQ(broken([](Arrays& a) { a.slots[2] = 3; }),
            "batch: request 1: slot_mapping[2] is 3, its token's position 8 is slot 20 (block_table[2] is 5, pages of "
            "4); below 0 writes nothing");
  EXPECT_EQ(broken([](Arrays& a) { a.slots[1] = 3; }).substr(0, 49),
            "batch: request 0: slot_mapping[1] is 3, its token");
}

TEST(Batch, TwoTokensWithOneSlot) {
  Arrays a;
  a.table = {0, 1, 2, 3, 4, 1};  // request 1 writes the third row of a page that request 0 writes the first row of
  a.lengths = {5, 11};
  a.slots = {3, 4, 6};
  EXPECT_EQ(violation(a), "valid");
  a.lengths = {5, 9};
  a.slots = {3, 4, 4};
  EXPECT_EQ(violation(a), "batch: slot_mapping[2] is 4, the slot of token 1 too: one of them would be lost");
  a.slots = {3, 4, -1};  // read by one, written by the other
  EXPECT_EQ(violation(a), "valid");

  a.starts = {0, 5, 5};  // one request whose table has a page twice
  a.table = {2, 2, 0, 0, 0, 0};
  a.slots = {8, 9, 10, 11, 8};
  EXPECT_EQ(violation(a), "batch: slot_mapping[4] is 8, the slot of token 0 too: one of them would be lost");
  EXPECT_THROW(planning::validate_held(a.batch(), 6, 4, {.sharding = CacheSharding(2, 64)}), BatchError);
}

// Random steps, whole and with one slot moved: what a table of every slot's owner says.
TEST(Batch, SlotsOfRandomSteps) {
  std::mt19937 random(11);
  const auto below = [&](int64_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
  int refused = 0;
  for (int round = 0; round < 2000; ++round) {
    const int32_t page_size = 1 + below(5), requests = 1 + below(6), columns = 4;
    Arrays a;
    a.starts = {0};
    a.lengths.clear(), a.table.clear(), a.slots.clear();
    const int32_t pages = requests * columns;
    std::vector<int32_t> ids(static_cast<size_t>(pages));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    if (below(2)) ids[static_cast<size_t>(below(pages))] = ids[static_cast<size_t>(below(pages))];  // often shared
    bool valid = true;
    std::vector<bool> owned(static_cast<size_t>(pages * page_size));
    for (int32_t r = 0; r < requests; ++r) {
      const int32_t length = 1 + below(columns * page_size), fresh = below(length + 1);
      for (int32_t p = length - fresh; p < length; ++p) {
        int32_t slot = ids[static_cast<size_t>(r * columns + p / page_size)] * page_size + p % page_size;
        if (below(8) == 0) slot = -1 - below(3);
        else if (below(60) == 0) {
          const int32_t other = below(pages * page_size);
          valid = valid && other == slot;
          slot = other;
        }
        if (slot >= 0) {
          valid = valid && !owned[static_cast<size_t>(slot)];
          owned[static_cast<size_t>(slot)] = true;
        }
        a.slots.push_back(slot);
      }
      a.starts.push_back(static_cast<int32_t>(a.slots.size()));
      a.lengths.push_back(length);
    }
    const Batch batch{a.starts, a.lengths, {ids.data(), {requests, columns}}, a.slots};
    // A rank of a split cache that holds all of it judges alike.
    bool held = true;
    try {
      planning::validate_held(batch, pages, page_size, {.sharding = CacheSharding(2, 1 << 20), .rank = 0});
    } catch (const BatchError&) {
      held = false;
    }
    EXPECT_EQ(held, valid) << "as a rank's, round " << round;
    std::string found = "valid";
    try {
      validate(batch, pages, page_size);
    } catch (const BatchError& e) {
      found = e.what();
    }
    EXPECT_EQ(found == "valid", valid) << "round " << round << ": " << found;
    refused += !valid;
  }
  EXPECT_GT(refused, 200);
  EXPECT_LT(refused, 1800);
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
