// Attention for tiles of 64 rows a CTA: one warpgroup keeps the queries in registers and makes scores and
// probabilities, two share the 64 x 512 f32 outputs by columns. A cluster of two CTAs takes 128 rows: each loads half
// of every block's values by boxes, for both, and its own rope; or, row by row, all of it for itself. Rows of e4m3
// become bf16 in the loading warps, whose registers the queries then leave.
#pragma once

#include <type_traits>

#include "backend/cuda/core/cluster.cuh"
#include "backend/cuda/sm90/attention/convert.cuh"
#include "backend/cuda/sm90/attention/load.cuh"
#include "backend/cuda/sm90/attention/wide_outputs.cuh"

namespace mla::cuda::latent {

// Tile: a struct of constants, one a kernel.
struct WideTile {
  static constexpr bool converts = false;  // are rows of the cache e4m3, which loading warps make bf16 of?
  static constexpr bool listed = false;    // are they listed, row by row?
  static constexpr bool has_rope = true;
  static constexpr int buffers = 3;
  static constexpr int query_steps = 27;  // of 36 times 16 columns of queries: as many as registers have room for
  static constexpr int query_boxes = 7;   // that they come from
  static constexpr int score_registers = 168, load_registers = 24;
  using Rows = BoxRows;
};
template <bool boxes>
struct Wide64 : WideTile {
  static constexpr int ctas = 1;           // of a cluster, 64 rows each
  static constexpr bool in_boxes = boxes;  // is the cache copied by boxes, or row by row?
  static constexpr bool fenced_by_readers = !boxes;
};
template <bool boxes>
struct Wide128 : WideTile {
  static constexpr int ctas = 2;
  static constexpr bool in_boxes = boxes, fenced_by_readers = !boxes;
};
/// Of two CTAs each makes half of a block's rows, for both.
template <class RowFormat, int ctas_, bool listed_ = false>
struct WideConverted {
  using Format = RowFormat;
  static constexpr int ctas = ctas_;
  static constexpr bool listed = listed_, has_rope = Format::has_rope;
  static constexpr int groups = 2 / ctas;  // of eight rows that a warp makes of a block
  static constexpr bool in_boxes = false, converts = true;
  // Four registers spilled in every block took a fifth of the time. Where lists leave enough, to pace costs 3%.
  static constexpr bool paced = ctas == 1 && !listed;
  // A fence waits for loads under way. It is the readers' where nobody copies from what was written.
  static constexpr bool fenced_by_readers = ctas == 1;
  static constexpr int buffers = 2, query_steps = 0, query_boxes = 0;
  static constexpr int score_registers = 64, load_registers = 128;
  using Rows = std::conditional_t<listed, ListedRows<Format, groups>, PartRows<Format, groups>>;
};

constexpr int wide_threads = 512;  // warpgroups 0, 1: outputs; 2: scores; 3: copies

/// An item's queries, then its blocks, go through the buffers in turn: column boxes 0-3 are values of warpgroup 0, 4-7
/// of warpgroup 1. The rope has two boxes of its own; once a block's scores are made, its rope box holds its
/// probabilities. Where rows are converted, queries and probabilities have room of their own, and a block's rope box
/// goes with its buffer: both are free again 16 rows at a time.
template <class Tile, bool invariant>
struct WideShared {
  static constexpr int buffers = Tile::buffers;
  alignas(1024) char kv[buffers][8][box_bytes];  // later the merge's
  alignas(1024) char rope[Tile::converts ? 3 : 2][box_bytes];
  alignas(1024) char q[9 - Tile::query_boxes][box_bytes];      // the other queries
  alignas(128) char q_step[Tile::query_steps ? 64 * 32 : 16];  // and the last 16 columns of the registers' boxes: 8 x 8
                                                               // matrices
  float inverse[64];                                           // of a piece's sums
  uint8_t exponent[2][64];                                     // of the largest output of each half of a row
  uint8_t growth[2][64];  // outputs held before this block's are to be multiplied by 2^-growth
  bool changed[2][4];     // is any growth of the warp's rows not 0?
  alignas(16) Item item[2];
  Splits splits;
  Split split;
  Walk<64 * Tile::ctas, invariant, Tile::listed>
      walk;  // where rows are converted, whose warps have no registers for it
  alignas(
      16) uint32_t there[Tile::listed ? buffers : 1][8];  // bit r of word g: has the list a row 8 g + r of the block?
  // full: both halves of the column boxes, for which one wait is a fifth of a softmax shorter than four; empty: a half
  // of them, or a quarter of the rows; made: a block's probabilities are there.
  alignas(8) uint64_t full[buffers], empty[buffers][Tile::converts ? 4 : 2], rope_full[2], rope_empty[2], made[2];
  uint64_t item_full[2], item_empty[2], q_full, q_empty, piece_read;
};

template <class Tile, class T, bool invariant>
__global__ void __launch_bounds__(wide_threads, 1)
    wide_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map,
                const __grid_constant__ CUtensorMap cache_map) {
  using Shared = WideShared<Tile, invariant>;
  constexpr int tile_rows = 64 * Tile::ctas, wide_buffers = Tile::buffers;
  constexpr int query_steps = Tile::query_steps, query_boxes = Tile::query_boxes;
  constexpr int copy_threads = 96;  // of the copying warpgroup; its last warp walks the schedule
  constexpr int arrivals = [] {     // of a block's values
    if constexpr (Tile::converts) return 4 * Tile::groups;
    else return Tile::in_boxes ? 2 : copy_threads;
  }();
  constexpr int served = Tile::in_boxes || Tile::converts ? Tile::ctas : 1;  // CTAs that a copy of values is for
  // Bytes of a half of the buffer's boxes that queries come through.
  constexpr auto query_bytes = [](int half) { return (half ? query_boxes - 4 : 4) * box_bytes; };
  extern __shared__ __align__(1024) char shared_bytes[];
  Shared& s = *reinterpret_cast<Shared*>(shared_bytes);
  const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int rank = Tile::ctas > 1 ? static_cast<int>(cluster_rank()) : 0, worker = blockIdx.x / Tile::ctas;
  using Order = FragmentOrder<T, invariant>;
  constexpr int merge_bytes = sizeof Shared::kv;
  const auto part_of = [&](const Item& it) {
    return Part{min(max(it.rows - rank * 64, 0), 64), it.row0 + rank * 64, Tile::ctas, rank};
  };

  if (threadIdx.x == 0) {
    for (int b = 0; b < wide_buffers; ++b) {
      mbarrier_init(smem_address(&s.full[b]), arrivals);
      for (uint64_t& empty : s.empty[b]) mbarrier_init(smem_address(&empty), (Tile::converts ? 8 : 4) * served);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(smem_address(&s.rope_full[i]), Tile::in_boxes ? 1 : copy_threads);
      mbarrier_init(smem_address(&s.rope_empty[i]), 8);
      mbarrier_init(smem_address(&s.made[i]), 4);
      mbarrier_init(smem_address(&s.item_full[i]), 1);
      mbarrier_init(smem_address(&s.item_empty[i]), Tile::converts ? 16 : 15);  // without the one that only walks
    }
    mbarrier_init(smem_address(&s.q_full), 1);
    mbarrier_init(smem_address(&s.q_empty), 4);
    mbarrier_init(smem_address(&s.piece_read), 1);
    mbarrier_init_fence();
    tma_prefetch_map(q_map);
    if constexpr (Tile::in_boxes) tma_prefetch_map(cache_map);
  }
  __syncwarp();
  cluster_arrive_relaxed();
  // Beside the barriers' birth and the previous kernel's end, each loading warp for itself:
  typename Tile::Rows rows;
  if (warpgroup == 3) {
    Item it;
    const int part = Tile::converts ? rank * 4 + warp - 12 : 0;
    const Split split = begin_work<tile_rows, invariant, Tile::listed>(p, worker, part, it, rows);
    if (warp == 15 && lane == 0) {
      s.item[0] = it, s.split = split;
      s.splits.count = s.splits.merges[0] = s.splits.merges[1] = 0;
    }
  } else if (!Tile::listed && warp == 1 && !p.starts) {
    prefetch_table(p);
  }
  cluster_wait();  // the barriers exist, the peer's too

  const auto wait_item = [&](int count) -> const Item& {
    mbarrier_wait(smem_address(&s.item_full[count & 1]), count >> 1 & 1);
    return s.item[count & 1];
  };
  const auto release_item = [&](int count) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem_address(&s.item_empty[count & 1]));
  };
  const auto release = [&](uint64_t* barrier) {  // by one lane of each warp that read
    const uint32_t bar = smem_address(barrier);
    if constexpr (served > 1) {
      mbarrier_arrive_remote(bar, 0);
      mbarrier_arrive_remote(bar, 1);
    } else {
      mbarrier_arrive(bar);
    }
  };

  // Cache rows of a block, box by box, by one lane of a warp: go(box, row).
  const auto for_boxes = [&](const auto& rows, auto go) {
#pragma unroll 1
    for (int k = 0; k < rows.boxes(); ++k)
      if (const int row = rows.row(k); elect_one()) go(k, row);
  };
  const auto load_box = [&](uint32_t to, uint64_t* full, int column, int row) {
    if constexpr (Tile::ctas > 1) tma_load_multicast(to, cache_map, smem_address(full), 3, column * 64, row);
    else tma_load(to, cache_map, smem_address(full), column * 64, row);
  };

  if (warpgroup == 3) {  // ---- load
    give_registers<Tile::load_registers>();
    int buffer = 0, parity = 1;
    const auto advance = [&] {
      if (++buffer == wide_buffers) buffer = 0, parity ^= 1;
    };
    // Before a buffer's half is filled; and in the end, for all of them: the peer's arrivals may not be on their way to
    // a CTA that left.
    const auto wait_for_release = [&](int half) { mbarrier_wait(smem_address(&s.empty[buffer][half]), parity); };
    const auto wait_for_rope_release = [&](int turn) {
      mbarrier_wait(smem_address(&s.rope_empty[turn & 1]), (turn >> 1) ^ 1);
    };
    // Items, by warp 15: hands over number `count`, and returns its blocks.
    using Walk = Walk<tile_rows, invariant, Tile::listed>;
    const auto announce = [&](Walk& walk, int count) {
      Item it;
      if (!walk.next(p, s.split, it)) it.blocks = -1;
      if (count) mbarrier_wait(smem_address(&s.item_empty[count & 1]), (count >> 1 & 1) ^ 1);
      if (lane == 0) {
        if (count) {
          s.item[count & 1] = it;
          mbarrier_arrive(smem_address(&s.item_full[count & 1]));
        }
        if (it.blocks >= 0) remember_split<Order>(p, s.splits, it, part_of(it), merge_bytes);
      }
      return it.blocks;
    };
    if constexpr (Tile::converts) {  // each warp its rows of a block; warp 12 also queries, warp 15 items
      const int part = rank * 4 + warp - 12;
      constexpr int groups = Tile::groups, group_rows = block_tokens / groups, boxes = Tile::has_rope ? 9 : 8;
      const char* const cache = static_cast<const char*>(p.cache);
      EightRows<typename Tile::Format> ahead;
      if (warp == 15) {
        __syncwarp();  // lane 0 stored the item and the split behind its arrival at the cluster's barrier
        if (lane == 0) mbarrier_arrive(smem_address(&s.item_full[0]));
        const Walk walk(p, s.split, worker);
        if (lane == 0) s.walk = walk;
      }
      if (!p.settled) wait_for_previous_grids();
      for (int count = 0;; ++count) {
        if (warp == 15) {
          __syncwarp();
          Walk walk = s.walk;
          announce(walk, count);
          __syncwarp();
          if (lane == 0) s.walk = walk;
        }
        const Item& it = wait_item(count);
        const int blocks = it.blocks;
        if (blocks < 0) break;
        if (count && blocks) rows = typename Tile::Rows(p, it, part);
        if (warp == 12) {
          mbarrier_wait(smem_address(&s.q_empty), (count & 1) ^ 1);
          wait_for_previous_grids();
          if (lane == 0) {
            if (blocks) mbarrier_arrive_expect(smem_address(&s.q_full), boxes * box_bytes);
            else mbarrier_arrive(smem_address(&s.q_full));
          }
          __syncwarp();
          if (blocks && lane < boxes)
            tma_load(smem_address(s.q[lane]), q_map, smem_address(&s.q_full), lane * 64, it.row0 + rank * 64);
          __syncwarp();
        }
        const auto load = [&](int i) {
          rows.seek(p, it, part, i);
          if constexpr (Tile::listed) ahead.load(p.lists, rows, i);
          else ahead.load(cache, rows, i, it.positions - it.block * block_tokens - part * 8 - i * group_rows);
          rows.look_ahead(p, it, part, i);
        };
        if (blocks) load(0);
#pragma unroll 1
        for (int i = 0; i < blocks * groups; ++i) {
          const int eights = part + i % groups * (group_rows / 8), at = eights * 1024;  // at: of its rows in a box
          uint32_t is = 0;                                                              // before the rows move on
          if constexpr (Tile::listed) is = rows.there(i);
          const EightRows<typename Tile::Format> now = ahead;
          if (i + 1 < blocks * groups) load(i + 1);
          mbarrier_wait(smem_address(&s.empty[buffer][eights / 2]), parity);
          const uint32_t full = smem_address(&s.full[buffer]), values = smem_address(s.kv[buffer][0]) + at,
                         rope = smem_address(s.rope[buffer]) + at;
          now.template put<Tile::paced>(values, rope);
          if constexpr (Tile::ctas > 1) fence_async_proxy();
          __syncwarp();
          uint32_t* const listed = &s.there[Tile::listed ? buffer : 0][eights];
          if (Tile::listed && lane == 0) *listed = is;
          if constexpr (Tile::ctas == 1) {
            if (lane == 0) mbarrier_arrive(full);
          } else {  // as many bytes as the other CTA's warp sends
            if (lane == 0) mbarrier_arrive_expect(full, boxes * 1024 + (Tile::listed ? 4 : 0));
            if (elect_one()) {
              const uint32_t there = map_to_cta(full, rank ^ 1), away = there - full;
#pragma unroll
              for (int box = 0; box < boxes; ++box) {
                const uint32_t from = box < 8 ? values + box * box_bytes : rope;
                bulk_copy_to_cta(from + away, from, 1024, there);
              }
              if constexpr (Tile::listed) store_remote_async(smem_address(listed) + away, is, there);
            }
          }
          if (i % groups == groups - 1) advance();
        }
        release_item(count);
      }
      for (int i = 0; i < wide_buffers; ++i) {
        for (uint64_t& empty : s.empty[buffer]) mbarrier_wait(smem_address(&empty), parity);
        advance();
      }
    } else if (warp == 15) {  // items, one ahead of those who work on them; the first one's queries
      __syncwarp();           // lane 0 stored the item and the split behind its arrival at the cluster's barrier
      if (lane == 0) mbarrier_arrive(smem_address(&s.item_full[0]));
      if (Tile::in_boxes && s.item[0].blocks > 0) {  // by the warp that has the least to do first
        const int row = warp_uniform(s.item[0].row0) + rank * 64;
        wait_for_previous_grids();
        if (elect_one()) {
          for (int half = 0; half < 2; ++half) mbarrier_arrive_expect(smem_address(&s.full[0]), query_bytes(half));
          mbarrier_arrive_expect(smem_address(&s.q_full), (9 - query_boxes) * box_bytes);
#pragma unroll
          for (int box = 0; box < 9; ++box) {
            const bool later = box >= query_boxes;
            tma_load(smem_address(later ? s.q[box - query_boxes] : s.kv[0][box]), q_map,
                     smem_address(later ? &s.q_full : &s.full[0]), box * 64, row);
          }
        }
        __syncwarp();
      }
      Walk walk(p, s.split, worker);  // again: few registers are left
      for (int count = 0; announce(walk, count) >= 0; ++count) {
      }
    } else if constexpr (!Tile::in_boxes) {
      int turn = 0;  // of the rope boxes, then their parity
      for (int count = 0;; ++count) {
        const Item& it = wait_item(count);
        const int blocks = it.blocks;
        if (blocks < 0) break;
        if (blocks) {
          RowCopies<copy_threads / 32> rows(p, it, warp - 12);
          wait_for_previous_grids();
          wait_for_release(0), wait_for_release(1);
          if (threadIdx.x % 128 == 0) mbarrier_arrive_expect(smem_address(&s.full[buffer]), query_boxes * box_bytes);
          else mbarrier_arrive(smem_address(&s.full[buffer]));
          if (warp == 12) {
            mbarrier_wait(smem_address(&s.q_empty), (count & 1) ^ 1);
            if (lane == 0) mbarrier_arrive_expect(smem_address(&s.q_full), 2 * box_bytes);
            __syncwarp();
            if (lane < 9)
              tma_load(smem_address(lane < query_boxes ? s.kv[buffer][lane] : s.q[lane - query_boxes]), q_map,
                       smem_address(lane < query_boxes ? &s.full[buffer] : &s.q_full), lane * 64, it.row0 + rank * 64);
            __syncwarp();
          }
          advance();
#pragma unroll 1
          for (int i = 0; i < blocks; ++i) {
            // The next page numbers are asked for ahead of this block's copies, in a queue that is not full.
            const auto now = rows.rows(p, warp - 12);
            rows.advance(p);
            wait_for_release(0), wait_for_release(1);
            rows.copy<0, 8, false>(p, now, warp - 12, smem_address(s.kv[buffer]));
            mbarrier_arrive_after_cp_async(smem_address(&s.full[buffer]));
            wait_for_rope_release(turn);
            rows.copy<8, 9, false>(p, now, warp - 12, smem_address(s.rope[turn & 1]));
            mbarrier_arrive_after_cp_async(smem_address(&s.rope_full[turn & 1]));
            turn = (turn + 1) & 3;
            advance();
          }
        } else if (warp == 12) {
          mbarrier_wait(smem_address(&s.q_empty), (count & 1) ^ 1);
          if (lane == 0) mbarrier_arrive(smem_address(&s.q_full));
        }
        release_item(count);
      }
    } else if (warp == 14) {  // the rope, and the queries that stay in shared memory
      int turn = 0;
      for (int count = 0;; ++count) {
        const Item& it = wait_item(count);
        const int blocks = it.blocks, block = it.block;
        if (blocks < 0) break;
        mbarrier_wait(smem_address(&s.q_empty), (count & 1) ^ 1);
        if (blocks) {
          if (count || !p.settled) wait_for_previous_grids();
          if (count) {  // warp 15 asks for the first item's queries
            rows = BoxRows(p, it);
            if (elect_one()) {
              mbarrier_arrive_expect(smem_address(&s.q_full), (9 - query_boxes) * box_bytes);
#pragma unroll 1
              for (int k = 0; k < 9 - query_boxes; ++k)
                tma_load(smem_address(s.q[k]), q_map, smem_address(&s.q_full), (query_boxes + k) * 64,
                         it.row0 + rank * 64);
            }
          }
#pragma unroll 1
          for (int i = 0; i < blocks; ++i) {
            const int at = turn & 1;
            rows.seek(p, block + i);
            wait_for_rope_release(turn);
            if (elect_one()) mbarrier_arrive_expect(smem_address(&s.rope_full[at]), rows.boxes() << p.box_shift << 7);
            for_boxes(rows, [&](int k, int row) {
              tma_load(smem_address(s.rope[at]) + (k << p.box_shift << 7), cache_map, smem_address(&s.rope_full[at]),
                       8 * 64, row);
            });
            if (i + 1 < blocks) {  // the next one's box is free late: it should not have to come from memory then
              rows.seek(p, block + i + 1);
              for_boxes(rows, [&](int, int row) {
                if (Tile::ctas == 1 || rank == at) tma_prefetch_box(cache_map, 8 * 64, row);
              });
            }
            turn = (turn + 1) & 3;
          }
        } else if (lane == 0) {
          mbarrier_arrive(smem_address(&s.q_full));
        }
        release_item(count);
      }
    } else {
      // A warp for each half of the values' columns, so that none waits for the other half's release.
      const int half = warp - 12;
      for (int count = 0;; ++count) {
        const Item& it = wait_item(count);
        const int blocks = it.blocks, block = it.block;
        if (blocks < 0) break;
        if (blocks) {
          if (count || !p.settled) wait_for_previous_grids();
          if (count) {  // warp 15 asks for the first item's queries
            rows = BoxRows(p, it);
            wait_for_release(half);
            if (elect_one()) {
              mbarrier_arrive_expect(smem_address(&s.full[buffer]), query_bytes(half));
#pragma unroll 1
              for (int box = half * 4; box < min(half * 4 + 4, query_boxes); ++box)
                tma_load(smem_address(s.kv[buffer][box]), q_map, smem_address(&s.full[buffer]), box * 64,
                         it.row0 + rank * 64);
            }
          }
          advance();
#pragma unroll 1
          for (int i = 0; i < blocks; ++i) {
            rows.seek(p, block + i);
            // Everyone's first block before anyone's second.
            if (count == 0 && i == 1) mbarrier_wait(smem_address(&s.full[1]), 0);
            wait_for_release(half);
            if (elect_one()) mbarrier_arrive_expect(smem_address(&s.full[buffer]), rows.boxes() << p.box_shift << 9);
            for_boxes(rows, [&](int k, int row) {
#pragma unroll 1
              for (int i = rank; i < 4; i += Tile::ctas) {
                const int box = half * 4 + i;
                load_box(smem_address(s.kv[buffer][box]) + (k << p.box_shift << 7), &s.full[buffer], box, row);
              }
            });
            advance();
          }
        }
        release_item(count);
      }
      for (int i = 0; i < wide_buffers; ++i) wait_for_release(half), advance();
    }
  } else if (warpgroup == 2) {  // ---- scores
    if constexpr (Tile::score_registers > 128) take_registers<Tile::score_registers>();
    else give_registers<Tile::score_registers>();
    wait_for_previous_grids();
    // Registers are short: what can be had again is not kept.
    const auto my_row = [&] { return (thread_index() / 32 % 4) * 16 + thread_index() % 32 / 4; };  // and row + 8
    // 16 rows a warp; lane l gives the address of row l % 8 of matrix l / 8: rows 0-7, 8-15, then 8 columns on. The
    // next 16 columns: ^ 32.
    const auto matrix = [&] {
      const int thread = thread_index();
      return static_cast<uint32_t>((thread / 32 % 4 * 16 + thread % 16) * 128 +
                                   ((thread / 16 ^ thread) & 1 | thread & 6) * 16);
    };
    int buffer = 0, parity = 0;
    const auto advance = [&] {
      if (++buffer == wide_buffers) buffer = 0, parity ^= 1;
    };
    const auto signal = [&](int at) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem_address(&s.made[at]));
    };
    const auto finish = [&](const Item& it, int piece, int row, float sum, float top, const volatile float& peak) {
      return finish_row<Tile::ctas, Tile::converts>(p, it, piece, row, sum, top, peak);
    };
    int turn = 0;         // rope box of the next block, then its parity
    int pieces_read = 0;  // of which not the last of an item, by the outputs
    for (int count = 0;; ++count) {
      const Item& it = wait_item(count);
      const int blocks = it.blocks;
      if (blocks < 0) break;
      if (blocks) {
        // Positions that a row sees, counted from the item's first block.
        const auto limit = [&](int row) {
          const int part = Tile::ctas > 1 ? static_cast<int>(cluster_rank()) : 0;
          return min(it.context + 1 + p.by_heads.divide(it.first_row + part * 64 + row), it.positions) -
                 it.block * block_tokens;
        };
        const int seen_by_all = warp_uniform(limit(0) / block_tokens);  // blocks
        // Most of the queries stay in registers for as long as the item takes.
        uint32_t q[query_steps ? query_steps * 4 : 4];
        if constexpr (Tile::converts) mbarrier_wait(smem_address(&s.q_full), count & 1);
        else {
          constexpr bool converts = std::is_same_v<T, __half>;
          mbarrier_wait(smem_address(&s.full[buffer]), parity);
          if constexpr (converts) mbarrier_wait(smem_address(&s.q_full), count & 1);
          convert_queries<T, scores_barrier, 128>(p, s.kv[buffer][0], query_boxes * box_bytes);
          convert_queries<T, scores_barrier, 128>(p, s.q[0], sizeof s.q);
#pragma unroll
          for (int k = 0; k < query_steps; ++k)
            load_matrix_x4(smem_address(s.kv[buffer][k / 4]) + (matrix() ^ (k % 4 * 32)), q[4 * k], q[4 * k + 1],
                           q[4 * k + 2], q[4 * k + 3]);
          {
            uint32_t a[4];
            load_matrix_x4(smem_address(s.kv[buffer][query_steps / 4]) + (matrix() ^ (query_steps % 4 * 32)), a[0],
                           a[1], a[2], a[3]);
            const int thread = thread_index() % 128;
            store_matrix_x4(smem_address(s.q_step) + (thread / 32 * 2 + thread / 8 % 2) * 256 + thread / 16 % 2 * 128 +
                                thread % 8 * 16,
                            a[0], a[1], a[2], a[3]);
          }
          if (!converts) mbarrier_wait(smem_address(&s.q_full), count & 1);
          fence_async_proxy();
          barrier_sync(scores_barrier, 128);
          if (lane == 0) release(&s.empty[buffer][0]), release(&s.empty[buffer][1]);
          advance();
        }

        // Not for_pieces: of a loop around that of the blocks ptxas serialises the products (C7520).
        Pieces<invariant> at(p, it, blocks);
        float top0 = -INFINITY, top1 = -INFINITY, sum0 = 0, sum1 = 0;
        bool any = !Tile::listed;  // is there any row of a list until now?
        volatile float peak[2];    // not in registers: there are none left
        if (p.peaks) peak[0] = -INFINITY, peak[1] = -INFINITY;
        float d[32];
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
          mbarrier_wait(smem_address(&s.full[buffer]), parity);
          if (Tile::fenced_by_readers) fence_async_proxy();
          wgmma_fence();
          const uint64_t keys = warp_operand_128b(smem_address(s.kv[buffer][0])),
                         queries = warp_operand_128b(smem_address(s.q[0]));
          using Product = Wgmma<64, T>;
          static_for<32>([&](auto k) {
            constexpr uint32_t column = k / 4 * box_bytes + k % 4 * 32;
            if constexpr (k < query_steps) Product::template rs_at<column>(d, q + 4 * k, keys, k > 0);
            else if constexpr (query_steps % 4 && k == query_steps)
              Product::template ss_at<0, column>(d, operand_plain(smem_address(s.q_step), 256, 128), keys, 1);
            else Product::template ss_at<column - query_boxes * box_bytes, column>(d, queries, keys, k > 0);
          });
          // The block before is multiplied while this one's softmax runs, not beside its scores: the products would
          // then both be done when softmax begins.
          if (i > at.begin && !Tile::converts) {
            fence_async_proxy();  // of its probabilities; here its wait costs nothing
            signal(~turn & 1);
          }
          if (!Tile::converts) mbarrier_wait(smem_address(&s.rope_full[turn & 1]), turn >> 1);
          if (!Tile::in_boxes && !Tile::converts) fence_async_proxy();
          if constexpr (Tile::has_rope) {
            const uint64_t rope = warp_operand_128b(smem_address(s.rope[turn & 1]));
            static_for<4>([&](auto k) {
              Product::template ss_at<(8 - query_boxes) * box_bytes + k * 32, k * 32>(d, queries, rope, 1);
            });
          }
          wgmma_commit();
          wgmma_wait<0>();
          wgmma_pin(d);
          const bool last = i + 1 == at.end;
          if (i + 1 == blocks && lane == 0) mbarrier_arrive(smem_address(&s.q_empty));
          if constexpr (Tile::converts) {
            if (p.q_scale || p.k_scale) {
              const float scale = given(p.q_scale) * given(p.k_scale);
#pragma unroll
              for (int k = 0; k < 32; ++k) d[k] *= scale;
            }
          }

          if constexpr (Tile::listed) {
            const uint32_t there = s.there[buffer][lane % 8];
            any |= __any_sync(0xffffffffu, there);
            if (!__all_sync(0xffffffffu, there == 0xffu)) {
#pragma unroll
              for (int k = 0; k < 32; k += 4) {
                const uint32_t two = __shfl_sync(0xffffffffu, there, k / 4) >> lane % 4 * 2;
                if (!(two & 1)) d[k] = d[k + 2] = -INFINITY;
                if (!(two & 2)) d[k + 1] = d[k + 3] = -INFINITY;
              }
            }
          } else if (i >= seen_by_all) {
            const int base = i * block_tokens + thread_index() % 4 * 2, row = my_row();
            const int limit0 = limit(row), limit1 = limit(row + 8);
#pragma unroll
            for (int k = 0; k < 32; ++k) {
              const int position = base + k / 4 * 8 + k % 2;
              if (position >= (k % 4 < 2 ? limit0 : limit1)) d[k] = -INFINITY;
            }
          }
          float best0 = -INFINITY, best1 = -INFINITY;
#pragma unroll
          for (int k = 0; k < 32; k += 4) {
            best0 = fmaxf(best0, fmaxf(d[k], d[k + 1]));
            best1 = fmaxf(best1, fmaxf(d[k + 2], d[k + 3]));
          }
#pragma unroll
          for (int k = 1; k < 4; k *= 2) {
            best0 = fmaxf(best0, __shfl_xor_sync(0xffffffffu, best0, k));
            best1 = fmaxf(best1, __shfl_xor_sync(0xffffffffu, best1, k));
          }
          best0 *= p.scale_log2, best1 *= p.scale_log2;
          if (p.peaks) peak[0] = fmaxf(peak[0], best0), peak[1] = fmaxf(peak[1], best1);
          // Maxima grow by whole numbers, which fit a byte, if by less than makes nothing of what is held.
          float growth0 = 0, growth1 = 0;
          const auto grow = [](float best, float& top, float& growth) {
            if (!(best - top > lazy_growth)) return;
            growth = fminf(ceilf(best - top), 255.0f), top = growth < 255 ? top + growth : best;
          };
          grow(best0, top0, growth0), grow(best1, top1, growth1);
          const bool changed = __any_sync(0xffffffffu, growth0 + growth1 > 0);
          if (changed) {
            sum0 *= exp2_approx(-growth0), sum1 *= exp2_approx(-growth1);
            const int row = my_row();
            if (lane % 4 == 0) {
              s.growth[turn & 1][row] = static_cast<uint8_t>(growth0);
              s.growth[turn & 1][row + 8] = static_cast<uint8_t>(growth1);
            }
          }
          if (lane == 0) s.changed[turn & 1][warp % 4] = changed && i > at.begin;
          const float shift0 = top0 == -INFINITY ? 0.0f : top0, shift1 = top1 == -INFINITY ? 0.0f : top1;
          // The block before has been multiplied? A parity for each block.
          if (Tile::converts) mbarrier_wait(smem_address(&s.rope_empty[0]), turn & 1 ^ 1);
          const uint32_t to = smem_address(s.rope[Tile::converts ? 2 : turn & 1]) + matrix();
#pragma unroll
          for (int k = 0; k < 32; k += 8) {
            uint32_t a[4];
#pragma unroll
            for (int m = 0; m < 8; m += 4) {
              float* x = d + k + m;
              x[0] = exp2_approx(fmaf(x[0], p.scale_log2, -shift0));
              x[1] = exp2_approx(fmaf(x[1], p.scale_log2, -shift0));
              x[2] = exp2_approx(fmaf(x[2], p.scale_log2, -shift1));
              x[3] = exp2_approx(fmaf(x[3], p.scale_log2, -shift1));
              sum0 += x[0] + x[1];
              sum1 += x[2] + x[3];
              a[m / 2] = Pack<T>::two(x[0], x[1]);
              a[m / 2 + 1] = Pack<T>::two(x[2], x[3]);
            }
            store_matrix_x4(to ^ (k / 8 * 32), a[0], a[1], a[2], a[3]);
          }
          if (last) {
#pragma unroll
            for (int k = 1; k < 4; k *= 2) {
              sum0 += __shfl_xor_sync(0xffffffffu, sum0, k);
              sum1 += __shfl_xor_sync(0xffffffffu, sum1, k);
            }
            // The last sums have been read?
            if (at.begin) mbarrier_wait(smem_address(&s.piece_read), pieces_read++ & 1);
            else if (count) mbarrier_wait(smem_address(&s.item_empty[~count & 1]), (count - 1) >> 1 & 1);
            const int row = my_row();
            if (lane % 4 == 0) {
              const int first = Tile::ctas > 1 ? static_cast<int>(cluster_rank()) * 64 : 0;
              const auto lost = [&](int row) {
                return any && first + row < it.rows && limit(row) > at.begin * block_tokens &&
                       lost_to_query(p, it.row0 + first + row);
              };
              if (sum0 == 0 && lost(row)) sum0 = NAN;
              if (sum1 == 0 && lost(row + 8)) sum1 = NAN;
              s.inverse[row] = finish(it, at.piece, row, sum0, top0, peak[0]);
              s.inverse[row + 8] = finish(it, at.piece, row + 8, sum1, top1, peak[1]);
            }
          }
          if (last || Tile::converts) {
            fence_async_proxy();
            signal(turn & 1);
          }
          if (invariant && last) {
            at.next(p, blocks);
            top0 = top1 = -INFINITY, sum0 = sum1 = 0, any = !Tile::listed;
            if (p.peaks) peak[0] = -INFINITY, peak[1] = -INFINITY;
          }
          turn = (turn + 1) & 3;
          advance();
        }
      } else {
        mbarrier_wait(smem_address(&s.q_full), count & 1);  // or q_empty could complete twice before it is waited for
        if (lane % 4 == 0) {
          const volatile float none = -INFINITY;
          finish(it, it.piece, my_row(), 0, 0, none), finish(it, it.piece, my_row() + 8, 0, 0, none);
        }
        if (lane == 0) mbarrier_arrive(smem_address(&s.q_empty));
      }
      release_item(count);
    }
    barrier_arrive(merge_barrier, 128 + math_threads);  // blocks and queries are read
  } else {                                              // ---- outputs
    take_registers<160>();
    take_turn();
    const int h = warpgroup, row = warp % 4 * 16 + lane / 4;  // and row + 8, of the CTA's 64
    float o[2][64];            // 128 columns each: a product of 256 would want 154 registers at launch
    int buffer = 0, turn = 0;  // turn: rope box of the next block, then its parity
    const auto advance = [&] {
      if (++buffer == wide_buffers) buffer = 0;
    };

    for (int count = 0;; ++count) {
      const Item& it = wait_item(count);
      const int blocks = it.blocks;
      if (blocks < 0) break;
      if (blocks && !Tile::converts) advance();  // the queries
      for_pieces<invariant>(p, it, blocks, [&](int piece, int begin, int end) {
#pragma unroll
        for (int k = 0; k < 64; ++k) o[0][k] = o[1][k] = 0;
#pragma unroll 1
        for (int i = begin; i < end; ++i) {
          mbarrier_wait(smem_address(&s.made[turn & 1]), turn >> 1);
          if (s.changed[turn & 1][warp % 4]) {
            const float a = exp2_approx(-static_cast<float>(s.growth[turn & 1][row])),
                        b = exp2_approx(-static_cast<float>(s.growth[turn & 1][row + 8]));
#pragma unroll
            for (int k = 0; k < 64; ++k) o[0][k] *= k & 2 ? b : a, o[1][k] *= k & 2 ? b : a;
          }
          if (!Tile::converts &&
              i + 1 == blocks) {  // what lies past the sequence must not be multiplied, not even by 0
            const int valid = it.positions - (it.block + i) * block_tokens;
            if (valid < block_tokens) {
#pragma unroll 1
              for (int box = 4 * h; box < 4 * h + 4; ++box)
#pragma unroll 1
                for (int at = valid * 8 + threadIdx.x % 128; at < block_tokens * 8; at += 128)
                  *reinterpret_cast<uint4*>(s.kv[buffer][box] + at * 16) = {0, 0, 0, 0};
              fence_async_proxy();
              barrier_sync(half_barrier + h, 128);
            }
          }
          const int after = (it.block + i + 1) * block_tokens, hidden = hidden_from(p, it);
          if (!Tile::listed && after > hidden && hidden < it.positions) {  // a list hides nothing
            zero_nonfinite<T>(s.kv[buffer][4 * h], max(hidden - after + block_tokens, 0), block_tokens);
            barrier_sync(half_barrier + h, 128);
          }
          const uint64_t values = operand_128b(smem_address(s.kv[buffer][4 * h]), 1024, box_bytes);
          const uint64_t probabilities = operand_128b(smem_address(s.rope[Tile::converts ? 2 : turn & 1]));
          wgmma_pin(o[0]), wgmma_pin(o[1]);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k) {
#pragma unroll
            for (int n = 0; n < 2; ++n)
              Wgmma<128, T>::template ss<Major::k, Major::mn>(o[n], operand_advance(probabilities, k * 32),
                                                              operand_advance(values, n * 2 * box_bytes + k * 2048), 1);
            if (Tile::converts || k == 3) wgmma_commit();
          }
          if constexpr (Tile::converts) {  // 16 rows at a time, so that others may take their places
            const auto free = [&](int rows) {
              __syncwarp();
              if (lane == 0) release(&s.empty[buffer][rows]);
            };
            wgmma_wait<3>(), free(0);
            wgmma_wait<2>(), free(1);
            wgmma_wait<1>(), free(2);
          }
          wgmma_wait<0>();
          wgmma_pin(o[0]), wgmma_pin(o[1]);
          __syncwarp();
          if (lane == 0) {
            mbarrier_arrive(smem_address(&s.rope_empty[Tile::converts ? 0 : turn & 1]));
            release(&s.empty[buffer][Tile::converts ? 3 : h]);
          }
          turn = (turn + 1) & 3;
          advance();
        }

        finish_outputs<Order, Tile::ctas>(p, s, it, piece, end == blocks, part_of(it), o, rank,
                                          [&](int h, int i) { return reinterpret_cast<uint4*>(s.kv[i][4 * h]); });
      });
      release_item(count);
    }

    barrier_sync(merge_barrier, 128 + math_threads);  // their room is the merge's now
    merge_split_tiles<Order, tile_rows, Tile::listed>(p, s.splits, s.split, worker, s.kv[0][0], merge_bytes, part_of);
  }
}

}  // namespace mla::cuda::latent
