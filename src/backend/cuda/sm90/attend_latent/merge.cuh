// How pieces of a tile become one: partial rows (f32) through device memory, a counter a tile.
//
// A worker that wrote its piece counts it and, its own work done, waits until all of the tile's pieces are there; then
// it merges its share of the tile, an equal part of the columns. Nobody needs the others to be running: who has waited
// long enough leaves its share to the worker that merges last. Of two workers that share a tile on the line, the one
// whose piece is its last joins the other's from registers; if that takes too long it leaves both to the other.
#pragma once

#include <cuda_bf16.h>

#include "backend/cuda/core/mbarrier.cuh"
#include "backend/cuda/core/tma.cuh"
#include "backend/cuda/sm90/attend_latent/math.cuh"

namespace mla::cuda::latent {

/// The (token, head) row's log of the sum of exponentials, given in log2 units, if it is wanted.
__device__ inline void store_lse(const Params& p, int row, float lse2) {
  if (!p.lse) return;
  const int token = p.by_heads.divide(row);
  p.lse[token * p.lse_token_stride + (row - token * p.heads) * p.lse_head_stride] = lse2 * 0.6931471805599453f;
}

// ---- Where the numbers of a tile lie in a partial: units of four, in an order that suits who writes them.
// `group_rows` rows have `group_units` units in a row; row() and column() tell of unit's element e.

template <int tile_rows>
struct RowOrder {
  static constexpr int rows = tile_rows, group_rows = 1, group_units = width / 4;
  __device__ static int row(int unit, int) { return unit / group_units; }
  __device__ static int column(int unit, int e) { return unit % group_units * 4 + e; }
  __device__ static int first_unit(int row) { return row * group_units; }
};

/// As the narrow kernel's threads hold O^T: unit 1024 j + 256 i + t is of thread t's o[i].
template <int tile_rows>
struct TransposedOrder {
  static constexpr int rows = tile_rows, group_rows = 8, group_units = 1024;
  __device__ static int row(int unit, int e) { return unit / group_units * 8 + unit % 4 * 2 + e % 2; }
  __device__ static int column(int unit, int e) {
    return unit / 128 % 2 * 256 + unit / 256 % 4 * 64 + unit / 32 % 4 * 16 + unit / 4 % 8 + e / 2 * 8;
  }
  __device__ static int first_unit(int row) { return row / 8 * group_units + row % 8 / 2; }
};

/// As the wide kernel's threads hold O, warp by warp (warp % 4, then the half of the columns), 32 units of each chunk
/// of 8 columns.
struct FragmentOrder {
  static constexpr int rows = 64, group_rows = 16, group_units = 2048;
  __device__ static int row(int unit, int e) { return unit / group_units * 16 + unit % 32 / 4 + e / 2 * 8; }
  __device__ static int column(int unit, int e) {
    return unit / 1024 % 2 * 256 + unit / 32 % 32 * 8 + unit % 4 * 2 + e % 2;
  }
  __device__ static int first_unit(int row) { return row / 16 * group_units + row % 8 * 4; }
};

// ---- Counters. A tile's counts its pieces that are there, then its shares that are merged, and wraps to zero with the
// last; above them, shares left, which only the finisher that does them takes back. Of a pair (shared_by_two) it counts
// the second piece, above it whether the first one's worker left the tile; who joins or merges the two clears it.

constexpr unsigned one_left = 1 << 11, counts = one_left - 1;
static_assert(2 * most_pieces < one_left);

/// Until n pieces are there: what the counter then holds. 0: patience is over.
__device__ inline unsigned wait_for_pieces(const Params& p, const unsigned* counter, int n) {
  const int64_t start = clock64();
  do {
    unsigned seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    if ((seen & counts) >= static_cast<unsigned>(n)) return seen;
  } while (clock64() - start < p.patience);
  return 0;
}

/// Leaves a share to those who merge later. Unless n pieces are there by now: then it is the caller's, and the result
/// what the counter holds, otherwise 0.
__device__ inline unsigned leave(unsigned* counter, int n) {
  for (unsigned seen = *static_cast<volatile unsigned*>(counter);;) {
    if ((seen & counts) >= static_cast<unsigned>(n)) {
      __threadfence();
      return seen;
    }
    const unsigned was = atomicCAS(counter, seen, seen + one_left);
    if (was == seen) return 0;
    seen = was;
  }
}

/// A CTA's part of a tile: its rows, where they are in q, out and lse, and which of the `parts` interleaved partials of
/// a slot (2 for a cluster's row halves) is its own.
struct Part {
  int rows = 0;
  int64_t row0 = 0;
  int parts = 1, part = 0;
};

/// After all math threads wrote a piece's partial; by all of them. s, a kernel's shared memory, remembers the tile if
/// the worker has merging to do when its own work is done. pair: does the kernel join this tile's two pieces?
template <class Shared>
__device__ void publish(const Params& p, Shared& s, const Item& it, const Part& part, bool pair = false) {
  barrier_sync(math_barrier, math_threads);
  if (threadIdx.x != 0) return;
  unsigned* const counter = p.counters + it.counter * part.parts + part.part;
  __threadfence();  // also for what the barrier ordered before
  bool merges = true;
  if (!pair) {
    atomicAdd(counter, 1u);
  } else if (it.piece == 0) {
    merges = leave(counter, 1) != 0;
  } else {
    merges = atomicAdd(counter, 1u) >= one_left;
    __threadfence();
  }
  if (!merges) return;
  if (!p.split_blocks) s.split_item[s.split_items] = it;  // otherwise the walk finds them again
  ++s.split_items;
}

/// How two pieces are joined from registers: rounded as merge_units rounds, so that bits do not tell which was done.
struct Join {
  float first, second, lse2;  // weights of the pieces' outputs; of both

