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

// ---- Where the numbers of a tile lie in a partial: units of 16 bytes, in an order that suits who writes them.
// `group_rows` rows have `group_units` units in a row. A unit's elements are of the row first_row(unit), those of which
// second(e) holds of the one `step` on; shares of a tile are whole multiples of `least` units.

/// Four f32 of a row.
struct F32Units {
  static constexpr int values = 4, least = 1;
  static constexpr bool scaled = false;
  template <class Order>
  __device__ static void add(float (&sum)[values], const uint4& unit, float first, float second) {
    const uint32_t v[values] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int e = 0; e < values; ++e)
      sum[e] = __fmaf_rn(Order::second(e) ? second : first, __uint_as_float(v[e]), sum[e]);
  }
};

template <int tile_rows>
struct RowOrder : F32Units {
  static constexpr int rows = tile_rows, group_rows = 1, group_units = width / 4, step = 0;
  __device__ static constexpr bool second(int) { return false; }
  __device__ static int first_row(int unit) { return unit / group_units; }
  __device__ static int first_unit(int row) { return row * group_units; }
  template <class Put>
  __device__ static void put(int unit, const float (&v)[4], Put put) {
    put(first_row(unit), unit % group_units * 4, v);
  }
};

/// As the narrow kernel's threads hold O^T: unit 1024 j + 256 i + t is of thread t's o[i].
template <int tile_rows>
struct TransposedOrder : F32Units {
  static constexpr int rows = tile_rows, group_rows = 8, group_units = 1024, step = 1;
  __device__ static constexpr bool second(int e) { return e % 2; }
  __device__ static int first_row(int unit) { return unit / group_units * 8 + unit % 4 * 2; }
  __device__ static int first_unit(int row) { return row / 8 * group_units + row % 8 / 2; }
  template <class Put>
  __device__ static void put(int unit, const float (&v)[4], Put put) {
    const int column = unit / 128 % 2 * 256 + unit / 256 % 4 * 64 + unit / 32 % 4 * 16 + unit / 4 % 8;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      put(first_row(unit) + e % 2, column + e / 2 * 8, reinterpret_cast<const float(&)[1]>(v[e]));
  }
};

/// As the wide kernel's threads hold O, warp by warp (warp % 4, then the half of the columns), 32 units of each two
/// chunks of 8 columns. Eight f16 relative to a power of two for each row: O of a tile of 64 rows is 128 KB in f32, and
/// all workers write and read theirs at once.
struct FragmentOrder {
  static constexpr int values = 8, least = 4;
  static constexpr bool scaled = true;
  static constexpr int rows = 64, group_rows = 16, group_units = 1024, step = 8;
  __device__ static constexpr bool second(int e) { return e % 4 / 2; }
  __device__ static int first_row(int unit) { return unit / group_units * 16 + unit % 32 / 4; }
  __device__ static int first_unit(int row) { return row / 16 * group_units + row % 8 * 4; }
  template <class Order>
  __device__ static void add(float (&sum)[values], const uint4& unit, float first, float second) {
    const uint32_t v[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = __half22float2(reinterpret_cast<const __half2&>(v[i]));
      const float w = i % 2 ? second : first;
      sum[2 * i] = __fmaf_rn(w, two.x, sum[2 * i]), sum[2 * i + 1] = __fmaf_rn(w, two.y, sum[2 * i + 1]);
    }
  }
  /// Neighbouring lanes trade column pairs of the two chunks: each then has four columns in a row. By all lanes.
  template <class Put>
  __device__ static void put(int unit, const float (&v)[8], Put put) {
    const bool odd = unit & 1;
    const int column = unit / 512 % 2 * 256 + unit / 32 % 16 * 16 + odd * 8 + (unit % 4 * 2 & 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float *a = v + 2 * r, *b = v + 4 + 2 * r;
      const float get0 = __shfl_xor_sync(0xffffffffu, odd ? a[0] : b[0], 1),
                  get1 = __shfl_xor_sync(0xffffffffu, odd ? a[1] : b[1], 1);
      const float four[4] = {odd ? get0 : a[0], odd ? get1 : a[1], odd ? b[0] : get0, odd ? b[1] : get1};
      put(first_row(unit) + r * 8, column, four);
    }
  }
};

