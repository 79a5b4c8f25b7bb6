// index_score by e4m3 products: keys go from global memory through a ring in shared memory into the matrix units as
// they are. One block a multiprocessor takes an even share of all tiles. Roofline, schedule and figures: README.md.
#include <algorithm>
#include <bit>

#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/mbarrier.cuh"
#include "backend/cuda/core/tensor_map.hpp"
#include "backend/cuda/core/tma.cuh"
#include "backend/cuda/core/warp_scan.cuh"
#include "backend/cuda/core/warpgroup.cuh"
#include "backend/cuda/core/wgmma_fp8.cuh"
#include "backend/cuda/generic/index_score/relu.cuh"
#include "backend/cuda/generic/index_score/score.hpp"

namespace mla::cuda::generic {
namespace {

constexpr int kTileLog = 6, kTile = 1 << kTileLog;  // keys of a product: its rows
constexpr int kTileBytes = kTile * kIndexDim, kScaleBytes = kTile * 4;
constexpr int kStageBytes =
    kTileBytes + 1024;  // keys, then scales; from a multiple of 1024 to the next, as swizzles ask
constexpr int kCopyWarps = 4, kCopyThreads = 32 * kCopyWarps, kCopyRegisters = 64;

/// Columns of a product: so many heads, padded, of each of so many tokens; and how many tiles the ring holds: 12 where
/// their queries leave room. A type, for nvcc cannot name a kernel by a struct's value.
template <int kHeads, int kTokens, int kStages>
struct Columns {
  static constexpr int heads = kHeads, tokens = kTokens, all = kHeads * kTokens, stages = kStages;
};
constexpr int kGroups = 4, kMathThreads = 128 * kGroups, kThreads = kMathThreads + kCopyThreads;
constexpr int kMathRegisters = 104;  // with those of copies as many as at the start

struct Fp8Score {
  IndexScore a;
  int products;   // of a tile: 1, 2 or 4, each `tokens` tokens; the warpgroups share tiles and products evenly
  int group_log;  // of products * tokens, by 2
  int box_log;    // of the keys that lie in one page and are copied at once: 16, 32 or 64
  uint64_t keep;  // L2 policy of keys: read once, or by several groups of tokens
  bool joined;    // a tile is a page: its keys and scales are one copy, of 66 rows of 128 bytes
  bool mapped;    // queries and weights can be copied as boxes
};

// Tiles of one group of an item's tokens that follow each other: what the copying warp hands to the math warps, with
// the group's queries and weights.
struct Run {
  int tiles;  // 0: there is no further run
  int q, row, tokens;
  int column;      // of the first tile's first key; below 0 where the window begins within a tile
  int seen, most;  // columns that token t sees: seen + t, within [0, most]
};
constexpr int kRuns = 2;

// Shared memory, from a multiple of 1024 on.
template <class Columns>
struct Map {
  static constexpr int kStages = Columns::stages;
  uint32_t stages, queries, weights, full, empty, run_full, run_empty;
  int query_rows;  // of a run
  int run_offset;  // of the runs in the block's memory
  __device__ Map(const std::byte* memory, int products) : query_rows(Columns::all * products) {
    stages = (smem_address(memory) + 1023) & ~1023u;
    queries = stages + kStages * kStageBytes;
    weights = queries + kRuns * query_rows * kIndexDim;
    full = weights + kRuns * query_rows * 4;
    empty = full + kStages * 8;
    run_full = empty + kStages * 8;
    run_empty = run_full + kRuns * 8;
    run_offset = static_cast<int>(run_empty + kRuns * 8 - smem_address(memory));
  }
  static constexpr size_t bytes(int products) {
    return 1024 + kStages * kStageBytes + static_cast<size_t>(kRuns * Columns::all * products) * (kIndexDim + 4) +
           (kStages + kRuns) * 16 + kRuns * sizeof(Run);
  }
  __device__ uint32_t queries_of(uint32_t run) const { return queries + run % kRuns * (query_rows * kIndexDim); }
  __device__ uint32_t weights_of(uint32_t run) const { return weights + run % kRuns * (query_rows * 4); }
  __device__ Run& run(std::byte* memory, uint32_t i) const {
    return reinterpret_cast<Run*>(memory + run_offset)[i % kRuns];
  }
};

/// Tiles lie on multiples of kTile positions.
__device__ uint32_t tiles_of(const IndexItem& item, int64_t token) {
  const uint32_t columns = item.columns(token), before = static_cast<uint32_t>(item.kv_begin) % kTile;
  return columns == 0 ? 0 : (before + columns + kTile - 1) / kTile;
}

// A block's share of the call, by a whole warp. Short code without branches or divisions where they can be spared: the
// first keys wait for it, and a launch's first instructions come from L2. All groups of an item count as its last one,
// which sees most: what others lack costs nothing, and is little, for the tokens of a call lie close together.
class Walk {
 public:
  IndexItem item{};                     // of the window
  int token = 0, first = 0, count = 0;  // of the current run: the group's first token, tiles

