// attend_expanded of e4m3 operands. README.md has what differs from the 16-bit kernel (attend_expanded.cu), whose order
// of tiles, roles and epilogue it shares.
#include <algorithm>
#include <array>
#include <bit>
#include <climits>
#include <cmath>
#include <limits>
#include <string>

#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/tensor_map.hpp"
#include "backend/cuda/core/wgmma_fp8.cuh"
#include "backend/cuda/sm90/attend_expanded/codes.cuh"
#include "backend/cuda/sm90/attend_expanded/fp8.hpp"
#include "backend/cuda/sm90/attend_expanded/rows.cuh"
#include "backend/cuda/sm90/attend_expanded/tiles.cuh"

namespace mla::cuda::sm90 {
namespace {

// ---- config --------------------------------------------------------------------------------------------------------

struct Fp8Tile {
  int nope, rope, value;  ///< head dimensions
  int cluster;            ///< blocks that share keys and values: one tile between them
  int keys;               ///< of a block: 64 or 128
  int stages;             ///< blocks of keys, and of values, in flight
  constexpr int dim() const { return nope + rope; }
  constexpr int rows() const { return 64 * groups * cluster; }
  constexpr int first_row(int rank, int group) const { return 64 * (group * cluster + rank); }
  static constexpr int groups = 2;  ///< math warpgroups of a block, of 64 query rows each
  /// Sums of a tile's earlier chains lie beside the running one's in registers, else in shared memory.
  constexpr bool whole_in_registers() const { return value <= 128; }
  static constexpr int threads = 128 * (1 + groups), math_registers = 224, producer_registers = 56;
};

struct Deepseek128 {
  static constexpr Fp8Tile tile{.nope = 128, .rope = 64, .value = 128, .cluster = 1, .keys = 128, .stages = 4};
};
struct Deepseek256 {
  static constexpr Fp8Tile tile{.nope = 128, .rope = 64, .value = 128, .cluster = 2, .keys = 128, .stages = 4};
};
struct Glm128 {
  static constexpr Fp8Tile tile{.nope = 192, .rope = 64, .value = 256, .cluster = 1, .keys = 64, .stages = 2};
};
struct Glm256 {
  static constexpr Fp8Tile tile{.nope = 192, .rope = 64, .value = 256, .cluster = 2, .keys = 64, .stages = 2};
};

constexpr int group_rows = 64;  // query rows of a math warpgroup: the height of wgmma
constexpr int panel = 64;       // bytes of a row of queries or keys that lie together
constexpr int scale_rows = ops::ExpandedScales::kRows;
constexpr int watch_barrier = 7;  // of the two warps that look at values; math warpgroups have 1 and 2
constexpr int chain_keys = 512;   // over which tensor cores add up by themselves
// Weights are 2^7 at a row's reference, so that 2^-13 of it is still a normal e4m3 number, and the reference may be
// exceeded by 2^1.75 before it is raised: 2^8.75 is 430 of 448.
constexpr float weight_log2 = 7.0f, lazy_rescale = 1.75f;

/// Group and head strides of scales; without data every one is 1.
struct Scales {
  const float* data;
  int64_t group, head;
  __device__ __forceinline__ float at(int32_t row, int32_t of_head) const {
    return data ? __ldg(data + row * group + of_head * head) : 1.0f;
  }
};

struct Params : TileSource {
  CUtensorMap q, k_nope, k_pe, k_nope_pair, k_pe_pair, v;
  int32_t key_rows;     // of the arrays of keys
  int64_t k_nope_head;  // elements from one head to the next
  Scales q_scale, k_scale, v_scale;
  const ops::ScaleRows* scale_rows;  // may be null
  void* out;
  float* lse;                                        // may be null
  int64_t out_token, out_head, lse_token, lse_head;  // strides in elements
  float scale_log2;
  bool accumulate;
  int32_t chain_mask;  // tensor cores add up by themselves until a block whose number has none of these bits
  OutputCodes codes;   // of outputs that are Codes
};

// ---- shared memory -------------------------------------------------------------------------------------------------

template <Fp8Tile tile>
struct alignas(1024) Shared {
  uint8_t q[tile.groups][tile.dim() / panel][group_rows][panel];
  uint8_t k[tile.stages][tile.dim() / panel][tile.keys][panel];
  uint8_t v[tile.stages][tile.value][tile.keys];
  static constexpr int whole_groups = tile.whole_in_registers() ? 0 : tile.groups;
  std::array<float4[tile.value / 8][128], whole_groups> whole;  // outputs of earlier chains, each thread's own
  TileWork work[tile_ring];
  uint64_t work_full[tile_ring], work_empty[tile_ring];
  uint64_t q_full[tile.groups], q_empty[tile.groups];
  uint64_t k_full[tile.stages], k_empty[tile.stages];
  uint64_t v_full[tile.stages], v_empty[tile.stages];
  uint64_t v_tail[tile.stages];  // values that are to be looked at have landed
  float2 scales[tile.stages];    // of a block's keys and values
  float q_scale[tile.groups];
  int32_t poisoned[tile_ring];  // of a tile: the first key whose value is no number, hidden from some of its rows
};

/// The key in row r of 32 rows of shared memory. A thread's scores are of rows 8 j + 2 (lane % 4) + {0, 1}; with these
/// keys there, its four weights of 16 keys are four neighbouring ones, as the product with values takes them.
__host__ __device__ constexpr int key_of_row(int r) { return r / 16 * 16 + r % 8 / 2 * 4 + r % 16 / 8 * 2 + r % 2; }

// ---- roles ---------------------------------------------------------------------------------------------------------

/// Warp 0 of the producer: hands out tiles, loads queries, keys and scales.
template <Fp8Tile tile>
struct KeyProducer {
  const Params& p;
  Shared<tile>& shared;
  const int lane = threadIdx.x % 32, rank = rank_in_cluster<tile.cluster>();

