// A row is a cluster's. A sample of its scores gives a key that somewhat more than topk of them reach; each CTA lists
// those of its columns that do, in order, in shared memory. All CTAs then read all lists and find the last selected
// key, each for itself, so that each knows where its own selected go. A sample that misleads, too few or too many reach
// its key, costs time alone: the row is then decided by histograms of all of its scores.
#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

#include "backend/cuda/core/cluster.cuh"
#include "backend/cuda/core/index_items.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/mbarrier.cuh"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/core/select.cuh"
#include "backend/cuda/gpu_model.hpp"
#include "backend/cuda/sm90/select_topk/rows.cuh"
#include "backend/cuda/sm90/select_topk/select_topk.hpp"

namespace mla::cuda::sm90 {
namespace {

using namespace topk;

constexpr int kMostPerThread = 32, kMostBlocks = 8;
constexpr int kCandidates = 8192;                  // of a row
constexpr int kUnits = kCandidates / 32;           // of 32 candidates
constexpr int kMostTopkHere = 6144;                // what a sample takes for more seldom fits in kCandidates
constexpr int kFewSamples = 4, kMostSamples = 16;  // of a thread
static_assert(kMostSamples * kThreads <= kCandidates && kUnits <= kThreads);

struct Rows : TopkRows {
  int blocks = 1;  // of a row
  int passes = 1;  // of a block over its columns
};

// Code runs once a launch, so that it costs what fetching it costs: loops are not unrolled without a gain, and what is
// called from several places is one function.
struct Shared {
  uint32_t bins[kBins];
  uint32_t key[kCandidates];  // the sample's, then the row's candidates' in order of columns
  union {
    int32_t column[kCandidates];  // of the candidates, where one CTA has all
    struct {
      uint32_t key[kCandidates / 2];
      int32_t column[kCandidates / 2];
    } own;  // otherwise this CTA's
  };
  uint32_t units[kUnits];
  uint8_t marks[kThreads * kMostPerThread / 4];  // four columns each
  uint32_t warps[kWarps];
  uint32_t counts[2][kMostBlocks];   // CTAs' candidates and best; where the sample misled, what they select, may select
  uint32_t best, few_held, few[32];  // the candidates' best; those that decide at last
  Digit digit;
  IndexItem item;
};
__device__ __forceinline__ Shared& shared() {
  extern __shared__ __align__(16) std::byte memory[];
  return *reinterpret_cast<Shared*>(memory);
}

// Sum over threads before this one, and over all.
struct Scan {
  uint32_t before, total;
};
__device__ __noinline__ Scan scan(uint32_t x) {
  Scan s;
  s.before = scan_before(x, shared().warps, s.total);
  return s;
}

// Keys low to low + last, among which is the `need`-th from above of those not yet decided.
struct Range {
  uint32_t low, last, need;

