#include "serve/series.hpp"

#include <algorithm>

namespace mla::serve {

std::vector<StepBucket> buckets(std::span<const StepRecord> steps, int64_t most) {
  std::vector<StepBucket> all;
  const size_t limit = static_cast<size_t>(std::max<int64_t>(most, 1)), size = (steps.size() + limit - 1) / limit;
  for (size_t first = 0; first < steps.size(); first += size) {
    const std::span<const StepRecord> part = steps.subspan(first, std::min(size, steps.size() - first));
    StepBucket b{.start = part.front().start,
                 .end = part.back().start + part.back().seconds,
                 .steps = static_cast<int64_t>(part.size())};
    std::vector<double> seconds;
    for (const StepRecord& s : part) {
      seconds.push_back(s.seconds);
      b.seconds += s.seconds;
      b.max_seconds = std::max(b.max_seconds, s.seconds);
      b.requests += s.requests;
      b.prefill_tokens += s.prefill_tokens;
      b.decode_tokens += s.decode_tokens;
      b.context_tokens += s.context_tokens;
      b.pages = std::max(b.pages, s.pages);
      b.prompt_tokens += s.prompt_tokens;
      b.hit_tokens += s.hit_tokens;
      b.finished += s.finished;
    }
    b.median_seconds = percentile(std::move(seconds), 50);
    all.push_back(b);
  }
  return all;
}

}  // namespace mla::serve
