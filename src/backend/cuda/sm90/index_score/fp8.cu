// index_score by e4m3 products: keys go from global memory through a ring in shared memory into the matrix units as
// they are. One block a multiprocessor takes an even share of all tiles. Roofline, schedule and figures: README.md.
#include <algorithm>

#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/mbarrier.cuh"
#include "backend/cuda/core/tensor_map.hpp"
#include "backend/cuda/core/tma.cuh"
#include "backend/cuda/core/warpgroup.cuh"
#include "backend/cuda/core/wgmma_fp8.cuh"
#include "backend/cuda/generic/index_score/score.hpp"

namespace mla::cuda::generic {
namespace {

constexpr int kTile = 64;  // keys of a product: its rows
constexpr int kTileBytes = kTile * kIndexDim, kScaleBytes = kTile * 4;
constexpr int kStageBytes =
    kTileBytes + 1024;  // keys, then scales; from a multiple of 1024 to the next, as swizzles ask
constexpr int kStages = 8;
constexpr int kCopyWarps = 4, kCopyThreads = 32 * kCopyWarps, kCopyRegisters = 56;

/// Columns of a product: so many heads, padded, of each of so many tokens. A type, for nvcc cannot name a kernel by a
/// struct's value.
template <int kHeads, int kTokens>
struct Columns {
  static constexpr int heads = kHeads, tokens = kTokens, all = kHeads * kTokens;
  // Up to 64 memory is what takes time, and two warpgroups keep up with it. Such blocks fit a multiprocessor twice: the
  // next launch's come while this one's last ones run.
  static constexpr int blocks = tokens == 1 && all <= 64 ? 2 : 1, groups = 4 / blocks;
  static constexpr int math_threads = 128 * groups, threads = math_threads + kCopyThreads;
  static constexpr int registers = blocks == 2 ? 88 : 104;  // of math; with those of copies as many as at the start
};

struct Fp8Score {
  IndexScore a;
  int products;   // of a tile: 1, 2 or 4, each `tokens` tokens; the warpgroups share tiles and products evenly
  int box;        // keys that lie in one page and are copied at once: 16, 32 or 64
  uint64_t keep;  // L2 policy of keys: read once, or by several groups of tokens
  bool joined;    // a tile is a page: its keys and scales are one copy, of 66 rows of 128 bytes
};

// Tiles of one group of an item's tokens that follow each other: what the copying warp hands to the math warps.
struct Run {
  int tiles;  // 0: there is no further run
  int q, row, tokens;
  int column;      // of the first tile's first key; below 0 where the window begins within a tile
  int seen, most;  // columns that token t sees: seen + t, within [0, most]
};
constexpr int kRuns = 2;

struct Barriers {
  uint64_t full[kStages], empty[kStages], run_full[kRuns], run_empty[kRuns];
};

size_t shared_bytes(int columns, int products) {
  return 1024 + kStages * kStageBytes + static_cast<size_t>(columns * products) * kIndexDim + sizeof(Barriers) +
         kRuns * sizeof(Run);
}

// Shared memory, from a multiple of 1024 on.
struct Map {
  uint32_t stages, queries, full, empty, run_full, run_empty;
  int run_offset;  // of the runs in the block's memory
  __device__ Map(const std::byte* memory, int query_rows) {
    stages = (smem_address(memory) + 1023) & ~1023u;
    queries = stages + kStages * kStageBytes;
    full = queries + query_rows * kIndexDim;
    empty = full + kStages * 8;
    run_full = empty + kStages * 8;
    run_empty = run_full + kRuns * 8;
    run_offset = static_cast<int>(run_empty + kRuns * 8 - smem_address(memory));
  }
  __device__ Run& run(std::byte* memory, uint32_t i) const {
    return reinterpret_cast<Run*>(memory + run_offset)[i % kRuns];
  }
};

/// Tiles lie on multiples of kTile positions.
__device__ int tiles_of(const IndexItem& item, int64_t token) {
  const int columns = item.columns(token);
  return columns <= 0 ? 0 : (item.kv_begin % kTile + columns + kTile - 1) / kTile;
}

// A block's share of the call, by a whole warp. All groups of an item count as its last one,
// which sees most: what others lack costs nothing, and is little, for the tokens of a call lie close together.
class Walk {
 public:
  IndexItem item;           // of the window
  int token, first, count;  // of the current run: the group's first token, tiles