/// What a row of a partial (its largest element's exponent being that of `top`) is multiplied by to be f16 below 2^15,
/// and what that is multiplied by to be the row again: powers of two.
struct HalfScale {
  float to, back;
  __device__ explicit HalfScale(int exponent) {
    to = __int_as_float((268 - exponent) << 23), back = __int_as_float((exponent - 14) << 23);
  }
  /// As f32 has it, biased; kept where both powers are normal numbers.
  __device__ static int exponent(float top) { return max(__float_as_int(top) >> 23, 15); }
};

/// Where piece `piece` of the item's tile has the row's log of the sum of exponentials, and its HalfScale::back: a
/// row's lie beside each other.
__device__ inline int64_t partial_row(const Params& p, int slot0, int tile_rows, int row, int pieces, int piece) {
  return static_cast<int64_t>(slot0) * tile_rows + row * pieces + piece;
}

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

/// What a worker merges of a tile: its own share of the units, or another's that was left.
struct Share {
  int row0, slot0, counter;                       // of the tile: row, first partial slot, counter
  uint16_t pieces, piece;                         // of the tile; the worker's
  uint16_t begin, end;                            // units
  uint16_t at_a_time, blocks;                     // pieces, and blocks of lanes, that are copied before any is added
  uint8_t rows, row_begin, row_count, slot_step;  // the CTA's; those that the share touches
  uint8_t parts, part, log_lanes, log_row_lanes;

  __device__ int slot(int i) const { return slot_step == 1 ? slot0 + i : slot0 + 2 * i - (i > 0 ? 1 : 0); }
  __device__ int pitch() const { return row_count | 1; }
  __device__ int weight_bytes() const { return ((pieces + 1) * pitch() * 4 + 15) / 16 * 16; }
};

/// Makes s the tile's `share`-th share, of which nothing but the tile is known, or all of the tile. bytes: of shared
/// memory that there are to merge it in.
constexpr int all_shares = -1;
template <class Order>
__device__ void take_share(const Params& p, Share& s, int share, int bytes) {
  const int n = s.pieces, units = ceil_div(s.rows, Order::group_rows) * Order::group_units;
  // The first `more` shares have one more.
  const int each = units / Order::least / n, more = units / Order::least - each * n;
  const int begin = share == all_shares ? 0 : (share * each + min(share, more)) * Order::least,
            end = share == all_shares ? units : begin + (each + (share < more)) * Order::least, count = end - begin;
  const int row_begin = begin / Order::group_units * Order::group_rows;
  s.begin = begin, s.end = end, s.row_begin = row_begin;
  s.row_count =
      max(min(ceil_div(end, Order::group_units) * Order::group_rows, static_cast<int>(s.rows)) - row_begin, 0);
  // `lanes` units side by side; groups of threads share the pieces, so that few units have as many loads on their way.
  // Batch-invariant sums know nothing of the share: one thread sums all pieces.
  s.log_lanes = p.split_blocks ? 8 : min(max(32 - __clz(count - 1), 3), 8);
  s.log_row_lanes = p.split_blocks ? 2 : s.row_count <= 8 ? 5 : s.row_count <= 16 ? 4 : s.row_count <= 32 ? 3 : 2;
  const int most = ((n - 1) >> (8 - s.log_lanes)) + 1, depth = (bytes - s.weight_bytes()) / (math_threads * 16);
  s.at_a_time = min(most, depth);
  s.blocks = s.log_lanes < 8 ? 1 : min(depth / s.at_a_time, (count + math_threads - 1) / math_threads);
}

template <class Order>
__device__ Share make_share(const Params& p, const Item& it, const Part& part, int share, int bytes) {
  Share s;
  s.row0 = static_cast<int>(part.row0), s.slot0 = it.slot0, s.counter = it.counter;
  s.pieces = it.pieces, s.piece = it.piece, s.slot_step = it.slot_step;
  s.rows = part.rows, s.parts = part.parts, s.part = part.part;
  take_share<Order>(p, s, share, bytes);
  return s;
}

/// For the worker's pieces of split tiles, as long as they are not batch-invariant: at most two, its first and its
/// last.
struct Splits {
  Share share[2];
  bool merges[2];  // is there merging to do when the worker's own work is done?
  int joined;      // has the tile that a worker's last piece is of been joined?
};

/// By one thread, off the way of those who attend: whoever is told that there are no more items then finds the share.
template <class Order>
__device__ void remember_split(const Params& p, Splits& s, const Item& it, const Part& part, int bytes, bool pairs) {
  if (it.pieces > 1 && !p.split_blocks)
    s.share[it.split] = make_share<Order>(p, it, part, pairs && shared_by_two(it) ? all_shares : it.piece, bytes);
}