  __device__ bool has(uint32_t key) const { return key - low <= last; }
  __device__ bool below(uint32_t key) const { return key >= low && key - low > last; }  // is it below that key?
  __device__ void narrow(const Digit& d, int shift) {
    low += d.digit << shift;
    last = (1u << shift) - 1;
    need -= d.above;
  }
  // The digits of `last` that a histogram has room for.
  __device__ int shift() const { return max(0, 32 - __clz(static_cast<int>(last)) - 11); }
};
static_assert(kBins == 1 << 11);

__device__ __forceinline__ void clear_bins() {
  reinterpret_cast<uint4*>(shared().bins)[threadIdx.x] = {0, 0, 0, 0};
  __syncthreads();
}
static_assert(kBins == 4 * kThreads);
__device__ __forceinline__ int own_bins() { return kBins - 4 - 4 * static_cast<int>(threadIdx.x); }

// The digit at `shift` of the range's key, among the first `count` keys in shared memory.
__device__ __noinline__ Digit digit_among(int count, Range r, int shift) {
  Shared& s = shared();
  clear_bins();
#pragma unroll 4
  for (int c = static_cast<int>(threadIdx.x); c < count; c += kThreads)
    if (r.has(s.key[c])) atomicAdd(&s.bins[(s.key[c] - r.low) >> shift], 1u);
  __syncthreads();
  return find_digit(*reinterpret_cast<const uint4*>(s.bins + own_bins()), r.need, s.warps, s.digit);
}

// Which of a warp's `samples` scores of n, from above: the mean of what warps find so is above the last of topk but one
// time in some ten thousand, four standard deviations of it.
__device__ __forceinline__ int sampled_rank(int samples, int n, int topk) {
  const float share = static_cast<float>(topk) / static_cast<float>(n), mean = share * static_cast<float>(samples);
  return static_cast<int>(mean + 4 * sqrtf(mean * (1 - share) / kWarps) + 1.5f);
}

// A key that somewhat more than topk of a row's scores reach: the mean of what each warp finds for its part of the
// sample, `each` keys a thread in shared memory. By warps, since barriers cost more than comparisons, and from the best
// key down, where scores that are alike have keys that are near.
__device__ __forceinline__ uint32_t least_of(int each, int rank) {
  Shared& s = shared();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, enough = rank + rank / 8;
  const auto reached = [&](uint32_t key) {
    int n = 0;
#pragma unroll 1
    for (int i = thread; i < each * kThreads; i += kFewSamples * kThreads) {
#pragma unroll
      for (int j = 0; j < kFewSamples; ++j) n += s.key[i + j * kThreads] >= key;
    }
    return __reduce_add_sync(0xffffffffu, n);
  };
  uint32_t best = 0;
#pragma unroll 4
  for (int i = 0; i < each; ++i) best = max(best, s.key[thread + i * kThreads]);
  best = __reduce_max_sync(0xffffffffu, best);
  uint32_t step = 1u << 22, least = 0;
#pragma unroll 1
  for (; step && step < best; step *= 2)
    if (reached(best - step) >= rank) {
      least = best - step;
      break;
    }
  if (least == 0) step = 1u << 31;
#pragma unroll 1
  for (step /= least == 0 ? 1 : 2; step; step /= 2) {
    const int reach = reached(least + step);
    if (reach < rank) continue;
    least += step;
    if (reach <= enough) break;
  }
  if (lane == 0) s.units[thread / 32] = least / kWarps;
  __syncthreads();
  return __reduce_add_sync(0xffffffffu, lane < kWarps ? s.units[lane] : 0);
}

// The range's key, where it has 32 at most: each warp counts who of them is above whom.
__device__ __forceinline__ void decide_few(int count, Range& r) {
  Shared& s = shared();
#pragma unroll 4
  for (int c = static_cast<int>(threadIdx.x); c < count; c += kThreads)
    if (r.has(s.key[c])) s.few[atomicAdd(&s.few_held, 1u)] = s.key[c];
  __syncthreads();
  const uint32_t held = s.few_held, lane = threadIdx.x % 32, key = lane < held ? s.few[lane] : 0;
  uint32_t above = 0, reach = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < held; ++i) {
    const uint32_t other = __shfl_sync(0xffffffffu, key, i);
    above += other > key, reach += other >= key;
  }
  const uint32_t last = __ballot_sync(0xffffffffu, lane < held && above < r.need && r.need <= reach);
  const int at = __ffs(static_cast<int>(last)) - 1;
  r.low = __shfl_sync(0xffffffffu, key, at);
  r.need -= __shfl_sync(0xffffffffu, above, at);
  r.last = 0;
}

// A row whose sample misled: its last selected key by histograms of all scores, then each CTA's selected in order.
__device__ __noinline__ void select_by_histograms(const Rows& a, const float* scores, int64_t begin, int64_t end,
                                                  int32_t kv_begin, uint32_t* keys, int32_t* positions) {
  Shared& s = shared();
  constexpr int kColumns = 16;
  const int thread = static_cast<int>(threadIdx.x), blocks = a.blocks;
  const uint32_t rank = blocks > 1 ? cluster_rank() : 0;
  const auto each = [&](auto&& visit) {  // a thread's columns of a pass; as many passes for all threads
#pragma unroll 1
    for (int64_t from = begin; from < end; from += kThreads * kColumns) {
      const int64_t first = from + thread * kColumns;
      float x[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) x[i] = first + i < end ? scores[first + i] : 0;
      uint32_t key[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) key[i] = first + i < end ? key_of(x[i]) : 0;
      visit(first, key);
    }
  };
  const auto all_here = [&] {
    if (blocks > 1) cluster_sync();
    else __syncthreads();
  };

  Range r{0, ~0u, static_cast<uint32_t>(a.state.topk)};
  for (int level = 0; level < kKeyLevels; ++level) {
    clear_bins();
    each([&](int64_t, const uint32_t(&key)[kColumns]) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        if (key[i] != 0 && r.has(key[i])) atomicAdd(&s.bins[(key[i] - r.low) >> kShift[level]], 1u);
    });
    all_here();
    uint4 four = *reinterpret_cast<const uint4*>(s.bins + own_bins());
    if (blocks > 1) {
      four = {0, 0, 0, 0};
      for (int b = 0; b < blocks; ++b) {
        const uint32_t at = map_to_cta(smem_address(s.bins + own_bins()), static_cast<uint32_t>(b));
        four.x += load_remote(at), four.y += load_remote(at + 4);
        four.z += load_remote(at + 8), four.w += load_remote(at + 12);
      }
    }
    const Digit d = find_digit(four, r.need, s.warps, s.digit);
    r.narrow(d, kShift[level]);
    if (blocks > 1) cluster_sync();  // all have read these bins
    if (d.at == r.need) break;
  }

