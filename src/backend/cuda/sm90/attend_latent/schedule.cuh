// Who attends what: the device-side schedule of attend_latent.
//
// A tile is `tile_rows` consecutive (token, head) rows of one request; its work is the 64-position blocks that any of
// its rows sees. Tiles lie on a line, in order of requests, and workers (CTAs, or clusters) take stretches of it:
//
//   pieces   every tile is cut into pieces of `piece` blocks. Small batches: the smallest piece for which each worker
//            has at most one. Batch-invariant: 16 blocks, whatever the batch.
//            Tiles of about one size that workers take without cutting any: the longest tile.
//   line     equal stretches, cut wherever they end. Larger batches: no worker holds more than its share.
//
// Everything is a function of the lengths, so every worker computes its own stretch, and who shares a tile, alone.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "backend/cuda/core/divisor.cuh"
#include "backend/cuda/core/warpgroup.cuh"
#include "mla/work.hpp"

namespace mla::cuda::latent {

constexpr int entry = 576, width = 512, block_tokens = 64;
constexpr int threads = 384;  // of the narrow kernels: two math warpgroups, one that loads
/// Most pieces of a tile: workers, or what the host allows batch-invariant splits.
constexpr int most_pieces = 512;

struct Params {
  const LatentItem* items;
  const int32_t* block_table;
  int64_t table_stride;
  const void* cache;    // for what is not copied by boxes
  int64_t page_stride;  // bytes
  int requests;         // items
  int heads, page_size;
  Divisor by_heads, by_page;
  int box_shift;  // log2 of a copy box's rows, which divide the page size; negative: rows are copied one by one
  float scale_log2;
  float value_scale;  // of outputs (fp8)
  void* out;
  bool out_f32;
  float* lse;  // may be null
  int64_t lse_token_stride, lse_head_stride;
  float *partial_out, *partial_lse;  // merge.cuh
  unsigned* counters;                // of a tile's pieces (merge.cuh)
  unsigned* left;                    // of a piece: was its share of the merging left to others?
  int patience;                      // cycles that a worker waits for others, at most
  int workers;
  int split_blocks;   // batch-invariant pieces; 0: chosen from the batch
  int min_blocks;     // least blocks worth a worker
  int line_overhead;  // of a tile beside its blocks, in blocks, when workers share the line
};

__device__ inline int ceil_div(int a, int b) {
  return static_cast<int>((static_cast<uint32_t>(a) + static_cast<uint32_t>(b) - 1) / static_cast<uint32_t>(b));
}

template <int tile_rows>
struct Tiles {  // of one request
  int rows = 0, count = 0;
  int start = 0, visible = 0, kv_end = 0, request = 0;  // of its item

  Tiles() = default;
  __device__ Tiles(const Params& p, int i) {
    if (i >= p.requests) return;
    const LatentItem* item = p.items + i;
    *this = Tiles(p, __ldg(&item->q_count), __ldg(&item->visible), __ldg(&item->kv_end));
    start = __ldg(&item->q_begin), request = __ldg(&item->request);
  }
  __device__ Tiles(const Params& p, int q_count, int visible, int kv_end)
      : rows(max(q_count, 0) * p.heads), count(ceil_div(rows, tile_rows)), visible(visible), kv_end(kv_end) {}
  /// Positions that rows of the tile see, at most.
  __device__ int positions(const Params& p, int tile) const {
    const int last_token = p.by_heads.divide(min(rows, (tile + 1) * tile_rows) - 1);
    return max(min(visible + last_token + 1, kv_end), 0);
  }
  __device__ int blocks(const Params& p, int tile) const { return ceil_div(positions(p, tile), block_tokens); }
};

/// How the line is cut, and where one worker's stretch lies on it.
struct Split {
  int piece = 1;               // blocks a piece; 0: line
  int overhead = 0;            // of a tile on the line
  int workers = 0;             // that have work
  uint32_t units = 0;          // the line's length in blocks, overheads and padding included; times workers below 2^32
  int begin = 0, end = 0;      // this worker's stretch
  int request = 0, start = 0;  // the request in which it begins, and where that request begins on the line