/// After all math threads wrote a piece's partial; by all of them. pair: does the kernel join this tile's two pieces?
__device__ inline void publish(const Params& p, Splits& s, const Item& it, const Part& part, bool pair = false) {
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
  // Batch-invariant ones are found again by another walk.
  if (p.split_blocks) s.merges[0] = true;
  else if (merges) s.merges[it.split] = true;
}

/// How two pieces are joined from registers: added as merge_units adds, so that bits do not tell which was done.
struct Join {
  float first, second, inverse, lse2;  // weights of the pieces' outputs, what their sum is multiplied by; of both

  __device__ Join(float lse2_first, float lse2_second) {
    const float top = fmaxf(lse2_first, lse2_second), shift = top == -INFINITY ? 0.0f : top;
    first = exp2_approx(lse2_first - shift), second = exp2_approx(lse2_second - shift);
    const float sum = __fadd_rn(first, second);
    inverse = sum > 0 ? 1.0f / sum : 0.0f;
    lse2 = sum > 0 ? top + __log2f(sum) : -INFINITY;
  }
  __device__ static float sum(float first, float x, float second, float y) {
    return __fmaf_rn(second, y, __fmaf_rn(first, x, 0.0f));
  }
};

/// `count` columns of a row from `column` on to out, if there is the row.
template <int count>
__device__ inline void put(const Params& p, const Share& s, int row, int column, const float (&v)[count]) {
  if (row >= s.rows) return;
  const int64_t to = (static_cast<int64_t>(s.row0) + row) * width + column;
  if constexpr (count == 1) {
    if (p.out_f32) static_cast<float*>(p.out)[to] = v[0];
    else static_cast<__nv_bfloat16*>(p.out)[to] = __float2bfloat16_rn(v[0]);
  } else {
    if (p.out_f32) *reinterpret_cast<float4*>(static_cast<float*>(p.out) + to) = make_float4(v[0], v[1], v[2], v[3]);
    else
      *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + to) = {Pack<__nv_bfloat16>::two(v[0], v[1]),
                                                                            Pack<__nv_bfloat16>::two(v[2], v[3])};
  }
}

/// Merges a share of a tile whose pieces are all there. Sums over pieces in an order that follows from their number and
/// the share; batch-invariant, from a piece's number alone. ready(): waits for them, once all is known that can be
/// before; false: not to be done. space: shared memory, 16-byte aligned. By all math threads.
template <class Order, class Ready>
__device__ bool merge_units(const Params& p, const Share& s, char* space, Ready ready) {
  constexpr int values = Order::values;
  const int thread = threadIdx.x, n = s.pieces, rows = s.row_count, pitch = s.pitch(), begin = s.begin, end = s.end;
  float* const weights = reinterpret_cast<float*>(space);                           // [piece][row], then 1 / their sum
  uint4* const data = reinterpret_cast<uint4*>(space + s.weight_bytes()) + thread;  // [load][thread]
  const int log_lanes = s.log_lanes, log_groups = 8 - log_lanes, lanes = 1 << log_lanes, groups = 1 << log_groups,
            group = thread >> log_lanes;
  const int mine = group < n ? ((n - 1 - group) >> log_groups) + 1 : 0,  // pieces of the thread
      most = ((n - 1) >> log_groups) + 1, at_a_time = s.at_a_time, blocks = s.blocks;
  // Slots of the pieces from the second on lie `slot_step` apart, the first a little further on.
  constexpr int slot_units = Order::rows * width / Order::values;
  const int64_t step = static_cast<int64_t>(s.slot_step) * s.parts * slot_units;
  const uint4* const from =
      reinterpret_cast<const uint4*>(p.partial_out) + (static_cast<int64_t>(s.slot0) * s.parts + s.part) * slot_units;
  const int64_t skew = s.slot_step == 1 ? 0 : -static_cast<int64_t>(s.parts) * slot_units;

  // `row_lanes` lanes a row make its weights. The first of what they need is asked for ahead of the pieces.
  constexpr int at_once = 8;
  const int row_lanes = 1 << s.log_row_lanes, r = thread >> s.log_row_lanes, lane = thread & (row_lanes - 1),
            a_pass = row_lanes * at_once;
  const int64_t lse_at =
      partial_row(p, s.slot0, s.parts * Order::rows, s.part * Order::rows + s.row_begin + r, n, lane);
  float lse[at_once], back[at_once];
  const auto ask_lse = [&](int pass) {
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int at = pass + k * row_lanes;
      const bool in = r < rows && at + lane < n;
      lse[k] = in ? __ldcg(p.partial_lse + lse_at + at) : -INFINITY;
      if constexpr (Order::scaled) back[k] = in ? __ldcg(p.partial_back + lse_at + at) : 0.0f;
    }
  };
  if (!ready()) return false;
  ask_lse(0);

  float carried[values] = {};
  int base = begin, done = 0;  // done: pieces of these units, where all are too many at a time