  const auto marks = [&](const uint32_t(&key)[kColumns]) {  // chosen, and above them those of the range
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      m |= static_cast<uint32_t>(r.below(key[i])) << i | static_cast<uint32_t>(key[i] != 0 && r.has(key[i]))
                                                             << (16 + i);
    return m;
  };
  uint32_t above = 0, at_it = 0;
  each([&](int64_t, const uint32_t(&key)[kColumns]) {
    const uint32_t m = marks(key);
    above += __popc(m & 0xffff), at_it += __popc(m >> 16);
  });
  const uint32_t all_above = scan(above).total, all_at_it = scan(at_it).total;
  above = at_it = 0;
  if (blocks > 1) {
    if (thread < blocks) {
      store_remote(map_to_cta(smem_address(&s.counts[0][rank]), thread), all_above);
      store_remote(map_to_cta(smem_address(&s.counts[1][rank]), thread), all_at_it);
    }
    cluster_sync();
    for (uint32_t b = 0; b < rank; ++b) above += s.counts[0][b], at_it += s.counts[1][b];
  }
  each([&](int64_t first, const uint32_t(&key)[kColumns]) {
    const uint32_t m = marks(key);
    const auto [before, total] = scan(static_cast<uint32_t>(__popc(m & 0xffff) | __popc(m >> 16) << 16));
    uint32_t in = above + (before & 0xffff), of = at_it + (before >> 16);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const bool chosen = m >> i & 1, may = m >> (16 + i) & 1;
      if (chosen || (may && of < r.need)) {
        const uint32_t at = in + min(of, r.need);
        if (keys) keys[at] = key[i];
        positions[at] = kv_begin + static_cast<int32_t>(first + i);
      }
      in += chosen, of += may;
    }
    above += total & 0xffff, at_it += total >> 16;
  });
}

// A thread's columns of a pass: four of each 128, from `first` on; what lies behind `end` is not read.
template <int n>
__device__ __forceinline__ void load(float (&x)[n], const float* scores, int64_t first, int64_t end, bool by_fours) {
  if (by_fours && first + 32 * (n - 4) + 4 <= end) {
#pragma unroll
    for (int i = 0; i < n; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(scores + first + 32 * i);
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int64_t at = first + i / 4 * 128 + i % 4;
      x[i] = at < end ? scores[at] : 0;
    }
  }
}

