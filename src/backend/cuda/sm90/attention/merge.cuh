// How pieces of a tile become one: partial rows through device memory, a counter a tile.
//
// A worker that wrote its piece counts it and, its own work done, waits until all of the tile's pieces are there; then
// it merges its share of the tile, an equal part of the columns (in a relay every second worker does). Nobody needs the
// others to be running: who has waited long enough leaves its share to the worker that merges last, or counts last. Of
// two workers that share a tile on the line, the one whose piece is its last joins the other's from registers; if that
// takes too long it leaves both to the other.
#pragma once

#include <cuda_bf16.h>

#include "backend/cuda/core/mbarrier.cuh"
#include "backend/cuda/core/tma.cuh"
#include "backend/cuda/sm90/attention/math.cuh"

namespace mla::cuda::latent {

/// The (token, head) row's log of the sum of exponentials, given in log2 units, if it is wanted.
__device__ inline void store_lse(const Params& p, int row, float lse2) {
  if (!p.lse) return;
  int token = p.by_heads.divide(row);
  float* to = p.lse + (row - token * p.heads) * p.lse_head_stride;
  if (p.lse_by_requests) {
    const int request = p.by_queries.divide(token);
    to += (token - request * p.queries) * p.lse_query_stride, token = request;
  }
  to[token * p.lse_token_stride] = lse2 == -INFINITY && p.lse_empty_up ? INFINITY : lse2 * 0.6931471805599453f;
}

/// Its largest logit, given in log2 units; NaN if its sum is.
__device__ inline void store_max(const Params& p, int row, float max2, float sum) {
  const int token = p.by_heads.divide(row);
  p.max_logits[token * p.max_token_stride + (row - token * p.heads) * p.max_head_stride] =
      sum == sum ? max2 * 0.6931471805599453f : NAN;
}
/// What a (token, head) row keeps of its outputs beside its head's sink.
__device__ inline float kept(const Params& p, int row, float lse2) {
  if (!p.sinks || lse2 == -INFINITY) return 1.0f;
  const float sink = p.sinks[row - p.by_heads.divide(row) * p.heads];
  return 1.0f / (1.0f + exp2_approx(fmaf(sink, 1.4426950408889634f, -lse2)));
}

// ---- Where the numbers of a tile lie in a partial: units of 16 bytes, in an order that suits who writes them.
// `group_rows` rows have `group_units` units in a row. A unit's elements are of the row first_row(unit), those of which
// second(e) holds of the one `step` on; shares of a tile are whole multiples of `least` units. store() takes a unit's
// numbers to out: its first row there, whether that one and the one `step` on are wanted, and its first_column(unit);
// by all lanes. invariant: are the kernel's pieces batch-invariant? joins: does it join the two pieces of a tile that
// two workers share (shared_by_two)? relays: may every second worker leave merging to the others?

/// A unit to where it is in device memory. It should still be in L2 when it is read, and when it is written again:
/// caches that stream through would send it to memory and have it fetched.
__device__ inline void store_unit(void* at, uint4 v) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w), "l"(evict_last)
               : "memory");
}
__device__ inline void store_unit(void* at, float4 v) {
  store_unit(at, uint4{__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)});
}

/// Two elements of an out of 16 bits. T: of the products' operands; those of f16 alone may come with an out of f16.
template <class T>
__device__ inline uint32_t out_pair(const Params& p, float a, float b) {
  if (!__is_same(T, __nv_bfloat16) && p.out_f16) return Pack<__half>::two(a, b);
  return Pack<__nv_bfloat16>::two(a, b);
}
/// Four columns of a row of out, from element `at` on.
template <class T>
__device__ inline void store_four(const Params& p, int64_t at, float4 v) {
  if (p.out_f32) *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = v;
  else
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) = {out_pair<T>(p, v.x, v.y),
                                                                     out_pair<T>(p, v.z, v.w)};
}

/// Four f32 of a row.
struct F32Units {
  static constexpr int values = 4, least = 1;
  using Lse = float;  // of a row of a piece
  __device__ static Lse no_lse() { return -INFINITY; }
  __device__ static float lse(Lse x) { return x; }
  __device__ static float back(Lse) { return 1.0f; }

 protected:
  template <class Order>
  __device__ static void add_rows(float (&sum)[values], const uint4& unit, float first, float second) {
    const uint32_t v[values] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int e = 0; e < values; ++e)
      sum[e] = __fmaf_rn(Order::second(e) ? second : first, __uint_as_float(v[e]), sum[e]);
  }
};