#pragma unroll 1
  while (base < end) {
    const int upto = min(mine, done + at_a_time);
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
      const int unit = base + (b << log_lanes) + (thread & (lanes - 1));
      if (unit >= end) break;
      const int piece = group + (done << log_groups);
      const uint4* source = from + unit + piece * step + (piece ? skew : 0);
      uint32_t to = smem_address(data + b * at_a_time * math_threads);
      const int64_t next = step << log_groups;
#pragma unroll 4
      for (int k = done; k < upto; ++k) {
        cp_async_16(to, source);
        to += math_threads * 16;
        source += k + group == 0 ? next + skew : next;
      }
    }
    cp_async_commit();

    if (base == begin && done == 0) {  // Weights, meanwhile.
      float top = -INFINITY, total = 0;
#pragma unroll 1
      for (int pass = 0;;) {
#pragma unroll
        for (int k = 0; k < at_once; ++k) top = fmaxf(top, lse[k]);
        pass += a_pass;
        if (pass >= n) break;
        ask_lse(pass);
      }
      for (int d = row_lanes / 2; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
      const float shift = top == -INFINITY ? 0.0f : top;
#pragma unroll 1
      for (int pass = 0;;) {
        if (n > a_pass) ask_lse(pass);
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
          const float weight = exp2_approx(lse[k] - shift);
          const int at = pass + k * row_lanes + lane;
          total += weight;
          if (r < rows && at < n) weights[at * pitch + r] = Order::scaled ? weight * back[k] : weight;
        }
        pass += a_pass;
        if (pass >= n) break;
      }
      for (int d = row_lanes / 2; d; d /= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
      if (r < rows && lane == 0) {
        weights[n * pitch + r] = total > 0 ? 1.0f / total : 0.0f;
        const int unit = Order::first_unit(s.row_begin + r);
        if (begin <= unit && unit < end)
          store_lse(p, s.row0 + s.row_begin + r, total > 0 ? top + __log2f(total) : -INFINITY);
      }
    }
    cp_async_wait<0>();
    barrier_sync(math_barrier, math_threads);

    const bool more = done + at_a_time < most;
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
      const int unit = base + (b << log_lanes) + (thread & (lanes - 1));
      uint4* const loaded = data + b * at_a_time * math_threads;
      float sum[values];
#pragma unroll
      for (int e = 0; e < values; ++e) sum[e] = carried[e];
      const float* const row_weights = weights + min(Order::first_row(unit) - s.row_begin, max(rows - 1, 0));
      const int second = Order::first_row(unit) - s.row_begin + Order::step < rows ? Order::step : 0;
      if (unit < end) {
        const float* w = row_weights + (group + (done << log_groups)) * pitch;
#pragma unroll 4
        for (int k = 0; k < upto - done; ++k) {
          Order::template add<Order>(sum, loaded[k * math_threads], w[0], w[second]);
          w += pitch << log_groups;
        }
      }
#pragma unroll
      for (int e = 0; e < values; ++e) carried[e] = more ? sum[e] : 0.0f;
      if (more) continue;
      if (groups > 1) {
        for (int d = lanes; d < 32; d *= 2)
#pragma unroll
          for (int e = 0; e < values; ++e) sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], d);
        float4* const staged = reinterpret_cast<float4*>(loaded);  // for 8 values two loads' room, which is there
#pragma unroll
        for (int e = 0; e < values; e += 4)
          staged[e / 4 * math_threads] = make_float4(sum[e], sum[e + 1], sum[e + 2], sum[e + 3]);
        barrier_sync(math_barrier, math_threads);
        if (thread < lanes)
          for (int t = max(lanes, 32); t < math_threads; t += max(lanes, 32))
#pragma unroll
            for (int e = 0; e < values; e += 4) {
              const float4 v = staged[e / 4 * math_threads + t];
              sum[e] += v.x, sum[e + 1] += v.y, sum[e + 2] += v.z, sum[e + 3] += v.w;
            }
      }
      const float inverse[2] = {row_weights[n * pitch], row_weights[n * pitch + second]};
