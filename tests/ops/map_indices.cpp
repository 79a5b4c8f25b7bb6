// map_indices beyond its conformance cases: what is refused, in place, and the tail of padded arrays.
#include <gtest/gtest.h>

#include <limits>

#include "backend/run.hpp"
#include "support/count_allocations.hpp"

namespace mla {
namespace {

class MapIndices : public testing::Test {
 protected:
  template <class Args>
  std::string refusal(const Args& args) {
    try {
      ops::run(stream_, args);
    } catch (const ShapeError& e) {
      EXPECT_EQ(std::string_view(e.what()).find('\n'), std::string_view::npos);
      return e.what();
    }
    return "accepted";
  }
  template <class Args>
  std::string refusal(Args args, void (*change)(Args&)) {
    change(args);
    return refusal(args);
  }

  static constexpr int32_t kSmallest = std::numeric_limits<int32_t>::min(),
                           kLargest = std::numeric_limits<int32_t>::max();
  ThreadPool pool_{2};
  Stream stream_{pool_};
  std::vector<int32_t> positions_{0, 5, -1, kSmallest, kLargest, 7, 8, 3}, requests_{1, 0}, table_{4, 2, 9, 0, 7, -3},
      to_ = std::vector<int32_t>(12, 55);
  ops::MapToSlotsArgs slots_{.positions = {positions_.data(), {2, 4}},
                             .requests = requests_,
                             .block_table = {table_.data(), {2, 3}},
                             .page_size = 4,
                             .pages = 9,
                             .slots = {to_.data(), {3, 4}}};
  std::vector<int32_t> starts_{10, 0}, counts_{8, 6};
  ops::MapToWorkspaceArgs workspace_{.positions = {positions_.data(), {2, 4}},
                                     .requests = requests_,
                                     .starts = starts_,
                                     .counts = counts_,
                                     .rows = {to_.data(), {3, 4}}};
};

TEST_F(MapIndices, ByHand) {
  EXPECT_EQ(refusal(slots_), "accepted");
  // Request 1's pages are 0, 7 and none; request 0's 4, 2 and one past the cache. The tail is left alone.
  EXPECT_EQ(to_, (std::vector<int32_t>{0, 29, -1, -1, -1, 11, -1, 19, 55, 55, 55, 55}));
  const std::vector<int32_t> lengths{4, 2};
  slots_.lengths = lengths;
  EXPECT_EQ(refusal(slots_), "accepted");
  EXPECT_EQ(to_, (std::vector<int32_t>{0, -1, -1, -1, -1, -1, -1, 19, 55, 55, 55, 55}));
  EXPECT_EQ(refusal(workspace_), "accepted");
  EXPECT_EQ(to_, (std::vector<int32_t>{0, 5, -1, -1, -1, 17, -1, 13, 55, 55, 55, 55}));
}

TEST_F(MapIndices, PicksRows) {
  const std::vector<int32_t> rows{1, 1, 0}, far{2};
  ops::PickRowsArgs a{.positions = {positions_.data(), {2, 4}}, .rows = rows, .picked = {to_.data(), {3, 4}}};
  EXPECT_EQ(refusal(a), "accepted");
  EXPECT_EQ(to_, (std::vector<int32_t>{kLargest, 7, 8, 3, kLargest, 7, 8, 3, 0, 5, -1, kSmallest}));
  a.picked = {to_.data(), {2, 4}};
  EXPECT_EQ(refusal(a), "map_indices: rows length is 3, allowed 0 to 2");
  a.rows = far;
  EXPECT_EQ(refusal(a), "map_indices: row is 2, allowed 0 to 1");
  a.picked = {to_.data(), {3, 3}};
  EXPECT_EQ(refusal(a), "map_indices: picked Topk is 3, positions Topk is 4");
}

TEST_F(MapIndices, ToMasks) {
  constexpr uint32_t kPoison = 0xdeadbeef;
  std::vector<uint32_t> words(9, kPoison);
  // 31 and 32 lie beside the border of two words, 64 past the last one; a position may come twice.
  const std::vector<int32_t> positions{31, 32, -1, 64, kSmallest, kLargest, 0, 0}, rows{2, 0}, none{2, -1}, far{0, 3},
      three{0, 1, 2};
  ops::MapToMaskArgs a{.positions = {positions.data(), {2, 4}}, .rows = rows, .mask = {words.data(), {3, 2}, {3, 1}}};
  EXPECT_EQ(refusal(a), "accepted");
  EXPECT_EQ(words, (std::vector<uint32_t>{1, 0, kPoison, kPoison, kPoison, kPoison, 1u << 31, 1, kPoison}));
  words.assign(9, kPoison);
  a.rows = none;
  a.positions = {positions.data(), {2, 0}};
  EXPECT_EQ(refusal(a), "accepted");
  EXPECT_EQ(words, (std::vector<uint32_t>{kPoison, kPoison, kPoison, kPoison, kPoison, kPoison, 0, 0, kPoison}));
  a.rows = far;
  EXPECT_EQ(refusal(a), "map_indices: row is 3, allowed 0 to 2");
  a.rows = three;
  EXPECT_EQ(refusal(a), "map_indices: rows length is 3, allowed 0 to 2");
  a.rows = rows;
  a.mask = {words.data(), {3, 2}, {1, 3}};
  EXPECT_EQ(refusal(a), "map_indices: mask Word has stride 3, 1 is needed");
  a.mask = {};
  a.positions = {positions.data(), {2, 4}, {1, 2}};
  EXPECT_EQ(refusal(a), "map_indices: positions Topk has stride 2, 1 is needed");
  const int64_t before = test::allocation_count();
  ops::run(stream_, ops::MapToMaskArgs{
                        .positions = {positions.data(), {2, 4}}, .rows = rows, .mask = {words.data(), {3, 2}, {3, 1}}});
  EXPECT_EQ(test::allocation_count(), before);
}

TEST_F(MapIndices, InPlace) {
  slots_.slots = {positions_.data(), {2, 4}};
  EXPECT_EQ(refusal(slots_), "accepted");
  EXPECT_EQ(positions_, (std::vector<int32_t>{0, 29, -1, -1, -1, 11, -1, 19}));
}

TEST_F(MapIndices, WidestCache) {
  // Slots up to the largest number there is, by shift and by division.
  for (int64_t page_size : {int64_t{1} << 30, (int64_t{1} << 30) - 1}) {
    std::vector<int32_t> positions(40, kLargest - 2), out(40);
    const std::vector<int32_t> table{0, 1}, requests{0};
    const ops::MapToSlotsArgs a{.positions = {positions.data(), {1, 40}},
                                .requests = requests,
                                .block_table = {table.data(), {1, 2}},
                                .page_size = page_size,
                                .pages = 2,
                                .slots = {out.data(), {1, 40}}};
    EXPECT_EQ(refusal(a), "accepted");
    const bool held = kLargest - 2 < 2 * page_size;
    EXPECT_EQ(out, std::vector<int32_t>(40, held ? kLargest - 2 : -1));
  }
}

TEST_F(MapIndices, AllocatesNothing) {
  const int64_t before = test::allocation_count();
  ops::run(stream_, slots_);
  ops::run(stream_, workspace_);
  EXPECT_EQ(test::allocation_count(), before);
}

TEST_F(MapIndices, RefusesWhatDoesNotFit) {
  using A = ops::MapToSlotsArgs;
  using W = ops::MapToWorkspaceArgs;
  static const std::vector<int32_t> far{0, 2}, three{0, 0, 0}, negative{0, -1};
  EXPECT_EQ(refusal<A>(slots_, [](A& a) { a.page_size = 0; }), "map_indices: page_size is 0, allowed 1 to 2147483647");
  EXPECT_EQ(refusal<A>(slots_, [](A& a) { a.pages = int64_t{1} << 30; }),
            "map_indices: pages is 1073741824, allowed 0 to 536870912");
  EXPECT_EQ(refusal<A>(slots_,
                       [](A& a) {
                         a.held = {CacheSharding(3, 2), 3};
                       }),
            "map_indices: held rank is 3, allowed 0 to 2");
  EXPECT_EQ(refusal<W>(workspace_, [](W& a) { a.held.rank = -1; }), "map_indices: held rank is -1, allowed 0 to 0");
  EXPECT_EQ(refusal<A>(slots_, [](A& a) { a.requests = far; }), "map_indices: request is 2, allowed 0 to 1");
  EXPECT_EQ(refusal<A>(slots_, [](A& a) { a.requests = three; }), "map_indices: requests length is 3, allowed 0 to 2");
  EXPECT_EQ(refusal<A>(slots_, [](A& a) { a.lengths = std::span(three).first(1); }),
            "map_indices: request is 1, allowed 0 to 0");
  EXPECT_EQ(refusal<A>(slots_,
                       [](A& a) {
                         a.slots = {a.slots.data(), {3, 3}};
                       }),
            "map_indices: slots Topk is 3, positions Topk is 4");
  EXPECT_EQ(refusal<A>(slots_,
                       [](A& a) {
                         a.slots = {a.slots.data(), {1, 4}};
                       }),
            "map_indices: requests length is 2, allowed 0 to 1");
  EXPECT_EQ(refusal<A>(slots_,
                       [](A& a) {
                         a.positions = {a.positions.data(), {2, 4}, {1, 2}};
                       }),
            "map_indices: positions Topk has stride 2, 1 is needed");
  EXPECT_EQ(refusal<W>(workspace_, [](W& a) { a.counts = three; }),
            "map_indices: counts length is 3, starts length is 2");
  EXPECT_EQ(refusal<W>(workspace_, [](W& a) { a.counts = negative; }),
            "map_indices: count is -1, allowed 0 to 2147483648");
  EXPECT_EQ(refusal<W>(workspace_, [](W& a) { a.starts = negative; }),
            "map_indices: start is -1, allowed 0 to 2147483647");
  EXPECT_EQ(refusal<W>(workspace_, [](W& a) { a.requests = far; }), "map_indices: request is 2, allowed 0 to 1");
}

}  // namespace
}  // namespace mla
