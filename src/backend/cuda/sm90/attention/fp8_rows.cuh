// What the kernels over caches of e4m3 share: how their rows lie in shared memory, and conversions to f16.
//
// e4m3 is exact in f16. So are queries, once a power of two brings each row's largest to about 2^8. Scales of the cache
// never touch what is converted: one for all goes with the softmax scale and the output; those of 128 latents multiply
// f32 scores of their group, and the probabilities that their group's values are given.
#pragma once

#include <type_traits>

#include "backend/cuda/sm90/attention/load.cuh"
#include "backend/cuda/sm90/attention/math.cuh"
#include "backend/cuda/sm90/attention/merge.cuh"

namespace mla::cuda::latent {

constexpr int units = 4, unit_rows = 16;

/// How a block of 64 cached rows lies in shared memory: 4 units of 16 rows, as in the cache, and a gap after each.
/// Bank conflicts are met by choice of the order of positions: matrix loads take 2 rows of each unit, and the two rows
/// of S that each 8 threads load together are an odd number of 64 bytes apart.
struct Fp8Rows {
  static constexpr int bytes = 576, unit_bytes = 16 * bytes + 16, groups = 1;
  static constexpr bool scaled = false;        // do rows carry scales?
  static constexpr bool scales_apart = false;  // elsewhere in their page?
  static constexpr bool has_rope = true;       // do they have a rope beside their 512 values?
  static __device__ int unit(int g) { return g / 2; }
  static __device__ int odd_pair(int g) { return g % 2; }
  static __device__ bool swapped(int g) { return g % 2; }
};
struct Fp8DsMlaRows {
  static constexpr int bytes = 656, unit_bytes = 16 * bytes + 32, groups = 4;
  static constexpr bool scaled = true, has_rope = true, scales_apart = false;
  static constexpr int scales_at = 512, rope_at = 528;
  static __device__ int unit(int g) { return g % 2 * 2 + g / 2 % 2; }
  static __device__ int odd_pair(int g) { return g / 4; }
  static __device__ bool swapped(int) { return false; }
};

/// Two e4m3 codes, the low or high half of a word, to f16.
__device__ __forceinline__ uint32_t e4m3_low(uint32_t four) {
  uint32_t two;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(two) : "r"(four));
  return two;
}
__device__ __forceinline__ uint32_t e4m3_high(uint32_t four) {
  uint32_t two;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}" : "=r"(two) : "r"(four));
  return two;
}

/// A row of queries in shared memory to f16, in the order in which threads take elements of cached rows; by one warp.
/// Returns what brings its products back. The rope part of rows with scales stays bf16.
template <class Rows, int row_count>
__device__ float convert_query_row(char (&q)[9][row_count * 128], int row) {
  const int lane = threadIdx.x % 32;
  uint4 v[3];
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int at = lane + 32 * i;
    if (i == 2 && lane >= 8) break;
    v[i] = *reinterpret_cast<const uint4*>(q[at / 8] + row * 128 + (at % 8 ^ row % 8) * 16);
    const auto magnitude = [](uint32_t x) { return max(x & 0x7fffu, x >> 16 & 0x7fffu); };
    top = max(top, max(max(magnitude(v[i].x), magnitude(v[i].y)), max(magnitude(v[i].z), magnitude(v[i].w))));
  }
  top = __reduce_max_sync(0xffffffffu, top);
  const int up = min(127 + 8 - static_cast<int>(top >> 7), 126);
  const float scale = __int_as_float((up + 127) << 23);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int at = lane + 32 * i, m = at % 8;
    if (i == 2 && lane >= 8) break;
    const bool rope16 = Rows::scaled && at / 8 == 8;
    const uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float a = __int_as_float(static_cast<int>(words[k] << 16)) * scale,
                  b = __int_as_float(static_cast<int>(words[k] & 0xffff0000u)) * scale;
      const int to = (rope16 ? m / 4 : m % 2) * 4 + k, word = rope16 ? m % 4 : m / 2;
      *reinterpret_cast<uint32_t*>(q[at / 8] + row * 128 + (to ^ row % 8) * 16 + word * 4) =
          rope16 ? Pack<__nv_bfloat16>::two(a, b) : Pack<__half>::two(a, b);
    }
  }
  return __int_as_float((127 - up) << 23);
}

/// Room for scaled_peaks, where P will be.
template <int n>
struct ScaledPeaks {
  alignas(16) float scale[block_tokens][4];
  float v[n][block_tokens + 1], part[128 / n][n][4];
};

