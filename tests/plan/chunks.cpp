// Context chunks: packing rules on the shapes that broke simpler schemes, and on random ones.
#include <gtest/gtest.h>

#include "cases/compare.hpp"
#include "mla/plan.hpp"

namespace mla {
namespace {

using Chunks = std::vector<std::vector<GatherPiece>>;

// Every context row exactly once and in order; nothing over the budget; only first pieces continue a request; cuts on
// pages.
void check(const Chunks& chunks, const std::vector<int32_t>& contexts, int64_t rows, int64_t page_size,
           bool fixed = false) {
  std::vector<int32_t> done(contexts.size());
  for (const auto& chunk : chunks) {
    ASSERT_FALSE(chunk.empty());
    int32_t row = 0;
    for (size_t i = 0; i < chunk.size(); ++i) {
      const GatherPiece& p = chunk[i];
      EXPECT_EQ(p.row, row);
      EXPECT_EQ(p.start, done[p.request]);
      EXPECT_GT(p.count, 0);
      if (i > 0) {
        if (!fixed) {
          EXPECT_EQ(p.start, 0);
        }
        EXPECT_GT(p.request, chunk[i - 1].request);
      }
      if (rows >= page_size && !fixed) {
        EXPECT_EQ(p.start % page_size, 0);
      }
      row += p.count;
      done[p.request] += p.count;
    }
    EXPECT_LE(row, rows);
  }
  EXPECT_EQ(done, contexts);
}

TEST(Chunks, KnownContexts) {
  auto count = [](const std::vector<int32_t>& contexts, int64_t rows, int64_t page = 16) {
    const Chunks c = pack_context_chunks(contexts, rows, page);
    check(c, contexts, rows, page);
    return c.size();
  };
  EXPECT_EQ(count({960, 16, 16, 16, 16, 16, 16, 16}, 1024), 2u);
  EXPECT_EQ(count({2048, 320}, 1024), 3u);
  EXPECT_EQ(count({1024, 1024, 1024}, 1024), 3u);
  EXPECT_EQ(count({37, 1000, 5}, 1024), 2u);
  EXPECT_EQ(count({1}, 1024), 1u);
  EXPECT_EQ(count({64, 0, 64, 0}, 1024), 1u);
  EXPECT_EQ(count({0, 0}, 1024), 0u);
  EXPECT_EQ(count({100}, 7), 15u);  // less than a page of room: cuts cannot be aligned
  std::vector<int32_t> one_long(32, 16);
  one_long[0] = 60000;
  EXPECT_EQ(count(one_long, 65536), 1u);
}

TEST(Chunks, RandomContexts) {
  cases::Random random(5);
  for (int i = 0; i < 2000; ++i) {
    std::vector<int32_t> contexts(random.integer(0, 12));
    for (int32_t& c : contexts) c = static_cast<int32_t>(random.integer(0, 3) ? random.integer(0, 300) : 0);
    const int64_t page = random.integer(1, 70), rows = random.integer(1, 400), fixed = random.integer(1, rows);
    check(pack_context_chunks(contexts, rows, page), contexts, rows, page);
    const Chunks cut = pack_context_chunks(contexts, rows, page, fixed);
    check(cut, contexts, rows, page, true);
    for (const auto& chunk : cut)
      for (const GatherPiece& p : chunk) {
        EXPECT_EQ(p.start % fixed, 0);  // whatever the neighbours
        EXPECT_EQ(p.start, chunk[0].start);
      }
    const int64_t grain = random.integer(1, 40);
    for (const Chunks& apart : {pack_context_chunks(contexts, rows, page, 0, grain),
                                pack_context_chunks(contexts, rows, page, fixed, grain)}) {
      std::vector<int32_t> found(contexts.size());
      for (const auto& chunk : apart) {
        int64_t end = 0;
        for (const GatherPiece& p : chunk) {
          EXPECT_EQ(p.row % grain, 0);
          EXPECT_TRUE(p.row >= end && p.row - end < grain) << "rows between pieces";
          EXPECT_EQ(p.start, found[static_cast<size_t>(p.request)]);
          EXPECT_GT(p.count, 0);
          found[static_cast<size_t>(p.request)] += p.count;
          end = int64_t{p.row} + p.count;
          EXPECT_LE(end, rows);
        }
      }
      EXPECT_EQ(found, contexts);
    }
  }
}

TEST(Chunks, DefaultRows) {
  EXPECT_EQ(default_context_rows(1000, 4, 16), 8000);
  EXPECT_EQ(default_context_rows(10, 100, 64), 25600);
  EXPECT_EQ(default_context_rows(1 << 20, 4, 64), 65536);
  EXPECT_EQ(default_context_rows(100, 4096, 64), 262144);
}

TEST(Chunks, BadRows) {
  const std::vector<int32_t> contexts{1};
  EXPECT_THROW(pack_context_chunks(contexts, 0, 16), ShapeError);
  EXPECT_THROW(pack_context_chunks(contexts, 8, 16, 9), ShapeError);
  EXPECT_THROW(pack_context_chunks(contexts, 8, 16, 0, 0), ShapeError);
}

}  // namespace
}  // namespace mla