template <int tile_rows, bool batch_invariant>
struct RowOrder : F32Units {
  static constexpr bool invariant = batch_invariant, joins = false, relays = false;
  static constexpr int rows = tile_rows, group_rows = 1, group_units = width / 4, step = 0;
  __device__ static constexpr bool second(int) { return false; }
  __device__ static int first_row(int unit) { return unit / group_units; }
  __device__ static int first_unit(int row) { return row * group_units; }
  __device__ static void add(float (&sum)[4], const uint4& unit, float first, float second) {
    F32Units::add_rows<RowOrder>(sum, unit, first, second);
  }
  __device__ static int first_column(int unit) { return unit % group_units * 4; }
  __device__ static void store(const Params& p, int64_t row, bool on, bool, int column, const float (&v)[4]) {
    if (on) store_four<__nv_bfloat16>(p, row * width + column, make_float4(v[0], v[1], v[2], v[3]));
  }
};

/// As the narrow kernel's threads hold O^T: unit 1024 j + 256 i + t is of thread t's o[i].
template <int tile_rows, class T, bool batch_invariant>
struct TransposedOrder : F32Units {
  static constexpr bool invariant = batch_invariant, joins = !invariant, relays = may_relay(tile_rows, invariant);
  static constexpr int rows = tile_rows, group_rows = 8, group_units = 1024, step = 1;
  __device__ static constexpr bool second(int e) { return e % 2; }
  __device__ static int first_row(int unit) { return unit / group_units * 8 + unit % 4 * 2; }
  __device__ static int first_unit(int row) { return row / 8 * group_units + row % 8 / 2; }
  __device__ static void add(float (&sum)[4], const uint4& unit, float first, float second) {
    F32Units::add_rows<TransposedOrder>(sum, unit, first, second);
  }
  __device__ static int first_column(int unit) {
    return unit / 128 % 2 * 256 + unit / 256 % 4 * 64 + unit / 32 % 4 * 16 + unit / 4 % 8;
  }
  __device__ static void store(const Params& p, int64_t row, bool first, bool second, int column, const float (&v)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t at = (row + e % 2) * width + column + e / 2 * 8;
      if (!(e % 2 ? second : first)) continue;
      if (p.out_f32) static_cast<float*>(p.out)[at] = v[e];
      else static_cast<uint16_t*>(p.out)[at] = static_cast<uint16_t>(out_pair<T>(p, v[e], 0));
    }
  }
};