  /// This block's share of a block of keys, for all blocks of the cluster.
  __device__ void load_keys(const TileWork& work, int n, uint32_t stage, uint32_t full) const {
    constexpr int share = tile.keys / tile.cluster;
    const int32_t mine = rank * share, row = work.key + n * tile.keys + mine;
    const int32_t column = static_cast<int32_t>(work.head * p.k_nope_head);
    if (row + share <= p.key_rows) {  // row 2 b + 4 t + e of 16 a to row 8 b + 2 t + e
#pragma unroll
      for (int d = 0; d < tile.nope / panel; ++d)
        load_shared<tile.cluster>(smem_address(shared.k[stage][d][mine]), p.k_nope, full, column + d * panel, row, 0, 0,
                                  0);
#pragma unroll
      for (int d = 0; d < tile.rope / panel; ++d)
        load_shared<tile.cluster>(smem_address(shared.k[stage][tile.nope / panel + d][mine]), p.k_pe, full, d * panel,
                                  row, 0, 0, 0);
      return;
    }
    // Of the last keys in memory, two at a time, for the box above would not stop at its end.
    for (int r = 0; r < share; r += 2) {
      const int32_t from = row + r / 32 * 32 + key_of_row(r % 32);
      for (int d = 0; d < tile.nope / panel; ++d)
        load_shared<tile.cluster>(smem_address(shared.k[stage][d][mine + r]), p.k_nope_pair, full, column + d * panel,
                                  from);
      for (int d = 0; d < tile.rope / panel; ++d)
        load_shared<tile.cluster>(smem_address(shared.k[stage][tile.nope / panel + d][mine + r]), p.k_pe_pair, full,
                                  d * panel, from);
    }
  }

  __device__ void run() {
    uint32_t blocks = 0;  // of keys loaded so far
    TileOrder<tile.rows(), tile.keys> order;
    if (rank == 0) order.load(p, lane);
    int32_t number = blockIdx.x / tile.cluster, more = 0;
    TileWork work;
    for (uint32_t t = 0;; ++t) {
      const Slot<tile_ring> slot(t);
      const uint32_t announced = smem_address(&shared.work_full[slot.index]);
      if (rank == 0) {
        if (more > 0) {
          order.step(p, work);
          --more;
        } else {
          work = order.at(p, __shfl_sync(~0u, number, 0), lane, more);
          if (lane == 0) number = gridDim.x / tile.cluster + atomicAdd(&p.counters[0], 1);  // waited for after the run
        }
        mbarrier_wait(smem_address(&shared.work_empty[slot.index]), slot.parity ^ 1);
        if (lane == 0) {
          shared.work[slot.index] = work;
          mbarrier_arrive(announced);
        }
        if (lane > 0 && lane < tile.cluster) {
          const uint32_t to = map_to_cta(smem_address(&shared.work[slot.index]), lane),
                         bar = map_to_cta(announced, lane);
          send_tile(to, work, bar);
        }
      } else {
        if (lane == 0) mbarrier_arrive_expect(announced, sizeof(TileWork));
        mbarrier_wait(announced, slot.parity);
        work = shared.work[slot.index];
        __syncwarp();
        if (lane == 0) arrive_at<tile.cluster>(shared.work_empty[slot.index], 0);
      }
      if (work.blocks == 0) break;
      if (lane == 0) load_tile(work, t, blocks);
    }
    // Every drawer has its last number before it reports, so the last one to report may rewind the counters for the
    // next launch.
    if (rank == 0 && lane == 0) {
      __threadfence();
      if (atomicAdd(&p.counters[1], 1) == static_cast<int32_t>(gridDim.x / tile.cluster) - 1) {
        p.counters[0] = 0;
        p.counters[1] = 0;
      }
    }
  }