  __device__ Walk(const IndexScore& a, int group_log) : a_(a), group_log_(group_log) {
    const int lane = threadIdx.x % 32;
    int own = units_at(lane), total = own;
#pragma unroll 1
    for (int i = lane + 32; i < a.item_count; i += 32) total += units_at(i);
    total = __reduce_add_sync(0xffffffffu, total);
    const int share = total / gridDim.x, more = total % gridDim.x, block = blockIdx.x;
    int begin = share * block + min(block, more);
    left_ = share + (block < more);
    index_ = 0;
    // The item that has unit `begin`.
#pragma unroll 1
    while (left_ > 0) {
      const int sum = sum_upto(own, lane);
      const uint32_t past = __ballot_sync(0xffffffffu, sum > begin);
      if (past) {
        const int at = __ffs(static_cast<int>(past)) - 1;
        index_ += at;
        begin -= __shfl_sync(0xffffffffu, sum - own, at);
        break;
      }
      begin -= __shfl_sync(0xffffffffu, sum, 31);
      index_ += 32;
      own = units_at(index_ + lane);
    }
    if (left_ > 0) {
      take(load(index_));
      group_ = begin < tiles_ ? 0 : begin / tiles_;
      tile_ = begin - group_ * tiles_;
    }
  }

  /// The next run of tiles of one group; false: none is left.
  __device__ bool next() {
#pragma unroll 1
    while (left_ > 0) {
      if (group_ == groups_) {
#pragma unroll 1
        do take(load(++index_));
        while (units(item) == 0);
        group_ = tile_ = 0;
      }
      const int run = min(left_, tiles_ - tile_);
      token = group_ << group_log_;
      first = tile_;
      count = min(run, static_cast<int>(tiles_of(item, min(token + (1 << group_log_), item.q_count) - 1)) - tile_);
      left_ -= run;
      ++group_, tile_ = 0;
      if (count > 0) return true;
    }
    return false;
  }

 private:
  __device__ IndexItem load(int i) const { return clipped(a_.items[i], a_.first, a_.columns); }
  // Fewer than 2^31: as many as there are columns of scores by the sixty-four.
  __device__ int units(const IndexItem& i) const { return static_cast<int>(tiles_of(i, i.q_count - 1)) * groups(i); }
  __device__ int units_at(int i) const {
    const int n = units(load(min(i, a_.item_count - 1)));
    return i < a_.item_count ? n : 0;
  }
  __device__ int groups(const IndexItem& i) const { return (max(i.q_count, 0) + (1 << group_log_) - 1) >> group_log_; }
  __device__ void take(const IndexItem& i) {
    item = i;
    tiles_ = static_cast<int>(tiles_of(i, i.q_count - 1));
    groups_ = groups(i);
  }