  __device__ int tile_units(int blocks) const {
    blocks = max(blocks, 1);
    return piece ? ceil_div(blocks, piece) * piece : blocks + overhead;
  }
  /// The worker whose stretch holds x (line).
  __device__ int owner(int x) const { return static_cast<int>(((x + 1u) * workers + units - 1) / units) - 1; }
};

/// By one warp. The lengths are gone over once for their sum, once for each size of piece tried and once to find the
/// worker's place, always by the same instructions: at a kernel's start every new one is a wait for the instruction
/// cache.
template <int tile_rows>
__device__ Split make_split(const Params& p, int worker) {
  const int lane = threadIdx.x % 32;
  Split split;
  split.overhead = p.line_overhead;
  int piece = p.split_blocks ? p.split_blocks : 1, target = -1;  // piece 0: line
  int sum = 0, all_tiles = 0, longest = 0, low = 0, high = 0, count = 0;
  enum { first, search, whole, find } phase = first;
#pragma unroll 1
  for (;;) {
    int base = 0, tiles = 0;
    const LatentItem* item = p.items + min(lane, p.requests - 1);
    int q_count = lane < p.requests ? __ldg(&item->q_count) : 0;
    int visible = __ldg(&item->visible), kv_end = __ldg(&item->kv_end);
#pragma unroll 1
    for (int r0 = 0; r0 < p.requests; r0 += 32) {
      const Tiles<tile_rows> t(p, q_count, visible, kv_end);
      const int next = r0 + 32 + lane;  // under way while this request is counted
      item = p.items + min(next, p.requests - 1);
      q_count = next < p.requests ? __ldg(&item->q_count) : 0;
      visible = __ldg(&item->visible), kv_end = __ldg(&item->kv_end);
      int mine = 0;
      tiles += t.count;
#pragma unroll 1
      for (int i = 0; i < t.count; ++i) {
        const int blocks = max(t.blocks(p, i), 1);
        longest = max(longest, blocks);
        mine += piece == 0 ? blocks + p.line_overhead : piece == 1 ? blocks : ceil_div(blocks, piece);
      }
      if (phase != find) {
        base += mine;
        continue;
      }
      int upto = mine;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int left = __shfl_up_sync(0xffffffffu, upto, d);
        if (lane >= d) upto += left;
      }
      const unsigned past = __ballot_sync(0xffffffffu, base + upto > target);
      if (past) {
        const int owner = __ffs(past) - 1;
        split.request = r0 + owner;
        split.start = (base + __shfl_sync(0xffffffffu, upto - mine, owner)) * max(piece, 1);
        break;
      }
      base += __shfl_sync(0xffffffffu, upto, 31);
    }
    if (phase != find) base = __reduce_add_sync(0xffffffffu, base);
    if (phase == find) return split;
    if (phase == first) {
      sum = base, all_tiles = __reduce_add_sync(0xffffffffu, tiles);
      if (sum == 0) return split;
      if (p.split_blocks) {
        split.workers = min(sum, p.workers);
      } else {
        // The smallest of these pieces for which every worker has at most one: the first, where tiles are equal,
        // otherwise by bisection; none: the line.
        low = max(p.min_blocks, ceil_div(sum, p.workers)), high = low + 4 + low / 16;
        piece = all_tiles <= p.workers ? low : 0;
        phase = search;
        longest = __reduce_max_sync(0xffffffffu, longest);
        if (piece == 0 && ceil_div(all_tiles, p.workers) * longest <= high) {  // whole tiles
          piece = longest, base = all_tiles;
          split.workers = min(ceil_div(all_tiles, ceil_div(all_tiles, p.workers)), p.workers);
          phase = whole;
        }
        if (piece > 1 && phase == search) continue;
      }
    }
    if (phase == search) {
      if (piece > 1) {
        if (base <= p.workers) {
          high = piece, count = base;
        } else if (piece == high) {
          piece = 0;
        } else {
          low = piece + 1;
        }
        if (piece && low < high) {
          piece = count ? (low + high) / 2 : high;
          continue;
        }
        if (piece) piece = high, base = count;
      }
      if (piece == 0) {
        base = sum + all_tiles * p.line_overhead;
        split.workers = max(1, min(p.workers, sum / p.min_blocks));
      } else {
        split.workers = base;
      }
    }
    // base: pieces, or the line's length
    split.piece = piece;
    split.units = static_cast<uint32_t>(base) * max(piece, 1);
    if (worker >= split.workers) return split;
    target = static_cast<int>(static_cast<uint32_t>(base) * worker / split.workers);
    split.begin = target * max(piece, 1);
    split.end = static_cast<int>(static_cast<uint32_t>(base) * (worker + 1) / split.workers) * max(piece, 1);
    phase = find;
  }
}

