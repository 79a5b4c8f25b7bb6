// Random layers on the GPU against float64 (support/difference.hpp). MLA_TEST_ROUNDS of them, from MLA_TEST_SEED on.
#include "support/difference.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <exception>

namespace mla::test {
namespace {

uint64_t number(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

TEST(Difference, RandomLayersAgreeWithFloat64) {
  const uint64_t rounds = number("MLA_TEST_ROUNDS", 400), first = number("MLA_TEST_SEED", 1);
  for (uint64_t seed = first; seed < first + rounds; ++seed) {
    Difference d;
    try {
      d = difference(seed);
    } catch (const std::exception& e) {
      d.wrong = std::string("threw: ") + e.what();
    }
    EXPECT_EQ(d.wrong, "") << d.drawn << "\n  again: MLA_TEST_ROUNDS=1 MLA_TEST_SEED=" << seed;
  }
}

}  // namespace
}  // namespace mla::test