  __device__ Join(float lse2_first, float lse2_second) {
    const float top = fmaxf(lse2_first, lse2_second), shift = top == -INFINITY ? 0.0f : top;
    first = exp2_approx(lse2_first - shift), second = exp2_approx(lse2_second - shift);
    const float sum = __fadd_rn(first, second), inverse = sum > 0 ? 1.0f / sum : 0.0f;
    first = __fmul_rn(first, inverse), second = __fmul_rn(second, inverse);
    lse2 = sum > 0 ? top + __log2f(sum) : -INFINITY;
  }
  __device__ static float sum(float first, float x, float second, float y) {
    return __fmaf_rn(second, y, __fmaf_rn(first, x, 0.0f));
  }
};

/// A unit's four numbers to out, those of rows that there are.
template <class Order>
__device__ inline void put(const Params& p, const Part& part, int unit, float4 v) {
  if constexpr (Order::group_rows == 1) {  // all of one row, beside each other
    if (Order::row(unit, 0) >= part.rows) return;
    const int64_t to = part.row0 * width + unit * 4;
    if (p.out_f32) *reinterpret_cast<float4*>(static_cast<float*>(p.out) + to) = v;
    else
      *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + to) = {Pack<__nv_bfloat16>::two(v.x, v.y),
                                                                            Pack<__nv_bfloat16>::two(v.z, v.w)};
  } else {
    const float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = Order::row(unit, e);
      if (row >= part.rows) continue;
      const int64_t to = (part.row0 + row) * width + Order::column(unit, e);
      if (p.out_f32) static_cast<float*>(p.out)[to] = x[e];
      else static_cast<__nv_bfloat16*>(p.out)[to] = __float2bfloat16_rn(x[e]);
    }
  }
}