  const IndexScore& a_;
  int left_, group_log_, index_, tiles_, groups_, group_, tile_;
};

// tma_load under an L2 policy.
__device__ __forceinline__ void load_box(uint32_t dst, const CUtensorMap& map, uint32_t bar, int row, int page,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, "
      "%4}], [%5], %6;" ::"r"(dst),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(0), "r"(row), "r"(page), "r"(bar), "l"(policy)
      : "memory");
}

// A copying warp, which copies every fourth tile: one alone would take longer for a tile's copies than memory does. A
// lane looks up one box's page, 32 boxes ahead of those that are copied. Boxes without a visible key are left out,
// their pages may not exist; what their rows hold then are other tiles' keys, and no score of them is stored.
//
// The first of them hands the runs over, after its own first look-up: that is what keys wait for.
template <class Columns>
__device__ void copy_keys(const Fp8Score& s, const CUtensorMap& map, const CUtensorMap& query_map,
                          const CUtensorMap& weight_map, const Map<Columns>& at, std::byte* memory) {
  const IndexScore& a = s.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kCopyWarps, group_tokens = 1 << s.group_log;
  const int boxes_log = kTileLog - s.box_log, boxes = 1 << boxes_log, box = 1 << s.box_log;  // boxes: of a tile
  const int at_once = 32 >> boxes_log;                                                       // tiles looked up
  const int own_box = (lane & (boxes - 1)) << s.box_log, own_tile = lane >> boxes_log;
  Walk walk(a, s.group_log);
  uint32_t n = 0;
  for (uint32_t runs = 0;; ++runs) {
    const bool more = walk.next();
    const IndexItem& item = walk.item;
    const int32_t* table = a.table + item.request * a.table_row;
    const int64_t begin = int64_t{item.kv_begin} / kTile * kTile + int64_t{walk.first} * kTile,
                  end = int64_t{item.kv_begin} + item.columns(min(walk.token + group_tokens, item.q_count) - 1);
    int32_t page;
    uint32_t row;
    const auto look_up = [&](int tile) {  // of the run; past its end a position is past what the tokens see
      const int64_t position = begin + int64_t{tile} * kTile + own_box;
      page = -1;
      if (tile >= walk.count || position >= end || position + box <= item.kv_begin) return;
      const uint32_t p = static_cast<uint32_t>(position),
                     which = a.page_shift >= 0 ? p >> a.page_shift : p / a.page_size;
      row = p - which * a.page_size;
      page = __ldg(table + which);
    };
    int tile = (warp - n) & (kCopyWarps - 1);
    if (more) look_up(tile + kCopyWarps * own_tile);
    if (warp == 0) {
      mbarrier_wait(at.run_empty + runs % kRuns * 8, runs / kRuns % 2 ^ 1);
      if (lane == 0) {
        const uint32_t full = at.run_full + runs % kRuns * 8;
        Run& run = at.run(memory, runs);
        run.tiles = 0;
        if (more) {
          const int tokens = min(group_tokens, item.q_count - walk.token), most = item.kv_end - item.kv_begin;
          const int64_t seen = int64_t{item.visible} + walk.token + 1 - item.kv_begin;
          run = {.tiles = walk.count,
                 .q = item.q_begin + walk.token,
                 .row = item.row + walk.token,
                 .tokens = tokens,
                 .column = walk.first * kTile - item.kv_begin % kTile,
                 .seen = static_cast<int>(max(int64_t{-tokens}, min(seen, int64_t{most}))),
                 .most = most};
        }
        if (more && s.mapped) {
          const int q = item.q_begin + walk.token;
          mbarrier_arrive_expect(full, at.query_rows * (kIndexDim + 4));
          tma_load(at.queries_of(runs), query_map, full, 0, 0, q);
          tma_load(at.weights_of(runs), weight_map, full, 0, q);
        } else mbarrier_arrive(full);
      }
      __syncwarp();
    }
    if (!more) return;
#pragma unroll 1
    while (tile < walk.count) {
      const int32_t own = page;
      const uint32_t from = row;
      look_up(tile + kCopyWarps * (at_once + own_tile));
      const std::byte* scales = a.cache + own * a.page_stride + int64_t{a.page_size} * kIndexDim + from * 4;
      const uint32_t present = __ballot_sync(0xffffffffu, own >= 0);
#pragma unroll 1
      for (int i = 0; i < at_once && tile < walk.count; ++i, tile += kCopyWarps) {
        const uint32_t k = n + tile, stage = k % Columns::stages, full = at.full + 8 * stage;
        mbarrier_wait(at.empty + 8 * stage, k / Columns::stages % 2 ^ 1);
        if (own_tile != i) continue;
        if (own_box == 0)
          mbarrier_arrive_expect(full, __popc(present >> lane & ((1u << boxes) - 1)) * box * (kIndexDim + 4));
        __syncwarp(((1u << boxes) - 1) << i * boxes);
        if (own >= 0) {
          const uint32_t to = at.stages + stage * kStageBytes;
          load_box(to + own_box * kIndexDim, map, full, static_cast<int>(from), own, s.keep);
          if (!s.joined) bulk_load(to + kTileBytes + own_box * 4, scales, box * 4, full, evict_first);
        }
      }
      __syncwarp();
    }
    n += walk.count;
  }
}

__device__ __forceinline__ float load_shared(uint32_t at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ void load_shared_2(uint32_t at, float& x, float& y) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(at) : "memory");
}

