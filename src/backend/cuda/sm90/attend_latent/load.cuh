// What the loading warpgroup of both kernels shares: where blocks of 64 positions lie in the paged cache.
#pragma once

#include "backend/cuda/core/mbarrier.cuh"
#include "backend/cuda/core/tma.cuh"
#include "backend/cuda/sm90/attend_latent/schedule.cuh"

namespace mla::cuda::latent {

constexpr int box_bytes = block_tokens * 128;  // 64 positions x 64 elements, 128-byte swizzle

/// Cache rows of an item's blocks, box by box: lanes look up 32 boxes at a time, one such window ahead.
class BoxRows {
 public:
  BoxRows() = default;
  __device__ BoxRows(const Params& p, const Item& it)
      : table_(p.block_table + it.request * p.table_stride), positions_(it.positions), first_(it.block) {
    if (p.box_shift < 0) return;
    row_ = look_up(p, 0), next_ = look_up(p, 1);
  }

  /// Moves to block j, not before the last one; all lanes of the warp.
  __device__ void seek(const Params& p, int j) {
    const int per_block = block_tokens >> p.box_shift, at = (j - first_) << (6 - p.box_shift);
    offset_ = at % 32;
    if (at / 32 != window_) window_ = at / 32, row_ = next_, next_ = look_up(p, window_ + 1);
    boxes_ = min(per_block, (positions_ - j * block_tokens + (1 << p.box_shift) - 1) >> p.box_shift);
  }
  __device__ int boxes() const { return boxes_; }  ///< of the block that hold positions
  /// First cache row of the block's box i.
  __device__ int row(int i) const { return __shfl_sync(0xffffffffu, row_, offset_ + i); }

 private:
  __device__ int look_up(const Params& p, int window) const {
    const int position = first_ * block_tokens + ((window * 32 + static_cast<int>(threadIdx.x % 32)) << p.box_shift);
    if (position >= positions_) return 0;
    const int page = p.by_page.divide(position);
    return __ldg(table_ + page) * p.page_size + position - page * p.page_size;
  }

  const int* table_ = nullptr;
  int positions_ = 0, first_ = 0, row_ = 0, next_ = 0, window_ = 0, offset_ = 0, boxes_ = 0;
};

/// Copies an item's blocks row by row, by the loading warpgroup's 128 threads: 16-byte pieces, swizzled as the copy
/// engine would. Every thread then arrives at the barriers when its pieces land; who waits for them calls
/// fence_async_proxy().
class RowCopies {
 public:
  __device__ RowCopies(const Params& p, const Item& it)
      : p_(p), table_(p.block_table + it.request * p.table_stride), positions_(it.positions) {
    look_up(it.block);
  }

  /// Block j; the item's blocks in turn. box(b): shared-memory address of column box b.
  template <class Box>
  __device__ void copy(int j, Box box) {
    const int64_t offset[2] = {offset_[0], offset_[1]};
    look_up(j + 1);  // under way meanwhile
    const int thread = threadIdx.x % 128;
    constexpr int chunks = entry * 2 / 16;
#pragma unroll 4
    for (int i = 0; i < block_tokens * chunks / 128; ++i) {
      const int at = thread + 128 * i, row = at / chunks, chunk = at % chunks;
      const int64_t low = __shfl_sync(0xffffffffu, offset[0], row % 32);
      const int64_t high = __shfl_sync(0xffffffffu, offset[1], row % 32);
      const int64_t from = row < 32 ? low : high;
      if (from >= 0)
        cp_async_16(box(chunk / 8) + row * 128 + ((chunk % 8) ^ (row % 8)) * 16,
                    static_cast<const char*>(p_.cache) + from + chunk * 16);
    }
  }

 private:
  __device__ void look_up(int j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = j * block_tokens + half * 32 + static_cast<int>(threadIdx.x % 32);
      offset_[half] = -1;
      if (position < positions_) {
        const int page = p_.by_page.divide(position);
        offset_[half] =
            (static_cast<int64_t>(__ldg(table_ + page)) * p_.page_size + position - page * p_.page_size) * (entry * 2);
      }
    }
  }

  const Params& p_;
  const int32_t* table_;
  int positions_;
  int64_t offset_[2];  // of positions lane and lane + 32, in bytes; -1: past the end
};

}  // namespace mla::cuda::latent