/// For each row and group of scales, update(row, group, the largest |v scale| of a block); by a warpgroup, whose
/// threads have v of n rows at `position` and the next as they come from S^T.
template <int n, class Update>
__device__ void scaled_peaks(ScaledPeaks<n>& space, const float (&v)[n / 2], const float4 (&scale)[2], int position,
                             int barrier, Update update) {
  const int thread = threadIdx.x % 128, c = threadIdx.x % 4;
#pragma unroll
  for (int k = 0; k < n / 2; ++k) space.v[k / 4 * 8 + 2 * c + k % 2][position + k % 4 / 2] = v[k];
  if (c == 0)
#pragma unroll
    for (int i = 0; i < 2; ++i) *reinterpret_cast<float4*>(space.scale[position + i]) = scale[i];
  barrier_sync(barrier, 128);
  const int row = thread % n, part = thread / n;
  float4 top = {0, 0, 0, 0};
#pragma unroll 4
  for (int i = part * (n / 2); i < (part + 1) * (n / 2); ++i) {
    const float x = space.v[row][i];
    const float4 s = *reinterpret_cast<const float4*>(space.scale[i]);
    top = make_float4(fmaxf(top.x, fabsf(x * s.x)), fmaxf(top.y, fabsf(x * s.y)), fmaxf(top.z, fabsf(x * s.z)),
                      fmaxf(top.w, fabsf(x * s.w)));
  }
  space.part[part][row][0] = top.x, space.part[part][row][1] = top.y;
  space.part[part][row][2] = top.z, space.part[part][row][3] = top.w;
  barrier_sync(barrier, 128);
#pragma unroll
  for (int i = 0; i < (4 * n + 127) / 128; ++i) {
    const int at = thread + 128 * i;
    if (at >= 4 * n) break;
    float peak = 0;
#pragma unroll
    for (int k = 0; k < 128 / n; ++k) peak = fmaxf(peak, space.part[k][at / 4][at % 4]);
    update(at / 4, at % 4, peak);
  }
}

/// The power of two that brings a row's probabilities times a group's scales into f16's range, after a block of that
/// peak: `room` until now, `growth` what sums until now are multiplied by.
__device__ inline float new_room(float room, float growth, float peak, float most) {
  if (!(peak * room > most) && growth == 1) return room;
  const float reach = fmaxf(peak, growth * 0x1p7f / room);
  return __int_as_float(min(max(127 + 7 + 126 - (__float_as_int(reach) >> 23), 1), 253) << 23);
}

/// Where an item's rows of one unit lie in the cache: lanes look up 32 runs of rows at a time, one such window ahead.
template <class Rows>
class UnitRows {
 public:
  static constexpr int look_ups = 2, parts = units, part_rows = unit_rows;

  UnitRows() = default;
  __device__ UnitRows(const Params& p, const Item& it, int unit) : UnitRows(it, table_of(p, it), unit) {
    at_ = look_up(p, 0), next_ = look_up(p, 1);
  }
  __device__ UnitRows(const Params& p, const Begin<UnitRows>& begin, int unit)
      : UnitRows(begin.item, table_of(p, begin.item), unit) {
    at_ = place_of(p, position(p, first_, 0), begin.pages[0]),
    next_ = place_of(p, position(p, first_, 1), begin.pages[1]);
  }
  /// first: position of the unit's first row in the first block.
  __device__ static int position(const Params& p, int first, int window) {
    const int index = window * 32 + static_cast<int>(threadIdx.x % 32), shift = 4 - p.box_shift;  // runs of a unit
    return first + (index >> shift) * block_tokens + ((index & ((1 << shift) - 1)) << p.box_shift);
  }

  /// Moves to the item's block i, not before the last one; all lanes of the warp.
  __device__ void seek(const Params& p, int i) {
    const int at = i << (4 - p.box_shift);
    offset_ = at % 32;
    if (at / 32 != window_) window_ = at / 32, at_ = next_, next_ = look_up(p, window_ + 1);
  }
  /// Bytes from the cache's start to run i of the block.
  __device__ int64_t run(int i) const { return __shfl_sync(0xffffffffu, at_, offset_ + i); }

 private:
  __device__ UnitRows(const Item& it, const int* table, int unit)
      : table_(table), positions_(it.positions), first_(it.block * block_tokens + unit * unit_rows) {}
  __device__ int64_t look_up(const Params& p, int window) const {
    const int at = position(p, first_, window);
    return place_of(p, at, page_of(p, table_, positions_, at));
  }
  __device__ static int64_t place_of(const Params& p, int position, int page) {
    if (page < 0) return 0;
    return page * p.page_stride + (position - p.by_page.divide(position) * p.page_size) * int64_t{Rows::bytes};
  }

