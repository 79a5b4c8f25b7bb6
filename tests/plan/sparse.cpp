// Sparse work: every key of every row once, parts that do not depend on the other rows, and prefills packed by rows.
#include <gtest/gtest.h>

#include <limits>

#include "cases/compare.hpp"
#include "mla/error.hpp"
#include "mla/plan.hpp"

namespace mla {
namespace {

constexpr SplitPolicy kPolicies[] = {SplitPolicy::fast, SplitPolicy::batch_invariant};

// Items tile rows x keys; the partial rows of a split are those that merge_sparse joins, each written once.
void check(const SparseWork& work, int64_t rows, int64_t keys) {
  ASSERT_FALSE(work.items.empty());
  const int64_t splits = static_cast<int64_t>(work.items.size());
  int32_t done = 0;
  for (int64_t s = 0; s < splits; ++s) {
    const SparseItem& i = work.items[s];
    EXPECT_EQ(i.q_begin, 0);
    EXPECT_EQ(i.q_count, rows);
    EXPECT_EQ(i.k_begin, done);
    if (splits > 1) {
      EXPECT_GT(i.k_end, i.k_begin);
    }
    EXPECT_EQ(i.partial, splits > 1 ? s * rows : -1);
    if (work.part_keys > 0) {
      EXPECT_EQ(i.k_begin % work.part_keys, 0);
      if (splits > 1) {
        EXPECT_LE(i.k_end - i.k_begin, work.part_keys);
      }
    }
    done = i.k_end;
  }
  EXPECT_EQ(done, keys);
  EXPECT_EQ(work.partial_rows, splits > 1 ? splits * rows : 0);
  ASSERT_EQ(work.splits.size(), splits > 1 ? 1u : 0u);
  if (splits == 1) return;
  EXPECT_EQ(work.splits[0].row, 0);
  EXPECT_EQ(work.splits[0].rows, rows);
  EXPECT_EQ(work.splits[0].partial, 0);
  EXPECT_EQ(work.splits[0].splits, splits);
}

TEST(SparseWork, CoversEveryKeyOnce) {
  cases::Random random(3);
  for (int i = 0; i < 2000; ++i) {
    const int64_t rows = random.integer(1, random.integer(0, 3) ? 20 : 3000), keys = random.integer(0, 20000),
                  heads = random.integer(1, 200), units = random.integer(1, 300);
    for (SplitPolicy p : kPolicies) check(plan_sparse(rows, keys, heads, p, units), rows, keys);
  }
}

TEST(SparseWork, KnownShapes) {
  auto splits = [](int64_t rows, int64_t keys, int64_t heads, SplitPolicy p) {
    return plan_sparse(rows, keys, heads, p).items.size();
  };
  EXPECT_EQ(splits(1, 2048, 16, SplitPolicy::fast), 4u);
  EXPECT_EQ(splits(1, 2048, 128, SplitPolicy::fast), 4u);
  EXPECT_EQ(splits(8, 2048, 16, SplitPolicy::fast), 2u);
  EXPECT_EQ(splits(1, 500, 16, SplitPolicy::fast), 1u);
  EXPECT_EQ(splits(1, 2048, 16, SplitPolicy::batch_invariant), 2u);
  EXPECT_EQ(splits(1, 2049, 16, SplitPolicy::batch_invariant), 3u);
  // Rows that keep 64 workers busy by themselves need no partial rows.
  for (SplitPolicy p : kPolicies) {
    EXPECT_EQ(splits(64, 8192, 16, p), 1u);
    EXPECT_EQ(splits(32, 8192, 128, p), 1u);
    EXPECT_EQ(plan_sparse(8192, 8192, 128, p).partial_rows, 0);
    EXPECT_TRUE(plan_sparse(0, 2048, 16, p).items.empty());
    EXPECT_EQ(splits(3, 0, 16, p), 1u);  // rows that see nothing are written too
  }
}

TEST(SparseWork, InvariantPartsDependOnKeysAlone) {
  for (int64_t keys : {0, 100, 1024, 2048, 5000}) {
    const int32_t part = plan_sparse(1, keys, 1, SplitPolicy::batch_invariant).part_keys;
    EXPECT_GT(part, 0);
    for (int64_t rows : {1, 3, 63, 64, 5000})
      for (int64_t heads : {1, 16, 128})
        for (int64_t units : {1, 64, 1000})
          EXPECT_EQ(plan_sparse(rows, keys, heads, SplitPolicy::batch_invariant, units).part_keys, part);
  }
  EXPECT_EQ(plan_sparse(1, 2048, 16, SplitPolicy::fast).part_keys, 0);
}

TEST(SparseWork, RefusesImpossibleNumbers) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  auto refusal = [](int64_t rows, int64_t keys, int64_t heads, int64_t units) -> std::string {
    try {
      plan_sparse(rows, keys, heads, SplitPolicy::batch_invariant, units);
    } catch (const ShapeError& e) {
      return e.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refusal(kMost, kMost, kMost, 64), "accepted");
  EXPECT_EQ(refusal(-1, 1, 1, 64), "sparse rows is -1, allowed 0 to 2147483647");
  EXPECT_EQ(refusal(1, kMost + 1, 1, 64), "sparse keys is 2147483648, allowed 0 to 2147483647");
  EXPECT_EQ(refusal(1, 1, -2, 64), "sparse heads is -2, allowed 0 to 2147483647");
  EXPECT_EQ(refusal(1, 1, 1, 0), "sparse units is 0, allowed 1 to 2147483647");
  EXPECT_EQ(refusal(2000, kMost, 1, kMost), "sparse partial rows is 4194304000, allowed 0 to 2147483647");
}

std::string text(const std::vector<RequestRange>& chunks) {
  std::string s;
  for (const RequestRange& c : chunks) s += "(" + std::to_string(c.begin) + "," + std::to_string(c.end) + ")";
  return s;
}

std::string chunks_of(const std::vector<int32_t>& lengths, int64_t rows) {
  try {
    return text(split_prefill_chunks(lengths, rows));
  } catch (const ShapeError& e) {
    return e.what();
  }
}

TEST(PrefillChunks, KnownLengths) {
  EXPECT_EQ(chunks_of({2, 3, 4, 2}, 5), "(0,2)(2,3)(3,4)");
  EXPECT_EQ(chunks_of({5, 5, 5}, 5), "(0,1)(1,2)(2,3)");
  EXPECT_EQ(chunks_of({1, 1, 1}, 10), "(0,3)");
  EXPECT_EQ(chunks_of({4, 4, 4, 4}, 100), "(0,4)");
  EXPECT_EQ(chunks_of({}, 10), "");
  EXPECT_EQ(chunks_of({0, 0}, 1), "(0,2)");
  EXPECT_EQ(chunks_of({7, 0, 1}, 7), "(0,2)(2,3)");
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(chunks_of({kMost, kMost}, kMost), "(0,1)(1,2)");
  EXPECT_EQ(chunks_of({2, 6}, 5), "prefill length of request 1 is 6, allowed 0 to the workspace's 5 rows");
  EXPECT_EQ(chunks_of({-1}, 5), "prefill length of request 0 is -1, allowed 0 to the workspace's 5 rows");
  EXPECT_EQ(chunks_of({1}, 0), "prefill workspace rows is 0, allowed 1 to 2147483647");
}

TEST(PrefillChunks, RandomLengthsFitAndAreGreedy) {
  cases::Random random(9);
  for (int i = 0; i < 2000; ++i) {
    const int64_t rows = random.integer(1, 60);
    std::vector<int32_t> lengths(random.integer(0, 20));
    for (int32_t& n : lengths) n = static_cast<int32_t>(random.integer(0, rows));
    int32_t next = 0;
    for (const RequestRange& c : split_prefill_chunks(lengths, rows)) {
      EXPECT_EQ(c.begin, next);
      ASSERT_GT(c.end, c.begin);
      int64_t used = 0;
      for (int32_t r = c.begin; r < c.end; ++r) used += lengths[r];
      EXPECT_LE(used, rows);
      next = c.end;
      if (next < static_cast<int32_t>(lengths.size())) {
        EXPECT_GT(used + lengths[next], rows);
      }
    }
    EXPECT_EQ(next, static_cast<int32_t>(lengths.size()));
  }
}

}  // namespace
}  // namespace mla