/// Merges units [begin, end) of a tile whose pieces are all there. Sums over pieces in an order that follows from their
/// number and the share; batch-invariant, from a piece's number alone. ready(): waits for them, once all is known that
/// can be before; false: not to be done. space: `bytes` of shared memory, 16-byte aligned. By all math threads.
template <class Order, class Ready>
__device__ bool merge_units(const Params& p, const Item& it, const Part& part, int begin, int end, char* space,
                            int bytes, Ready ready) {
  const int thread = threadIdx.x, n = it.pieces;
  const int row_begin = begin / Order::group_units * Order::group_rows,
            row_end = min(ceil_div(end, Order::group_units) * Order::group_rows, part.rows), rows = row_end - row_begin,
            pitch = rows + 1;
  float* const weights = reinterpret_cast<float*>(space);  // [piece][row]
  const int weight_bytes = (n * pitch * 4 + 15) / 16 * 16;
  float4* const data = reinterpret_cast<float4*>(space + weight_bytes);  // [load][thread]
  const int depth = (bytes - weight_bytes) / (math_threads * 16);
  // `lanes` units side by side; groups of threads share the pieces, so that few units have as many loads on their way.
  // Batch-invariant sums know nothing of the share: one thread sums all pieces.
  const int count = end - begin;
  const int log_lanes = p.split_blocks || count > 128 ? 8
                        : count > 64                  ? 7
                        : count > 32                  ? 6
                        : count > 16                  ? 5
                        : count > 8                   ? 4
                                                      : 3;
  const int lanes = 1 << log_lanes, groups = math_threads >> log_lanes, group = thread >> log_lanes,
            mine = group < n ? ((n - 1 - group) >> (8 - log_lanes)) + 1 : 0,  // pieces of the thread
      most = ((n - 1) >> (8 - log_lanes)) + 1, at_a_time = min(most, depth),
            blocks = groups > 1 ? 1 : min(depth / at_a_time, (count + lanes - 1) >> log_lanes);
  // Pieces lie `stride` rows apart; the first one of a tile on the line a slot further on.
  const int64_t stride = static_cast<int64_t>(it.slot_step) * part.parts * Order::rows,
                zero = (static_cast<int64_t>(partial_slot(it, 1)) - it.slot_step) * part.parts * Order::rows +
                       part.part * Order::rows,
                first = (static_cast<int64_t>(it.slot0) * part.parts + part.part) * Order::rows;
  const auto piece_row = [&](int i) { return i ? zero + i * stride : first; };

  // `row_lanes` lanes a row make its weights. The first of what they need is asked for ahead of the pieces.
  const int log_row_lanes = p.split_blocks ? 2
                            : rows <= 8    ? 5
                            : rows <= 16   ? 4
                            : rows <= 32   ? 3
                                           : 2,
            row_lanes = 1 << log_row_lanes, r = thread >> log_row_lanes, lane = thread & (row_lanes - 1);
  constexpr int at_once = 8;
  float lse[at_once];
  const auto ask_lse = [&](int i) {
    if (r >= rows) return;
#pragma unroll
    for (int k = 0; k < at_once; ++k)
      if (const int at = i + k * row_lanes; at < n) lse[k] = __ldcg(p.partial_lse + row_begin + r + piece_row(at));
  };
  if (!ready()) return false;
  ask_lse(lane);

  float4 carried{};
  int base = begin, done = 0;  // done: pieces of these units, where all are too many at a time
#pragma unroll 1
  while (base < end) {
    const int upto = min(mine, done + at_a_time);
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
      const int unit = base + (b << log_lanes) + (thread & (lanes - 1));
      if (unit >= end) break;
      const float4* from = reinterpret_cast<const float4*>(p.partial_out) + unit;
      const uint32_t to = smem_address(data + b * at_a_time * math_threads + thread);
#pragma unroll 8
      for (int k = done; k < upto; ++k)
        cp_async_16(to + (k - done) * math_threads * 16, from + piece_row(group + k * groups) * (width / 4));
    }
    cp_async_commit();

    if (base == begin && done == 0) {  // Weights, meanwhile.
      float* const weight = weights + r;
      float top = -INFINITY, total = 0;
      if (r < rows)
#pragma unroll 1
        for (int i = lane; i < n; i += row_lanes * at_once) {
          if (i > lane) ask_lse(i);
#pragma unroll
          for (int k = 0; k < at_once; ++k)
            if (const int at = i + k * row_lanes; at < n) weight[at * pitch] = lse[k], top = fmaxf(top, lse[k]);
        }
      for (int d = row_lanes / 2; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
      const float shift = top == -INFINITY ? 0.0f : top;
      if (r < rows)
#pragma unroll 4
        for (int i = lane; i < n; i += row_lanes) total += weight[i * pitch] = exp2_approx(weight[i * pitch] - shift);
      for (int d = row_lanes / 2; d; d /= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
      const float inverse = total > 0 ? 1.0f / total : 0.0f;
      if (r < rows) {
#pragma unroll 4
        for (int i = lane; i < n; i += row_lanes) weight[i * pitch] *= inverse;
        const int unit = Order::first_unit(row_begin + r);
        if (lane == 0 && begin <= unit && unit < end)
          store_lse(p, static_cast<int>(part.row0) + row_begin + r, total > 0 ? top + __log2f(total) : -INFINITY);
      }
    }
    cp_async_wait<0>();
    barrier_sync(math_barrier, math_threads);

    const bool more = done + at_a_time < most;
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
      const int unit = base + (b << log_lanes) + (thread & (lanes - 1));
      float4* const from = data + b * at_a_time * math_threads + thread;
      float4 sum = carried;
      if (unit < end) {
        const float *w[4], *const w0 = weights + (group + done * groups) * pitch - row_begin;
#pragma unroll
        for (int e = 0; e < 4; ++e) w[e] = w0 + Order::row(unit, e);
#pragma unroll 8
        for (int k = 0; k < upto - done; ++k) {
          const float4 v = from[k * math_threads];
          const int at = k * groups * pitch;
          sum.x = __fmaf_rn(w[0][at], v.x, sum.x), sum.y = __fmaf_rn(w[1][at], v.y, sum.y);
          sum.z = __fmaf_rn(w[2][at], v.z, sum.z), sum.w = __fmaf_rn(w[3][at], v.w, sum.w);
        }
      }
      carried = more ? sum : float4{};
      if (more) continue;
      if (groups > 1) {
        for (int d = lanes; d < 32; d *= 2) {
          sum.x += __shfl_xor_sync(0xffffffffu, sum.x, d), sum.y += __shfl_xor_sync(0xffffffffu, sum.y, d);
          sum.z += __shfl_xor_sync(0xffffffffu, sum.z, d), sum.w += __shfl_xor_sync(0xffffffffu, sum.w, d);
        }
        *from = sum;
        barrier_sync(math_barrier, math_threads);
        if (thread < lanes)
          for (int t = max(lanes, 32); t < math_threads; t += max(lanes, 32)) {
            const float4 v = from[t];
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
          }
      }
      if (thread < lanes && unit < end) put<Order>(p, part, unit, sum);
    }
    done = more ? done + at_a_time : 0;
    if (!more) base += blocks << log_lanes;
    if (base < end) barrier_sync(math_barrier, math_threads);
  }
  return true;
}