  const int* table_ = nullptr;
  int positions_ = 0, first_ = 0, window_ = 0, offset_ = 0;
  int64_t at_ = 0, next_ = 0;
};

/// Copies one unit of the item's block i to shared memory; rows past the sequence become zero: they must not be
/// multiplied as they are, not even by 0. By one warp.
template <class Rows>
__device__ void load_unit(const Params& p, const Item& it, UnitRows<Rows>& rows, int i, int unit, char* to,
                          uint32_t full) {
  const int lane = threadIdx.x % 32;
  const int valid = min(max(it.positions - (it.block + i) * block_tokens - unit * unit_rows, 0), unit_rows);
  rows.seek(p, i);
  if (valid < unit_rows) {
    for (int at = valid * Rows::bytes + lane * 16; at < unit_rows * Rows::bytes; at += 512)
      *reinterpret_cast<uint4*>(to + at) = {0, 0, 0, 0};
    fence_async_proxy();  // before a later copy to the same place
    __syncwarp();
  }
  if (lane == 0) mbarrier_arrive_expect(full, valid * Rows::bytes);
  __syncwarp();
  const int64_t from = rows.run(lane & ((unit_rows >> p.box_shift) - 1));
  const int begin = lane << p.box_shift;
  if (begin < valid)
    bulk_load(smem_address(to) + begin * Rows::bytes, static_cast<const char*>(p.cache) + from,
              min(1 << p.box_shift, valid - begin) * Rows::bytes, full, row_policy(p));
  __syncwarp();
}

/// Where an item's rows of one unit lie that a list names: lanes look up the slots of two blocks at a time, one such
/// window ahead.
template <class Rows>
class ListedUnits {
 public:
  ListedUnits() = default;
  __device__ ListedUnits(const Params& p, const Item& it, int unit)
      : row_(it.request),
        end_(min(it.positions, (it.block + it.blocks) * block_tokens)),
        first_(it.block * block_tokens + unit * unit_rows),
        second_from_(p.lists.sources > 1 ? ListedRow::first_keys(p.lists, it.request) : 0x7fffffff) {
    at_ = place_of(p, 0, look_up(p, 0)), next_ = look_up(p, 1);
  }

  /// Moves to the item's block i, not before the last one; all lanes of the warp.
  __device__ void seek(const Params& p, int i) {
    offset_ = i % 2 * unit_rows;
    if (i / 2 != window_) window_ = i / 2, at_ = place_of(p, window_, next_), next_ = look_up(p, window_ + 1);
  }
  /// Row lane % 16 of the unit.
  __device__ const char* row() const {
    const auto at = reinterpret_cast<unsigned long long>(at_);
    return reinterpret_cast<const char*>(
        __shfl_sync(0xffffffffu, at, offset_ + static_cast<int>(threadIdx.x % unit_rows)));
  }
  /// Bit r: is there a row r?
  __device__ uint32_t there() const { return __ballot_sync(0xffffffffu, at_ != nullptr) >> offset_ & 0xffffu; }

 private:
  __device__ int position(int window) const {
    const int lane = threadIdx.x % 32;
    return first_ + (2 * window + lane / unit_rows) * block_tokens + lane % unit_rows;
  }
  __device__ int look_up(const Params& p, int window) const {
    const int at = position(window), second = at >= second_from_;
    if (at >= end_) return -1;
    const SlotSource& from = p.lists.source[second];
    return __ldg(from.slots + row_ * from.slot_stride + (second ? at - second_from_ : at));
  }
  __device__ const char* place_of(const Params& p, int window, int slot) const {
    const int second = position(window) >= second_from_;
    const SlotSource& from = p.lists.source[second];
    if (slot < 0 || slot >= from.held) return nullptr;
    return reinterpret_cast<const char*>(from.cache) + unit_of(from, p.by_slot_page[second], slot) * int64_t{16};
  }

  const char* at_ = nullptr;
  int row_ = 0, end_ = 0, first_ = 0, second_from_ = 0, next_ = -1, window_ = 0, offset_ = 0;
};

