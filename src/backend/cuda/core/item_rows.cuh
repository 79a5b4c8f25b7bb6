// The rows of a step's items (gather pieces, split rows), dealt out to the warps of a launch.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "backend/cuda/core/warp_scan.cuh"

namespace mla::cuda {

/// Blocks, and the run of rows a warp takes at a time: short ones while there are warps to fill, then whole batches.
struct ItemGrid {
  unsigned blocks = 1;
  int32_t run = 1;

  ItemGrid(int64_t rows, int multiprocessors, int threads, int most_run = 16, int batch = 1) {
    const int64_t warps = threads / 32, most = int64_t{multiprocessors} * 2048 / 32;
    run = static_cast<int32_t>(std::clamp<int64_t>(rows / most, 1, most_run));
    if (run > batch / 2) run = (run + batch - 1) / batch * batch;
    blocks = static_cast<unsigned>(std::clamp<int64_t>((rows + warps * run - 1) / (warps * run), 1, int64_t{1} << 24));
  }
};

/// f(item, first, count), count at most `run`, for this warp's share of the rows that items have: runs of `run` rows,
/// taken in turn by the warps of the grid. rows_of(item) is read here: it may be less than the launch was made for. All
/// lanes of a warp call it, and f, together.
template <class Item, class RowsOf, class F>
__device__ void for_item_rows(const Item* items, int32_t count, int32_t run, RowsOf&& rows_of, F&& f) {
  struct Words {
    int32_t at[sizeof(Item) / 4];
  };
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32,
                warps = static_cast<int64_t>(gridDim.x) * blockDim.x / 32;
  int64_t at = warp * run, run_end = at + run;  // among all items' rows
  int64_t before = 0;                           // rows of the items before `base`
  for (int32_t base = 0; base < count; base += 32) {
    // Lane l has item base + l, whose rows end at `end`.
    Item mine{};
    int64_t rows = 0;
    if (base + lane < count) {
      mine = items[base + lane];
      rows = rows_of(mine);
    }
    const int64_t end = sum_upto<int64_t>(rows, lane) + before;
    before = __shfl_sync(0xffffffffu, end, 31);
    while (at < before) {
      const int owner = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, end > at))) - 1;
      Words words = std::bit_cast<Words>(mine);
#pragma unroll
      for (int32_t& w : words.at) w = __shfl_sync(0xffffffffu, w, owner);
      const int64_t item_end = __shfl_sync(0xffffffffu, end, owner),
                    item_begin = item_end - __shfl_sync(0xffffffffu, rows, owner), until = min(item_end, run_end);
      f(std::bit_cast<Item>(words), at - item_begin, static_cast<int32_t>(until - at));
      at = until;
      if (at == run_end) {
        at += (warps - 1) * run;
        run_end = at + run;
      }
    }
  }
}

}  // namespace mla::cuda