  __device__ void load_tile(const TileWork& work, uint32_t t, uint32_t& blocks) {
    const ops::ScaleRows rows = p.scale_rows ? p.scale_rows[work.number()] : ops::ScaleRows{};
    const auto scales_of = [&](int n) {
      if (work.keys <= 0) return float2{1.0f, 1.0f};  // its one block is hidden; its row may not exist
      const int32_t row = p.scale_rows ? rows.k + n * tile.keys / scale_rows : 0;
      return float2{p.k_scale.at(row, work.head), p.v_scale.at(row, work.head)};
    };
    float q_scale[tile.groups];
    for (int g = 0; g < tile.groups; ++g) {
      // The item's row that the tile begins with.
      const int32_t first = work.row - p.items[work.number()].q_begin + tile.first_row(rank, g);
      q_scale[g] = tile.first_row(rank, g) >= work.rows
                       ? 1.0f
                       : p.q_scale.at(p.scale_rows ? rows.q + first / scale_rows : 0, work.head);
    }
    float2 scales = scales_of(work.blocks - 1);
    for (int n = work.blocks - 1; n >= 0; --n, ++blocks) {
      const Slot<tile.stages> k(blocks);
      const uint32_t full = smem_address(&shared.k_full[k.index]);
      mbarrier_wait(smem_address(&shared.k_empty[k.index]), k.parity ^ 1);
      shared.scales[k.index] = scales;
      mbarrier_arrive_expect(full, sizeof(shared.k[0]));
      load_keys(work, n, k.index, full);
      if (n > 0) scales = scales_of(n - 1);
      if (n != work.blocks - 1) continue;
      // After the first block of keys, whose stage is free sooner than the queries' space.
      for (int g = 0; g < tile.groups; ++g) {
        const uint32_t landed = smem_address(&shared.q_full[g]);
        mbarrier_wait(smem_address(&shared.q_empty[g]), (t & 1) ^ 1);
        shared.q_scale[g] = q_scale[g];
        const int first = tile.first_row(rank, g);
        if (first >= work.rows) {  // no rows: whatever lies there makes rows that are not stored
          mbarrier_arrive(landed);
          continue;
        }
        mbarrier_arrive_expect(landed, sizeof(shared.q[0]));
#pragma unroll
        for (int d = 0; d < tile.dim() / panel; ++d)
          tma_load(smem_address(shared.q[g][d]), p.q, landed, d * panel, work.head, work.row + first);
      }
    }
  }
};

/// Keys of a block that the tile's first row sees, and keys that there are. 0 times NaN would reach the sums, so values
/// are looked at where some are hidden from some of the tile's rows or lie past the item's end.
template <Fp8Tile tile>
struct Values {
  int32_t seen, valid;
  __device__ Values(const TileWork& work, int n) {
    valid = min(max(work.keys - n * tile.keys, 0), tile.keys);
    seen = min(max(work.diagonal - n * tile.keys, 0), valid);
  }
  __device__ bool watched() const { return seen < tile.keys; }
};

/// Warp 1 of the producer: loads values.
template <Fp8Tile tile>
__device__ void produce_values(const Params& p, Shared<tile>& shared) {
  const int lane = threadIdx.x % 32, rank = rank_in_cluster<tile.cluster>();
  constexpr int share = tile.value / tile.cluster;
  uint32_t blocks = 0;
  for (uint32_t t = 0;; ++t) {
    const Slot<tile_ring> slot(t);
    mbarrier_wait(smem_address(&shared.work_full[slot.index]), slot.parity);
    const TileWork work = shared.work[slot.index];
    if (lane == 0) shared.poisoned[slot.index] = INT_MAX;
    __syncwarp();
    if (lane == 0) arrive_at<tile.cluster>(shared.work_empty[slot.index], 0);
    if (work.blocks == 0) return;
    if (lane != 0) continue;
    const int32_t begin = work.keys > 0 ? work.key : 0;  // a multiple of 16, which an item without keys may not say
    for (int n = work.blocks - 1; n >= 0; --n, ++blocks) {
      const Slot<tile.stages> v(blocks);
      const uint32_t landed =
          smem_address(Values<tile>(work, n).watched() ? &shared.v_tail[v.index] : &shared.v_full[v.index]);
      mbarrier_wait(smem_address(&shared.v_empty[v.index]), v.parity ^ 1);
      mbarrier_arrive_expect(landed, sizeof(shared.v[0]));
      load_shared<tile.cluster>(smem_address(shared.v[v.index][rank * share]), p.v, landed, begin + n * tile.keys,
                                rank * share, work.head);
    }
  }
}

/// Ones in the bytes of word w of 16 bytes whose number is below n.
__device__ __forceinline__ uint32_t bytes_below(int n, int w) {
  const int bytes = min(max(n - 4 * w, 0), 4);
  return bytes == 4 ? ~0u : (1u << 8 * bytes) - 1;
}

/// Warps 2 and 3 of the producer: look at the watched blocks. Keys past the item's end become zeros, and so do NaN of
/// keys that some of the tile's rows do not see. Those that see them are told (poisoned).
template <Fp8Tile tile>
__device__ void watch_values(Shared<tile>& shared, int watcher) {
  constexpr int watchers = 2, chunks = tile.keys / 16;
  const int lane = threadIdx.x % 32;
  uint32_t before = 0, tails = 0;  // blocks of earlier tiles; tails: a parity bit for each stage
  for (uint32_t t = 0;; ++t) {
    const Slot<tile_ring> slot(t);
    mbarrier_wait(smem_address(&shared.work_full[slot.index]), slot.parity);
    const TileWork work = shared.work[slot.index];
    __syncwarp();
    if (lane == 0) arrive_at<tile.cluster>(shared.work_empty[slot.index], 0);
    if (work.blocks == 0) return;
    const int32_t seen_by_all = min(work.diagonal, work.keys);
    for (int n = work.blocks - 1; n >= 0 && seen_by_all < (n + 1) * tile.keys; --n) {
      const Values<tile> values(work, n);
      const Slot<tile.stages> v(before + work.blocks - 1 - n);
      mbarrier_wait(smem_address(&shared.v_tail[v.index]), tails >> v.index & 1);
      tails ^= 1u << v.index;
      int32_t bad = INT_MAX;
      for (int chunk = values.seen / 16; chunk < chunks; ++chunk) {
        const int seen = values.seen - 16 * chunk, valid = values.valid - 16 * chunk;
#pragma unroll 4
        for (int row = watcher * 32 + lane; row < tile.value; row += watchers * 32) {
          const int swizzled = tile.keys == 128 ? chunk ^ row % 8 : chunk ^ row / 2 % 4;
          uint4* const at = reinterpret_cast<uint4*>(shared.v[v.index][row]) + swizzled;
          const uint4 x = *at;
          const uint32_t words[4] = {x.x, x.y, x.z, x.w};
          uint32_t kept[4], changed = 0;
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const uint32_t inside = bytes_below(valid, w), hidden = inside & ~bytes_below(seen, w);
            const uint32_t nan = ((words[w] & 0x7f7f7f7f) + 0x01010101) & 0x80808080 & hidden;
            kept[w] = words[w] & inside & ~((nan >> 7) * 0xff);
            changed |= kept[w] ^ words[w];
            if (nan) bad = min(bad, n * tile.keys + 16 * chunk + 4 * w + (__ffs(static_cast<int>(nan)) - 1) / 8);
          }
          if (changed) *at = uint4{kept[0], kept[1], kept[2], kept[3]};
        }
      }
      if (bad != INT_MAX) atomicMin(&shared.poisoned[slot.index], bad);
      fence_async_proxy();
      barrier_sync(watch_barrier, watchers * 32);  // both have looked
      if (watcher == 0 && lane == 0) mbarrier_arrive(smem_address(&shared.v_full[v.index]));
    }
    before += work.blocks;
  }
}

/// Two numbers to e4m3, the first in the low byte.
__device__ __forceinline__ uint32_t pair_e4m3(float low, float high) {
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}

/// Raises a reference that the scores exceed. Whether outputs so far must be multiplied by `factor`; a whole warp
/// decides alike.
template <int n>
__device__ __forceinline__ bool refer(const float (&s)[n], RowState& state, float (&factor)[2], float scale_log2) {
  float high[2];
  bool ask[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    high[h] = fmaf(row_maximum(s, h), scale_log2, -weight_log2);
    ask[h] = high[h] > state.reference[h] + lazy_rescale;  // true of the first score seen
  }
  factor[0] = factor[1] = 1.0f;
  const bool raised = __any_sync(~0u, ask[0] || ask[1]);
  if (raised) raise_references(state, ask, high, factor);
  return raised;
}

/// Scores to weights of e4m3, in the order of A's registers.
template <int n>
__device__ __forceinline__ void weigh(const float (&s)[n], uint32_t (&weights)[n / 4], RowState& state,
                                      float scale_log2) {
  const float offset[2] = {offset_of(state.reference[0]), offset_of(state.reference[1])};
  float even[2] = {}, odd[2] = {};
#pragma unroll
  for (int j = 0; j < n / 8; ++j)  // 16 columns
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        x[e] = exp2_approx(fmaf(s[8 * j + e / 2 * 4 + 2 * h + e % 2], scale_log2, -offset[h]));
      even[h] += x[0];
      odd[h] += x[1];
      even[h] += x[2];
      odd[h] += x[3];
      weights[2 * j + h] = pair_e4m3(x[0], x[1]) | pair_e4m3(x[2], x[3]) << 16;
    }
  state.sum[0] += even[0] + odd[0];
  state.sum[1] += even[1] + odd[1];
}