// Queries of a group's tokens, rows of 128 bytes, one after another in the products' columns, and a weight for each;
// zeros for what is none. Where the copy engine cannot: strides or addresses that are no multiples of 16 bytes.
template <class Columns>
__device__ void stage_queries(const IndexScore& a, const Run& run, int rows, uint32_t queries, uint32_t weights) {
  const auto* q = static_cast<const std::byte*>(a.q);
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * 8; i += kMathThreads) {
    const int row = i / 8, piece = i % 8, t = row / Columns::heads, head = row % Columns::heads;
    uint32_t words[4] = {};
    float weight = 0;
    if (t < run.tokens && head < a.heads) {
      const std::byte* from = q + (int64_t{run.q} + t) * a.q_token + head * a.q_head + 16 * piece;
#pragma unroll
      for (int b = 0; b < 16; ++b) words[b / 4] |= static_cast<uint32_t>(from[b]) << (8 * (b % 4));
      weight = a.weights[(int64_t{run.q} + t) * a.weights_token + head * a.weights_head];
    }
    store_shared_16(queries + row * kIndexDim + (piece ^ row % 8) * 16, {words[0], words[1], words[2], words[3]});
    if (piece == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(weights + row * 4), "f"(weight) : "memory");
  }
}

// A math warpgroup: one product of every tile, or of each second or fourth. Rows of D are keys: a lane has columns 8 j
// + 2 (lane % 4) and + 1 of two of them.
template <class Columns>
__device__ void score_tiles(const Fp8Score& s, const Map<Columns>& at, std::byte* memory) {
  constexpr int N = Columns::all, T = Columns::tokens, kStored = (T + 1) / 2, kStages = Columns::stages;
  // Of a lane's weights in registers; the others are read for each tile. With all in registers something else spills.
  constexpr int kHeld = N == 128 ? 24 : N / 4;
  const IndexScore& a = s.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = warp_uniform(threadIdx.x / 128);
  const int product = group % s.products, turns = kGroups / s.products, turn = group / s.products;
  const bool half = lane % 2;
  const int row = 16 * warp + lane / 4 + 8 * half;  // the key whose score this lane finishes
  const int which = T > 1 ? lane / 2 % 2 : 0;       // of the tokens 2 i + which of the product
  // Of two rows of scales that came with the keys the second has its 16-byte pieces swapped in pairs, by the swizzle.
  const int scale_at = kTileBytes + row * 4 ^ (s.joined && row >= 32 ? 16 : 0);
  uint32_t n = 0;
  for (uint32_t runs = 0;; ++runs) {
    mbarrier_wait(at.run_full + runs % kRuns * 8, runs / kRuns % 2);
    const Run run = at.run(memory, runs);
    if (run.tiles == 0) return;
    if (!s.mapped) {
      stage_queries<Columns>(a, run, at.query_rows, at.queries_of(runs), at.weights_of(runs));
      fence_async_proxy();
      barrier_sync(1, kMathThreads);
    }
    const uint32_t own_weights = at.weights_of(runs) + 4 * (product * N + 2 * (lane % 4));
    float weights[N / 4];  // of columns 8 j + 2 (lane % 4) and + 1
#pragma unroll
    for (int i = 0; i < kHeld; i += 2) load_shared_2(own_weights + 16 * i, weights[i], weights[i + 1]);
    const uint64_t b = warp_operand_128b(at.queries_of(runs) + product * N * kIndexDim);

    int seen[kStored];
#pragma unroll
    for (int i = 0; i < kStored; ++i) {
      const int t = product * T + 2 * i + which;
      seen[i] = t < run.tokens && (T > 1 || lane % 4 < 2) ? min(run.seen + t, run.most) : 0;
    }
    const bool idle = product * T >= run.tokens;
    // The same in all lanes, and known to be: k counts all tiles that the block has copied.
    const uint32_t skipped = (turn - n) & (turns - 1), end = __reduce_max_sync(0xffffffffu, n + run.tiles);
    int column = run.column + static_cast<int>(skipped) * kTile + row;
    float* to = a.scores + (int64_t{run.row} + product * T + which) * a.scores_row + column;
    for (uint32_t k = __reduce_max_sync(0xffffffffu, n + skipped); k < end;
         k += turns, column += turns * kTile, to += turns * kTile) {
      const uint32_t stage = k % kStages;
      mbarrier_wait(at.full + 8 * stage, k / kStages % 2);
      if (idle) {
        mbarrier_arrive(at.empty + 8 * stage);
        continue;
      }
      float acc[N / 2];
      const uint64_t keys = operand_128b(at.stages + stage * kStageBytes);
      wgmma_pin(acc);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step)
        WgmmaFp8<N>::ss(acc, operand_advance(keys, 32 * step), operand_advance(b, 32 * step), step > 0);
      wgmma_commit();
      const float scale = a.scale * load_shared(at.stages + stage * kStageBytes + scale_at);
      wgmma_wait<0>();
      wgmma_pin(acc);
      mbarrier_arrive(at.empty + 8 * stage);  // by every lane: one lane's would be put behind the sums

#pragma unroll
      for (int i = kHeld; i < N / 4; i += 2) load_shared_2(own_weights + 16 * i, weights[i], weights[i + 1]);
      float sum[T][2];
#pragma unroll
      for (int t = 0; t < T; ++t) {
        sum[t][0] = sum[t][1] = 0;
#pragma unroll
        for (int i = 0; i < Columns::heads / 8; ++i) {
          const int j = t * (Columns::heads / 8) + i;
#pragma unroll
          for (int e = 0; e < 4; ++e) {  // columns in turn, of either row
            const float x = acc[4 * j + e % 2 * 2 + e / 2];
            sum[t][e % 2] = fmaf(relu(x), weights[2 * j + e / 2], sum[t][e % 2]);
          }
        }
      }
      // Over the four lanes of a row, each of which ends with one row and half of the tokens: the same additions
      // whatever the lane.
      float own[T];
#pragma unroll
      for (int t = 0; t < T; ++t)
        own[t] = (half ? sum[t][1] : sum[t][0]) + __shfl_xor_sync(0xffffffffu, half ? sum[t][0] : sum[t][1], 1);
#pragma unroll
      for (int i = 0; i < (T + 1) / 2; ++i) {
        float score;
        if constexpr (T == 1) score = own[0] + __shfl_xor_sync(0xffffffffu, own[0], 2);
        else
          score = (which ? own[2 * i + 1] : own[2 * i]) +
                  __shfl_xor_sync(0xffffffffu, which ? own[2 * i] : own[2 * i + 1], 2);
        if (column >= 0 && column < seen[i]) to[2 * i * a.scores_row] = score * scale;
      }
    }
    n += run.tiles;
    mbarrier_arrive(at.run_empty + runs % kRuns * 8);  // each for itself: racecheck credits no other lane with it
  }
}