/// load_unit of a list's; rows that do not exist become zero, and `there` says which do.
template <class Rows>
__device__ void load_listed_unit(const Params& p, ListedUnits<Rows>& rows, int i, char* to, uint32_t& there,
                                 uint32_t full) {
  const int lane = threadIdx.x % 32;
  rows.seek(p, i);
  const uint32_t is = rows.there();
  const char* const from = rows.row();
  if (is != 0xffffu) {
#pragma unroll 1
    for (int at = lane * 16; at < unit_rows * Rows::bytes; at += 512)
      if (!(is >> at / Rows::bytes & 1)) *reinterpret_cast<uint4*>(to + at) = {0, 0, 0, 0};
    fence_async_proxy();  // before a later copy to the same place
    __syncwarp();
  }
  if (lane == 0) there = is, mbarrier_arrive_expect(full, __popc(is) * Rows::bytes);
  __syncwarp();
  if (lane < unit_rows && is >> lane & 1) bulk_load(smem_address(to) + lane * Rows::bytes, from, Rows::bytes, full);
  __syncwarp();
}

/// A loading warp: its unit of every block; the first one also brings the items and their queries. listed: are rows
/// listed?
template <class Order, class Rows, bool listed = false>
class UnitLoader {
  using Units = std::conditional_t<listed, ListedUnits<Rows>, UnitRows<Rows>>;

 public:
  UnitLoader() = default;
  /// Finds the first item, beside the barriers' birth and the previous kernel's end, and tells all of it.
  template <class Shared>
  __device__ UnitLoader(const Params& p, const CUtensorMap& q_map, Shared& s) {
    const Split mine = begin_work<Order::rows, Order::invariant, listed>(p, blockIdx.x, warp_unit(), it_, rows_);
    if (more_ = it_.blocks >= 0; more_) prefetch_queries(q_map, it_);
    if (threadIdx.x == math_threads) s.split = mine, s.item[0] = it_;
  }

  /// load(item, rows, i, unit): the unit of its block i, as soon as there is room. Queries wait for the last scores of
  /// the item before; `ahead` blocks of the cache go ahead of them.
  template <class Shared, class PartOf, class Load>
  __device__ void run(const Params& p, const CUtensorMap& q_map, Shared& s, int ahead, int merge_bytes, PartOf part_of,
                      Load load) {
    const int unit = warp_unit();
    int count = 0;
    Walk<Order::rows, Order::invariant, listed> walk;  // again, once copies are under way: few registers are left
    if (!p.settled) wait_for_previous_grids();
    while (more_) {
      Item following;
      Units following_rows;
      bool another = false, looked = false;
      const auto look_ahead = [&] {  // its lengths and page numbers are asked for while this item is copied
        looked = true;
        if (count == 0) walk = {p, s.split, static_cast<int>(blockIdx.x)}, walk.next(p, s.split, following);
        another = walk.next(p, s.split, following);
        if (another) following_rows = Units(p, following, unit), prefetch_queries(q_map, following);
      };
      const int blocks = warp_uniform(it_.blocks), queries_at = unit || count == 0 ? -1 : min(blocks, ahead);
#pragma unroll 1
      for (int i = 0; i < blocks; ++i) {
        if (i == queries_at) hand_over<Order::rows>(s, q_map, it_, count);
        load(it_, rows_, i, unit);
        if (!looked && i > 0) look_ahead();
      }
      if (queries_at == blocks) hand_over<Order::rows>(s, q_map, it_, count);
      if (!looked) look_ahead();
      if (threadIdx.x == math_threads)
        remember_split<Order>(p, s.splits, s.item[count & 1], part_of(s.item[count & 1]), merge_bytes);
      ++count;
      it_ = following, rows_ = following_rows, more_ = another;
    }
    if (unit == 0) hand_over_none(s, count);
  }

 private:
  __device__ static int warp_unit() { return warp_uniform(threadIdx.x / 32) - math_threads / 32; }
  __device__ static void prefetch_queries(const CUtensorMap& q_map, const Item& it) {
    const int lane = threadIdx.x % 32;
    if (warp_unit() == 0 && lane < 9) tma_prefetch_box(q_map, lane * 64, it.row0);
  }

  Item it_;
  Units rows_;
  bool more_ = false;
};

/// After an item's blocks: barriers until both math warpgroups passed as many of their own, each one more for `each` of
/// its `passed`, `more` for what else the other had. Order needs none of them, but compute-sanitizer's racecheck takes
/// warps of different numbers of barriers for unordered across a common one.
__device__ inline void even_barriers(int own_barrier, int passed, int each, int more) {
  const int both = barrier_count(math_barrier, math_threads, static_cast<int>(threadIdx.x % 128) < passed);
#pragma unroll 1
  for (int i = max(both - 2 * passed, 0) * each + more; i > 0; --i) barrier_sync(own_barrier, 128);
}

}  // namespace mla::cuda::latent