/// Keys that a row does not see: -inf. A thread has four neighbouring keys of every 16, from `key` on.
template <int n>
__device__ __forceinline__ void mask(float (&s)[n], int32_t key, int32_t seen_low, int32_t seen_high) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t keys = max((h == 0 ? seen_low : seen_high) - key, 0), count = keys / 16 * 4 + min(keys % 16, 4);
    const uint32_t bits = count > 31 ? ~0u : (1u << count) - 1;
    static_assert(n / 2 <= 32);
#pragma unroll
    for (int j = 0; j < n / 4; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (!(bits & 1u << (2 * j + e))) s[4 * j + 2 * h + e] = -INFINITY;
  }
}

/// A math warpgroup: 64 query rows of every tile.
template <Fp8Tile tile, class Out>
struct Math {
  const Params& p;
  Shared<tile>& shared;
  const int group, thread;
  float o[tile.value / 2];
  float earlier[tile.whole_in_registers() ? tile.value / 2 : 1] = {};  // outputs of the tile's earlier chains
  RowState state;
  uint32_t t = 0;                               // tiles begun
  uint32_t scored = 0;                          // blocks of keys let go of; values of one less are added
  bool keys_came = false, values_came = false;  // of the next blocks, seen ahead of the wait
  int32_t n = 0;                                // block at hand
  float q_scale = 1.0f;                         // times scale_log2
  float k_scale = 1.0f;                         // of the block at hand, times q_scale
  float v_scale = 1.0f;                         // outputs are in units of it
  bool some = false;                            // shared.whole holds outputs of the tile's earlier chains
  float pending[2] = {1.0f, 1.0f};              // what those must be multiplied by

  __device__ __forceinline__ Math(const Params& params, Shared<tile>& memory, int warpgroup)
      : p(params), shared(memory), group(warpgroup), thread(threadIdx.x % 128) {}

