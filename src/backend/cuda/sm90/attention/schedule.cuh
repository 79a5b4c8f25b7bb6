// Who attends what: the device-side schedule.
//
// A tile is `tile_rows` consecutive (token, head) rows of one request; its work is the 64-position blocks that any of
// its rows sees. Tiles lie on a line, in order of requests, and workers (CTAs, or clusters) take stretches of it:
//
//   pieces   every tile is cut into pieces of `piece` blocks. Small batches: the smallest piece for which each worker
//            has at most one. Batch-invariant: 16 blocks, whatever the batch; a worker takes several in a row.
//            Tiles of about one size that workers take without cutting any: the longest tile.
//            In a relay the first half of the workers have every second piece: they leave as soon as it is done, and
//            the next call's first half begins in their place while the other half merges.
//   line     equal stretches, cut wherever they end. Larger batches: no worker holds more than its share.
//
// Everything is a function of the lengths, so every worker computes its own stretch, and who shares a tile, alone.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "backend/cuda/core/divisor.cuh"
#include "backend/cuda/core/warp_scan.cuh"
#include "backend/cuda/core/warpgroup.cuh"
#include "backend/cuda/sm90/attention/slots.cuh"
#include "mla/work.hpp"

namespace mla::cuda::latent {

constexpr int entry = 576, width = 512, block_tokens = 64;
constexpr int threads = 384;  // of the narrow kernels: two math warpgroups, one that loads
/// Most pieces of a tile: workers, or what the host allows batch-invariant splits.
constexpr int most_pieces = 512;

/// Do kernels know relays (below)? Larger tiles have too much to merge for half of the workers.
constexpr bool may_relay(int tile_rows, bool invariant) { return tile_rows == 16 && !invariant; }

struct Start;

struct Params {
  const Start* starts;  // of all workers, made ahead; null: each finds its own
  // What the schedule needs lies together: constants of a launch come from L2 line by line when first used.
  const LatentItem* items;
  int requests;  // items, lengths, or rows of lists
  int heads;
  Divisor by_heads, by_workers;
  int workers;
  int split_blocks;      // of batch-invariant pieces
  int min_blocks;        // least blocks worth a worker
  bool relay;            // may every second worker leave merging to the others?
  bool one_tile;         // has a request one tile at most?
  bool one_each;         // so, and there are 32 requests at most?
  bool late;             // are items, lengths and table what the stream's previous kernel writes?
  bool extras;           // are there sinks, or are largest logits wanted?
  bool peaks;            // are they?
  bool lse_by_requests;  // have lse's requests a stride of their own?
  bool lse_empty_up;     // is it +inf, not -inf, of a row that sees nothing?
  bool shared_keys;      // are cached rows read by several requests?
  bool by_lengths;       // in place of items, are there lengths?
  uint16_t row_bytes;    // of what rows of a cache of 16 bits are numbered by: a row, or 16
  uint16_t row_step;     // from a row's number to the next one's
  bool no_rope;          // have rows values alone?
  const int32_t* block_table;
  int64_t table_stride;
  Divisor by_page;
  int page_size;
  int line_overhead;  // of a tile beside its blocks, in blocks, when workers share the line
  int box_shift;      // log2 of a copy box's rows, which divide the page size; negative: rows are copied one by one
  float scale_log2;
  const void* cache;      // for what is not copied by boxes
  int64_t page_stride;    // bytes
  int page_step;          // from a page's number to the next one's, of a cache of 16 bits
  bool out_f32, out_f16;  // neither: bf16
  void* out;
  float* lse;  // may be null
  int64_t lse_token_stride, lse_head_stride;
  float *partial_out, *partial_lse;  // merge.cuh
  unsigned* counters;                // of a tile's pieces (merge.cuh)
  unsigned* left;                    // of a piece: was its share of the merging left to others?
  int patience;                      // cycles that a worker waits for others, at most
  bool q_f16;                        // are queries f16, over a cache of f16? Otherwise bf16
  bool settled;                      // may cached rows be read while the stream's previous kernel ends?
  const void* q;                     // for rows that see keys but no logit above -inf (lost_to_query)
  float value_scale;                 // of outputs (fp8)
  // Of few calls, behind what all calls read:
  const float* sinks;  // of heads; may be null
  float* max_logits;   // may be null
  Divisor by_queries;
  int queries;  // of lse's requests
  // Positions of each request, all of which have query_tokens.
  const int32_t* lengths;
  int64_t length_stride;
  int query_tokens, most_positions;
  bool causal;
  int64_t lse_query_stride;
  int64_t max_token_stride, max_head_stride;
  float* partial_max;
  int q_width;  // elements of a query row
  // Of caches of fp8, on device, beside scale_log2 and value_scale; null: 1.
  const float *q_scale, *k_scale;
  // Of kernels whose rows are listed, each request of which is one query row:
  SlotLists lists;
  Divisor by_slot_page[2];
};

/// By a constant.
__device__ inline int ceil_div(int a, int b) {
  return static_cast<int>((static_cast<uint32_t>(a) + static_cast<uint32_t>(b) - 1) / static_cast<uint32_t>(b));
}
/// a / b below 2^21, in half of the instructions of a division.
__device__ inline int small_quotient(uint32_t a, uint32_t b) {
  const auto q =
      static_cast<int>(static_cast<float>(a) * reciprocal_approx(static_cast<float>(b)));  // or one beside it
  const auto rest = static_cast<int>(a - static_cast<uint32_t>(q) * b);
  return q + (rest >= static_cast<int>(b)) - (rest < 0);
}

/// A query row of lists: number `i` of those of a call.
struct ListedRow {
  int row = 0, count = 0;  // count: of this query row, 0 or 1
  int keys = 0;

