// The sparse indexer's tiles: bounded, and every row meets every position it sees once.
#include <gtest/gtest.h>

#include <map>

#include "cases/compare.hpp"
#include "mla/index_plan.hpp"
#include "mla/plan.hpp"

namespace mla {
namespace {

TEST(IndexTiles, AreBounded) {
  for (int64_t topk : {1, 64, 2048, 8192})
    for (int64_t rows : {1, 7, 64, 1000})
      for (int64_t longest : {1, 1000, 65536, 1 << 20})
        for (size_t bytes : {size_t{1} << 18, size_t{1} << 20, kIndexTileBytes, kIndexTileBytesGpu}) {
          const IndexTiles t = index_tiles(rows, longest, topk, bytes);
          EXPECT_LE(t.score_bytes + t.state_bytes, bytes) << topk << " " << rows << " " << longest;
          EXPECT_GE(t.rows, 1);
          EXPECT_LE(t.rows, rows);
          EXPECT_GE(t.keys, 1024);
          EXPECT_LT(t.keys, longest + 1024);
          EXPECT_EQ(t.score_bytes, static_cast<size_t>(t.rows * t.keys) * 4);
          EXPECT_EQ(t.state_bytes, static_cast<size_t>(t.rows) * topk_state_bytes(topk));
        }
  // A decode step over 64K takes one round; a long prefill shares each key among 64 rows.
  EXPECT_EQ(index_tiles(1, 65536, 2048).keys, 65536);
  EXPECT_EQ(index_tiles(4096, 65536, 2048).rows, 64);
  // A GPU's: a decode step of 64 takes one over 128K.
  EXPECT_EQ(index_tiles(64, 131072, 2048, kIndexTileBytesGpu).keys, 131072);
  EXPECT_EQ(index_tiles(4096, 16384, 2048, kIndexTileBytesGpu).rows, 640);
  EXPECT_EQ(index_tiles(4096, 5120, 2048, kIndexTileBytesGpu).rows, 1216);
  EXPECT_EQ(index_tiles(4096, 65536, 2048, kIndexTileBytesGpu).rows, 512);  // in rounds
  EXPECT_EQ(index_tiles(0, 100, 5).rows, 0);
}

TEST(IndexTiles, BadNumbersAreNamed) {
  auto refusal = [](int64_t rows, int64_t longest, int64_t topk, size_t bytes) -> std::string {
    try {
      index_tiles(rows, longest, topk, bytes);
    } catch (const ShapeError& e) {
      return e.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refusal(1, 1, 0, 1 << 20), "index topk is 0, allowed 1 to 8192");
  EXPECT_EQ(refusal(1, 1, 8193, 1 << 20), "index topk is 8193, allowed 1 to 8192");
  EXPECT_EQ(refusal(-1, 1, 1, 1 << 20), "index rows is -1, must not be negative");
  EXPECT_EQ(refusal(1, -1, 1, 1 << 20), "index longest is -1, must not be negative");
  EXPECT_EQ(refusal(1, 1, 2048, 1000), "index tile is 1000 bytes, at least 37056 are needed at topk 2048");
}

TEST(TopkState, RoomForTwiceTopk) {
  for (int64_t topk : {1, 1000, 1024, 1025, 8192}) {
    EXPECT_GE(topk_capacity(topk), 2 * topk);  // the sort's other half
    EXPECT_GT(topk_capacity(topk), topk + 1023);
    EXPECT_EQ(topk_capacity(topk) % 16, 0);
    EXPECT_EQ(topk_state_bytes(topk) % 64, 0u);
    EXPECT_GE(topk_state_bytes(topk), 64 + 8 * static_cast<size_t>(topk_capacity(topk)));
  }
}

TEST(IndexSchedule, EveryRowMeetsEveryPositionOnce) {
  cases::Random random(9);
  for (int i = 0; i < 300; ++i) {
    std::vector<RequestPlan> requests(random.integer(0, 6));
    int32_t rows = 0;
    for (RequestPlan& r : requests) {
      r.q_begin = rows;
      r.query_len = static_cast<int32_t>(random.integer(0, random.integer(0, 1) ? 3 : 200));
      r.context = static_cast<int32_t>(random.integer(0, 1) ? random.integer(0, 9000) : 0);
      rows += r.query_len;
    }
    const int64_t topk = random.integer(1, random.integer(0, 1) ? 100 : 5000);
    const size_t bytes = topk_state_bytes(topk) + 4096 * static_cast<size_t>(random.integer(1, 200));
    const IndexSchedule s = schedule_index(requests, topk, bytes);

    struct Row {
      int64_t fills = 0, finishes = 0;
      std::vector<std::pair<int32_t, int32_t>> seen;  // ranges of positions
    };
    std::vector<Row> met(rows);
    for (const IndexItem& item : s.all)
      for (int32_t q = 0; q < item.q_count; ++q) {
        EXPECT_LE(item.columns(q), topk);
        EXPECT_EQ(item.kv_begin, 0);
        met[item.q_begin + q].fills += item.columns(q) == item.visible + q + 1;
      }
    for (const IndexTile& tile : s.selected) {
      std::map<int32_t, int32_t> row_of;  // state row of each query row
      int32_t next = 0;
      for (const IndexItem& item : tile.rows) {
        EXPECT_EQ(item.row, next);
        next += item.q_count;
        for (int32_t q = 0; q < item.q_count; ++q) {
          ++met[item.q_begin + q].finishes;
          row_of[item.q_begin + q] = item.row + q;
        }
      }
      EXPECT_LE(next, s.tiles.rows);
      ASSERT_LE(tile.rows.size(), static_cast<size_t>(s.tiles.rows));
      EXPECT_GT(tile.rounds(s.tiles.keys), 0);
      for (int64_t r = 0; r < tile.rounds(s.tiles.keys); ++r) {
        bool some = false;
        for (const IndexItem& whole : tile.rows) {
          const IndexItem item = clipped(whole, r * s.tiles.keys, s.tiles.keys);
          EXPECT_EQ(item.kv_begin, std::min<int64_t>(whole.kv_end, r * s.tiles.keys));
          EXPECT_LE(item.kv_end, whole.kv_end);
          EXPECT_LE(item.kv_end - item.kv_begin, s.tiles.keys);
          some |= item.kv_end > item.kv_begin;
          EXPECT_LE(item.row + item.q_count, s.tiles.rows);
          for (int32_t q = 0; q < item.q_count; ++q) {
            EXPECT_EQ(row_of.at(item.q_begin + q), item.row + q);
            if (item.columns(q) > 0)
              met[item.q_begin + q].seen.push_back({item.kv_begin, item.kv_begin + item.columns(q)});
          }
        }
        EXPECT_TRUE(some);
      }
    }
    for (const RequestPlan& r : requests)
      for (int32_t q = 0; q < r.query_len; ++q) {
        const Row& row = met[r.q_begin + q];
        const int32_t visible = r.context + q + 1;
        if (visible <= topk) {
          EXPECT_TRUE(row.fills == 1 && row.finishes == 0 && row.seen.empty());
          continue;
        }
        EXPECT_TRUE(row.fills == 0 && row.finishes == 1);
        int32_t end = 0;
        for (auto [from, to] : row.seen) {
          EXPECT_EQ(from, end);
          end = to;
        }
        EXPECT_EQ(end, visible);
      }
  }
}

}  // namespace
}  // namespace mla
