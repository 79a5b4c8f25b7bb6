// ops::HeldTokens on the device: positions of a sequence and a rank's own numbers of its tokens.
#pragma once

#include <cstdint>

#include "ops/held.hpp"

namespace mla::cuda {

struct HeldRows {
  uint32_t members, member, together;

  explicit HeldRows(const ops::HeldTokens& held)
      : members(static_cast<uint32_t>(held.sharding.ranks())),
        member(static_cast<uint32_t>(held.rank)),
        together(static_cast<uint32_t>(held.sharding.interleave())) {}

  /// -1: another rank's, or below 0.
  __device__ int32_t index(int32_t position) const {
    if (position < 0 || members == 1) return position < 0 ? -1 : position;
    const uint32_t at = static_cast<uint32_t>(position), block = at / together, turn = block / members;
    if (block - turn * members != member) return -1;
    return static_cast<int32_t>(turn * together + (at - block * together));
  }
  __device__ int32_t position(int32_t index) const {
    if (members == 1) return index;
    const uint32_t at = static_cast<uint32_t>(index), block = at / together;
    return static_cast<int32_t>((block * members + member) * together + (at - block * together));
  }
};

}  // namespace mla::cuda
