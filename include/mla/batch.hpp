// One step's requests, as an engine describes them.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "mla/view.hpp"

namespace mla {

/// All arrays are the caller's host memory.
struct Batch {
  std::span<const int32_t> query_start_loc;  ///< [requests + 1]: first token row of each request; starts at 0
  std::span<const int32_t> seq_lens;         ///< [requests]: cached context + new tokens
  View<const int32_t, Request, Page>
      block_table;  ///< pages of each request in order; entries past its end may hold anything
  /// [tokens]: where each new token's row goes, the place of its position in its request's own pages; < 0: nowhere
  std::span<const int32_t> slot_mapping;
  /// [requests]: the tokens of each request that are its prompt, its first ones, cached or not; the others were
  /// generated. Read by PathPolicy::by_prompt alone; may be empty for others.
  std::span<const int32_t> prompt_lens = {};

  int64_t requests() const { return static_cast<int64_t>(seq_lens.size()); }
  int64_t tokens() const { return query_start_loc.empty() ? 0 : query_start_loc.back(); }
  int64_t query_len(int64_t r) const { return query_start_loc[r + 1] - query_start_loc[r]; }
  int64_t context_len(int64_t r) const { return seq_lens[r] - query_len(r); }
};

/// BatchError for the first violation found, with request, value and limit: query starts begin at 0 and never fall,
/// seq_lens cover the new tokens, the block table covers every sequence with pages of the cache, and there is a slot a
/// token: a negative one, which writes nothing (padding), or block_table[r, position / page_size] * page_size +
/// position % page_size, which no other token of the batch has. Requests may share pages that they only read.
/// prompt_lens has an entry for each request or none, none of them negative.
void validate(const Batch& batch, int64_t pages, int64_t page_size);

struct DecodePrefillSplit {
  int64_t decodes = 0, prefills = 0;  ///< requests
  int64_t decode_tokens = 0, prefill_tokens = 0;
  friend bool operator==(const DecodePrefillSplit&, const DecodePrefillSplit&) = default;
};

struct SplitOptions {
  int64_t threshold = 1;                        ///< longest query that still counts as decode
  bool require_uniform = false;                 ///< all decode queries share one length (or are padding of length 0)
  bool treat_short_extends_as_decodes = true;   ///< false: a short query that continues a prompt counts as prefill
  std::span<const uint8_t> is_prefilling = {};  ///< [requests], read only when the flag above is false
};

/// For engines that order decodes first and label them; the layer itself needs neither.
DecodePrefillSplit split_decodes_and_prefills(std::span<const int32_t> query_start_loc, const SplitOptions& options);

/// The fewest swaps (pairs of request indices, applied in order) that bring all decodes (query_len <= threshold) to the
/// front.
std::vector<std::pair<int64_t, int64_t>> reorder_swaps(std::span<const int32_t> query_lens, int64_t threshold);

}  // namespace mla
