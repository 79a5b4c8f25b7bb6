// How a run, or a plan of one, splits the cache over ranks that share the heads evenly.
#pragma once

#include <vector>

#include "mla/mla.hpp"

namespace mla::serve {

/// Rank `rank` of `ranks`, in groups of `members` that hold `interleave` tokens in turn; 1: every rank has the whole
/// cache.
inline ContextParallel context_share(int64_t heads, int rank, int ranks, int members, int64_t interleave,
                                     ContextExchange exchange) {
  if (members == 1) return {};
  ContextParallel c{.sharding = CacheSharding(members, interleave), .rank = rank, .heads = {}, .exchange = exchange};
  for (int r = 0; r < ranks; ++r) c.heads.push_back(head_share(heads, r, ranks).count);
  return c;
}

/// Heads of the members of a rank's group, where they exchange heads; else none.
inline std::vector<HeadRange> group_share(const ContextParallel& c, int64_t heads) {
  std::vector<HeadRange> group;
  const int ranks = static_cast<int>(c.heads.size());
  for (int r = c.first(); c.exchange == ContextExchange::heads && r < c.first() + c.sharding.ranks(); ++r)
    group.push_back(head_share(heads, r, ranks));
  return group;
}

}  // namespace mla::serve