/// As the wide kernel's threads hold O, warp by warp (warp % 4, then the half of the columns), 32 units of each two
/// chunks of 8 columns. Eight f16 relative to a power of two for each row: O of a tile of 64 rows is 128 KB in f32, and
/// all workers write and read theirs at once.
template <class T, bool batch_invariant>
struct FragmentOrder {
  static constexpr bool invariant = batch_invariant, joins = !invariant, relays = false;
  static constexpr int values = 8, least = 4;
  static constexpr int rows = 64, group_rows = 16, group_units = 1024, step = 8;
  __device__ static constexpr bool second(int e) { return e % 4 / 2; }
  __device__ static int first_row(int unit) { return unit / group_units * 16 + unit % 32 / 4; }
  __device__ static int first_unit(int row) { return row / 16 * group_units + row % 8 * 4; }
  using Lse = float2;  // and HalfScale::back
  __device__ static Lse no_lse() { return {-INFINITY, 0.0f}; }
  __device__ static float lse(Lse x) { return x.x; }
  __device__ static float back(Lse x) { return x.y; }
  __device__ static void add(float (&sum)[values], const uint4& unit, float first, float second) {
    const uint32_t v[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = __half22float2(reinterpret_cast<const __half2&>(v[i]));
      const float w = i % 2 ? second : first;
      sum[2 * i] = __fmaf_rn(w, two.x, sum[2 * i]), sum[2 * i + 1] = __fmaf_rn(w, two.y, sum[2 * i + 1]);
    }
  }
  __device__ static int first_column(int unit) { return unit / 512 % 2 * 256 + unit / 32 % 16 * 16; }
  __device__ static void store(const Params& p, int64_t row, bool first, bool second, int column, const float (&v)[8]) {
    if (p.out_f32) store<true>(p, first_element<true>(row, column), first, second, v);
    else store<false>(p, first_element<false>(row, column), first, second, v);
  }
  /// f32: lanes store pairs of columns. 16 bits: neighbouring lanes trade pairs of the two chunks and store four
  /// columns in a row. at: first_element(), of out, that the lane stores.
  template <bool f32>
  __device__ static int64_t first_element(int64_t row, int column) {
    const int lane = threadIdx.x % 32;
    return row * width + column + (f32 ? lane % 4 * 2 : lane % 2 * 8 + (lane % 4 * 2 & 4));
  }
  template <bool f32>
  __device__ static void store(const Params& p, int64_t at, bool first, bool second, const float (&v)[8]) {
    const bool odd = threadIdx.x % 2;
#pragma unroll
    for (int r = 0; r < 2; ++r, at += step * width) {
      const bool on = r ? second : first;
      const float *low = v + 2 * r, *high = v + 4 + 2 * r;
      if constexpr (f32) {
        float* to = static_cast<float*>(p.out) + at;
        if (on) *reinterpret_cast<float2*>(to) = make_float2(low[0], low[1]);
        if (on) *reinterpret_cast<float2*>(to + 8) = make_float2(high[0], high[1]);
      } else {
        const uint32_t a = out_pair<T>(p, low[0], low[1]), b = out_pair<T>(p, high[0], high[1]),
                       other = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1);
        if (on) *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) = {odd ? other : a, odd ? b : other};
      }
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

/// Where piece `piece` of a tile has the Order::Lse of a row: a row's lie beside each other.
__device__ inline int64_t partial_row(int slot0, int tile_rows, int row, int pieces, int piece) {
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

/// Leaves `shares` to those who merge later. Unless n pieces are there by now: then they are the caller's, and the
/// result what the counter holds, otherwise 0.
__device__ inline unsigned leave(unsigned* counter, int n, int shares = 1) {
  for (unsigned seen = *static_cast<volatile unsigned*>(counter);;) {
    if ((seen & counts) >= static_cast<unsigned>(n)) {
      fence_gpu();
      return seen;
    }
    const unsigned was = atomicCAS(counter, seen, seen + shares * one_left);
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
struct alignas(16) Share {
  int row0, slot0, counter;                       // of the tile: row, first partial slot, counter
  uint16_t pieces, shares, share, taken;          // of the tile; the worker's, from which on it has how many
  uint16_t begin, end;                            // units
  uint8_t at_a_time, blocks;                      // pieces, and blocks of lanes, that are copied before any is added
  uint8_t rows, row_begin, row_count, slot_step;  // the CTA's; those that the share touches
  uint8_t parts : 4, part : 4, log_lanes : 4, log_row_lanes : 4;

  __device__ int pitch() const { return row_count | 1; }
  __device__ int weight_bytes() const { return ((pieces + 1) * pitch() * 4 + 15) / 16 * 16; }
};

constexpr int no_share = 0xffff;

/// Makes s, of which nothing but the tile need be known, `taken` of the tile's shares from its `share`-th on. bytes: of
/// shared memory that there are to merge them in.
template <class Order>
__device__ void take_share(const Params& p, Share& s, int share, int taken, int bytes) {
  const int n = s.pieces, m = s.shares, units = ceil_div(s.rows, Order::group_rows) * Order::group_units;
  // The first `more` shares have one more.
  const int each = small_quotient(units / Order::least, m), more = units / Order::least - each * m;
  const auto begin_of = [&](int i) { return (i * each + min(i, more)) * Order::least; };
  const int begin = begin_of(share), end = begin_of(share + taken), count = end - begin;
  const int row_begin = begin / Order::group_units * Order::group_rows;
  s.begin = begin, s.end = end, s.row_begin = row_begin;
  s.row_count =
      max(min(ceil_div(end, Order::group_units) * Order::group_rows, static_cast<int>(s.rows)) - row_begin, 0);
  // `lanes` units side by side; groups of threads share the pieces, so that few units have as many loads on their way.
  s.log_lanes = min(max(32 - __clz(count - 1), 3), 8);
  s.log_row_lanes = Order::invariant ? 2 : s.row_count <= 8 ? 5 : s.row_count <= 16 ? 4 : s.row_count <= 32 ? 3 : 2;
  const int most = ((n - 1) >> (8 - s.log_lanes)) + 1, depth = (bytes - s.weight_bytes()) / (math_threads * 16);
  s.at_a_time = min(most, depth);
  s.blocks = s.log_lanes < 8 ? 1 : min(small_quotient(depth, s.at_a_time), (count + math_threads - 1) / math_threads);
}

template <class Order>
__device__ Share make_share(const Params& p, const Item& it, const Part& part, int share, int taken, int bytes) {
  Share s;
  s.row0 = static_cast<int>(part.row0), s.slot0 = it.slot0, s.counter = it.counter;
  s.pieces = it.pieces, s.shares = Order::relays ? it.shares() : it.pieces, s.share = share, s.taken = taken;
  s.slot_step = it.slot_step;
  s.rows = part.rows, s.parts = part.parts, s.part = part.part;
  if (!Order::relays || share != no_share) take_share<Order>(p, s, share, taken, bytes);
  return s;
}

/// The worker's pieces of split tiles: at most two, its first and its last, unless they are batch-invariant.
struct Splits {
  Share share[2];
  int count;
  bool merges[2];  // of a pair's, or of an early worker's: is it to be merged when the worker's own work is done?
  bool joined;     // has the tile that a worker's last piece is of been joined?
};

/// By one thread, off the way of those who attend: whoever is told that there are no more items finds the share.
template <class Order>
__device__ void remember_split(const Params& p, Splits& s, const Item& it, const Part& part, int bytes) {
  if (it.pieces == 1) return;
  s.count = it.split + 1;
  if constexpr (!Order::invariant) {
    int share = it.piece, taken = 1;
    if (Order::joins && shared_by_two(it)) share = 0, taken = it.pieces;
    else if (Order::relays) share = it.early() ? no_share : it.share();
    s.share[it.split] = make_share<Order>(p, it, part, share, taken, bytes);
  }
}

/// After all math threads wrote the partials of an item's pieces; by all of them.
template <class Order>
__device__ void publish(const Params& p, Splits& s, const Item& it, const Part& part) {
  barrier_sync(math_barrier, math_threads);
  if (threadIdx.x != 0) return;
  unsigned* const counter = p.counters + it.counter * part.parts + part.part;
  const bool pair = Order::joins && shared_by_two(it);
  fence_gpu();  // also for what the barrier ordered before
  if (pair && it.piece == 0) {
    s.merges[it.split] = leave(counter, 1) != 0;
  } else if (pair) {
    s.merges[it.split] = atomicAdd(counter, 1u) >= one_left;
    fence_gpu();
  } else if (Order::relays && it.early()) {
    // Is this the last piece, and had all who merge left before? Then it is all this worker's.
    const unsigned was = atomicAdd(counter, 1u), before = it.pieces - 1, merging = it.shares();
    s.merges[it.split] = (was & counts) == before && was / one_left == merging;
    if (s.merges[it.split]) fence_gpu();
  } else {
    atomicAdd(counter, Order::invariant ? it.run : 1u);
  }
}

/// How two pieces are joined from registers: added as merge_units adds, so that bits do not tell which was done.
struct Join {
  float first, second, inverse, lse2;  // weights of the pieces' outputs, what their sum is multiplied by; of both

  __device__ Join(float lse2_first, float lse2_second) {
    const float top = fmaxf(lse2_first, lse2_second), shift = top == -INFINITY ? 0.0f : top;
    first = exp2_approx(lse2_first - shift), second = exp2_approx(lse2_second - shift);
    const float sum = __fadd_rn(first, second);
    inverse = sum == 0 ? 0.0f : reciprocal_approx(sum);  // NaN stays
    lse2 = sum == 0 ? -INFINITY : top + __log2f(sum);
  }
  __device__ static float sum(float first, float x, float second, float y) {
    return __fmaf_rn(second, y, __fmaf_rn(first, x, 0.0f));
  }
};

/// Merges a share of a tile whose pieces are all there. Sums over pieces in an order that follows from their number and
/// the share; batch-invariant, from a piece's number alone. ready(): waits for them, once all is known that can be
/// before; false: not to be done. A share may be empty. space: shared memory, 16-byte aligned. By all math threads.
///
/// What runs once takes four or five cycles an instruction: short code counts more than anything.
template <class Order, class Ready>
__device__ bool merge_units(const Params& p, const Share& share, char* space, Ready ready) {
  constexpr int values = Order::values, slot_units = Order::rows * width / values, at_once = 8;
  const Share s = share;
  const int thread = threadIdx.x, n = s.pieces, rows = s.row_count, pitch = s.pitch(), begin = s.begin, end = s.end;
  float* const weights = reinterpret_cast<float*>(space);                           // [piece][row], then 1 / their sum
  uint4* const data = reinterpret_cast<uint4*>(space + s.weight_bytes()) + thread;  // [load][thread]
  const int log_lanes = s.log_lanes, lanes = 1 << log_lanes, log_groups = 8 - log_lanes, groups = 1 << log_groups,
            group = thread >> log_lanes, first_unit = begin + (thread & (lanes - 1));
  const int mine = group < n ? ((n - 1 - group) >> log_groups) + 1 : 0,  // pieces of the thread
      most = ((n - 1) >> log_groups) + 1, at_a_time = s.at_a_time, blocks = s.blocks;
  // Slots of the pieces from the second on lie `slot_step` apart, the first not quite.
  const int step = s.slot_step * s.parts * slot_units, skew = s.slot_step == 1 ? 0 : s.parts * slot_units;
  const uint4 *const from = reinterpret_cast<const uint4*>(p.partial_out) +
                            static_cast<int64_t>(s.slot0 * s.parts + s.part) * slot_units,
                     *mine_from = from + first_unit + (group ? group * step - skew : 0);
  const auto copy = [&](const uint4* source, int base, int done) {  // of pieces from `done` on; source: base's first
    const int next = step << log_groups;
#pragma unroll 1
    for (int b = 0; b < blocks && base + (b << log_lanes) < end; ++b) {
      const uint4* at = source + (b << log_lanes);
      uint32_t to = smem_address(data + b * at_a_time * math_threads);
      int advance = done + group ? next : next - skew;  // past the tile's first piece
#pragma unroll 1
      for (int left = min(mine - done, at_a_time); left > 0; left -= at_once, to += at_once * math_threads * 16) {
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
          if (k < left) cp_async_16(to + k * math_threads * 16, at);
          at += k ? next : advance;
        }
        advance = next;
      }
      if (b == 0) cp_async_commit();  // what can be added while the others come
    }
    cp_async_commit();
  };

  // `row_lanes` lanes a row make its weights. The first of what they need is asked for ahead of the pieces.
  const int row_lanes = 1 << s.log_row_lanes, r = thread >> s.log_row_lanes, lane = thread & (row_lanes - 1);
  const int pieces_here = r < rows ? n - lane : 0;
  using Lse = typename Order::Lse;
  const Lse* lse_of = reinterpret_cast<const Lse*>(p.partial_lse) +
                      partial_row(s.slot0, s.parts * Order::rows, s.part * Order::rows + s.row_begin + r, n, lane);
  asm volatile("" : "+l"(mine_from), "+l"(lse_of));  // before the wait, not after it
  if (!ready()) return false;
  Lse lse[at_once];
  const bool few = at_once / 2 * row_lanes >= n;  // half of them is enough
  const auto asked = [&](auto each) {
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      if (k == at_once / 2 && few) break;
      each(k, lse[k]);
    }
  };
  const Lse* ask = lse_of;
  asked([&](int k, Lse& x) {
    x = k * row_lanes < pieces_here ? __ldcg(ask) : Order::no_lse();
    ask += row_lanes;
  });
  copy(mine_from, first_unit, 0);

  {                                     // Weights, meanwhile.
    const auto rest = [&](auto each) {  // of more pieces than were asked for
      if (at_once * row_lanes < n)
#pragma unroll 1
        for (int i = at_once * row_lanes; i < pieces_here; i += row_lanes) each(i, __ldcg(lse_of + i));
    };
    const auto over_row = [&](float x, auto op) {
#pragma unroll
      for (int d = 16; d; d /= 2)
        if (d < row_lanes) x = op(x, __shfl_xor_sync(0xffffffffu, x, d));
      return x;
    };
    const auto larger = [](float x, float y) { return fmaxf(x, y); };
    float top = -INFINITY, total = 0;
    asked([&](int, Lse x) { top = fmaxf(top, Order::lse(x)); });
    rest([&](int, Lse x) { top = fmaxf(top, Order::lse(x)); });
    top = over_row(top, larger);
    const float shift = top == -INFINITY ? 0.0f : top;
    float* const weight = weights + lane * pitch + r;
    const auto weigh = [&](int i, Lse x) {
      const float w = exp2_approx(Order::lse(x) - shift);
      total += w;
      if (i < pieces_here) weight[i * pitch] = w * Order::back(x);
    };
    asked([&](int k, Lse x) { weigh(k * row_lanes, x); });
    rest(weigh);
    total = over_row(total, [](float x, float y) { return x + y; });
    if (lane == 0 && r < rows) {
      const int unit = Order::first_unit(s.row_begin + r), row = s.row0 + s.row_begin + r;
      const float lse2 = total == 0 ? -INFINITY : top + __log2f(total);
      weights[n * pitch + r] = total == 0 ? 0.0f : reciprocal_approx(total);  // NaN stays
      if (begin <= unit && unit < end) store_lse(p, row, lse2);
      if (p.extras) {
        weights[n * pitch + r] *= kept(p, row, lse2);
        if (p.peaks && begin <= unit && unit < end) {
          const float* max = p.partial_max + (lse_of - reinterpret_cast<const Lse*>(p.partial_lse));
          float largest = -INFINITY;
#pragma unroll 1
          for (int i = 0; i < n; ++i) largest = fmaxf(largest, __ldcg(max + i));
          store_max(p, row, largest, total);
        }
      }
    }
  }

  float carried[values] = {};
  int base = first_unit, done = 0;  // done: pieces of these units, where all are too many at a time
#pragma unroll 1
  for (;;) {
    // Batch-invariant sums know nothing of the share: one thread adds all pieces.
    constexpr bool alone = Order::invariant;
    const int before = done << log_groups, first = alone ? before : before + group,
              apart = alone ? lanes : math_threads,
              count = !alone  ? min(mine - done, at_a_time)
                      : group ? 0
                              : min(n - before, at_a_time << log_groups);
    const bool more = done + at_a_time < most;
    cp_async_wait<1>();
    barrier_sync(math_barrier, math_threads);

#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
      if (b == 1) {
        cp_async_wait<0>();
        barrier_sync(math_barrier, math_threads);
      }
      const int unit = base + (b << log_lanes);
      uint4* const loaded = data + b * at_a_time * math_threads;
      const int row = Order::first_row(unit), in_share = min(row - s.row_begin, rows - 1),
                second = in_share + Order::step < rows ? Order::step : 0;
      const float* w = weights + in_share + first * pitch;
      float sum[values];
#pragma unroll
      for (int e = 0; e < values; ++e) sum[e] = carried[e];
      if (unit < end) {
        const uint4* next = loaded;
#pragma unroll 8
        for (int k = 0; k < count; ++k, next += apart, w += alone ? pitch : pitch << log_groups)
          Order::add(sum, *next, w[0], w[second]);
      }
      if (more) {
#pragma unroll
        for (int e = 0; e < values; ++e) carried[e] = sum[e];
        break;  // of one block
      }
      if (groups > 1 && !alone) {
#pragma unroll
        for (int d = 8; d < 32; d *= 2)
          if (d >= lanes)
#pragma unroll
            for (int e = 0; e < values; ++e) sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], d);
        float4* const staged = reinterpret_cast<float4*>(loaded);  // of 8 values: two loads' room, which there is
#pragma unroll
        for (int e = 0; e < values; e += 4)
          staged[e / 4 * math_threads] = make_float4(sum[e], sum[e + 1], sum[e + 2], sum[e + 3]);
        barrier_sync(math_barrier, math_threads);
        if (thread < lanes) {
          const int apart = max(lanes, 32);
#pragma unroll
          for (int t = 1; t < 8; ++t)
            if (t * apart < math_threads)
#pragma unroll
              for (int e = 0; e < values; e += 4) {
                const float4 v = staged[e / 4 * math_threads + t * apart];
                sum[e] += v.x, sum[e + 1] += v.y, sum[e + 2] += v.z, sum[e + 3] += v.w;
              }
        }
      }
      const float* const inverse = weights + in_share + n * pitch;
      const float inverses[2] = {inverse[0], inverse[second]};
#pragma unroll
      for (int e = 0; e < values; ++e) sum[e] *= inverses[Order::second(e)], carried[e] = 0;
      const bool on = thread < lanes && unit < end && row < s.rows;
      Order::store(p, s.row0 + row, on, on && row + Order::step < s.rows, Order::first_column(unit), sum);
    }
    done = more ? done + at_a_time : 0;
    if (!more) base += blocks << log_lanes;
    if (base - first_unit + begin >= end) break;
    barrier_sync(math_barrier, math_threads);
    const int next = (done << log_groups) + group;
    copy(from + base + (next ? next * step - skew : 0), base, done);
  }
  return true;
}

