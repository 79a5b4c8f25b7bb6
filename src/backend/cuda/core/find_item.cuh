// Which item a CTA's tile belongs to. Items are read on the device: those of a captured call may change under it.
#pragma once

#include <cstdint>

namespace mla::cuda {

struct Found {
  int32_t item = -1;   ///< -1: the tile lies past all items
  int32_t tile = 0;    ///< number within the item
  int64_t tokens = 0;  ///< query rows of the items before it
};

/// The item of tile `at`, tiles being numbered through items; each warp finds it for itself. tiles(i), tokens(i): of an
/// item.
template <class Tiles, class Tokens>
__device__ Found find_item(int32_t items, int64_t at, Tiles&& tiles, Tokens&& tokens) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int64_t before = 0, tokens_before = 0;
  for (int32_t base = 0; base < items; base += 32) {
    const int32_t i = base + lane;
    const int64_t n = i < items ? tiles(i) : 0, t = i < items ? tokens(i) : 0;
    int64_t n_sum = n, t_sum = t;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int64_t x = __shfl_up_sync(0xffffffffu, n_sum, d), y = __shfl_up_sync(0xffffffffu, t_sum, d);
      if (lane >= d) n_sum += x, t_sum += y;
    }
    const unsigned past = __ballot_sync(0xffffffffu, before + n_sum > at);
    if (past) {
      const int who = __ffs(static_cast<int>(past)) - 1;
      return {.item = base + who,
              .tile = static_cast<int32_t>(__shfl_sync(0xffffffffu, at - (before + n_sum - n), who)),
              .tokens = __shfl_sync(0xffffffffu, tokens_before + t_sum - t, who)};
    }
    before += __shfl_sync(0xffffffffu, n_sum, 31);
    tokens_before += __shfl_sync(0xffffffffu, t_sum, 31);
  }
  return {};
}

}  // namespace mla::cuda
