// What a stream on a GPU remembers of the choices that its calls made.
#include "core/selection_log.hpp"

#include <gtest/gtest.h>

#include <array>

namespace mla {
namespace {

using Found = SelectionLog::Found;

TEST(SelectionLog, KnowsWhoseChoiceLiesWhere) {
  SelectionLog log;
  const std::array<std::byte, 3> memory{};
  EXPECT_EQ(log.look(&memory[0], 7), Found::none);
  log.note(&memory[0], 7, false);
  EXPECT_EQ(log.look(&memory[0], 7), Found::same);
  EXPECT_EQ(log.look(&memory[0], 8), Found::other);
  EXPECT_EQ(log.look(&memory[1], 7), Found::none);
  log.note(&memory[0], 8, false);
  EXPECT_EQ(log.look(&memory[0], 7), Found::other);
  log.forget(&memory[0]);  // a call that failed on its way
  EXPECT_EQ(log.look(&memory[0], 8), Found::none);
}

// A graph's launches make choices for steps that the host hears nothing of.
TEST(SelectionLog, CapturedChoicesAreAnyStepsFromThenOn) {
  SelectionLog log;
  const std::array<std::byte, 2> memory{};
  log.note(&memory[0], 7, true);
  EXPECT_EQ(log.look(&memory[0], 8), Found::same);
  log.forget(&memory[0]);
  log.note(&memory[0], 9, false);
  EXPECT_EQ(log.look(&memory[0], 8), Found::same);
  EXPECT_EQ(log.look(&memory[1], 8), Found::none);
}

TEST(SelectionLog, HoldsTheLatestOfMany) {
  SelectionLog log;
  const std::vector<std::byte> memory(3000);
  for (const std::byte& at : memory) log.note(&at, 1, false);
  EXPECT_EQ(log.look(&memory.front(), 1), Found::none);
  EXPECT_EQ(log.look(&memory.back(), 1), Found::same);
  EXPECT_EQ(log.look(&memory[2500], 1), Found::same);
}

}  // namespace
}  // namespace mla
