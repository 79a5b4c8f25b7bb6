// Which part of a buffer goes to which node, and that moving it changes no byte.
#include "core/placement.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <numeric>
#include <string>
#include <vector>

#include "mla/error.hpp"
#include "support/message.hpp"
#include "support/nodes.hpp"

namespace mla {
namespace {

constexpr size_t kPage = 4096, kBlock = kPlacedBlock;

std::vector<PlacedPart> parts(uintptr_t address, size_t bytes, std::vector<int> workers, Placement how) {
  return placed_parts(address, bytes, kPage, workers, how);
}

TEST(Placement, RangesAreCutByTheNodesWorkers) {
  // 3 and 1 of 4 workers; blocks end at multiples of 2 MiB of the addresses.
  EXPECT_EQ(parts(3 * kBlock, 4 * kBlock, {3, 1}, Placement::in_ranges),
            (std::vector<PlacedPart>{
                {0, 0, kBlock}, {0, kBlock, 2 * kBlock}, {0, 2 * kBlock, 3 * kBlock}, {1, 3 * kBlock, 4 * kBlock}}));
  // Within a block at a page; the last part ends with the buffer.
  EXPECT_EQ(parts(kBlock + 3 * kPage, 10 * kPage + 5, {1, 1, 1}, Placement::in_ranges),
            (std::vector<PlacedPart>{{0, 0, 3 * kPage}, {1, 3 * kPage, 6 * kPage}, {2, 6 * kPage, 10 * kPage + 5}}));
  // Fewer pages than nodes.
  EXPECT_EQ(parts(0, kPage, {1, 1, 1}, Placement::in_ranges), (std::vector<PlacedPart>{{2, 0, kPage}}));
  EXPECT_TRUE(parts(0, 0, {1, 1}, Placement::in_ranges).empty());
}

TEST(Placement, BlocksGoInTurnByTheirAddresses) {
  EXPECT_EQ(parts(3 * kBlock - kPage, 2 * kBlock, {1, 5}, Placement::in_turn),
            (std::vector<PlacedPart>{{0, 0, kPage}, {1, kPage, kPage + kBlock}, {0, kPage + kBlock, 2 * kBlock}}));
  EXPECT_EQ(parts(5 * kBlock, kPage, {1, 1, 1}, Placement::in_turn), (std::vector<PlacedPart>{{2, 0, kPage}}));
}

TEST(Placement, PartsAreAllOfTheBufferOnce) {
  for (const Placement how : {Placement::in_ranges, Placement::in_turn})
    for (const std::vector<int>& workers : {std::vector<int>{1}, {1, 1}, {31, 1, 64, 7}})
      for (const size_t bytes : {size_t{1}, kPage, kPage + 1, 3 * kBlock + 17, 40 * kBlock}) {
        size_t at = 0;
        for (const PlacedPart& p : parts(7 * kPage, bytes, workers, how)) {
          EXPECT_EQ(p.begin, at);
          EXPECT_GT(p.end, p.begin);
          EXPECT_LE(p.end - p.begin, kBlock);
          EXPECT_EQ(p.begin % kPage, 0u);
          EXPECT_LT(p.node, std::ssize(workers));
          at = p.end;
        }
        EXPECT_EQ(at, bytes);
      }
}

TEST(Placement, EveryByteStays) {
  for (const std::vector<int>& nodes : {std::vector<int>{1, 1}, {1, 2, 3}, {4}}) {
    ThreadPool pool = test::pool_of_nodes(nodes);
    for (const Placement how : {Placement::in_ranges, Placement::in_turn})
      for (const size_t bytes : {size_t{0}, size_t{64}, size_t{1} << 16, 3 * kPage + 70000, 3 * kBlock + 1000}) {
        const Buffer b(bytes);
        b.place(pool, how);
        for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(b.data()[i], std::byte{0});
        for (size_t i = 0; i < bytes; ++i) b.data()[i] = static_cast<std::byte>(i * 7 + i / 251);
        b.place(pool, how);
        for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(b.data()[i], static_cast<std::byte>(i * 7 + i / 251)) << i;
      }
  }
}

// Pages are given back and touched anew: those of a map that was never written have no memory before, and have it then.
TEST(Placement, TouchesEveryPage) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), pages = 3 * kBlock / page;
  ThreadPool pool = test::pool_of_nodes({2, 1});
  const Buffer b(pages * page);
  const auto resident = [&] {
    std::vector<unsigned char> in(pages);
    EXPECT_EQ(mincore(b.data(), b.size(), in.data()), 0);
    return std::accumulate(in.begin(), in.end(), size_t{0}, [](size_t n, unsigned char c) { return n + (c & 1); });
  };
  EXPECT_EQ(resident(), 0u);
  b.place(pool, Placement::in_ranges);
  EXPECT_EQ(resident(), pages);
}

TEST(Placement, LockedPagesAreAnErrorAndStayAsTheyAre) {
  ThreadPool pool = test::pool_of_nodes({1, 1});
  const Buffer b(size_t{1} << 16);
  b.as<int>()[5] = 42;
  // Sanitizers' own mlock() does nothing.
  if (syscall(SYS_mlock, b.data(), b.size()) != 0) GTEST_SKIP() << "this process may not lock memory";
  const std::string message = test::message_of<DeviceError>([&] { b.place(pool, Placement::in_ranges); });
  syscall(SYS_munlock, b.data(), b.size());
  EXPECT_EQ(message, "place: the system does not take back 32768 bytes of 64.0 KiB: Invalid argument");
  EXPECT_EQ(b.as<int>()[5], 42);
}

}  // namespace
}  // namespace mla
