// A batch of given query and context lengths for tests of plans: every request names the same pages, which a plan does
// not mind.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "mla/batch.hpp"

namespace mla::test {

struct Made {
  std::vector<int32_t> starts{0}, lengths, table, slots;
  std::vector<int32_t> prompts;  ///< several new tokens are a prompt's, a single one is not
  int64_t pages = 0, width = 1;
  Made(const std::vector<int64_t>& queries, const std::vector<int64_t>& contexts, int64_t page_size) {
    for (size_t r = 0; r < queries.size(); ++r) {
      starts.push_back(starts.back() + static_cast<int32_t>(queries[r]));
      lengths.push_back(static_cast<int32_t>(queries[r] + contexts[r]));
      prompts.push_back(static_cast<int32_t>(contexts[r] + (queries[r] > 1 ? queries[r] : 0)));
      width = std::max(width, (queries[r] + contexts[r] + page_size - 1) / page_size);
    }
    pages = width;
    for (size_t r = 0; r < queries.size(); ++r)
      for (int64_t p = 0; p < width; ++p) table.push_back(static_cast<int32_t>(p));
    slots.assign(static_cast<size_t>(starts.back()), -1);
  }
  Batch batch() const {
    return {starts, lengths, {table.data(), {static_cast<int64_t>(lengths.size()), width}}, slots, prompts};
  }
};

}  // namespace mla::test