  __device__ Walk(const IndexScore& a, int group_tokens) : a_(a), group_tokens_(group_tokens) {
    const int lane = threadIdx.x % 32;
    int total = 0;
    for (int i = lane; i < a.item_count; i += 32) total += units(load(i));
#pragma unroll
    for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
    const int share = total / gridDim.x, more = total % gridDim.x, block = blockIdx.x;
    int begin = share * block + min(block, more);
    left_ = share + (block < more);
    index_ = 0;
    // The item that has unit `begin`.
    while (left_ > 0) {
      const int own = index_ + lane < a.item_count ? units(load(index_ + lane)) : 0;
      int sum = own;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += below;
      }
      const uint32_t past = __ballot_sync(0xffffffffu, sum > begin);
      if (past) {
        const int at = __ffs(static_cast<int>(past)) - 1;
        index_ += at;
        begin -= __shfl_sync(0xffffffffu, sum - own, at);
        break;
      }
      begin -= __shfl_sync(0xffffffffu, sum, 31);
      index_ += 32;
    }
    if (left_ > 0) {
      take(load(index_));
      group_ = begin / tiles_, tile_ = begin % tiles_;
    }
  }

  /// The next run of tiles of one group; false: none is left.
  __device__ bool next() {
    while (left_ > 0) {
      if (group_ == groups_) {
        do take(load(++index_));
        while (units(item) == 0);
        group_ = tile_ = 0;
      }
      const int run = min(left_, tiles_ - tile_);
      token = group_ * group_tokens_;
      first = tile_;
      count = min(run, tiles_of(item, min(token + group_tokens_, item.q_count) - 1) - tile_);
      left_ -= run;
      ++group_, tile_ = 0;
      if (count > 0) return true;
    }
    return false;
  }

 private:
  __device__ IndexItem load(int i) const { return clipped(a_.items[i], a_.first, a_.columns); }
  // Fewer than 2^31: as many as there are columns of scores by the sixty-four.
  __device__ int units(const IndexItem& i) const { return i.q_count <= 0 ? 0 : tiles_of(i, i.q_count - 1) * groups(i); }
  __device__ int groups(const IndexItem& i) const { return (i.q_count + group_tokens_ - 1) / group_tokens_; }
  __device__ void take(const IndexItem& i) {
    item = i;
    tiles_ = tiles_of(i, i.q_count - 1);
    groups_ = groups(i);
  }

