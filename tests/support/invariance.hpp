// Batch-invariant bits, whatever the threads and the neighbours.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/engine.hpp"

namespace mla::test {

/// Sixty rows of `mine` in four steps, on one thread and on three, alone and beside `other` (ninety rows at least): the
/// same bits each time.
inline void expect_bits_ignore_threads_and_neighbours(const LayerWeights& weights, const CacheSpec& spec,
                                                      const PlanOptions& plan, const std::vector<float>& mine,
                                                      const std::vector<float>& other, const std::string& where) {
  std::vector<float> first;
  for (int threads : {1, 3})
    for (bool alone : {true, false}) {
      Engine engine(weights, spec, {.plan = plan, .threads = threads});
      const int64_t me = engine.add(mine), they = engine.add(other);
      std::vector<float> out;
      for (int64_t count : {40, 1, 1, 18}) {
        std::vector<Engine::Piece> pieces{{me, count}};
        if (!alone) pieces.insert(pieces.begin(), {they, 1 + count / 2});
        const auto rows = engine.step(pieces);
        out.insert(out.end(), rows.back().begin(), rows.back().end());
      }
      if (first.empty()) first = out;
      EXPECT_TRUE(out == first) << where << " " << threads << " threads" << (alone ? ", alone" : "");
    }
}

}  // namespace mla::test