  /// The description of tile number `of`, read as shared memory: a generic pointer to it would live in two registers.
  __device__ __forceinline__ TileWork work(uint32_t of) const {
    const uint32_t at = smem_address(&shared.work[of % tile_ring]);
    int32_t w[8];
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(at)
                 : "memory");
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4 + 16];"
                 : "=r"(w[4]), "=r"(w[5]), "=r"(w[6]), "=r"(w[7])
                 : "r"(at)
                 : "memory");
    return {w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]};
  }

  __device__ __forceinline__ int low() const {
    if constexpr (tile.cluster == 1) return tile.first_row(0, group);
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return tile.first_row(rank, group);
  }
  /// First of this thread's two rows, as a row of the tile; the other is 8 below.
  __device__ __forceinline__ int tile_row() const { return low() + thread / 32 * 16 + thread % 32 / 4; }

  __device__ __forceinline__ TileWork begin_tile() {
    const Slot<tile_ring> slot(t++);
    mbarrier_wait(smem_address(&shared.work_full[slot.index]), slot.parity);
    return work(t - 1);
  }
  /// Scales are read before the turn's barrier, which lies before their space is let go of.
  __device__ __forceinline__ void wait_queries() {
    mbarrier_wait(smem_address(&shared.q_full[group]), (t - 1) & 1);
    q_scale = shared.q_scale[group] * p.scale_log2;
  }
  /// The scale of the block's values.
  __device__ __forceinline__ float wait_keys() {
    const Slot<tile.stages> k(scored);
    if (!keys_came) mbarrier_wait(smem_address(&shared.k_full[k.index]), k.parity);
    const float2 scales = shared.scales[k.index];
    k_scale = scales.x * q_scale;
    return scales.y;
  }
  __device__ __forceinline__ void wait_values() {
    const Slot<tile.stages> v(scored - 1);
    if (!values_came) mbarrier_wait(smem_address(&shared.v_full[v.index]), v.parity);
  }
  /// In every block that loads into this space.
  static __device__ __forceinline__ void release(uint64_t& bar) {
#pragma unroll
    for (int rank = 0; rank < tile.cluster; ++rank) arrive_at<tile.cluster>(bar, rank);
  }
  /// Block n's scores are in registers: its keys' space is free, after a tile's last block (number 0) the queries' too.
  __device__ __forceinline__ void release_keys() {
    if (thread == 0) {
      release(shared.k_empty[scored % tile.stages]);
      if (n == 0) mbarrier_arrive(smem_address(&shared.q_empty[group]));
    }
    const Slot<tile.stages> k(++scored);
    keys_came = mbarrier_test(smem_address(&shared.k_full[k.index]), k.parity);
  }
  /// Of the block before the one whose scores were the last.
  __device__ __forceinline__ void release_values() {
    if (thread == 0) release(shared.v_empty[(scored - 2) % tile.stages]);
    const Slot<tile.stages> v(scored - 1);
    values_came = mbarrier_test(smem_address(&shared.v_full[v.index]), v.parity);
  }

  static __device__ __forceinline__ uint32_t uniform(uint32_t x) {
    return static_cast<uint32_t>(warp_uniform(static_cast<int>(x)));
  }

  __device__ __forceinline__ void issue_scores(float (&s)[tile.keys / 2]) {
    const uint64_t a = operand_64b(smem_address(shared.q[uniform(group)])),
                   b = operand_64b(smem_address(shared.k[uniform(scored % tile.stages)]));
#pragma unroll
    for (int i = 0; i < tile.dim() / panel; ++i)
#pragma unroll
      for (int j = 0; j < panel / 32; ++j)
        WgmmaFp8<tile.keys>::ss(s, operand_advance(a, i * sizeof(shared.q[0][0]) + 32 * j),
                                operand_advance(b, i * sizeof(shared.k[0][0]) + 32 * j), i + j > 0);
    wgmma_commit();
  }
  /// o (+)= weights times the block's values.
  __device__ __forceinline__ void issue_values(const uint32_t (&weights)[tile.keys / 8], bool add) {
    const uint32_t at = smem_address(shared.v[uniform((scored - 1) % tile.stages)]);
    const uint64_t b = tile.keys == 128 ? operand_128b(at) : operand_64b(at);
#pragma unroll
    for (int i = 0; i < tile.keys / 32; ++i)
      WgmmaFp8<tile.value>::rs(o, weights + 4 * i, operand_advance(b, 32 * i), i > 0 || add);
    wgmma_commit();
  }

  __device__ __forceinline__ void mask_block(float (&s)[tile.keys / 2]) {
    const TileWork w = work(t - 1);
    mask(s, n * tile.keys + thread % 4 * 4, min(w.keys, w.diagonal + tile_row()),
         min(w.keys, w.diagonal + tile_row() + 8));
  }
  template <int n>
  static __device__ __forceinline__ void multiply(float (&sums)[n], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < n; ++i) sums[i] *= factor[i / 2 % 2];
  }
  /// Outputs so far, and those of earlier chains.
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
    multiply(o, factor);
    if constexpr (tile.whole_in_registers()) multiply(earlier, factor);
    else pending[0] *= factor[0], pending[1] *= factor[1];
  }

  /// o += what the tile's earlier chains made.
  __device__ __forceinline__ void add_earlier() {
    if constexpr (tile.whole_in_registers()) {
#pragma unroll
      for (int i = 0; i < tile.value / 2; ++i) o[i] += earlier[i];
    } else if (some) {
#pragma unroll
      for (int j = 0; j < tile.value / 8; ++j) {
        const float4 x = shared.whole[group][j][thread];
        o[4 * j] = fmaf(x.x, pending[0], o[4 * j]);
        o[4 * j + 1] = fmaf(x.y, pending[0], o[4 * j + 1]);
        o[4 * j + 2] = fmaf(x.z, pending[1], o[4 * j + 2]);
        o[4 * j + 3] = fmaf(x.w, pending[1], o[4 * j + 3]);
      }
    }
  }
  /// Ends a chain: the next product's sums begin at 0.
  __device__ __forceinline__ void end_chain() {
    if constexpr (tile.whole_in_registers()) {
#pragma unroll
      for (int i = 0; i < tile.value / 2; ++i) earlier[i] += o[i];
    } else {
      add_earlier();
#pragma unroll
      for (int j = 0; j < tile.value / 8; ++j)
        shared.whole[group][j][thread] = float4{o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]};
      pending[0] = pending[1] = 1.0f;
      some = true;
    }
  }
  /// A tile's outputs are complete in o.
  __device__ __forceinline__ void end_chains() {
    add_earlier();
    if constexpr (tile.whole_in_registers()) {
#pragma unroll
      for (float& x : earlier) x = 0.0f;
    } else some = false;
  }

  /// Stores tile number `of`, merged with what is there when accumulating, and lets go of its description.
  __device__ __forceinline__ void finish(uint32_t of, const RowState& done, float unit) {
    end_chains();
    store_tile(of, done, unit);
    __syncwarp();
    if (thread % 32 == 0) arrive_at<tile.cluster>(shared.work_empty[of % tile_ring], 0);
  }
  __device__ __forceinline__ void store_tile(uint32_t of, const RowState& done, float unit) {
    const TileWork w = work(of);
    const int32_t rows = w.rows, head = w.head, begin = w.row;
    [[maybe_unused]] CodeRows codes;
    [[maybe_unused]] float factors[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = done.sum[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      int row = tile_row() + 8 * h;
      asm volatile("" : "+r"(row));
      const bool valid = row < rows;
      using Stored = std::conditional_t<std::is_same_v<Out, Codes>, float, Out>;
      Stored* const out = static_cast<Stored*>(p.out) + int64_t{begin + row} * p.out_token + head * p.out_head;
      const int64_t lse_at = int64_t{begin + row} * p.lse_token + head * p.lse_head;
      float lse = sum == 0.0f ? -INFINITY : done.reference[h] * 0.6931471805599453f + __logf(sum);  // NaN stays
      float take = sum == 0.0f ? 0.0f : __fdividef(unit, sum);
      if (p.accumulate) {
        float before = valid ? p.lse[lse_at] : -INFINITY;
        // A NaN lse beside a number is an empty part's.
        if (before == INFINITY || (before != before && load_pair(out).x == load_pair(out).x)) before = -INFINITY;
        const float high = offset_of(fmaxf(before, lse));
        const float part_before = __expf(before - high), part = __expf(lse - high), whole = part_before + part;
        const float share = whole == 0.0f ? 0.0f : __fdividef(1.0f, whole);
        merge_row(out, o, h, part_before * share, take * part * share);
        if (whole != 0.0f) lse = high + __logf(whole);
        take = 1.0f;
      }
      if (min(w.keys, w.diagonal + row) > shared.poisoned[of % tile_ring]) take = NAN;
      if constexpr (std::is_same_v<Out, Codes>) {
        if (w.last()) codes.row[h] = begin + row, codes.valid[h] = valid, factors[h] = take;
        else store_row(out, o, h, take, valid);
      } else store_row(out, o, h, take, valid);
      if (p.lse && valid && thread % 4 == 0) p.lse[lse_at] = lse;
    }
    if constexpr (std::is_same_v<Out, Codes>)
      if (w.last()) store_codes(p.codes, o, factors, codes, head);
  }

  /// The 16-bit kernel's overlapped schedule: the products of the next block's scores and of this block's values are
  /// issued together, in turns of two warpgroups; the softmax runs while the values' product and the other warpgroup's
  /// products keep the tensor cores busy.
  __device__ __forceinline__ void run() {
    float s[tile.keys / 2], factor[2];
    uint32_t weights[tile.keys / 8];
    const auto my_turn = [&] { barrier_sync(1 + group, 256); };
    const auto your_turn = [&] { barrier_arrive(2 - group, 256); };
    int32_t clear;  // blocks below this number are seen whole by all rows
    const auto next_tile = [&] {
      const TileWork w = begin_tile();
      clear = warp_uniform(min(w.keys, w.diagonal + low()) / tile.keys);
      n = warp_uniform(w.blocks - 1);
    };
    if (group == 1) your_turn();  // the first turn is warpgroup 0's
    next_tile();
    if (n < 0) return;

    // The very first scores.
    wait_queries();
    v_scale = wait_keys();
    my_turn();
    wgmma_pin(s);
    wgmma_fence();
    issue_scores(s);
    your_turn();
    wgmma_wait<0>();
    wgmma_pin(s);
    release_keys();
    if (n >= clear) mask_block(s);
    refer(s, state, factor, k_scale);
    weigh(s, weights, state, k_scale);

    bool first = true;  // of a chain
    while (true) {      // block n's values, and the next block's scores
      const bool last = n == 0, chained = (n & p.chain_mask) == 0;
      if (last) {
        next_tile();
        if (n < 0) break;
        wait_queries();
      } else --n;
      const float next_unit = wait_keys(), unit = v_scale;
      wait_values();
      my_turn();
      wgmma_pin(o);
      wgmma_pin(s);
      wgmma_pin(weights);
      wgmma_fence();
      issue_scores(s);
      issue_values(weights, !first);
      your_turn();
      wgmma_wait<1>();
      wgmma_pin(s);
      release_keys();
      const RowState done = state;
      if (last) state = RowState{};
      if (n >= clear) mask_block(s);
      const bool raised = refer(s, state, factor, k_scale);
      wgmma_wait<0>();
      wgmma_pin(o);
      wgmma_pin(weights);
      release_values();
      v_scale = next_unit;
      const bool other_unit = unit != next_unit;
      if (!last && (chained || raised || other_unit)) {
        if (other_unit) {
          const float change = __fdividef(unit, next_unit);
          factor[0] *= change;
          factor[1] *= change;
        }
        if (chained) end_chain();
        if (raised || other_unit) rescale(factor);
      }
      weigh(s, weights, state, k_scale);
      if (last) finish(t - 2, done, unit);
      first = last || chained;
    }
    // The last values.
    wait_values();
    my_turn();
    wgmma_pin(o);
    wgmma_pin(weights);
    wgmma_fence();
    issue_values(weights, !first);
    if (group == 0) your_turn();
    wgmma_wait<0>();
    wgmma_pin(o);
    finish(t - 2, state, v_scale);
  }
};

