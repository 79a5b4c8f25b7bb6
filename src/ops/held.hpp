// Of a cache whose tokens are split over ranks, the tokens that one of them holds: positions of a sequence and the
// rank's own numbers of them, in 32 bits.
#pragma once

#include <cstdint>

#include "mla/sharding.hpp"

namespace mla::ops {

struct HeldTokens {
  CacheSharding sharding;  ///< by default one rank, which holds all
  int64_t rank = 0;

  bool all() const { return sharding.ranks() == 1; }
  /// Which of the rank's tokens a position is; -1 for another rank's, and for a position below 0.
  int32_t index(int32_t position) const {
    if (position < 0) return -1;
    const auto at = static_cast<uint32_t>(position), together = static_cast<uint32_t>(sharding.interleave()),
               block = at / together, turn = block / static_cast<uint32_t>(sharding.ranks());
    if (block - turn * static_cast<uint32_t>(sharding.ranks()) != static_cast<uint32_t>(rank)) return -1;
    return static_cast<int32_t>(turn * together + (at - block * together));
  }
  /// The position of the rank's token at `index`.
  int32_t position(int32_t index) const { return static_cast<int32_t>(sharding.position(rank, index)); }
};

}  // namespace mla::ops