  __device__ ListedRow(const SlotLists& lists, int i) {
    const SparseItem item = lists.items ? *lists.items : lists.item;
    i += lists.first_row;
    if (i >= item.q_count) return;
    row = item.q_begin + i, count = 1;
    keys = slots_that_count(lists, lists.source[0], row, item.k_end, 0);
    if (lists.sources > 1) keys += slots_that_count(lists, lists.source[1], row, item.k_end, lists.source[0].topk);
  }
  /// Slots that count of the first source.
  __device__ static int first_keys(const SlotLists& lists, int row) {
    return slots_that_count(lists, lists.source[0], row, lists.items ? lists.items->k_end : lists.item.k_end, 0);
  }
};

/// listed: are requests query rows with lists of their own?
template <int tile_rows, bool listed = false>
struct Tiles {  // of one request
  int rows = 0, count = 0;
  int start = 0, visible = 0, kv_end = 0, request = 0;  // of its item

  Tiles() = default;
  __device__ Tiles(const Params& p, int i) {
    if (i >= p.requests) return;
    if constexpr (listed) {
      const ListedRow row(p.lists, i);
      *this = Tiles(p, row.count, row.keys, row.keys);
      start = request = row.row;
      return;
    }
    if (p.by_lengths) [[unlikely]] {
      const int end = min(max(p.lengths[i * p.length_stride], 0), p.most_positions);
      *this = Tiles(p, p.query_tokens, p.causal ? end - p.query_tokens : end - 1, end);
      start = i * p.query_tokens, request = i;
      return;
    }
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
  /// The blocks that it counts as: one at least, if there is such a tile.
  __device__ int length(const Params& p, int tile) const { return tile < count ? max(blocks(p, tile), 1) : 0; }
  __device__ Tiles of_lane(int lane) const {
    Tiles t;
    const auto get = [lane](int x) { return warp_uniform(__shfl_sync(0xffffffffu, x, lane)); };
    t.rows = get(rows), t.count = get(count);
    t.start = get(start), t.visible = get(visible), t.kv_end = get(kv_end), t.request = get(request);
    return t;
  }
};

/// How the line is cut, and where one worker's stretch lies on it. The line is measured in pieces, or in blocks where
/// stretches are cut wherever they end.
struct Split {
  int piece = 1;               // blocks a piece; 0: line
  int workers = 0;             // that have work
  uint32_t units = 0;          // the line's length, overheads included; times workers below 2^32
  int begin = 0, end = 0;      // this worker's stretch
  int request = 0, start = 0;  // the request in which it begins, and where that request begins on the line
  bool relay = false;          // do only workers of odd pieces on the line merge? They are born last.

