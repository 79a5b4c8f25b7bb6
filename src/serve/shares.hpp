// How a run, or a plan of one, splits the cache over ranks that share the heads evenly.
#pragma once

#include "mla/mla.hpp"

namespace mla::serve {

/// Rank `rank` of `ranks`, in groups of `members` that hold `interleave` tokens in turn; 1: every rank has the whole
/// cache.
inline ContextParallel context_share(int64_t heads, int rank, int ranks, int members, int64_t interleave) {
  if (members == 1) return {};
  ContextParallel c{.sharding = CacheSharding(members, interleave), .rank = rank, .heads = {}};
  for (int r = 0; r < ranks; ++r) c.heads.push_back(head_share(heads, r, ranks).count);
  return c;
}

}  // namespace mla::serve
