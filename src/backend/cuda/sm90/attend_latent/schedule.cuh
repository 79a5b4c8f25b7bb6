// Who attends what: the device-side schedule of attend_latent, and the merge of the pieces it cuts.
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
  float *partial_out, *partial_lse;
  unsigned* counters;
  int workers;
  int split_blocks;  // batch-invariant pieces; 0: chosen from the batch
  int min_blocks;    // least blocks worth a worker
};

/// Cost of a tile beside its blocks, in blocks, when workers share the line.
constexpr int line_overhead = 2;

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
  int workers = 0;             // that have work
  uint32_t units = 0;          // the line's length in blocks, overheads and padding included; times workers below 2^32
  int begin = 0, end = 0;      // this worker's stretch
  int request = 0, start = 0;  // the request in which it begins, and where that request begins on the line

  __device__ int tile_units(int blocks) const {
    blocks = max(blocks, 1);
    return piece ? ceil_div(blocks, piece) * piece : blocks + line_overhead;
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
        mine += piece == 0 ? blocks + line_overhead : piece == 1 ? blocks : ceil_div(blocks, piece);
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
        // The smallest of these pieces for which every worker has at most one, by bisection; none: the line.
        low = max(p.min_blocks, ceil_div(sum, p.workers)), high = low + 4 + low / 16;
        piece = all_tiles <= p.workers ? (low == 1 ? 1 : high) : 0;
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
          piece = (low + high) / 2;
          continue;
        }
        if (piece) piece = high, base = count;
      }
      if (piece == 0) {
        base = sum + all_tiles * line_overhead;
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
  int counter;
};

/// Partial slot of piece i of the item's tile.
__device__ inline int partial_slot(const Item& it, int i) {
  return it.slot_step == 1 ? it.slot0 + i : it.slot0 + 2 * i - (i > 0 ? 1 : 0);
}

/// Walks the items of one worker; the same values in all lanes of a warp.
template <int tile_rows>
class Walk {
 public:
  __device__ Walk(const Params& p, const Split& split, int worker)
      : p_(p),
        split_(split),
        worker_(worker),
        at_(split.begin),
        end_(split.end),
        request_(split.request),
        start_(split.start),
        tiles_(p, split.request) {}

  __device__ bool next(Item& it) {
    while (at_ < end_) {
      while (tile_ >= tiles_.count) {
        if (++request_ >= p_.requests) return false;
        tiles_ = Tiles<tile_rows>(p_, request_);
        tile_ = 0;
      }
      const int blocks = tiles_.blocks(p_, tile_), units = split_.tile_units(blocks), begin = at_ - start_;
      if (begin >= max(blocks, 1)) {  // past this tile's blocks
        if (start_ + units >= end_) return false;
        start_ += units;
        at_ = max(at_, start_);
        ++tile_;
        continue;
      }
      const int stop = split_.piece ? begin + split_.piece : end_ - start_;
      it.request = tiles_.request;
      it.first_row = tile_ * tile_rows;
      it.row0 = tiles_.start * p_.heads + it.first_row;
      it.rows = min(tile_rows, tiles_.rows - it.first_row);
      it.context = tiles_.visible;
      it.positions = tiles_.positions(p_, tile_);
      it.block = begin;
      it.blocks = max(min(stop, blocks) - begin, 0);
      if (split_.piece) {
        it.pieces = ceil_div(max(blocks, 1), split_.piece);
        it.piece = begin / split_.piece;
        it.counter = it.slot0 = start_ / split_.piece;
        it.slot_step = 1;
      } else {
        const int first = split_.owner(start_);
        it.pieces = split_.owner(start_ + max(blocks, 1) - 1) - first + 1;
        it.piece = worker_ - first;
        it.counter = first;
        it.slot0 = 2 * first + 1;  // a worker's first item uses its even slot, its last the odd one
        it.slot_step = 2;
      }
      it.slot = partial_slot(it, it.piece);
      at_ += split_.piece ? split_.piece : min(stop, max(blocks, 1)) - begin;
      return true;
    }
    return false;
  }

 private:
  const Params& p_;
  const Split& split_;
  int worker_, at_, end_, request_, start_, tile_ = 0;
  Tiles<tile_rows> tiles_;
};

// Named barriers: all math threads; then the wide kernel's, of each half of them and of the warpgroup that makes
// scores.
constexpr int math_threads = 256, math_barrier = 1, half_barrier = 2, scores_barrier = 4;

/// The (token, head) row's log of the sum of exponentials, given in log2 units, if it is wanted.
__device__ inline void store_lse(const Params& p, int row, float lse2) {
  if (!p.lse) return;
  const int token = p.by_heads.divide(row);
  p.lse[token * p.lse_token_stride + (row - token * p.heads) * p.lse_head_stride] = lse2 * 0.6931471805599453f;
}

/// A partial's rows are written by all math threads: count it. By all math threads.
__device__ inline void publish(const Params& p, int counter) {
  barrier_sync(math_barrier, math_threads);
  if (threadIdx.x == 0) {
    __threadfence();  // also for what the barrier ordered before
    atomicAdd(p.counters + counter, 1u);
  }
}

__device__ inline void wait_for_count(const unsigned* counter, int n) {
  unsigned seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < static_cast<unsigned>(n));
}

/// Most pieces of a tile: workers, or what the host allows batch-invariant splits.
constexpr int most_pieces = 512;
struct MergeSpace {
  float4 out[math_threads];
  float weight[768];  // [row of the share][piece], normalised
};