/// By one warp, beside make_split: a line of each request's row of the block table is asked into L2, the next one by
/// the next CTA. In small batches pages are then at hand when a worker knows which it needs.
__device__ inline void prefetch_table(const Params& p) {
  const int lane = threadIdx.x % 32;
  if (p.requests > 32 || lane >= p.requests) return;
  const LatentItem* item = p.items + lane;
  const int lines = ceil_div(max(__ldg(&item->kv_end), 0), 32 * p.page_size);
  if (__ldg(&item->q_count) <= 0 || lines == 0) return;
  const int32_t* line = p.block_table + __ldg(&item->request) * p.table_stride + blockIdx.x % lines * 32;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

/// A piece of a tile: what a worker does at a time.
struct Item {
  int request;        // row of the block table
  int row0, rows;     // the tile's rows among all (token, head) rows
  int first_row;      // row0 within the request
  int context;        // token i sees positions <= context + i
  int positions;      // that the tile sees
  int block, blocks;  // first block and how many
  int pieces, piece;  // of the tile, and which this is
  int slot, slot0;    // partial slot of this piece and of the tile's first piece
  int slot_step;      // from the second piece's slot to the third's
  int counter;        // of the tile
  int split;          // which of the worker's items with several pieces
};

/// Partial slot of piece i of the item's tile.
__device__ inline int partial_slot(const Item& it, int i) {
  return it.slot_step == 1 ? it.slot0 + i : it.slot0 + 2 * i - (i > 0 ? 1 : 0);
}
/// On the line: is the tile shared by two workers? One has its piece done at its start, the other joins it to what it
/// holds at its end.
__device__ inline bool shared_by_two(const Item& it) { return it.pieces == 2 && it.slot_step == 2; }

/// Walks the items of one worker; the same values in all lanes of a warp.
template <int tile_rows>
class Walk {
 public:
  Walk() = default;
  __device__ Walk(const Params& p, const Split& split, int worker)
      : p_(&p),
        split_(&split),
        worker_(worker),
        at_(split.begin),
        end_(split.end),
        request_(split.request),
        start_(split.start),
        tiles_(p, split.request) {}

  __device__ bool next(Item& it) {
    while (at_ < end_) {
      while (tile_ >= tiles_.count) {
        if (++request_ >= p_->requests) return false;
        tiles_ = Tiles<tile_rows>(*p_, request_);
        tile_ = 0;
      }
      const int blocks = tiles_.blocks(*p_, tile_), units = split_->tile_units(blocks), begin = at_ - start_;
      if (begin >= max(blocks, 1)) {  // past this tile's blocks
        if (start_ + units >= end_) return false;
        start_ += units;
        at_ = max(at_, start_);
        ++tile_;
        continue;
      }
      const int stop = split_->piece ? begin + split_->piece : end_ - start_;
      it.request = tiles_.request;
      it.first_row = tile_ * tile_rows;
      it.row0 = tiles_.start * p_->heads + it.first_row;
      it.rows = min(tile_rows, tiles_.rows - it.first_row);
      it.context = tiles_.visible;
      it.positions = tiles_.positions(*p_, tile_);
      it.block = begin;
      it.blocks = max(min(stop, blocks) - begin, 0);
      if (split_->piece) {
        it.pieces = ceil_div(max(blocks, 1), split_->piece);
        it.piece = begin / split_->piece;
        it.counter = it.slot0 = start_ / split_->piece;
        it.slot_step = 1;
      } else {
        const int first = split_->owner(start_);
        it.pieces = split_->owner(start_ + max(blocks, 1) - 1) - first + 1;
        it.piece = worker_ - first;
        it.counter = first;
        it.slot0 = 2 * first + 1;  // a worker's first item uses its even slot, its last the odd one
        it.slot_step = 2;
      }
      it.slot = partial_slot(it, it.piece);
      it.split = splits_;
      splits_ += it.pieces > 1;
      at_ += split_->piece ? split_->piece : min(stop, max(blocks, 1)) - begin;
      return true;
    }
    return false;
  }

 private:
  const Params* p_;
  const Split* split_;
  int worker_, at_, end_, request_, start_, tile_ = 0, splits_ = 0;
  Tiles<tile_rows> tiles_;
};

}  // namespace mla::cuda::latent