template <class Config, class Out>
__global__ void __launch_bounds__(Config::tile.threads, 1)
    attend_expanded_fp8_kernel(const __grid_constant__ Params p) {
  constexpr Fp8Tile tile = Config::tile;
  extern __shared__ __align__(1024) char storage[];  // a constant address: it takes no registers
  using Storage = Shared<tile>;
  Storage& shared = *reinterpret_cast<Storage*>(storage);
  if (threadIdx.x == 0) {
    if (smem_address(storage) % 1024 != 0) __trap();
    const auto init = [](auto& barriers, uint32_t arrivals) {
      for (uint64_t& b : barriers) mbarrier_init(smem_address(&b), arrivals);
    };
    init(shared.work_full, 1);
    // Every math warp, the warp that loads values and two that look at them; of the cluster's other blocks also the one
    // that loads keys.
    init(shared.work_empty, tile.cluster * (4 * tile.groups + 4) - 1);
    init(shared.q_full, 1);
    init(shared.q_empty, 1);
    init(shared.k_full, 1);
    init(shared.k_empty, tile.groups * tile.cluster);
    init(shared.v_full, 1);
    init(shared.v_empty, tile.groups * tile.cluster);
    init(shared.v_tail, 1);
    mbarrier_init_fence();
    tma_prefetch_map(p.q);
    tma_prefetch_map(p.k_nope);
    tma_prefetch_map(p.k_pe);
    tma_prefetch_map(p.v);
  }
  if constexpr (tile.cluster > 1) cluster_sync();
  else __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == tile.groups) {
    give_registers<tile.producer_registers>();
    const int warp = warp_uniform(threadIdx.x / 32) % 4;
    if (warp == 0) KeyProducer<tile>{p, shared}.run();
    else if (warp == 1) produce_values<tile>(p, shared);
    else watch_values<tile>(shared, warp - 2);
  } else {
    take_registers<tile.math_registers>();
    Math<tile, Out>(p, shared, warpgroup).run();
  }
  if constexpr (tile.cluster > 1) {  // the others' copies and arrivals reach into this block
    __syncwarp();
    cluster_sync();
  }
}

// ---- launch --------------------------------------------------------------------------------------------------------

constexpr const char* op = "attend_expanded of e4m3 (sm90)";

template <class D, class V>
void require(const char* name, const V& view, int64_t expected, const char* as) {
  const int64_t got = view.template extent<D>();
  if (got != expected)
    throw ShapeError(std::string(op) + ": " + name + " " + std::string(D::name) + " is " + std::to_string(got) + ", " +
                     as + " has " + std::to_string(expected));
}
template <class D, class V>
void require_dense(const char* name, const V& view) {
  if (view.template stride<D>() != 1)
    throw ShapeError(std::string(op) + ": " + name + " " + std::string(D::name) + " has stride " +
                     std::to_string(view.template stride<D>()) + ", it must be dense");
}
template <class V>
void require_e4m3(const char* name, const V& view) {
  if (view.dtype() != Dtype::fp8_e4m3)
    throw UnsupportedError(std::string(op) + ": " + name + " is " + std::string(to_string(view.dtype())) +
                           ", it must be fp8_e4m3");
}

