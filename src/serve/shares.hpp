// How a run, or a plan of one, splits the cache over ranks that share the heads evenly.
#pragma once

#include "mla/mla.hpp"

namespace mla::serve {

/// Rank `rank` of `ranks`, which hold `interleave` tokens in turn; 0: every rank has the whole cache.
inline ContextParallel context_share(int64_t heads, int rank, int ranks, int64_t interleave) {
  if (interleave == 0) return {};
  ContextParallel c{.sharding = CacheSharding(ranks, interleave), .rank = rank, .heads = {}};
  for (int r = 0; r < ranks; ++r) c.heads.push_back(head_share(heads, r, ranks).count);
  return c;
}

}  // namespace mla::serve