#pragma unroll
      for (int e = 0; e < values; ++e) sum[e] *= inverse[Order::second(e)];
      const bool on = thread < lanes && unit < end;
      Order::put(unit, sum, [&](int row, int column, const auto& v) {
        if (on) put(p, s, row, column, v);
      });
    }
    done = more ? done + at_a_time : 0;
    if (!more) base += blocks << log_lanes;
    if (base < end) barrier_sync(math_barrier, math_threads);
  }
  return true;
}

/// Merges what is this worker's of a tile that it holds a piece of: `share`, in shared memory, and what others left.
/// again(i): makes `share` the i-th. pair: are all units this worker's? space: shared memory, 16-byte aligned. By all
/// math threads, after all own work.
template <class Order, class Again>
__device__ void merge(const Params& p, Share& share, char* space, bool pair, Again again) {
  constexpr int nothing = -2;
  const int n = share.pieces, parts = share.parts, part = share.part;
  unsigned* const counter = p.counters + share.counter * parts + part;
  const auto left = [&](int i) { return p.left + share.slot(i) * parts + part; };
  int& told = *reinterpret_cast<int*>(space);
  const auto tell = [&](auto find_out) {  // to all what thread 0 finds out
    barrier_sync(math_barrier, math_threads);
    if (threadIdx.x == 0) told = find_out();
    barrier_sync(math_barrier, math_threads);
    return told;
  };
  int others = 0, to_do = 0;  // shares that were left; thread 0's: and that are still to be done,
  bool finishes = false;      // by this worker?
  for (bool own = true;; own = false) {
    const auto ready = [&] {
      if (!own || pair) return true;
      if (threadIdx.x == 0) {
        unsigned seen = wait_for_pieces(p, counter, n);
        if (!seen) seen = leave(counter, n);
        if (!seen) atomicExch(left(share.piece), 1u);
        told = seen ? static_cast<int>(seen / one_left) : nothing;
      }
      barrier_sync(math_barrier, math_threads);
      others = told;
      return others != nothing;
    };
    if (!(share.begin < share.end ? merge_units<Order>(p, share, space + 16, ready) : ready())) return;
    if (others == 0) break;
    // The last to finish does what was left, and leaves the counter as the next call needs it.
    const int next = tell([&] {
      if (own) finishes = (atomicAdd(counter, 1u) & counts) + 1 + others == 2u * n, to_do = others;
      if (!finishes) return nothing;
      if (to_do-- == 0) {
        *counter = 0;
        return nothing;
      }
      int i = 0;
      while (!atomicExch(left(i), 0u)) i = (i + 1) % n;
      return i;
    });
    if (next == nothing) return;
    if (threadIdx.x == 0) again(next);
    barrier_sync(math_barrier, math_threads);
  }
  if (threadIdx.x == 0) {  // It wraps when all shares are merged.
    if (pair) *counter = 0;
    else atomicInc(counter, 2u * n - 1);
  }
}

/// All tiles that the worker published pieces of, after all its own work. part_of(item): the CTA's part; pairs: does
/// the kernel join them? By all math threads.
template <class Order, int tile_rows, class PartOf>
__device__ void merge_split_tiles(const Params& p, Splits& s, const Split& split, int worker, char* space, int bytes,
                                  bool pairs, PartOf part_of) {
  barrier_sync(math_barrier, math_threads);
  if (!p.split_blocks) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      if (!s.merges[i]) continue;
      Share& share = s.share[i];
      const bool pair = pairs && share.pieces == 2 && share.slot_step == 2;
      merge<Order>(p, share, space, pair, [&](int other) { take_share<Order>(p, share, other, bytes); });
      if (i == 0) barrier_sync(math_barrier, math_threads);
    }
    return;
  }
  if (!s.merges[0]) return;
  Walk<tile_rows> walk(p, split, worker);
  Item it;
#pragma unroll 1
  while (walk.next(it)) {
    if (it.pieces == 1) continue;
    Share& share = s.share[0];
    const Part part = part_of(it);
    barrier_sync(math_barrier, math_threads);
    if (threadIdx.x == 0) share = make_share<Order>(p, it, part, it.piece, bytes);
    barrier_sync(math_barrier, math_threads);
    merge<Order>(p, share, space, false, [&](int other) { take_share<Order>(p, share, other, bytes); });
  }
}

}  // namespace mla::cuda::latent