// A key that somewhat more than topk of a row's n scores reach, from a sample; 1, which all do, where topk is not fewer
// or a sample cannot tell. `held`: a thread's scores x are the row's, from column `mine` on.
template <int per_thread>
__device__ __forceinline__ uint32_t least_by_sample(const float (&x)[per_thread], bool held, int mine,
                                                    const float* scores, int n, int topk) {
  if (n <= topk) return 1;
  Shared& s = shared();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int each = kFewSamples, samples, rank;  // of a thread; a warp's; from above
  if (held) {
    samples = static_cast<int>(int64_t{n} * kFewSamples / per_thread / kWarps);
    rank = sampled_rank(samples, n, topk);
#pragma unroll
    for (int i = 0; i < kFewSamples; ++i) {
      constexpr int kApart = per_thread / kFewSamples;
      const bool counts = mine + (i * kApart / 4 * 128) + i * kApart % 4 < n;
      // A warp's part comes from all over the row.
      s.key[i * kThreads + thread % kWarps * 32 + thread / kWarps] = counts ? key_of(x[i * kApart]) : 0;
    }
    __syncthreads();
  } else {
    // As many as leave room for the candidates that are to be expected, and more.
    for (;; each *= 2) {
      samples = each * 32;
      rank = sampled_rank(samples, n, topk);
      if (each == kMostSamples || int64_t{rank} * n <= int64_t{samples} * (kCandidates * 3 / 4)) break;
    }
    const int halves = __ffs(2 * each * kThreads) - 1;
#pragma unroll 4
    for (int i = 0; i < each; ++i) {
      const auto number = static_cast<uint64_t>(i * kThreads + lane * kWarps + warp);
      s.key[i * kThreads + thread] = key_of(scores[(2 * number + 1) * static_cast<uint32_t>(n) >> halves]);
    }
  }
  return rank < samples ? least_of(each, rank) : 1;
}