template <class Columns>
__global__ void __launch_bounds__(kThreads, 1)
    fp8_score_kernel(const Fp8Score s, const __grid_constant__ CUtensorMap map,
                     const __grid_constant__ CUtensorMap query_map, const __grid_constant__ CUtensorMap weight_map) {
  extern __shared__ std::byte memory[];
  const Map<Columns> at(memory, s.products);
  if (threadIdx.x == 0) {
    tma_prefetch_map(map);
    tma_prefetch_map(query_map);
    tma_prefetch_map(weight_map);
    for (int i = 0; i < Columns::stages; ++i) {
      mbarrier_init(at.full + 8 * i, 1);
      mbarrier_init(at.empty + 8 * i, 128 * s.products);
    }
    for (int i = 0; i < kRuns; ++i) {
      mbarrier_init(at.run_full + 8 * i, 1);
      mbarrier_init(at.run_empty + 8 * i, kMathThreads);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  take_turn();
  if (threadIdx.x >= kMathThreads) {
    give_registers<kCopyRegisters>();
    copy_keys(s, map, query_map, weight_map, at, memory);
  } else {
    take_registers<kMathRegisters>();
    score_tiles<Columns>(s, at, memory);
  }
}

template <class Columns>
void launch_columns(cudaStream_t stream, Fp8Score s, const CUtensorMap& map, int64_t q_tokens, int blocks,
                    const std::string& shape) {
  CUtensorMap query_map{}, weight_map{};
  if (s.mapped) {
    const auto heads = static_cast<uint64_t>(s.a.heads), all = static_cast<uint64_t>(q_tokens);
    const auto group = static_cast<uint32_t>(Columns::tokens * s.products);
    const uint64_t q_extents[] = {kIndexDim, heads, all}, w_extents[] = {heads, all},
                   q_strides[] = {static_cast<uint64_t>(s.a.q_head), static_cast<uint64_t>(s.a.q_token)},
                   w_strides[] = {static_cast<uint64_t>(s.a.weights_token) * 4};
    const uint32_t q_box[] = {kIndexDim, Columns::heads, group}, w_box[] = {Columns::heads, group};
    query_map = tensor_map("index_score", "q", MapType::u8, s.a.q, q_extents, q_strides, q_box, Swizzle::b128);
    weight_map =
        tensor_map("index_score", "weights", MapType::f32, s.a.weights, w_extents, w_strides, w_box, Swizzle::none);
  }
  launch(fp8_score_kernel<Columns>,
         {.grid = dim3(static_cast<unsigned>(blocks)),
          .block = dim3(kThreads),
          .shared_bytes = Map<Columns>::bytes(s.products),
          .overlap = true},
         stream, "index_score", "scores of e4m3 products", shape, s, map, query_map, weight_map);
}

template <int kHeads, int kTokens>
void launch_tokens(cudaStream_t stream, Fp8Score s, const CUtensorMap& map, int64_t q_tokens, int64_t tokens,
                   int blocks, const std::string& shape) {
  const int64_t products = (tokens + kTokens - 1) / kTokens;
  s.products = products > 2 ? 4 : static_cast<int>(products);
  s.group_log = std::countr_zero(static_cast<unsigned>(kTokens * s.products));
  constexpr uint64_t evict_normal = 0x1000000000000000;
  s.keep = products > 4 ? evict_normal : evict_first;
  if (s.products < 4) launch_columns<Columns<kHeads, kTokens, 12>>(stream, s, map, q_tokens, blocks, shape);
  else if constexpr (kHeads * kTokens == 128)  // fewer columns are of one or two tokens, which are one product
    launch_columns<Columns<kHeads, kTokens, 8>>(stream, s, map, q_tokens, blocks, shape);
}

}  // namespace

void score_by_fp8(cudaStream_t stream, const IndexScore& a, int64_t pages, int64_t q_tokens, int64_t tokens, int blocks,
                  const std::string& shape) {
  Fp8Score s{.a = a, .products = 1, .group_log = 0, .box_log = 4, .keep = 0, .joined = false, .mapped = false};
  // A dimension of one has any stride.
  if (a.heads == 1) s.a.q_head = kIndexDim, s.a.weights_head = 1;
  if (q_tokens == 1) s.a.q_token = s.a.q_head * a.heads, s.a.weights_token = (a.heads + 3) / 4 * 4;
  const auto whole = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const auto pitch = [](int64_t bytes) { return bytes > 0 && bytes % 16 == 0; };
  s.mapped = whole(a.q) && pitch(s.a.q_head) && pitch(s.a.q_token) && whole(a.weights) && s.a.weights_head == 1 &&
             pitch(4 * s.a.weights_token);
  while (s.box_log < kTileLog && a.page_size % (2u << s.box_log) == 0) ++s.box_log;
  s.joined = a.page_size == kTile;
  const uint32_t rows = s.joined ? kTile + kScaleBytes / kIndexDim : 1u << s.box_log;  // of 128 bytes
  const uint64_t extents[] = {kIndexDim, s.joined ? rows : a.page_size, static_cast<uint64_t>(pages)},
                 strides[] = {kIndexDim, static_cast<uint64_t>(a.page_stride)};
  const uint32_t box[] = {kIndexDim, rows, 1};
  const CUtensorMap map =
      tensor_map("index_score", "index cache", MapType::u8, a.cache, extents, strides, box, Swizzle::b128);
  if (a.heads > 64) launch_tokens<128, 1>(stream, s, map, q_tokens, tokens, blocks, shape);
  else if (a.heads > 32 && tokens == 1) launch_tokens<64, 1>(stream, s, map, q_tokens, tokens, blocks, shape);
  else if (a.heads > 32) launch_tokens<64, 2>(stream, s, map, q_tokens, tokens, blocks, shape);
  else if (tokens == 1) launch_tokens<32, 1>(stream, s, map, q_tokens, tokens, blocks, shape);
  else if (tokens == 2) launch_tokens<32, 2>(stream, s, map, q_tokens, tokens, blocks, shape);
  else launch_tokens<32, 4>(stream, s, map, q_tokens, tokens, blocks, shape);
}

}  // namespace mla::cuda::generic