void check_args(const AttendExpandedFp8Args& a) {
  const int64_t heads = a.q.extent<Head>(), keys = a.k_nope.extent<Key>(), tokens = a.q.extent<Token>();
  require_e4m3("q", a.q);
  require_e4m3("k_nope", a.k_nope);
  require_e4m3("k_pe", a.k_pe);
  require_e4m3("v", a.v);
  if (a.out.dtype() != Dtype::f32 && a.out.dtype() != Dtype::bf16)
    throw UnsupportedError(std::string(op) + ": out is " + std::string(to_string(a.out.dtype())) +
                           ", it must be f32 or bf16");
  require<Head>("k_nope", a.k_nope, heads, "q");
  require<Head>("v", a.v, heads, "q");
  require<Head>("out", a.out, heads, "q");
  require<Token>("out", a.out, tokens, "q");
  require<Key>("k_pe", a.k_pe, keys, "k_nope");
  require<Key>("v", a.v, keys, "k_nope");
  require<Value>("out", a.out, a.v.extent<Value>(), "v");
  require<QueryKey>("q", a.q, a.k_nope.extent<Nope>() + a.k_pe.extent<Rope>(), "k_nope Nope + k_pe Rope");
  require_dense<QueryKey>("q", a.q);
  require_dense<Nope>("k_nope", a.k_nope);
  require_dense<Rope>("k_pe", a.k_pe);
  if (keys > 1) require_dense<Key>("v", a.v);
  require_dense<Value>("out", a.out);
  if (a.lse) {
    require<Token>("lse", a.lse, tokens, "q");
    require<Head>("lse", a.lse, heads, "q");
  } else if (a.accumulate) {
    throw ShapeError(std::string(op) + ": accumulate needs lse");
  }
  const auto out_bytes = [&](int64_t stride) { return stride * static_cast<int64_t>(size_of(a.out.dtype())); };
  if ((reinterpret_cast<uintptr_t>(a.out.data()) | static_cast<uint64_t>(out_bytes(a.out.stride<Token>())) |
       static_cast<uint64_t>(out_bytes(a.out.stride<Head>()))) %
          16 !=
      0)
    throw ShapeError(std::string(op) + ": out rows are not aligned to 16 bytes");
  if (a.quantized) check_codes(op, a.quantized, a.out.dtype(), tokens, heads, a.v.extent<Value>());
  if (!(a.scale > 0)) throw ShapeError(std::string(op) + ": scale is " + std::to_string(a.scale) + ", allowed above 0");
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  if (a.item_count < 0 || a.item_count > most / 2)
    throw ShapeError(std::string(op) + ": item_count is " + std::to_string(a.item_count));
  if (a.most_queries < 0 || a.most_queries > tokens)
    throw ShapeError(std::string(op) + ": most_queries is " + std::to_string(a.most_queries) + ", q Token is " +
                     std::to_string(tokens));
  if (tokens > most / 4 || keys > most / 4 || (tokens / 64 + a.item_count) * heads > most / 2 ||
      heads * a.k_nope.stride<Head>() > most)
    throw ShapeError(std::string(op) + ": " + std::to_string(tokens) + " tokens, " + std::to_string(keys) + " keys, " +
                     std::to_string(heads) + " heads, " + std::to_string(a.item_count) +
                     " items are more than one launch can number");
  if (a.item_count > 0 && tokens > 0 && heads > 0 && (!a.items || !a.workspace))
    throw ShapeError(std::string(op) + ": " + (a.items ? "workspace" : "items") + " is null");
}

/// A map of bytes; extents innermost first, strides those of the dimensions after the innermost.
template <size_t n>
CUtensorMap byte_map(const char* name, const void* base, const std::array<int64_t, n>& extents,
                     const std::array<int64_t, n - 1>& strides, const std::array<int, n>& box, Swizzle swizzle) {
  const auto aligned = [&](int64_t bytes, const char* what) {
    if (bytes <= 0 || bytes % 16 != 0)
      throw ShapeError(std::string(op) + ": " + name + " " + what + " is " + std::to_string(bytes) +
                       " bytes, the copy engine needs a positive multiple of 16");
  };
  aligned(static_cast<int64_t>(reinterpret_cast<uintptr_t>(base)), "address");
  std::array<uint64_t, n> e{};
  std::array<uint64_t, n - 1> s{};
  std::array<uint32_t, n> b{};
  for (size_t i = 0; i < n; ++i) e[i] = static_cast<uint64_t>(extents[i]), b[i] = static_cast<uint32_t>(box[i]);
  for (size_t i = 0; i + 1 < n; ++i) {
    aligned(strides[i], "stride");
    s[i] = static_cast<uint64_t>(strides[i]);
  }
  return tensor_map(op, name, MapType::u8, base, e, s, b, swizzle);
}

