// Difference fuzzing: a random model, batches, cache, plan and threads, and the layer's output against float64.
#pragma once

#include <cstdint>
#include <string>

namespace mla::test {

/// What one round drew, and what was wrong with the layer's answer; empty: nothing.
struct Difference {
  std::string drawn, wrong;
};

/// Sequences of a random small model go through a random cache in random steps: any mix of new tokens and contexts,
/// none among them, any path, policy and number of threads. Every row is judged against float64 within twice the error
/// of a plain computation. Some rounds make hidden states NaN or infinite: rows that attend to them must then be NaN,
/// and those that do not keep the bits of the same steps without them.
Difference difference(uint64_t seed);

}  // namespace mla::test
