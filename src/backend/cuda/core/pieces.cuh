// The rows of gather pieces, dealt out to the warps of a launch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "mla/work.hpp"

namespace mla::cuda {

/// Blocks, and the run of rows a warp takes at a time: short ones while there are warps to fill.
struct PieceGrid {
  unsigned blocks = 1;
  int32_t run = 1;

  PieceGrid(int64_t rows, int multiprocessors, int threads) {
    const int64_t warps = threads / 32, most = int64_t{multiprocessors} * 2048 / 32;
    run = static_cast<int32_t>(std::clamp<int64_t>(rows / most, 1, 16));
    blocks = static_cast<unsigned>(std::clamp<int64_t>((rows + warps * run - 1) / (warps * run), 1, int64_t{1} << 24));
  }
};

/// f(piece, first, count), count at most 32, for this warp's share of the pieces' rows: runs of `run` rows, taken in
/// turn by the warps of the grid. Counts are read here: they may be fewer than the launch was made for. All lanes of a
/// warp call it, and f, together.
template <class F>
__device__ void for_piece_rows(const GatherPiece* pieces, int32_t count, int32_t run, F&& f) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32,
                warps = static_cast<int64_t>(gridDim.x) * blockDim.x / 32;
  int64_t at = warp * run, run_end = at + run;  // among all pieces' rows
  int64_t before = 0;                           // rows of the pieces before `base`
  for (int32_t base = 0; base < count; base += 32) {
    // Lane l has piece base + l, whose rows end at `end`.
    GatherPiece mine;
    if (base + lane < count) mine = pieces[base + lane];
    int64_t end = mine.count;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int64_t left = __shfl_up_sync(0xffffffffu, end, d);
      if (lane >= d) end += left;
    }
    end += before;
    before = __shfl_sync(0xffffffffu, end, 31);
    while (at < before) {
      const int owner = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, end > at))) - 1;
      GatherPiece piece;
      piece.request = __shfl_sync(0xffffffffu, mine.request, owner);
      piece.start = __shfl_sync(0xffffffffu, mine.start, owner);
      piece.count = __shfl_sync(0xffffffffu, mine.count, owner);
      piece.row = __shfl_sync(0xffffffffu, mine.row, owner);
      const int64_t piece_end = __shfl_sync(0xffffffffu, end, owner), until = min(piece_end, run_end);
      f(piece, static_cast<int32_t>(at - (piece_end - piece.count)), static_cast<int32_t>(until - at));
      at = until;
      if (at == run_end) {
        at += (warps - 1) * run;
        run_end = at + run;
      }
    }
  }
}

}  // namespace mla::cuda