  const IndexScore& a_;
  int left_, group_tokens_, index_, tiles_, groups_, group_, tile_;
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
template <int product_tokens>
__device__ void copy_keys(const Fp8Score& s, const CUtensorMap& map, const Map& at, std::byte* memory) {
  const IndexScore& a = s.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kCopyWarps, boxes = kTile / s.box;  // boxes of a tile
  const int group_tokens = product_tokens * s.products, at_once = 32 / boxes;                      // tiles looked up
  const int own_box = lane % boxes * s.box, own_tile = lane / boxes;
  Walk walk(a, group_tokens);
  uint32_t n = 0;
  for (uint32_t runs = 0;; ++runs) {
    const bool more = walk.next();
    const IndexItem& item = walk.item;
    if (warp == 0) {
      mbarrier_wait(at.run_empty + runs % kRuns * 8, runs / kRuns % 2 ^ 1);
      if (lane == 0) {
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
        mbarrier_arrive(at.run_full + runs % kRuns * 8);
      }
      __syncwarp();
    }
    if (!more) return;
    const int32_t* table = a.table + item.request * a.table_row;
    const int64_t begin = int64_t{item.kv_begin} / kTile * kTile + int64_t{walk.first} * kTile,
                  end = int64_t{item.kv_begin} + item.columns(min(walk.token + group_tokens, item.q_count) - 1);
    int32_t page;
    uint32_t row;
    const auto look_up = [&](int tile) {  // of the run; past its end a position is past what the tokens see
      const int64_t position = begin + int64_t{tile} * kTile + own_box;
      page = -1;
      if (tile >= walk.count || position >= end || position + s.box <= item.kv_begin) return;
      const uint32_t p = static_cast<uint32_t>(position),
                     which = a.page_shift >= 0 ? p >> a.page_shift : p / a.page_size;
      row = p - which * a.page_size;
      page = __ldg(table + which);
    };
    int tile = (warp - n) & (kCopyWarps - 1);
    look_up(tile + kCopyWarps * own_tile);
    while (tile < walk.count) {
      const int32_t own = page;
      const uint32_t from = row;
      look_up(tile + kCopyWarps * (at_once + own_tile));
      const std::byte* scales = a.cache + own * a.page_stride + int64_t{a.page_size} * kIndexDim + from * 4;
      const uint32_t present = __ballot_sync(0xffffffffu, own >= 0);
      for (int i = 0; i < at_once && tile < walk.count; ++i, tile += kCopyWarps) {
        const uint32_t k = n + tile, stage = k % kStages, full = at.full + 8 * stage;
        mbarrier_wait(at.empty + 8 * stage, k / kStages % 2 ^ 1);
        if (own_tile != i) continue;
        if (own_box == 0)
          mbarrier_arrive_expect(full, __popc(present >> lane & ((1u << boxes) - 1)) * s.box * (kIndexDim + 4));
        __syncwarp(((1u << boxes) - 1) << i * boxes);
        if (own >= 0) {
          const uint32_t to = at.stages + stage * kStageBytes;
          load_box(to + own_box * kIndexDim, map, full, static_cast<int>(from), own, s.keep);
          if (!s.joined) bulk_load(to + kTileBytes + own_box * 4, scales, s.box * 4, full, evict_first);
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

// Queries of a group's tokens, rows of 128 bytes, one after another in the products' columns; zeros for what is none.
template <class Columns>
__device__ void stage_queries(const IndexScore& a, int64_t token, int tokens, int rows, uint32_t to) {
  const auto* q = static_cast<const std::byte*>(a.q);
  const bool wide = (reinterpret_cast<uintptr_t>(q) | a.q_token | a.q_head) % 16 == 0;
  for (int i = threadIdx.x; i < rows * 8; i += Columns::math_threads) {
    const int row = i / 8, piece = i % 8, t = row / Columns::heads, head = row % Columns::heads;
    uint4 v{};
    if (t < tokens && head < a.heads) {
      const std::byte* from = q + (token + t) * a.q_token + head * a.q_head + 16 * piece;
      if (wide) v = __ldg(reinterpret_cast<const uint4*>(from));
      else {
        uint32_t words[4] = {};
#pragma unroll
        for (int b = 0; b < 16; ++b) words[b / 4] |= static_cast<uint32_t>(from[b]) << (8 * (b % 4));
        v = {words[0], words[1], words[2], words[3]};
      }
    }
    store_shared_16(to + row * kIndexDim + (piece ^ row % 8) * 16, v);
  }
}

// A math warpgroup: one product of every tile, or of each second or fourth. Rows of D are keys: a lane has columns 8 j
// + 2 (lane % 4) and + 1 of two of them.
template <class Columns>
__device__ void score_tiles(const Fp8Score& s, const Map& at, std::byte* memory) {
  constexpr int N = Columns::all, T = Columns::tokens, kStored = (T + 1) / 2;
  const IndexScore& a = s.a;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = warp_uniform(threadIdx.x / 128);
  const int product = group % s.products, turns = Columns::groups / s.products, turn = group / s.products;
  const bool half = lane % 2;
  const int row = 16 * warp + lane / 4 + 8 * half;  // the key whose score this lane finishes
  const int which = T > 1 ? lane / 2 % 2 : 0;       // of the tokens 2 i + which of the product
  // Of two rows of scales that came with the keys the second has its 16-byte pieces swapped in pairs, by the swizzle.
  const int scale_at = kTileBytes + row * 4 ^ (s.joined && row >= 32 ? 16 : 0);
  const uint64_t b = warp_operand_128b(at.queries + product * N * kIndexDim);
  uint32_t n = 0;
  for (uint32_t runs = 0;; ++runs) {
    mbarrier_wait(at.run_full + runs % kRuns * 8, runs / kRuns % 2);
    const Run run = at.run(memory, runs);
    mbarrier_arrive(at.run_empty + runs % kRuns * 8);  // each for itself: racecheck credits no other lane with it
    if (run.tiles == 0) return;
    if (runs > 0) barrier_sync(1, Columns::math_threads);  // the last run's queries are read
    stage_queries<Columns>(a, run.q, run.tokens, N * s.products, at.queries);
    // Halved: relu(x) is (x + |x|) / 2, an addition where the maximum would take the slower pipe. Sums of e4m3 products
    // are never infinite.
    float weights[N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int column = 8 * (i / 2) + 2 * (lane % 4) + i % 2, t = product * T + column / Columns::heads,
                head = column % Columns::heads;
      weights[i] = 0;
      if (t < run.tokens && head < a.heads)
        weights[i] =
            0.5f * (__ldg(a.weights + (int64_t{run.q} + t) * a.weights_token + head * a.weights_head) * a.scale);
    }
    fence_async_proxy();
    barrier_sync(1, Columns::math_threads);

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
        if (lane == 0) mbarrier_arrive(at.empty + 8 * stage);
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
      const float scale = load_shared(at.stages + stage * kStageBytes + scale_at);
      wgmma_wait<0>();
      wgmma_pin(acc);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(at.empty + 8 * stage);

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
            sum[t][e % 2] = fmaf(x + fabsf(x), weights[2 * j + e / 2], sum[t][e % 2]);
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
  }
}

template <class Columns>
__global__ void __launch_bounds__(Columns::threads, Columns::blocks)
    fp8_score_kernel(const Fp8Score s, const __grid_constant__ CUtensorMap map) {
  extern __shared__ std::byte memory[];
  const Map at(memory, Columns::all * s.products);
  if (threadIdx.x == 0) {
    tma_prefetch_map(map);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(at.full + 8 * i, 1);
      mbarrier_init(at.empty + 8 * i, 4 * s.products);  // a warp each
    }
    for (int i = 0; i < kRuns; ++i) {
      mbarrier_init(at.run_full + 8 * i, 1);
      mbarrier_init(at.run_empty + 8 * i, Columns::math_threads);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  take_turn();
  if (threadIdx.x >= Columns::math_threads) {
    give_registers<kCopyRegisters>();
    copy_keys<Columns::tokens>(s, map, at, memory);
  } else {
    take_registers<Columns::registers>();
    score_tiles<Columns>(s, at, memory);
  }
}

template <class Columns>
void launch_columns(cudaStream_t stream, Fp8Score s, const CUtensorMap& map, int64_t tokens, int blocks,
                    const std::string& shape) {
  const int64_t products = (tokens + Columns::tokens - 1) / Columns::tokens;
  s.products = products > 2 ? 4 : static_cast<int>(products);
  constexpr uint64_t evict_normal = 0x1000000000000000;
  s.keep = products > 4 ? evict_normal : evict_first;
  launch(fp8_score_kernel<Columns>,
         {.grid = dim3(static_cast<unsigned>(blocks)),
          .block = dim3(Columns::threads),
          .shared_bytes = shared_bytes(Columns::all, s.products),
          .overlap = true},
         stream, "index_score", "scores of e4m3 products", shape, s, map);
}

}  // namespace

void score_by_fp8(cudaStream_t stream, const IndexScore& a, int64_t pages, int64_t tokens, int blocks,
                  const std::string& shape) {
  Fp8Score s{.a = a, .products = 1, .box = 16, .keep = 0, .joined = false};
  while (s.box < kTile && a.page_size % (2 * s.box) == 0) s.box *= 2;
  s.joined = a.page_size == kTile;
  const uint32_t rows = s.joined ? kTile + kScaleBytes / kIndexDim : s.box;  // of 128 bytes
  const uint64_t extents[] = {kIndexDim, s.joined ? rows : a.page_size, static_cast<uint64_t>(pages)},
                 strides[] = {kIndexDim, static_cast<uint64_t>(a.page_stride)};
  const uint32_t box[] = {kIndexDim, rows, 1};
  const CUtensorMap map =
      tensor_map("index_score", "index cache", MapType::u8, a.cache, extents, strides, box, Swizzle::b128);
  if (a.heads > 64) launch_columns<Columns<128, 1>>(stream, s, map, tokens, blocks, shape);
  else if (a.heads > 32 && tokens == 1) launch_columns<Columns<64, 1>>(stream, s, map, tokens, blocks, shape);
  else if (a.heads > 32) launch_columns<Columns<64, 2>>(stream, s, map, tokens, blocks, shape);
  else if (tokens == 1) launch_columns<Columns<32, 1>>(stream, s, map, tokens, blocks, shape);
  else if (tokens == 2) launch_columns<Columns<32, 2>>(stream, s, map, tokens, blocks, shape);
  else launch_columns<Columns<32, 4>>(stream, s, map, tokens, blocks, shape);
}

}  // namespace mla::cuda::generic