template <int per_thread>
__global__ void __launch_bounds__(kThreads, 2) select_kernel(const Rows a) {
  constexpr int kPass = kThreads * per_thread;  // columns
  Shared& s = shared();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, blocks = a.blocks;
  const uint32_t rank = blocks > 1 ? cluster_rank() : 0;
  const int64_t row = blockIdx.x / static_cast<unsigned>(blocks);
  const int64_t begin = int64_t{rank} * a.passes * kPass;
  const float* const scores = a.scores + row * a.scores_row;
  // A warp's columns are neighbours; a lane has four of each 128, the first of which is this one.
  const int mine_at = warp * 32 * per_thread + 4 * lane;
  take_turn();
  // Asked for before it is known how many count: the others are there, whatever they hold.
  float x[per_thread];
  load(x, scores, begin + mine_at, a.columns, a.by_fours);
  if (!find_item<kThreads>(a.items, a.item_count, &IndexItem::row, row, s.item)) return;
  const IndexItem item = clipped(s.item, a.first, a.columns);
  const int n = max(0, item.columns(row - item.row)), topk = a.state.topk;
  uint32_t* const keys = a.indices ? nullptr : a.state.keys(row, 0);
  int32_t* const positions =
      a.indices ? a.indices + (item.q_begin + row - item.row) * a.indices_row : a.state.positions(row, 0);
  if (rank == 0) {
    if (!a.indices && thread == 0) *a.state.row(row) = {min(n, topk), 0, 1};
    for (int k = n + thread; a.indices && k < topk; k += kThreads) positions[k] = -1;
  }
  if (n == 0) return;
  if (blocks > 1) cluster_arrive_relaxed();  // waited for before another CTA's memory is touched
  if (thread == 0) s.best = s.few_held = 0;

  uint32_t least = least_by_sample(x, blocks == 1 && a.passes == 1, mine_at, scores, n, topk);
  const bool all = least <= key_of(-INFINITY);  // then all are candidates, NaN too
  if (all) least = 1;                           // no score has key 0
  const float bound = score_of(least);

  // This CTA's candidates.
  const int64_t end = min(static_cast<int64_t>(n), begin + int64_t{a.passes} * kPass);
  uint32_t* const own_key = blocks == 1 ? s.key : s.own.key;
  int32_t* const own_column = blocks == 1 ? s.column : s.own.column;
  const uint32_t own_most = blocks == 1 ? kCandidates : kCandidates / 2;
  uint32_t own = 0;
#pragma unroll 1
  for (int64_t from = begin; from < end; from += kPass) {
    // Marks pass through shared memory, for a lane's next columns are its neighbours.
    const int here = static_cast<int>(min(end - from, int64_t{kPass}));
#pragma unroll
    for (int i = 0; i < per_thread; i += 4) {
      uint32_t four = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        four |= static_cast<uint32_t>((all || x[i + j] >= bound) && mine_at + 32 * i + j < here) << j;
      s.marks[(mine_at + 32 * i) / 4] = static_cast<uint8_t>(four);
    }
    if (from + kPass < end) load(x, scores, from + kPass + mine_at, end, a.by_fours);
    __syncwarp();
    uint32_t reach = 0;
#pragma unroll
    for (int i = 0; i < per_thread / 4; ++i)
      reach |= static_cast<uint32_t>(s.marks[thread * (per_thread / 4) + i]) << 4 * i;
    const auto [before, total] = scan(static_cast<uint32_t>(__popc(reach)));
#pragma unroll 1
    for (uint32_t at = own + before; reach && at < own_most; reach &= reach - 1, ++at) {
      own_column[at] = static_cast<int32_t>(from + thread * per_thread + __ffs(static_cast<int>(reach)) - 1);
    }
    own += total;
  }
  __syncthreads();
  uint32_t best = 0;
#pragma unroll 4
  for (uint32_t c = thread; c < min(own, own_most); c += kThreads) {
    own_key[c] = key_of(scores[own_column[c]]);
    best = max(best, own_key[c]);
  }
  best = __reduce_max_sync(0xffffffffu, best);
  if (lane == 0) atomicMax(&s.best, best);
  __syncthreads();
  best = s.best;
  if (own > own_most) own = kCandidates + 1;

  uint32_t total = own, mine = 0;  // the row's; in front of this CTA's
  if (blocks > 1) {
    cluster_wait();
    if (thread < 2 * blocks)
      store_remote(map_to_cta(smem_address(&s.counts[thread / blocks][rank]), thread % blocks),
                   thread < blocks ? own : best);
    cluster_sync();  // counts and candidates are there
    const bool is = lane < blocks;
    const uint32_t of = is ? s.counts[0][lane] : 0;
    total = __reduce_add_sync(0xffffffffu, of);
    mine = __reduce_add_sync(0xffffffffu, lane < static_cast<int>(rank) ? of : 0);
    best = __reduce_max_sync(0xffffffffu, is ? s.counts[1][lane] : 0);
  }
  if (total > kCandidates || total < static_cast<uint32_t>(min(n, topk))) {
    select_by_histograms(a, scores, begin, end, item.kv_begin, keys, positions);
    return;
  }

  if (blocks > 1) {
    // Each CTA's by as many warps, which the number of CTAs divides.
    const int warps = kWarps / blocks;
    const auto of = static_cast<uint32_t>(warp / warps);
    uint32_t before = 0;
    for (uint32_t b = 0; b < of; ++b) before += s.counts[0][b];
    const uint32_t count = s.counts[0][of], list = map_to_cta(smem_address(s.own.key), of);
#pragma unroll 2
    for (uint32_t c = 4 * (thread % (32 * warps)); c < count; c += 4 * 32 * warps) {
      const uint4 four = load_remote_four(list + 4 * c);
      s.key[before + c] = four.x;
      if (c + 1 < count) s.key[before + c + 1] = four.y;
      if (c + 2 < count) s.key[before + c + 2] = four.z;
      if (c + 3 < count) s.key[before + c + 3] = four.w;
    }
    cluster_arrive();  // has read the others' lists
    __syncthreads();
  }

  Range r{least, best - least, static_cast<uint32_t>(topk)};
  bool whole = total <= static_cast<uint32_t>(topk);
#pragma unroll 1
  while (!whole) {
    const int shift = r.shift();
    const Digit d = digit_among(static_cast<int>(total), r, shift);
    r.narrow(d, shift);
    whole = d.at == r.need || shift == 0;
    if (!whole && d.at <= 32) {
      decide_few(static_cast<int>(total), r);
      break;
    }
  }

  // Above the range all are selected, in it as many as are needed, from the first on.
  const auto ballots = [&](uint32_t c) {
    const uint32_t key = c < total ? s.key[c] : 0;
    return uint2{__ballot_sync(0xffffffffu, r.below(key)), __ballot_sync(0xffffffffu, key != 0 && r.has(key))};
  };
#pragma unroll 2
  for (uint32_t c = thread; c - lane < total; c += kThreads) {
    const auto [above, at_it] = ballots(c);
    if (lane == 0) s.units[c / 32] = static_cast<uint32_t>(__popc(above) | __popc(at_it) << 16);
  }
  __syncthreads();
  const auto units = static_cast<int>((total + 31) / 32);
  const uint32_t before = scan(thread < units ? s.units[thread] : 0).before;
  if (thread < units) s.units[thread] = before;
  __syncthreads();
  const uint32_t lower = (1u << lane) - 1;
#pragma unroll 2
  for (uint32_t c = (mine & ~31u) + thread; c - lane < mine + own; c += kThreads) {
    const auto [above, at_it] = ballots(c);
    const uint32_t unit = s.units[c / 32], of = (unit >> 16) + __popc(at_it & lower);
    const bool chosen = above >> lane & 1 || (at_it >> lane & 1 && of < r.need);
    if (c < mine || c >= mine + own || !chosen) continue;
    const uint32_t at = (unit & 0xffff) + __popc(above & lower) + min(of, r.need);
    if (keys) keys[at] = s.key[c];
    positions[at] = item.kv_begin + own_column[c - mine];
  }
  if (blocks > 1) cluster_wait();  // the others have read this CTA's list
}

}  // namespace