template <class Config, class Out>
void run(cudaStream_t stream, const AttendExpandedFp8Args& a) {
  constexpr Fp8Tile tile = Config::tile;
  const int64_t heads = a.q.extent<Head>(), tokens = a.q.extent<Token>(), keys = a.k_nope.extent<Key>();
  Params p;
  p.q = byte_map<3>("q", a.q.data(), {tile.dim(), heads, tokens}, {a.q.stride<Head>(), a.q.stride<Token>()},
                    {panel, 1, group_rows}, Swizzle::b64);
  constexpr int share = tile.keys / tile.cluster;
  // A box's rows: 2 neighbours (e), 4 of those 4 rows apart (t), the 2 of them 2 rows apart (b), and 16 further on (a).
  const auto key_map = [&](const char* name, const void* data, int64_t width, int64_t stride) {
    return byte_map<5>(name, data, {width, keys, 4, 2, share / 16}, {stride, 4 * stride, 2 * stride, 16 * stride},
                       {panel, 2, 4, 2, share / 16}, Swizzle::b64);
  };
  const auto pair_map = [&](const char* name, const void* data, int64_t width, int64_t stride) {
    return byte_map<2>(name, data, {width, keys}, {stride}, {panel, 2}, Swizzle::b64);
  };
  constexpr Swizzle v_swizzle = tile.keys == 128 ? Swizzle::b128 : Swizzle::b64;
  constexpr std::array<int, 3> v_box{tile.keys, tile.value / tile.cluster, 1};
  if (keys > 0) {
    const int64_t width = (heads - 1) * a.k_nope.stride<Head>() + tile.nope;
    p.k_nope = key_map("k_nope", a.k_nope.data(), width, a.k_nope.stride<Key>());
    p.k_nope_pair = pair_map("k_nope", a.k_nope.data(), width, a.k_nope.stride<Key>());
    p.k_pe = key_map("k_pe", a.k_pe.data(), tile.rope, a.k_pe.stride<Key>());
    p.k_pe_pair = pair_map("k_pe", a.k_pe.data(), tile.rope, a.k_pe.stride<Key>());
    p.v = byte_map<3>("v", a.v.data(), {keys, tile.value, heads}, {a.v.stride<Value>(), a.v.stride<Head>()}, v_box,
                      v_swizzle);
  } else {  // maps cannot be empty: one row of something there is, which every row of the result masks
    p.k_nope = p.k_nope_pair = p.k_pe = p.k_pe_pair =
        byte_map<2>("q", a.q.data(), {panel, 1}, {panel}, {panel, 2}, Swizzle::b64);
    p.v = byte_map<3>("q", a.q.data(), {panel, 1, 1}, {panel, panel}, v_box, v_swizzle);
  }
  p.key_rows = static_cast<int32_t>(keys);
  p.k_nope_head = a.k_nope.stride<Head>();
  const auto scales = [](const View<const float, Group, Head>& x) {
    return x ? Scales{x.data(), x.stride<Group>(), x.stride<Head>()} : Scales{};
  };
  p.q_scale = scales(a.q_scale);
  p.k_scale = scales(a.k_scale);
  p.v_scale = scales(a.v_scale);
  p.scale_rows = a.scale_rows;
  p.items = a.items;
  p.out = a.out.data();
  p.lse = a.lse.data();
  p.out_token = a.out.stride<Token>();
  p.out_head = a.out.stride<Head>();
  p.lse_token = a.lse.stride<Token>();
  p.lse_head = a.lse.stride<Head>();
  p.items_count = static_cast<int32_t>(a.item_count);
  p.heads = static_cast<int32_t>(heads);
  p.scale_log2 = a.scale * 1.4426950408889634f;
  p.accumulate = a.accumulate;
  if constexpr (std::is_same_v<Out, Codes>) p.codes = output_codes(a.quantized);
  static_assert(std::has_single_bit(unsigned{chain_keys / tile.keys}));
  p.chain_mask = a.sums == ops::ExpandedSums::raw ? std::numeric_limits<int32_t>::max() : chain_keys / tile.keys - 1;
  const int multiprocessors = cuda::multiprocessors(op);
  p.run_keys = run_keys_of(tile.rows(), multiprocessors, tokens, heads);
  p.counters = static_cast<int32_t*>(a.workspace);

  constexpr size_t shared_bytes = sizeof(Shared<tile>);
  static_assert(shared_bytes <= 227 * 1024);
  const int64_t clusters =
      clusters_of(tile.rows(), tile.cluster, multiprocessors, tokens, a.most_queries, a.item_count, heads);
  cuda::launch(
      &attend_expanded_fp8_kernel<Config, Out>,
      {.grid = static_cast<unsigned>(clusters * tile.cluster),
       .block = tile.threads,
       .shared_bytes = shared_bytes,
       .cluster = tile.cluster},
      stream, op, "launch",
      "tokens " + std::to_string(tokens) + ", keys " + std::to_string(keys) + ", heads " + std::to_string(heads), p);
}

template <class Out>
void dispatch(cudaStream_t stream, const AttendExpandedFp8Args& a) {
  const int64_t nope = a.k_nope.extent<Nope>(), rope = a.k_pe.extent<Rope>(), value = a.v.extent<Value>();
  const ExpandedTile tile = attend_expanded_tile(a);
  if (tile == ExpandedTile::rows_192)
    throw UnsupportedError(std::string(op) + ": tiles of 192 rows; this kernel has 128 and 256");
  const bool pairs = tile == ExpandedTile::rows_256;
  if (nope == 128 && rope == 64 && value == 128)
    return pairs ? run<Deepseek256, Out>(stream, a) : run<Deepseek128, Out>(stream, a);
  if (nope == 192 && rope == 64 && value == 256)
    return pairs ? run<Glm256, Out>(stream, a) : run<Glm128, Out>(stream, a);
  throw UnsupportedError(std::string(op) + ": Nope/Rope/Value " + std::to_string(nope) + "/" + std::to_string(rope) +
                         "/" + std::to_string(value) + "; this kernel has 128/64/128 and 192/64/256");
}

}  // namespace

ExpandedTile attend_expanded_tile(const AttendExpandedFp8Args& args) {
  if (args.tile != ExpandedTile::automatic || args.item_count <= 0) return args.tile;
  return suitable_tile(op, args.item_count, args.q.extent<Token>(), args.k_nope.extent<Key>(), args.q.extent<Head>());
}

void attend_expanded(cudaStream_t stream, const AttendExpandedFp8Args& args) {
  check_args(args);
  require_hopper(op);
  if (args.item_count == 0 || args.q.extent<Token>() == 0 || args.q.extent<Head>() == 0) return;
  if (args.quantized) dispatch<Codes>(stream, args);
  else if (args.out.dtype() == Dtype::f32) dispatch<float>(stream, args);
  else dispatch<__nv_bfloat16>(stream, args);
}

}  // namespace mla::cuda::sm90
