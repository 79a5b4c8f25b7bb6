// A batch as `mla plan` is told of it: lengths alone, of which it makes the arrays that a plan reads.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "mla/batch.hpp"

namespace mla::cli {

constexpr int64_t kMostTokens = int64_t{1} << 28;  ///< of a length, and of a batch's new tokens

struct BatchLengths {
  std::vector<int64_t> queries, contexts;  ///< new and cached tokens of each request
};

/// A JSON object with arrays query_lens and contexts. CheckpointError for text that is none, InputError for numbers
/// that are not integers.
BatchLengths parse_batch(std::string_view text, std::string_view where);

/// A batch whose requests all name the same pages, which a plan does not mind. Several new tokens are a prompt's, a
/// single one was generated (Batch::prompt_lens). Refers to its own memory.
class BatchOfLengths {
 public:
  /// InputError unless every length is 0 to 2^28, there are as many contexts as queries, and no more than 2^28 new
  /// tokens.
  BatchOfLengths(const BatchLengths& lengths, int64_t page_size);
  Batch batch() const;
  int64_t pages() const { return static_cast<int64_t>(table_.size()); }  ///< of a cache that it fits

 private:
  std::vector<int32_t> starts_{0}, lengths_, prompts_, table_, slots_;
};

}  // namespace mla::cli