/// Merges what is this worker's of a tile that it holds a piece of: `share`, in shared memory, and what others left; if
/// it has no share, they left all. pair: are all units this worker's? space: shared memory, 16-byte aligned. By all
/// math threads.
template <class Order>
__device__ void merge(const Params& p, Share& share, char* space, int bytes, bool pair) {
  const bool alone = Order::relays && share.share == no_share;        // an early worker, those who merge having left
  constexpr int nothing = -2, late = -3, waiter = math_threads - 32;  // not thread 0, who may still be publishing
  const int n = share.pieces, m = share.shares;
  unsigned* const counter = p.counters + share.counter * share.parts + share.part;
  const auto left = [&](int i) { return p.left + partial_slot(share, i) * share.parts + share.part; };
  int& told = *reinterpret_cast<int*>(space);
  int others = 0, to_do = 0;  // shares that were left; thread 0's: and that are still to be done,
  bool finishes = false;      // by this worker?
  for (bool own = true;; own = false) {
    const auto ready = [&] {
      if (!own || pair) return true;
      const auto tell = [&](unsigned seen, int otherwise) {
        told = seen ? static_cast<int>(seen / one_left) : otherwise;
      };
      if (threadIdx.x == waiter) tell(wait_for_pieces(p, counter, n), late);
      barrier_sync(math_barrier, math_threads);
      others = told;
      if (others == late) {
        // By who counted this worker's piece, after that: so that who counts the last one does not leave, too.
        barrier_sync(math_barrier, math_threads);
        if (threadIdx.x == 0) {
          const unsigned seen = leave(counter, n, share.taken);
          if (!seen) atomicExch(left(share.share), share.taken);
          tell(seen, nothing);
        }
        barrier_sync(math_barrier, math_threads);
        others = told;
      }
      return others != nothing;
    };
    if (own && alone) others = m;
    else if (!merge_units<Order>(p, share, space + 16, ready)) return;
    if (others == 0) break;
    // The last to finish does what was left, and leaves the counter as the next call needs it.
    barrier_sync(math_barrier, math_threads);
    if (threadIdx.x == 0) {
      const unsigned done = share.taken;
      if (own) finishes = alone || (atomicAdd(counter, done) & counts) + done + others == n + m, to_do = others;
      told = nothing;
      if (finishes && to_do == 0) {
        *counter = 0;
      } else if (finishes) {
        int next = 0;
        while (!(share.taken = atomicExch(left(next), 0u))) next = (next + 1) % m;
        to_do -= share.taken;
        take_share<Order>(p, share, next, share.taken, bytes);
        told = next;
      }
    }
    barrier_sync(math_barrier, math_threads);
    if (told == nothing) return;
  }
  if (threadIdx.x == 0) {  // It wraps when all shares are merged.
    const unsigned done = share.taken;
    if (pair) *counter = 0;
    else if (!Order::invariant) atomicInc(counter, n + m - 1);
    else if (atomicAdd(counter, done) + done == n + m) *counter = 0;
  }
}

