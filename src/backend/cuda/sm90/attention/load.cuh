// What the loading warps share: how an item and its queries reach the math warps, and where blocks of 64 positions lie
// in the paged cache of 16 bits.
#pragma once

#include <cstring>

#include "backend/cuda/core/mbarrier.cuh"
#include "backend/cuda/core/tma.cuh"
#include "backend/cuda/sm90/attention/schedule.cuh"

namespace mla::cuda::latent {

constexpr int box_bytes = block_tokens * 128;  // 64 positions x 64 elements, 128-byte swizzle

/// How L2 keeps cached rows of a tile that one CTA has: no other CTA of the tile reads them again.
__device__ inline uint64_t row_policy(const Params& p) { return p.shared_keys ? evict_normal : evict_first; }

/// Queries of an item of the tile's first row row0, for which the math warps wait; by one warp.
template <int tile_rows, class Shared>
__device__ void load_queries(Shared& s, const CUtensorMap& q_map, int row0) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) mbarrier_arrive_expect(smem_address(&s.q_full), 9 * tile_rows * 128);
  __syncwarp();
  if (lane < 9) tma_load(smem_address(s.q[lane]), q_map, smem_address(&s.q_full), lane * 64, row0);
  __syncwarp();
}
/// Hands the kernel's item number `count` to the math warps, and its queries; by one warp. Not the first one: that lies
/// in s.item[0] (blocks -1: none), and a math warp asks for its queries as soon as the grids before are complete, when
/// loading warps may be stuck in a full queue.
template <int tile_rows, class Shared>
__device__ void hand_over(Shared& s, const CUtensorMap& q_map, const Item& it, int count) {
  mbarrier_wait(smem_address(&s.q_empty), (count & 1) ^ 1);
  if (threadIdx.x % 32 == 0) s.item[count & 1] = it;
  load_queries<tile_rows>(s, q_map, it.row0);
}
template <int tile_rows, class Shared>
__device__ void load_first_queries(Shared& s, const CUtensorMap& q_map) {
  if (s.item[0].blocks >= 0) load_queries<tile_rows>(s, q_map, s.item[0].row0);
}
/// Tells them that there is no item number `count`; the first one lies there already, and they may be reading it.
template <class Shared>
__device__ void hand_over_none(Shared& s, int count) {
  mbarrier_wait(smem_address(&s.q_empty), (count & 1) ^ 1);
  if (threadIdx.x % 32 == 0) {
    if (count > 0) s.item[count & 1].blocks = -1;
    mbarrier_arrive(smem_address(&s.q_full));
  }
}

// Where an item's rows lie is known by a Rows class, which at first looks pages up `look_ups` times, a lane a page each
// time: these may be known from a Start. position(): of a lane's look-up, `first` being the item's first (or the first
// of the loading warp's part of a block). Page -1: past the item's end.

__device__ inline const int* table_of(const Params& p, const Item& it) {
  return p.block_table + it.request * p.table_stride;
}
__device__ inline int page_of(const Params& p, const int* table, int positions, int position) {
  return position < positions ? __ldg(table + p.by_page.divide(position)) : -1;
}
/// The number of the cache row that a position has in its page.
__device__ inline int row_in(const Params& p, int page, int position) {
  const int row = position - p.by_page.divide(position) * p.page_size;
  return page * p.page_step + row * p.row_step;
}

/// A Start as a loading warp has it: with what it looks pages up for.
template <class Rows>
struct Begin {
  Item item;
  Split split;
  int pages[Rows::look_ups];

  /// part: of a block, where the warp has one of its own.
  __device__ Begin(const Start& start, int part) {
#pragma unroll
    for (int i = 0; i < Rows::look_ups; ++i)  // relaxed: not later, when the item turns out to have blocks
      asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];"
                   : "=r"(pages[i])
                   : "l"(&start.pages[part * Rows::look_ups + i][threadIdx.x % 32]));
    read(item, start.item), read(split, start.split);
  }

 private:
  template <class T>
  __device__ static void read(T& to, const T& from) {
    uint4 v[(sizeof(T) + 15) / 16];
#pragma unroll
    for (size_t i = 0; i < sizeof v / 16; ++i) v[i] = __ldg(reinterpret_cast<const uint4*>(&from) + i);
    memcpy(&to, v, sizeof(T));
  }
};

/// By a loading warp: its worker's split and first item (blocks -1: none), and that item's rows.
template <int tile_rows, bool invariant, bool listed = false, class Rows>
__device__ Split begin_work(const Params& p, int worker, int part, Item& it, Rows& rows) {
  if (p.late) wait_for_previous_grids();
  if (p.starts) {
    if constexpr (!listed) {
      const Begin<Rows> begin(p.starts[worker], part);
      if (it = begin.item; it.blocks > 0) rows = Rows(p, begin, part);
      return begin.split;
    }
  }
  Split split;
  Walk<tile_rows, invariant, listed> walk(p, worker, split);
  if (!walk.next(p, split, it)) it.blocks = -1;
  if (listed) wait_for_previous_grids();  // they make the lists
  if (it.blocks > 0) rows = Rows(p, it, part);
  return split;
}

/// Cache rows of an item's blocks, box by box: lanes look up 32 boxes at a time, one such window ahead.
class BoxRows {
 public:
  static constexpr int look_ups = 2, parts = 1, part_rows = block_tokens;