  /// Of a tile of so many blocks, one at least: its length on the line.
  __device__ int length(const Params& p, int blocks) const {
    return piece > 1 ? small_quotient(blocks + piece - 1, piece) : piece ? blocks : blocks + p.line_overhead;
  }
  /// The worker whose stretch holds x (line).
  __device__ int owner(int x) const { return small_quotient((x + 1u) * workers + units - 1, units) - 1; }
};

/// By one warp, which then has the first tile's request in `tiles`. What runs at a kernel's start takes four or five
/// cycles an instruction: requests up to the 32nd are read once, and most divisions are by numbers that the host knows.
template <int tile_rows, bool invariant, bool listed>
__device__ Split make_split(const Params& p, int worker, Tiles<tile_rows, listed>& tiles) {
  const int lane = threadIdx.x % 32;
  const Tiles<tile_rows, listed> mine(p, lane);
  const int first = mine.length(p, 0);
  Split split;
  // Of the lane's tiles behind `first`: those of its request, then of the requests from the 33rd on.
  const auto further = [&](auto each) {
#pragma unroll 1
    for (int i = 1; i < mine.count; ++i) each(mine.length(p, i));
  };
  const auto others = [&](auto each) {
#pragma unroll 1
    for (int r = 32 + lane; r < p.requests; r += 32) {
      const Tiles<tile_rows, listed> t(p, r);
#pragma unroll 1
      for (int i = 0; i < t.count; ++i) each(t.length(p, i));
    }
  };
  // The same for many, four reads under way at a time: one takes some 600 cycles.
  const auto many_others = [&](auto each) {
#pragma unroll 1
    for (int r = 32 + lane; r < p.requests; r += 128) {
      Tiles<tile_rows> t[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const LatentItem* item = p.items + min(r + 32 * k, p.requests - 1);
        const int q_count = __ldg(&item->q_count);
        t[k] = {p, r + 32 * k < p.requests ? q_count : 0, __ldg(&item->visible), __ldg(&item->kv_end)};
      }
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll 1
        for (int i = 0; i < t[k].count; ++i) each(t[k].length(p, i));
    }
  };
  int own = first, longest = first;  // own: what the lane's request has of the line
  const auto measure = [&](int blocks) { own += blocks, longest = max(longest, blocks); };
  if (!p.one_each) further(measure);
  int all_tiles = mine.count, blocks = own;
  const auto measure_other = [&](int more) { blocks += more, longest = max(longest, more), ++all_tiles; };
  if (!listed && p.requests > 128 && !p.by_lengths) many_others(measure_other);
  else if (!p.one_each) others(measure_other);
  all_tiles = __reduce_add_sync(0xffffffffu, all_tiles);
  blocks = __reduce_add_sync(0xffffffffu, blocks);
  longest = __reduce_max_sync(0xffffffffu, longest);
  if (all_tiles == 0) return split;

  const auto pieces_of_all = [&] {
    own = first ? split.length(p, first) : 0;
    if (!p.one_each) further([&](int more) { own += split.length(p, more); });
    int pieces = own;
    if (!p.one_each) others([&](int more) { pieces += split.length(p, more); });
    return __reduce_add_sync(0xffffffffu, pieces);
  };
  const int tiles_a_worker = p.by_workers.divide(all_tiles + p.workers - 1),
            least = max(p.min_blocks, p.by_workers.divide(blocks + p.workers - 1)),
            most = least + 4 + min(least / 16, 8);
  int sum = 0;
  bool line = false;
  if (invariant || tiles_a_worker == 1) {
    // The smallest of these pieces for which every worker has at most one: the first, where tiles are equal, otherwise
    // by bisection; none: the line.
    split.piece = invariant ? p.split_blocks : least;
#pragma unroll 1
    for (int below = least - 1, fits = 0;;) {
      sum = pieces_of_all();
      if (invariant) break;
      (sum > p.workers ? below : fits) = split.piece;
      line = below == most;
      if (line || (fits == split.piece && fits == below + 1)) break;
      split.piece = !fits ? most : fits == below + 1 ? fits : (below + fits) / 2;
    }
    split.workers = min(sum, p.workers);
  } else if (tiles_a_worker * longest <= most) {  // whole tiles
    split.piece = longest, sum = all_tiles, own = mine.count;
    split.workers = min(small_quotient(all_tiles + tiles_a_worker - 1, tiles_a_worker), p.workers);
  } else {
    line = true;
  }
  if (line) {
    split.piece = 0, sum = blocks + all_tiles * p.line_overhead;
    own = first + mine.count * p.line_overhead;
    further([&](int more) { own += more; });
    split.workers = max(1, min(p.workers, blocks / p.min_blocks));
  }
  split.units = static_cast<uint32_t>(sum);
  // Batch-invariant: as few workers as that takes, so that stretches end where tiles of one length do.
  const int each = p.by_workers.divide(sum + p.workers - 1);
  if (invariant) split.workers = small_quotient(sum + each - 1, each);
  if (worker >= split.workers) return split;
  const bool one_a_worker = sum == split.workers;
  if (invariant) {
    split.begin = worker * each, split.end = min(split.begin + each, sum);
  } else {
    split.begin = one_a_worker ? worker : static_cast<int>(split.units * worker / split.workers);
    split.end = one_a_worker ? worker + 1 : static_cast<int>(split.units * (worker + 1) / split.workers);
  }
  if constexpr (may_relay(tile_rows, invariant)) {
    // Where a few are busy, the next call's have room beside them.
    split.relay = p.relay && !line && tiles_a_worker == 1 && 4 * split.workers > 3 * p.workers;
    const int early = (split.workers + 1) / 2;
    if (split.relay) split.begin = worker < early ? 2 * worker : 2 * (worker - early) + 1, split.end = split.begin + 1;
  }

  // Where it begins.
  if (p.one_tile && !p.one_each && sum == all_tiles && all_tiles == p.requests) {  // whole tiles, one a request
    split.request = split.start = split.begin;
    tiles = Tiles<tile_rows, listed>(p, split.begin);
    return split;
  }
  int before = 0;
#pragma unroll 1
  for (int r0 = 0;; r0 += 32) {
    Tiles<tile_rows, listed> t = mine;
    if (r0) {
      t = Tiles<tile_rows, listed>(p, r0 + lane), own = 0;
#pragma unroll 1
      for (int i = 0; i < t.count; ++i) own += split.length(p, t.length(p, i));
    }
    const int upto = sum_upto(own, lane);
    const unsigned past = __ballot_sync(0xffffffffu, before + upto > split.begin);
    if (past) {
      const int owner = __ffs(past) - 1;
      split.request = r0 + owner;
      split.start = warp_uniform(before + __shfl_sync(0xffffffffu, upto - own, owner));
      tiles = t.of_lane(owner);
      return split;
    }
    before += __shfl_sync(0xffffffffu, upto, 31);
  }
}

/// By one warp, beside those that make the split: a line of each request's row of the block table is asked into L2, the
/// next one by the next CTA. In small batches pages are then at hand when a worker knows which it needs.
__device__ inline void prefetch_table(const Params& p) {
  const int lane = threadIdx.x % 32;
  if (p.late || p.by_lengths || p.requests > 32 || lane >= p.requests) return;
  const LatentItem* item = p.items + lane;
  const int positions = __ldg(&item->kv_end);
  if (__ldg(&item->q_count) <= 0 || positions <= 0) return;
  const int lines = p.by_page.divide(positions - 1) / 32 + 1;
  const int32_t* line = p.block_table + __ldg(&item->request) * p.table_stride + blockIdx.x % lines * 32;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

/// A piece of a tile, or several in a row that are batch-invariant: what a worker does at a time.
struct Item {
  int request;        // row of the block table
  int row0, rows;     // the tile's rows among all (token, head) rows
  int first_row;      // row0 within the request
  int context;        // token i sees positions <= context + i
  int positions;      // that the tile sees
  int block, blocks;  // first block and how many
  int pieces, piece;  // of the tile, and which this is, or the first
  int run;            // pieces that it has
  int slot0;          // partial slot of the tile's first piece
  int slot_step;      // from the second piece's slot to the third's
  int counter;        // of the tile
  int split;          // which of the worker's items with several pieces
  bool relay;         // Split::relay

  /// Is it of a relay's workers that do not merge?
  __device__ bool early() const { return relay && (slot0 + piece) % 2 == 0; }
  /// How many workers merge the tile, and which of them this piece's is, if it does.
  __device__ int shares() const { return relay ? (slot0 + pieces) / 2 - slot0 / 2 : pieces; }
  __device__ int share() const { return relay ? (slot0 + piece) / 2 - slot0 / 2 : piece; }
};

/// Partial slot of piece i of the tile of an Item, or of a Share (merge.cuh).
template <class Of>
__device__ inline int partial_slot(const Of& tile, int i) {
  return tile.slot_step == 1 ? tile.slot0 + i : tile.slot0 + 2 * i - (i > 0 ? 1 : 0);
}
/// On the line: is the tile, of an Item or of a Share, shared by two workers? One has its piece done at its start, the
/// other joins it to what it holds at its end.
template <class Of>
__device__ inline bool shared_by_two(const Of& tile) {
  return tile.pieces == 2 && tile.slot_step == 2;
}

/// A piece of an item, one after another: its number in the tile and its blocks among the item's.
template <bool invariant>
struct Pieces {
  int piece, begin = 0, end;

  __device__ Pieces(const Params& p, const Item& it, int blocks)
      : piece(it.piece), end(invariant ? min(p.split_blocks, blocks) : blocks) {}
  __device__ void next(const Params& p, int blocks) { ++piece, begin = end, end = min(begin + p.split_blocks, blocks); }
};

/// The pieces of an item in turn: go(piece, begin, end).
template <bool invariant, class Go>
__device__ __forceinline__ void for_pieces(const Params& p, const Item& it, int blocks, Go go) {
  Pieces<invariant> at(p, it, blocks);
#pragma unroll 1
  for (;; at.next(p, blocks)) {  // an item without blocks has a piece, too
    go(at.piece, at.begin, at.end);
    if (!invariant || at.end >= blocks) return;
  }
}

/// Walks the items of one worker; the same values in all lanes of a warp. invariant: are pieces batch-invariant?
template <int tile_rows, bool invariant, bool listed = false>
class Walk {
 public:
  Walk() = default;
  /// Makes the split, too.
  __device__ Walk(const Params& p, int worker, Split& split) : worker_(worker) {
    split = make_split<tile_rows, invariant, listed>(p, worker, tiles_);
    at_ = split.begin, request_ = split.request, start_ = split.start;
  }
  /// From the start again.
  __device__ Walk(const Params& p, const Split& split, int worker)
      : tiles_(p, split.request), worker_(worker), at_(split.begin), request_(split.request), start_(split.start) {}

  __device__ bool next(const Params& p, const Split& split, Item& it) {
    const int piece = split.piece, end = split.end;
    while (at_ < end) {
      while (tile_ >= tiles_.count) {
        if (++request_ >= p.requests) return false;
        tiles_ = Tiles<tile_rows, listed>(p, request_);
        tile_ = 0;
      }
      const int blocks = tiles_.blocks(p, tile_), length = split.length(p, max(blocks, 1)), begin = at_ - start_;
      if (begin >= length - (piece ? 0 : p.line_overhead)) {  // past this tile's blocks
        start_ += length;
        if (start_ >= end) return false;
        at_ = max(at_, start_);
        ++tile_;
        continue;
      }
      it.request = tiles_.request;
      it.first_row = tile_ * tile_rows;
      it.row0 = tiles_.start * p.heads + it.first_row;
      it.rows = min(tile_rows, tiles_.rows - it.first_row);
      it.context = tiles_.visible;
      it.positions = tiles_.positions(p, tile_);
      if (piece) {
        it.block = begin * piece;
        it.run = invariant ? min(length - begin, end - at_) : 1;
        it.blocks = max(min(it.run * piece, blocks - it.block), 0);
        it.pieces = length;
        it.piece = begin;
        it.counter = it.slot0 = start_;
        it.slot_step = 1;
        at_ += it.run;
      } else {
        const int most = max(blocks, 1), stop = min(end - start_, most), first = split.owner(start_);
        it.block = begin;
        it.blocks = max(min(stop, blocks) - begin, 0);
        it.pieces = split.owner(start_ + most - 1) - first + 1;
        it.piece = worker_ - first;
        it.run = 1;
        it.counter = first;
        it.slot0 = 2 * first + 1;  // a worker's first item uses its even slot, its last the odd one
        it.slot_step = 2;
        at_ += stop - begin;
      }
      it.relay = split.relay;
      it.split = splits_;
      splits_ += it.pieces > 1;
      return true;
    }
    return false;
  }

 private:
  Tiles<tile_rows, listed> tiles_;
  int worker_, at_, request_, start_, tile_ = 0, splits_ = 0;
};

/// Where a worker begins, made ahead of the calls that attend by it: all that it needs before its first copy, in one
/// read.
struct Start {
  static constexpr int most_look_ups = 8;
  alignas(16) Item item;  // blocks -1: none
  alignas(16) Split split;
  alignas(16) int pages[most_look_ups][32];  // load.cuh
};

}  // namespace mla::cuda::latent
