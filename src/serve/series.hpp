// A run over time, in a bounded number of pieces: as many as a chart can show.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "serve/replay.hpp"

namespace mla::serve {

/// Consecutive steps. Tokens and requests are sums over them.
struct StepBucket {
  double start = 0, end = 0;  ///< simulated seconds: of the first step's start, the last one's end
  int64_t steps = 0;
  double seconds = 0, median_seconds = 0, max_seconds = 0;  ///< of steps: sum, median, longest
  int64_t requests = 0, prefill_tokens = 0, decode_tokens = 0, context_tokens = 0;
  int64_t pages = 0;  ///< most in use
  int64_t prompt_tokens = 0, hit_tokens = 0, finished = 0;
};

/// All steps in at most `most` (1 or more) buckets of equally many steps; the last may have fewer.
std::vector<StepBucket> buckets(std::span<const StepRecord> steps, int64_t most);

}  // namespace mla::serve