  BoxRows() = default;
  __device__ BoxRows(const Params& p, const Item& it, int = 0) : BoxRows(it, table_of(p, it)) {
    if (p.box_shift < 0) return;
    row_ = look_up(p, 0), next_ = look_up(p, 1);
  }
  __device__ BoxRows(const Params& p, const Begin<BoxRows>& begin, int = 0)
      : BoxRows(begin.item, table_of(p, begin.item)) {
    if (p.box_shift < 0) return;
    const int first = first_ * block_tokens;
    row_ = row_of(p, position(p, first, 0), begin.pages[0]), next_ = row_of(p, position(p, first, 1), begin.pages[1]);
  }
  __device__ static int position(const Params& p, int first, int window) {
    return first + ((window * 32 + static_cast<int>(threadIdx.x % 32)) << p.box_shift);
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
  __device__ BoxRows(const Item& it, const int* table) : table_(table), positions_(it.positions), first_(it.block) {}
  __device__ int look_up(const Params& p, int window) const {
    const int at = position(p, first_ * block_tokens, window);
    return row_of(p, at, page_of(p, table_, positions_, at));
  }
  __device__ static int row_of(const Params& p, int position, int page) {
    return page < 0 ? 0 : row_in(p, page, position);
  }

  const int* table_ = nullptr;
  int positions_ = 0, first_ = 0, row_ = 0, next_ = 0, window_ = 0, offset_ = 0, boxes_ = 0;
};

/// Copies an item's blocks row by row, by `warps` warps: each has `fours` times four rows of a block, a lane 16 bytes
/// of each of their column boxes, swizzled as the copy engine would. Lane l looks up row l / 8 of the warp's (l % 8)-th
/// four. Page numbers are asked for a block ahead, and not touched before: in a full queue they take as long as the
/// copies. Who waits for the copies calls fence_async_proxy().
template <int warps>
class RowCopies {
 public:
  static constexpr int fours = (block_tokens / 4 + warps - 1) / warps;
  static constexpr int look_ups = 2, parts = warps, part_rows = fours * 4;  // look-ups of two blocks

  RowCopies() = default;
  __device__ RowCopies(const Params& p, const Item& it, int part)
      : table_(table_of(p, it)), positions_(it.positions), first_(it.block * block_tokens + part * fours * 4) {
    page_ = look_up(p, 0), next_ = look_up(p, 1);
  }
  __device__ RowCopies(const Params& p, const Begin<RowCopies>& begin, int part)
      : table_(table_of(p, begin.item)),
        positions_(begin.item.positions),
        first_(begin.item.block * block_tokens + part * fours * 4),
        page_(begin.pages[0]),
        next_(begin.pages[1]) {}
  __device__ static int position(const Params&, int first, int block) {
    const int lane = threadIdx.x % 32;
    return first + block * block_tokens + lane % 8 * 4 + lane / 8;
  }

  /// The next of an item's blocks on their way to L2, two at most. Only where little else is read: the previous
  /// kernel's own reads would wait for them.
  __device__ void prefetch(const Params& p, int blocks) const {
    static_assert(fours == 4);  // of a lane and the one beside it, each asks for a row of one block
    const int next = __shfl_xor_sync(0xffffffffu, row_of(p, 1, next_), 4);
    const bool second = threadIdx.x % 8 >= 4;
    const int row = second ? next : row_of(p, 0, page_);
    if (second < blocks && row >= 0) bulk_prefetch(address(p, row), (p.no_rope ? width : entry) * 2);
  }

  /// Moves to the next block.
  __device__ void advance(const Params& p) {
    first_ += block_tokens;
    page_ = next_, next_ = look_up(p, 1);
  }

  /// Cache rows that a lane copies of the block. -1: none.
  struct Rows {
    int of[fours];
  };
  __device__ Rows rows(const Params& p, int part) const {
    const int mine = row_of(p, 0, page_);
    Rows rows;
#pragma unroll
    for (int i = 0; i < fours; ++i) {
      rows.of[i] = __shfl_sync(0xffffffffu, mine, i, 8);
      if ((part * fours + i) * 4 >= block_tokens) rows.of[i] = -1;
    }
    return rows;
  }
  /// Copies their column boxes [first, last) to shared memory, the first to address `box`. by_policy: L2 keeps them as
  /// row_policy() says.
  /// ^, not +: where a register of the warp's own is added to an address, ptxas 13.0 takes an odd one for the policy's
  /// descriptor, which is an illegal instruction.
  template <int first, int last, bool by_policy>
  __device__ static void copy(const Params& p, const Rows& rows, int part, uint32_t box) {
    const int lane = threadIdx.x % 32, chunk = lane % 8;
    const uint32_t to = (box + part * fours * 512) ^ (lane / 8 * 128 + (chunk ^ lane / 8) * 16);
#pragma unroll
    for (int i = 0; i < fours; ++i) {
      if (rows.of[i] < 0) continue;
      const char* source = address(p, rows.of[i], chunk * 16);
#pragma unroll
      for (int b = first; b < last; ++b) {
        const uint32_t at = (to ^ i % 2 * 64) + i * 512 + (b - first) * box_bytes;
        if (b == 8 && p.no_rope) store_shared_16(at, uint4{});
        else if constexpr (by_policy) cp_async_16(at, source + b * 128, row_policy(p));
        else cp_async_16(at, source + b * 128);
      }
    }
  }

 private:
  __device__ int look_up(const Params& p, int block) const {
    return page_of(p, table_, positions_, position(p, first_, block));
  }
  __device__ int row_of(const Params& p, int block, int page) const {
    const int at = position(p, first_, block);
    return page < 0 ? -1 : row_in(p, page, at);
  }
  /// Of a byte of a row. It is added first: added last, it would be added again for each column.
  __device__ static const char* address(const Params& p, int row, int byte = 0) {
    return static_cast<const char*>(p.cache) + byte + static_cast<int64_t>(row) * p.row_bytes;
  }

  const int* table_ = nullptr;
  int positions_ = 0, first_ = 0;  // first_: of the warp's rows of this block
  int page_, next_;                // of a lane's row in this block and in the next one; -1: past the end
};

}  // namespace mla::cuda::latent
