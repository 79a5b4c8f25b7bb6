// The kernel of 16-bit operands: its configurations, roles and memory. README.md has the roofline, the schedule and the
// budgets.
#pragma once

#include <climits>
#include <cmath>
#include <cstdint>

#include "backend/cuda/core/cluster.cuh"
#include "backend/cuda/core/mbarrier.cuh"
#include "backend/cuda/core/tma.cuh"
#include "backend/cuda/core/warpgroup.cuh"
#include "backend/cuda/core/wgmma.cuh"
#include "backend/cuda/sm90/attend_expanded/attend_expanded.hpp"
#include "backend/cuda/sm90/attend_expanded/codes.cuh"
#include "backend/cuda/sm90/attend_expanded/rows.cuh"
#include "backend/cuda/sm90/attend_expanded/tiles.cuh"

namespace mla::cuda::sm90::expanded {

// ---- config --------------------------------------------------------------------------------------------------------

struct TileConfig {
  int nope, rope, value;                   ///< head dimensions
  int cluster;                             ///< blocks that share keys and values: one tile between them
  int groups;                              ///< math warpgroups of a block, of 64 query rows each
  int keys, key_stages;                    ///< keys of a block; blocks of keys in flight
  int value_keys, value_stages;            ///< values arrive in parts of a block
  bool weights_ahead;                      ///< registers for two blocks' weights: written while the others are used
  int math_registers, producer_registers;  ///< a thread; together what the block starts with, or a warpgroup waits
                                           ///< forever for its share
  constexpr int dim() const { return nope + rope; }
  constexpr int rows() const { return 64 * groups * cluster; }
  /// First row of a warpgroup in its tile: the blocks of a cluster take turns, so that they see about the same keys.
  constexpr int first_row(int rank, int group) const { return 64 * (group * cluster + rank); }
  constexpr int threads() const { return 128 * (1 + groups); }
  constexpr int value_parts() const { return keys / value_keys; }
};

// The kernel's template argument is one of these types: nvcc 13.0 writes a launch stub that does not compile when it is
// a TileConfig itself.
struct Deepseek128 {
  static constexpr TileConfig tile{.nope = 128,
                                   .rope = 64,
                                   .value = 128,
                                   .cluster = 1,
                                   .groups = 2,
                                   .keys = 128,
                                   .key_stages = 2,
                                   .value_keys = 128,
                                   .value_stages = 2,
                                   .weights_ahead = true,
                                   .math_registers = 232,
                                   .producer_registers = 40};
};
struct Deepseek256 {
  static constexpr TileConfig tile{.nope = 128,
                                   .rope = 64,
                                   .value = 128,
                                   .cluster = 2,
                                   .groups = 2,
                                   .keys = 128,
                                   .key_stages = 2,
                                   .value_keys = 128,
                                   .value_stages = 2,
                                   .weights_ahead = true,
                                   .math_registers = 232,
                                   .producer_registers = 40};
};
struct Deepseek192 {
  static constexpr TileConfig tile{.nope = 128,
                                   .rope = 64,
                                   .value = 128,
                                   .cluster = 1,
                                   .groups = 3,
                                   .keys = 128,
                                   .key_stages = 2,
                                   .value_keys = 64,
                                   .value_stages = 3,
                                   .weights_ahead = false,
                                   .math_registers = 160,
                                   .producer_registers = 32};
};
struct Glm128 {
  static constexpr TileConfig tile{.nope = 192,
                                   .rope = 64,
                                   .value = 256,
                                   .cluster = 1,
                                   .groups = 2,
                                   .keys = 80,
                                   .key_stages = 2,
                                   .value_keys = 80,
                                   .value_stages = 2,
                                   .weights_ahead = false,
                                   .math_registers = 232,
                                   .producer_registers = 40};
};
struct Glm256 {
  static constexpr TileConfig tile{.nope = 192,
                                   .rope = 64,
                                   .value = 256,
                                   .cluster = 2,
                                   .groups = 2,
                                   .keys = 80,
                                   .key_stages = 2,
                                   .value_keys = 80,
                                   .value_stages = 2,
                                   .weights_ahead = false,
                                   .math_registers = 232,
                                   .producer_registers = 40};
};

constexpr int group_rows = 64;        // query rows of a math warpgroup: the height of wgmma
constexpr int panel = 64;             // elements of a 128-byte row of shared memory
constexpr int watch_barrier = 7;      // of the two warps that look at values; math warpgroups have 1 to 3
constexpr float lazy_rescale = 8.0f;  // a row's reference maximum is kept until a score exceeds it by 2^8
constexpr float most_sum = 1024.0f;   // or until a thread's exponentials of a block sum to more

struct Params : TileSource {
  CUtensorMap q, k_nope, k_pe, v;
  void* out;
  float* lse;                                        // may be null
  int64_t out_token, out_head, lse_token, lse_head;  // strides in elements
  float scale, scale_log2;
  bool accumulate;
  int32_t nope_heads, rope_heads, value_heads;  // -1: each head has its own k_nope, k_pe, values; 0: they share one
  OutputCodes codes;                            // of outputs that are Codes
  // Of calls with masked items: words of a query row, and from one row to the next. `columns` has them as threads hold
  // columns, four words for each block of an item's keys (masked.cu).
  const uint32_t *mask, *columns;
  int64_t mask_row;
  int32_t columns_row;
};

// ---- shared memory -------------------------------------------------------------------------------------------------

template <TileConfig tile, class Element>
struct alignas(1024) Shared {
  Element q[tile.groups][tile.dim() / panel][group_rows][panel];
  Element k[tile.key_stages][tile.dim() / panel][tile.keys][panel];
  Element v[tile.value_stages][tile.value / panel][tile.value_keys][panel];
  TileWork work[tile_ring];
  uint64_t work_full[tile_ring], work_empty[tile_ring];
  uint64_t q_full[tile.groups], q_empty[tile.groups];
  uint64_t k_full[tile.key_stages], k_empty[tile.key_stages];
  uint64_t v_full[tile.value_stages], v_empty[tile.value_stages];
  uint64_t v_tail[tile.value_stages];  // a part of values that is to be looked at has landed
  int32_t poisoned[tile_ring];  // of a tile: the first key whose value is no number, hidden from some of its rows
  uint32_t poisoned_rows[tile_ring][tile.rows() / 32];  // of a masked one: its rows that see such a key, as bits
  bool watch_masked;                                    // some value of a masked item is no number
};

// ---- roles ---------------------------------------------------------------------------------------------------------

/// Warp 0 of the producer: hands out tiles, loads queries and keys.
template <TileConfig tile, class Element>
__device__ void produce_keys(const Params& p, Shared<tile, Element>& shared) {
  const int lane = threadIdx.x % 32, rank = rank_in_cluster<tile.cluster>();
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
        const uint32_t to = map_to_cta(smem_address(&shared.work[slot.index]), lane), bar = map_to_cta(announced, lane);
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
    if (lane == 0) {
      for (int n = work.blocks - 1; n >= 0; --n, ++blocks) {
        const Slot<tile.key_stages> k(blocks);
        const uint32_t full = smem_address(&shared.k_full[k.index]);
        mbarrier_wait(smem_address(&shared.k_empty[k.index]), k.parity ^ 1);
        mbarrier_arrive_expect(full, sizeof(shared.k[0]));
        const int32_t mine = rank * (tile.keys / tile.cluster), row = work.key + n * tile.keys + mine;
#pragma unroll
        for (int d = 0; d < tile.nope / panel; ++d)
          load_shared<tile.cluster>(smem_address(shared.k[k.index][d][mine]), p.k_nope, full, d * panel,
                                    work.head & p.nope_heads, row);
#pragma unroll
        for (int d = 0; d < tile.rope / panel; ++d)
          load_shared<tile.cluster>(smem_address(shared.k[k.index][tile.nope / panel + d][mine]), p.k_pe, full,
                                    d * panel, work.head & p.rope_heads, row);
        if (n != work.blocks - 1) continue;
        // After the first block of keys, whose stage is free sooner than the queries' space.
        for (int g = 0; g < tile.groups; ++g) {
          const uint32_t landed = smem_address(&shared.q_full[g]);
          mbarrier_wait(smem_address(&shared.q_empty[g]), (t & 1) ^ 1);
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
  }
  // Every drawer has its last number before it reports, so the last one to report may rewind the counters for the next
  // launch.
  if (rank == 0 && lane == 0) {
    __threadfence();
    if (atomicAdd(&p.counters[1], 1) == static_cast<int32_t>(gridDim.x / tile.cluster) - 1) {
      p.counters[0] = 0;
      p.counters[1] = 0;
      p.counters[2] = 0;
    }
  }
}

/// Keys of a part of values that the tile's first row sees, and keys that there are. 0 times NaN would reach the sums,
/// so a part is watched that has values hidden from some of the tile's rows, or rows past the item's end.
template <TileConfig tile>
struct ValuePart {
  int32_t first, seen, valid;
  __device__ ValuePart(const TileWork& work, int n, int part, bool watch_masked)
      : first(n * tile.keys + part * tile.value_keys) {
    valid = min(max(work.keys - first, 0), tile.value_keys);
    seen = min(max(work.diagonal - first, 0), valid);
    if (work.mask >= 0) seen = watch_masked ? 0 : valid;  // numbers all of them: nothing to look at
  }
  __device__ bool watched() const { return seen < tile.value_keys; }
};

/// Warp 1 of the producer: loads values.
template <TileConfig tile, class Element>
__device__ void produce_values(const Params& p, Shared<tile, Element>& shared) {
  const int lane = threadIdx.x % 32, rank = rank_in_cluster<tile.cluster>();
  constexpr int panels = tile.value / panel / tile.cluster;  // that this block loads
  uint32_t parts = 0;
  for (uint32_t t = 0;; ++t) {
    const Slot<tile_ring> slot(t);
    mbarrier_wait(smem_address(&shared.work_full[slot.index]), slot.parity);
    const TileWork work = shared.work[slot.index];
    if (lane == 0) {
      shared.poisoned[slot.index] = INT_MAX;
#pragma unroll
      for (uint32_t& rows : shared.poisoned_rows[slot.index]) rows = 0;
    }
    __syncwarp();
    if (lane == 0) arrive_at<tile.cluster>(shared.work_empty[slot.index], 0);
    if (work.blocks == 0) return;
    if (lane != 0) continue;
    for (int n = work.blocks - 1; n >= 0; --n)
      for (int part = 0; part < tile.value_parts(); ++part, ++parts) {
        const Slot<tile.value_stages> v(parts);
        const ValuePart<tile> values(work, n, part, shared.watch_masked);
        const uint32_t full = smem_address(&shared.v_full[v.index]), tail = smem_address(&shared.v_tail[v.index]),
                       landed = values.watched() ? tail : full;
        mbarrier_wait(smem_address(&shared.v_empty[v.index]), v.parity ^ 1);
        mbarrier_arrive_expect(landed, sizeof(shared.v[0]));
#pragma unroll
        for (int i = 0; i < panels; ++i) {
          const int d = rank * panels + i;
          load_shared<tile.cluster>(smem_address(shared.v[v.index][d]), p.v, landed, d * panel,
                                    work.head & p.value_heads, work.key + values.first);
        }
      }
  }
}

/// Infinities and NaN of a row's 16 bytes become zeros; were there any?
template <class Element>
__device__ __forceinline__ bool keep_numbers(uint4& at) {
  constexpr uint32_t exponent = std::is_same_v<Element, __nv_bfloat16> ? 0x7f80 : 0x7c00;
  uint32_t words[4] = {at.x, at.y, at.z, at.w};
  bool found = false;
#pragma unroll
  for (uint32_t& word : words) {
    if ((word & exponent) == exponent) word &= 0xffff0000u, found = true;
    if ((word & exponent << 16) == exponent << 16) word &= 0xffffu, found = true;
  }
  if (found) at = {words[0], words[1], words[2], words[3]};
  return found;
}

/// Whether 16 bytes hold an infinity or NaN: bit 15 or 31, where adding one to an exponent of ones arrives.
template <class Element>
__device__ __forceinline__ uint32_t no_numbers(uint4 x) {
  constexpr uint32_t exponents = std::is_same_v<Element, __nv_bfloat16> ? 0x7f807f80 : 0x7c007c00,
                     one = exponents & ~(exponents << 1);
  return ((x.x & exponents) + one) | ((x.y & exponents) + one) | ((x.z & exponents) + one) | ((x.w & exponents) + one);
}

/// A key of a masked tile has a value that is no number: notes the rows that see it.
template <TileConfig tile, class Element>
__device__ void poison_rows(const Params& p, Shared<tile, Element>& shared, uint32_t slot, const TileWork& work,
                            int32_t key) {
  const int32_t column = work.mask + key;
  for (int32_t r = max(key + 1 - work.diagonal, 0); r < work.rows; ++r)
    if (p.mask[int64_t{work.row + r} * p.mask_row + column / 32] >> column % 32 & 1)
      atomicOr(&shared.poisoned_rows[slot][r / 32], 1u << r % 32);
}

/// Warps 2 and 3 of the producer: look at the watched parts. Rows past the item's end become zeros, and so does what is
/// no number of keys that some of the tile's rows do not see. Those that see them are told (poisoned).
template <TileConfig tile, class Element>
__device__ void watch_values(const Params& p, Shared<tile, Element>& shared, int watcher) {
  constexpr int watchers = 2, row_chunks = panel * sizeof(Element) / 16;
  const int lane = threadIdx.x % 32;
  uint32_t before = 0, tails = 0;  // parts of earlier tiles; tails: a parity bit for each stage
  for (uint32_t t = 0;; ++t) {
    const Slot<tile_ring> slot(t);
    mbarrier_wait(smem_address(&shared.work_full[slot.index]), slot.parity);
    const TileWork work = shared.work[slot.index];
    __syncwarp();
    if (lane == 0) arrive_at<tile.cluster>(shared.work_empty[slot.index], 0);
    if (work.blocks == 0) return;
    int32_t seen_by_all = min(work.diagonal, work.keys);
    if (work.mask >= 0) seen_by_all = shared.watch_masked ? 0 : work.keys;
    for (int n = work.blocks - 1; n >= 0 && seen_by_all < (n + 1) * tile.keys; --n)
      for (int part = 0; part < tile.value_parts(); ++part) {
        const ValuePart<tile> values(work, n, part, shared.watch_masked);
        if (!values.watched()) continue;
        const Slot<tile.value_stages> v(before + (work.blocks - 1 - n) * tile.value_parts() + part);
        mbarrier_wait(smem_address(&shared.v_tail[v.index]), tails >> v.index & 1);
        tails ^= 1u << v.index;
        uint32_t found = 0;
        const int begin = values.seen * row_chunks + watcher * 32 + lane, end = values.valid * row_chunks;
        for (int d = 0; d < tile.value / panel; ++d) {
          uint4* const rows = reinterpret_cast<uint4*>(shared.v[v.index][d]);
#pragma unroll 4
          for (int i = begin; i < end; i += watchers * 32) found |= no_numbers<Element>(rows[i]);
          for (int i = end + watcher * 32 + lane; i < tile.value_keys * row_chunks; i += watchers * 32)
            rows[i] = uint4{};
        }
        if (found & 0x80008000u) {
          int32_t bad = INT_MAX;
          for (int d = 0; d < tile.value / panel; ++d) {
            uint4* const rows = reinterpret_cast<uint4*>(shared.v[v.index][d]);
#pragma unroll 1
            for (int i = begin; i < end; i += watchers * 32) {
              if (!keep_numbers<Element>(rows[i])) continue;
              const int32_t key = values.first + i / row_chunks;
              if (work.mask >= 0) poison_rows(p, shared, slot.index, work, key);
              else bad = min(bad, key);
            }
          }
          atomicMin(&shared.poisoned[slot.index], bad);
        }
        fence_async_proxy();
        barrier_sync(watch_barrier, watchers * 32);  // both have looked
        if (watcher == 0 && lane == 0) mbarrier_arrive(smem_address(&shared.v_full[v.index]));
      }
    before += work.blocks * tile.value_parts();
  }
}

/// Scores to exponentials, in place. Whether outputs so far must be multiplied by `factor`; a whole warp decides alike.
template <int n>
__device__ __forceinline__ bool exponentiate(float (&s)[n], RowState& state, float (&factor)[2], float scale_log2) {
  float high[2];
  bool ask[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    high[h] = row_maximum(s, h) * scale_log2;
    ask[h] = high[h] > state.reference[h] + lazy_rescale;  // true of the first score seen
  }
  const bool raised = __any_sync(~0u, ask[0] || ask[1]);
  if (raised) raise_references(state, ask, high, factor);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float offset = offset_of(state.reference[h]);
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
      float& a = s[4 * j + 2 * h];
      float& b = s[4 * j + 2 * h + 1];
      a = exp2_approx(fmaf(a, scale_log2, -offset));
      b = exp2_approx(fmaf(b, scale_log2, -offset));
      even += a;
      odd += b;
    }
    state.sum[h] += even + odd;
  }
  return raised;
}

/// The same without looking for the maximum: exponentials from the reference at hand, and once more where a thread's
/// sum shows that it is too low. The scores stay as they are.
template <class Element, int n>
__device__ __forceinline__ bool exponentiate_ahead(const float (&s)[n], uint32_t (&weights)[n / 2], RowState& state,
                                                   float (&factor)[2], float scale_log2) {
  float sum[2];
  const auto attempt = [&] {
    float even[2] = {}, odd[2] = {};
    const float offset[2] = {offset_of(state.reference[0]), offset_of(state.reference[1])};
#pragma unroll
    for (int j = 0; j < n / 4; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float a = exp2_approx(fmaf(s[4 * j + 2 * h], scale_log2, -offset[h])),
                    b = exp2_approx(fmaf(s[4 * j + 2 * h + 1], scale_log2, -offset[h]));
        even[h] += a;
        odd[h] += b;
        weights[2 * j + h] = packed<Element>(a, b);
      }
    sum[0] = even[0] + odd[0];
    sum[1] = even[1] + odd[1];
  };
  bool ask[2] = {true, true};
  if (!__all_sync(~0u,
                  state.reference[0] == -INFINITY && state.reference[1] == -INFINITY)) {  // not a tile's first block
    attempt();
#pragma unroll
    for (int h = 0; h < 2; ++h) ask[h] = sum[h] > most_sum || state.reference[h] == -INFINITY;
  }
  const bool raised = __any_sync(~0u, ask[0] || ask[1]);
  if (raised) {
    const float high[2] = {row_maximum(s, 0) * scale_log2, row_maximum(s, 1) * scale_log2};
    raise_references(state, ask, high, factor);
    attempt();
  }
  state.sum[0] += sum[0];
  state.sum[1] += sum[1];
  return raised;
}

/// A thread holds columns 8 j + {0, 1} from `column` on of each of its rows, here as bits of a word: those below
/// `seen`.
__device__ __forceinline__ uint32_t columns_below(int32_t seen, int32_t column) {
  const int32_t columns = max(seen - column, 0), count = columns / 8 * 2 + min(columns % 8, 2);
  return count > 31 ? ~0u : (1u << count) - 1;
}
/// Columns that are not among a row's bits become -inf.
template <int n>
__device__ __forceinline__ void mask(float (&s)[n], const uint32_t (&bits)[2]) {
  static_assert(n / 2 <= 32);
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int j = 0; j < n / 4; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (!(bits[h] & 1u << (2 * j + e))) s[4 * j + 2 * h + e] = -INFINITY;
}

/// A math warpgroup: 64 query rows of every tile. Masked: of calls with masked items. Out: the outputs' type; not
/// chosen at run time, for a kernel should fit the 128 KB of instructions that a multiprocessor holds, and it has this
/// code several times.
template <TileConfig tile, class Element, class Out, bool masked>
struct Math {
  const Params& p;
  Shared<tile, Element>& shared;
  const int group, thread;
  float o[tile.value / 2];
  RowState state;
  uint32_t t = 0;       // tiles begun
  uint32_t blocks = 0;  // blocks of keys let go of
  uint32_t parts = 0;   // parts of values let go of
  int32_t n = 0;        // block at hand