/// All tiles that the worker published pieces of, after all its own work, when nobody reads `space` any more.
/// part_of(item): the CTA's part. By all math threads.
template <class Order, int tile_rows, bool listed = false, class PartOf>
__device__ void merge_split_tiles(const Params& p, Splits& s, const Split& split, int worker, char* space, int bytes,
                                  PartOf part_of) {
  if (s.count == 0) return;
  if constexpr (Order::invariant) {
    Share& share = s.share[0];
    Walk<tile_rows, true, listed> walk(p, split, worker);
    Item it;
#pragma unroll 1
    while (walk.next(p, split, it)) {
      if (it.pieces == 1) continue;
      barrier_sync(math_barrier, math_threads);  // the share before is merged
      if (threadIdx.x == 0) share = make_share<Order>(p, it, part_of(it), it.piece, it.run, bytes);
      barrier_sync(math_barrier, math_threads);
      merge<Order>(p, share, space, bytes, false);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < s.count; ++i) {
      Share& share = s.share[i];
      const bool pair = Order::joins && shared_by_two(share);
      const bool asks = pair || (Order::relays && share.share == no_share);
      if (i || asks) barrier_sync(math_barrier, math_threads);  // the share before is merged, merges[i] known
      if (!asks || s.merges[i]) merge<Order>(p, share, space, bytes, pair);
    }
  }
}

}  // namespace mla::cuda::latent