/// Merges this piece's share of its tile, in order of pieces, once all pieces are there. `parts`: interleaved partials
/// of one slot (2 for a cluster's two row halves), `part` ours. dry: touches no device memory. By all math threads.
template <int rows_per_slot>
__device__ void merge_share(const Params& p, const Item& it, int rows, int64_t row0, int parts, int part,
                            MergeSpace& space, bool dry = false) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, n = it.pieces;
  unsigned* counter = p.counters + it.counter * parts + part;
  const int units = rows * (width / 128);
  const int begin = static_cast<int>(static_cast<uint32_t>(units) * it.piece / n) * 32;  // columns, four at a time
  const int end = static_cast<int>(static_cast<uint32_t>(units) * (it.piece + 1) / n) * 32;
  const int rows_at_once = 768u / static_cast<uint32_t>(n);
  // Rows of pieces 1, 2, .. lie `stride` apart.
  const int64_t first_row = (static_cast<int64_t>(it.slot0) * parts + part) * rows_per_slot;
  const int64_t next_row = (static_cast<int64_t>(partial_slot(it, 1)) * parts + part) * rows_per_slot;
  const int64_t stride = static_cast<int64_t>(it.slot_step) * parts * rows_per_slot;
  const auto slot_row = [&](int i) { return i == 0 ? first_row : next_row + (i - 1) * stride; };

  if (thread == 0 && !dry) wait_for_count(counter, n);
  barrier_sync(math_barrier, math_threads);

  // Weights of as many rows as there is room for, and their columns; a thread's first columns are on their way
  // meanwhile.
#pragma unroll 1
  for (int first = begin; first < end;) {
    const int row_begin = first / 128, row_end = min(row_begin + rows_at_once, (end + 127) / 128);
    const int stop = min(end, row_end * 128);
    // Where columns are few, groups of threads share the pieces. A thread keeps eight loads in flight.
    const int count = stop - first;
    const int lanes = count <= 32 ? 32 : count <= 64 ? 64 : count <= 128 ? 128 : 256, groups = math_threads / lanes;
    const int group = thread / lanes, piece_begin = n * group / groups, piece_end = n * (group + 1) / groups;
    float4 v[2][8];
    const auto load = [&](int base, int i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int unit = base + c * lanes + thread % lanes;
        if (unit >= stop || dry) continue;
        const float* column = p.partial_out + static_cast<int64_t>(unit / 128) * width + unit % 128 * 4;
#pragma unroll
        for (int k = 0; k < 8; ++k)
          if (i + k < piece_end) v[c][k] = __ldcg(reinterpret_cast<const float4*>(column + slot_row(i + k) * width));
      }
    };
    load(first, piece_begin);
#pragma unroll 1
    for (int row = row_begin + warp; row < row_end; row += math_threads / 32) {
      float* weights = space.weight + (row - row_begin) * n;
      float top = -INFINITY;
#pragma unroll 4
      for (int i = lane; i < n; i += 32) {
        weights[i] = dry ? 0.0f : __ldcg(p.partial_lse + slot_row(i) + row);
        top = fmaxf(top, weights[i]);
      }
#pragma unroll
      for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
      const float shift = top == -INFINITY ? 0.0f : top;
      float sum = 0;
      for (int i = lane; i < n; i += 32) sum += weights[i] = exp2_approx(weights[i] - shift);
#pragma unroll
      for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
      for (int i = lane; i < n; i += 32) weights[i] *= inverse;
      if (row * 128 >= begin && lane == 0 && !dry)
        store_lse(p, static_cast<int>(row0) + row, sum > 0 ? top + __log2f(sum) : -INFINITY);
    }
    barrier_sync(math_barrier, math_threads);

#pragma unroll 1
    for (int base = first; base < stop; base += 2 * lanes) {
      float4 a[2] = {};
#pragma unroll 1
      for (int i = piece_begin; i < piece_end; i += 8) {
        if (base != first || i != piece_begin) load(base, i);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int unit = base + c * lanes + thread % lanes;
          if (unit >= stop || dry) continue;
          const float* weights = space.weight + (unit / 128 - row_begin) * n;
#pragma unroll
          for (int k = 0; k < 8; ++k)
            if (i + k < piece_end) {
              const float w = weights[i + k];
              a[c].x += w * v[c][k].x, a[c].y += w * v[c][k].y, a[c].z += w * v[c][k].z, a[c].w += w * v[c][k].w;
            }
        }
      }
      if (groups > 1) {  // then this is the only round, and its second column is empty
        space.out[thread] = a[0];
        barrier_sync(math_barrier, math_threads);
        if (group == 0)
          for (int g = 1; g < groups; ++g) {
            const float4 v = space.out[thread + g * lanes];
            a[0].x += v.x, a[0].y += v.y, a[0].z += v.z, a[0].w += v.w;
          }
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (group != 0 || base + c * lanes + thread % lanes >= stop || dry) continue;
        const int64_t at = row0 * width + (base + c * lanes + thread % lanes) * int64_t{4};
        if (p.out_f32) {
          *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = a[c];
        } else {
          const __nv_bfloat162 two[2] = {__floats2bfloat162_rn(a[c].x, a[c].y), __floats2bfloat162_rn(a[c].z, a[c].w)};
          *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + at) = *reinterpret_cast<const uint2*>(two);
        }
      }
    }
    first = stop;
    barrier_sync(math_barrier, math_threads);
  }
  // The last to finish leaves the counter as the next call needs it.
  if (thread == 0 && !dry && atomicAdd(counter, 1u) == 2u * n - 1) *counter = 0;
}

}  // namespace mla::cuda::latent