bool serves(const backend::GpuModel& gpu, const ops::SelectTopkArgs& a) {
  return gpu.hopper && a.begin && !a.positions.data() && a.state.topk <= kMostTopkHere;
}

void select_topk(const Queue& queue, const ops::SelectTopkArgs& a, int64_t rows, int64_t columns) {
  const TopkRows all{
      .state = state_of(a.state),
      .items = queue.reads(a.items, "select_topk", "items"),
      .item_count = static_cast<int>(a.items.size()),
      .scores = a.scores.data(),
      .scores_row = a.scores.stride<Token>(),
      .by_fours = a.scores.stride<Token>() % 4 == 0 && reinterpret_cast<uintptr_t>(a.scores.data()) % 16 == 0,
      .first = a.first,
      .columns = a.scores.extent<Key>(),
      .indices = a.indices.data(),
      .indices_row = a.indices.stride<Token>()};
  if (serves_short_rows(model_of(queue), rows, columns)) return select_short_rows(queue, all, rows, columns);
  Rows r{all};
  // As few columns a thread as a multiprocessor for each CTA leaves; what is longer takes several passes.
  const auto fits = [&]<int per_thread>(std::integral_constant<int, per_thread>) {
    constexpr int64_t pass = int64_t{kThreads} * per_thread;
    int64_t blocks = 1;
    while (blocks * pass < columns && blocks < kMostBlocks && 2 * blocks * rows <= queue.multiprocessors()) blocks *= 2;
    if (per_thread < kMostPerThread && blocks * pass < columns) return false;
    r.blocks = static_cast<int>(blocks);
    r.passes = static_cast<int>((columns + blocks * pass - 1) / (blocks * pass));
    launch(select_kernel<per_thread>,
           {.grid = dim3(static_cast<unsigned>(rows * blocks)),
            .block = dim3(kThreads),
            .shared_bytes = sizeof(Shared),
            .cluster = r.blocks,
            .overlap = true},
           queue.stream(), "select_topk", "select by clusters",
           "rows " + std::to_string(rows) + ", columns " + std::to_string(columns) + ", topk " +
               std::to_string(a.state.topk),
           r);
    return true;
  };
  [&]<int... per_thread>(std::integer_sequence<int, per_thread...>) {
    (void)(fits(std::integral_constant<int, per_thread>()) || ...);
  }
  (std::integer_sequence<int, 4, 8, 16, kMostPerThread>());
}

}  // namespace mla::cuda::sm90