  __device__ __forceinline__ Math(const Params& params, Shared<tile, Element>& memory, int warpgroup)
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
    int32_t mask = -1;
    if constexpr (masked) asm volatile("ld.shared.s32 %0, [%1 + 32];" : "=r"(mask) : "r"(at) : "memory");
    return {w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], mask};
  }

  /// This warpgroup's first row in a tile. Asked for where it is needed: a register for it would be one too many.
  __device__ __forceinline__ int low() const {
    if constexpr (tile.cluster == 1) return tile.first_row(0, group);
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return tile.first_row(rank, group);
  }
  /// First of this thread's two rows, as a row of the tile; the other is 8 below.
  __device__ __forceinline__ int tile_row() const { return low() + thread / 32 * 16 + thread % 32 / 4; }

  /// Waits for the next tile.
  __device__ __forceinline__ TileWork begin_tile() {
    const Slot<tile_ring> slot(t++);
    mbarrier_wait(smem_address(&shared.work_full[slot.index]), slot.parity);
    return work(t - 1);
  }

  __device__ __forceinline__ void wait_queries() { mbarrier_wait(smem_address(&shared.q_full[group]), (t - 1) & 1); }
  __device__ __forceinline__ void wait_keys() {
    const Slot<tile.key_stages> k(blocks);
    mbarrier_wait(smem_address(&shared.k_full[k.index]), k.parity);
  }
  __device__ __forceinline__ void wait_values(int part) {
    const Slot<tile.value_stages> v(parts + part);
    mbarrier_wait(smem_address(&shared.v_full[v.index]), v.parity);
  }
  /// In every block that loads into this space.
  static __device__ __forceinline__ void release(uint64_t& bar) {
#pragma unroll
    for (int rank = 0; rank < tile.cluster; ++rank) arrive_at<tile.cluster>(bar, rank);
  }
  /// Block n's scores are in registers, or not wanted: its keys' space is free, after a tile's last block (number 0)
  /// the queries' too.
  __device__ __forceinline__ void release_keys() {
    if (thread == 0) {
      release(shared.k_empty[blocks % tile.key_stages]);
      if (n == 0) mbarrier_arrive(smem_address(&shared.q_empty[group]));
    }
    ++blocks;
  }
  __device__ __forceinline__ void release_values() {
    if (thread == 0) release(shared.v_empty[parts % tile.value_stages]);
    ++parts;
  }

  /// Descriptors live in uniform registers. The compiler does not see that the counts are uniform, and would otherwise
  /// move every descriptor over, two instructions and their latency in front of each product.
  static __device__ __forceinline__ uint32_t uniform(uint32_t x) {
    return static_cast<uint32_t>(warp_uniform(static_cast<int>(x)));
  }

  /// Scores of the block's first 2 n keys.
  template <int n>
  __device__ __forceinline__ void issue_scores(float (&s)[n]) {
    using Product = Wgmma<2 * n, Element>;
    const uint64_t a = operand_128b(smem_address(shared.q[uniform(group)])),
                   b = operand_128b(smem_address(shared.k[uniform(blocks % tile.key_stages)]));
#pragma unroll
    for (int i = 0; i < tile.dim() / panel; ++i)
#pragma unroll
      for (int j = 0; j < panel / 16; ++j)
        Product::template ss<>(s, operand_advance(a, i * sizeof(shared.q[0][0]) + 32 * j),
                               operand_advance(b, i * sizeof(shared.k[0][0]) + 32 * j), i + j > 0);
    wgmma_commit();
  }
  /// o (+)= weights times one part of the block's values.
  template <int n>
  __device__ __forceinline__ void issue_values(const uint32_t (&weights)[n], int part, bool add) {
    using Product = Wgmma<tile.value, Element>;
    const uint64_t b =
        operand_128b(smem_address(shared.v[uniform((parts + part) % tile.value_stages)]), 1024, sizeof(shared.v[0][0]));
#pragma unroll
    for (int i = 0; i < tile.value_keys / 16; ++i)
      Product::template rs<Major::mn>(o, weights + 4 * (part * tile.value_keys / 16 + i), operand_advance(b, 2048 * i),
                                      i > 0 || add);
    wgmma_commit();
  }

  /// Where the words of this thread's first row begin, of a masked item; else below 0.
  __device__ __forceinline__ int32_t masks_of(const TileWork& w) const {
    if (w.mask < 0 || w.keys == 0) return -1;
    return (w.row + tile_row()) * p.columns_row + thread % 4;
  }
  /// Of block `of` the keys that masks name, among this thread's columns of its two rows. Rows past a tile's read what
  /// others have there.
  __device__ __forceinline__ void load_masks(int32_t masks, int32_t of, uint32_t (&named)[2]) const {
    named[0] = named[1] = ~0u;
    if (masks < 0) return;
    named[0] = __ldg(p.columns + masks + 4 * of);
    named[1] = __ldg(p.columns + masks + 4 * of + 8 * p.columns_row);
  }

  /// Block n's scores that rows do not see, by the items' bounds.
  template <int columns>
  __device__ __forceinline__ void mask_block(float (&s)[columns], const uint32_t (&named)[2] = {~0u, ~0u}) {
    const TileWork w = work(t - 1);
    const int32_t column = n * tile.keys + thread % 4 * 2, seen = w.diagonal + tile_row();
    mask(s, {columns_below(min(w.keys, seen), column) & named[0],
             columns_below(min(w.keys, seen + 8), column) & named[1]});
  }
  /// The same, and those that masks do not name, of whom the next block's are asked for. Blocks below number `clear`
  /// lie within all bounds.
  template <int columns>
  __device__ __forceinline__ void hide(float (&s)[columns], int32_t clear, int32_t masks, uint32_t (&named)[2]) {
    if (n >= clear) mask_block(s, named);
    else if constexpr (masked) mask(s, named);
    if constexpr (masked)
      if (n > 0) load_masks(masks, n - 1, named);
  }
  /// What the softmax did to the references, done to the outputs so far.
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < tile.value / 8; ++j) {
      o[4 * j] *= factor[0];
      o[4 * j + 1] *= factor[0];
      o[4 * j + 2] *= factor[1];
      o[4 * j + 3] *= factor[1];
    }
  }
  template <int n>
  static __device__ __forceinline__ void pack(const float (&s)[2 * n], uint32_t (&weights)[n]) {
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      // Accumulators 8 j .. 8 j + 7 are rows (low, low, high, high) of columns 16 j and 16 j + 8: the order of A's
      // registers.
      weights[2 * j] = packed<Element>(s[4 * j], s[4 * j + 1]);
      weights[2 * j + 1] = packed<Element>(s[4 * j + 2], s[4 * j + 3]);
    }
  }
  /// Stores tile number `of`, merged with what is there when accumulating, and lets go of its description.
  __device__ __forceinline__ void finish(uint32_t of, const RowState& done) {
    store_tile(of, done);
    __syncwarp();
    if (thread % 32 == 0) arrive_at<tile.cluster>(shared.work_empty[of % tile_ring], 0);
  }
  __device__ __forceinline__ void store_tile(uint32_t of, const RowState& done) {
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
      float take = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
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
      bool poisoned = min(w.keys, w.diagonal + row) > shared.poisoned[of % tile_ring];
      if constexpr (masked)
        if (w.mask >= 0) poisoned = shared.poisoned_rows[of % tile_ring][row / 32] >> row % 32 & 1;
      if (poisoned) take = NAN;
      if constexpr (std::is_same_v<Out, Codes>) {
        if (w.last()) codes.row[h] = begin + row, codes.valid[h] = valid, factors[h] = take;
        else store_row(out, o, h, take, valid);
      } else store_row(out, o, h, take, valid);
      if (p.lse && valid && thread % 4 == 0) p.lse[lse_at] = lse;
    }
    if constexpr (std::is_same_v<Out, Codes>)
      if (w.last()) store_codes(p.codes, o, factors, codes, head);
  }

  /// Two warpgroups. The products of the next block's scores and of this block's values are issued together, in turns;
  /// the softmax runs while the values' product and the other warpgroup's products keep the tensor cores busy. Tiles
  /// follow one another without a gap: the next tile's first scores are issued with this tile's last values.
  __device__ __forceinline__ void run_overlapped() {
    static_assert(tile.groups == 2 && tile.value_parts() == 1);
    float s[tile.keys / 2];
    uint32_t weights[tile.keys / 4];
    float factor[2];
    const auto my_turn = [&] { barrier_sync(1 + group, 256); };
    const auto your_turn = [&] { barrier_arrive(2 - group, 256); };
    int32_t clear;                   // blocks below this number are seen whole by all rows, but for masks
    int32_t masks = -1;              // masks_of() the tile
    uint32_t named[2] = {~0u, ~0u};  // of the block whose scores come next: asked for a block ahead
    const auto next_tile = [&] {
      const TileWork w = begin_tile();
      if constexpr (masked) masks = masks_of(w);
      clear = warp_uniform(min(w.keys, w.diagonal + low()) / tile.keys);
      n = warp_uniform(w.blocks - 1);
    };
    if (group == 1) your_turn();  // the first turn is warpgroup 0's
    next_tile();
    if (n < 0) return;

    // The very first scores.
    wait_queries();
    wait_keys();
    if constexpr (masked) load_masks(masks, n, named);
    my_turn();
    wgmma_fence();
    issue_scores(s);
    your_turn();
    wgmma_wait<0>();
    wgmma_pin(s);
    release_keys();
    hide(s, clear, masks, named);
    if constexpr (tile.weights_ahead) {
      exponentiate_ahead<Element>(s, weights, state, factor, p.scale_log2);
    } else {
      exponentiate(s, state, factor, p.scale_log2);
      pack(s, weights);
    }

    bool first = true;
    // Block n's values with `now`; the next block's weights to `next`, the same registers when they are not written
    // ahead. The loop holds two copies of this. With one and a copy of the registers at its end, ptxas 13.0 merges the
    // two and writes weights that a product still reads.
    const auto step = [&](uint32_t(&now)[tile.keys / 4], uint32_t(&next)[tile.keys / 4]) {
      const bool last = n == 0;
      if (last) {
        next_tile();
        if (n < 0) {  // the last values
          wait_values(0);
          my_turn();
          wgmma_pin(o);
          wgmma_pin(now);
          wgmma_fence();
          issue_values(now, 0, !first);
          if (group == 0) your_turn();
          wgmma_wait<0>();
          wgmma_pin(o);
          return false;
        }
        if constexpr (masked) load_masks(masks, n, named);
        wait_queries();
      } else --n;
      wait_keys();
      wait_values(0);
      my_turn();
      wgmma_pin(o);
      wgmma_pin(now);
      wgmma_fence();
      issue_scores(s);
      issue_values(now, 0, !first);
      your_turn();
      wgmma_wait<1>();
      wgmma_pin(s);
      release_keys();
      const RowState done = state;
      if (last) state = RowState{};
      hide(s, clear, masks, named);
      bool raised;
      if constexpr (tile.weights_ahead) raised = exponentiate_ahead<Element>(s, next, state, factor, p.scale_log2);
      else raised = exponentiate(s, state, factor, p.scale_log2);
      wgmma_wait<0>();
      wgmma_pin(o);
      wgmma_pin(now);
      release_values();
      if (last) finish(t - 2, done);
      else if (raised) rescale(factor);
      if constexpr (!tile.weights_ahead) pack(s, next);
      first = last;
      return true;
    };
    if constexpr (tile.weights_ahead) {
      uint32_t other[tile.keys / 4];
      while (step(weights, other) && step(other, weights)) {
      }
    } else {
      while (step(weights, weights)) {
      }
    }
    finish(t - 2, state);
  }

  /// Scores, softmax and values of block n, or of its first `columns` keys where no row of this warpgroup sees more.
  template <int columns>
  __device__ __forceinline__ void attend_block(bool add, bool hides) {
    constexpr int parts_seen = columns / tile.value_keys;
    float s[columns / 2], factor[2];
    uint32_t weights[columns / 4];
    wgmma_pin(s);
    wgmma_fence();
    issue_scores(s);
    wgmma_wait<0>();
    wgmma_pin(s);
    release_keys();
    if (hides) mask_block(s);
    if (exponentiate(s, state, factor, p.scale_log2) && add) rescale(factor);
    pack(s, weights);
    for (int part = 0; part < tile.value_parts(); ++part) wait_values(part);
    wgmma_pin(o);
    wgmma_pin(weights);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < parts_seen; ++part) issue_values(weights, part, part > 0 || add);
    if constexpr (parts_seen > 1) {
      wgmma_wait<1>();
      release_values();
    }
    wgmma_wait<0>();
    wgmma_pin(o);
    wgmma_pin(weights);
    for (int part = parts_seen > 1; part < tile.value_parts(); ++part) release_values();
  }

  /// Three warpgroups, for which scores and weights do not both fit the registers: each alternates between scores,
  /// softmax and values on its own, and at most times some other one keeps the tensor cores busy. A warpgroup passes
  /// over blocks that its rows do not see.
  __device__ __forceinline__ void run_alternating() {
    static_assert(tile.value_parts() == 2);
    for (;;) {
      const TileWork w = begin_tile();
      n = warp_uniform(w.blocks - 1);
      if (n < 0) return;
      // Keys that the last row of this warpgroup sees, and the first: what is skipped, and what needs no mask.
      const int32_t low = this->low(), high = min(low + group_rows, w.rows) - 1;
      const int32_t seen = warp_uniform(high < low ? 0 : min(w.keys, w.diagonal + high)),
                    clear = warp_uniform(min(w.keys, w.diagonal + low));
      bool add = false;
      state = RowState{};
      wait_queries();
      for (; n >= 0; --n) {
        const int32_t columns = seen - n * tile.keys;
        wait_keys();
        if (columns <= 0) {
          for (int part = 0; part < tile.value_parts(); ++part) wait_values(part);
          // Thread 0 speaks for the warpgroup; where products are issued, they keep its warps together.
          barrier_sync(1 + group, 128);
          release_keys();
          for (int part = 0; part < tile.value_parts(); ++part) release_values();
          continue;
        }
        const bool hides = clear < (n + 1) * tile.keys;
        if (columns <= tile.value_keys) attend_block<tile.value_keys>(add, hides);
        else attend_block<tile.keys>(add, hides);
        add = true;
      }
      if (!add) {
#pragma unroll
        for (float& x : o) x = 0.0f;
      }
      finish(t - 1, state);
    }
  }
};

template <class Config, class Element, class Out, bool masked>
__global__ void __launch_bounds__(Config::tile.threads(), 1) attend_expanded_kernel(const __grid_constant__ Params p) {
  constexpr TileConfig tile = Config::tile;
  extern __shared__ __align__(1024) char storage[];  // a constant address: it takes no registers
  using Storage = Shared<tile, Element>;
  Storage& shared = *reinterpret_cast<Storage*>(storage);
  if (threadIdx.x == 0) {
    if (smem_address(storage) % 1024 != 0) __trap();
    shared.watch_masked = masked && p.counters[2] != 0;
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
    if (warp == 0) produce_keys<tile, Element>(p, shared);
    else if (warp == 1) produce_values<tile, Element>(p, shared);
    else watch_values<tile, Element>(p, shared, warp - 2);
  } else {
    take_registers<tile.math_registers>();
    Math<tile, Element, Out, masked> math(p, shared, warpgroup);
    static_assert(!masked || tile.groups == 2);
    if constexpr (tile.groups == 3) math.run_alternating();
    else math.run_overlapped();
  }
  if constexpr (tile.cluster > 1) {  // the others' copies and arrivals reach into this block
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace mla::cuda::sm90::expanded