/// Merges what is this worker's of a tile that it holds a piece of. space: as above. By all math threads, after all own
/// work.
template <class Order>
__device__ void merge(const Params& p, const Item& it, const Part& part, char* space, int bytes, bool pair) {
  constexpr int all = -1, nothing = -2;
  const int n = it.pieces, units = ceil_div(part.rows, Order::group_rows) * Order::group_units;
  unsigned* const counter = p.counters + it.counter * part.parts + part.part;
  const auto left = [&](int i) { return p.left + partial_slot(it, i) * part.parts + part.part; };
  int& told = *reinterpret_cast<int*>(space);
  const auto tell = [&](auto find_out) {  // to all what thread 0 finds out
    barrier_sync(math_barrier, math_threads);
    if (threadIdx.x == 0) told = find_out();
    barrier_sync(math_barrier, math_threads);
    return told;
  };
  int others = 0, to_do = 0;  // shares that were left; thread 0's: and that are still to be done,
  bool finishes = false;      // by this worker?
  int share = pair ? all : it.piece;
  for (bool own = true;; own = false) {
    const int even = units / n, more = units - even * n;  // the first `more` shares have one unit more
    const int begin = share == all ? 0 : share * even + min(share, more),
              end = share == all ? units : begin + even + (share < more);
    const auto ready = [&] {
      if (!own || pair) return true;
      others = tell([&] {
        unsigned seen = wait_for_pieces(p, counter, n);
        if (!seen) seen = leave(counter, n);
        if (seen) return static_cast<int>(seen / one_left);
        atomicExch(left(it.piece), 1u);
        return nothing;
      });
      return others != nothing;
    };
    if (pair) barrier_sync(math_barrier, math_threads);
    if (!(begin < end ? merge_units<Order>(p, it, part, begin, end, space + 16, bytes - 16, ready) : ready())) return;
    if (others == 0) break;
    // The last to finish does what was left, and leaves the counter as the next call needs it.
    share = tell([&] {
      if (own) finishes = (atomicAdd(counter, 1u) & counts) + 1 + others == 2u * n, to_do = others;
      if (!finishes) return nothing;
      if (to_do-- == 0) {
        *counter = 0;
        return nothing;
      }
      int next = 0;
      while (!atomicExch(left(next), 0u)) next = (next + 1) % n;
      return next;
    });
    if (share == nothing) return;
  }
  if (threadIdx.x == 0) {  // It wraps when all shares are merged.
    if (pair) *counter = 0;
    else atomicInc(counter, 2u * n - 1);
  }
}

/// All tiles that the worker published pieces of, after all its own work. s: a kernel's shared memory; part_of(item):
/// the CTA's part; pairs: does the kernel join them? By all math threads.
template <class Order, int tile_rows, class Shared, class PartOf>
__device__ void merge_split_tiles(const Params& p, const Shared& s, int worker, char* space, int bytes, bool pairs,
                                  PartOf part_of) {
  barrier_sync(math_barrier, math_threads);
  if (!s.split_items) return;
  Walk<tile_rows> walk(p, s.split, worker);
#pragma unroll 1
  for (int i = 0;; ++i) {
    Item it;
    if (p.split_blocks) {
      if (!walk.next(it)) return;
      if (it.pieces == 1) continue;
    } else {
      if (i == s.split_items) return;
      it = s.split_item[i];
    }
    merge<Order>(p, it, part_of(it), space, bytes, pairs && shared_by_two(it));
  }
}

}  // namespace mla::cuda::latent
