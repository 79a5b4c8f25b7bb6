// What kernels share that select the best by a radix select on (score descending, position ascending): scores as keys,
// the running selection's memory, a level's decision from its histogram, and levels over few candidates.
//
// A row of the state: its count, which of two sets it is and whether that is in order; then for each set topk keys and
// topk positions. A call reads one and writes another.
#pragma once

#include <cmath>
#include <cstdint>

#include "backend/cuda/core/warp_scan.cuh"
#include "mla/index_plan.hpp"
#include "ops/select_topk/op.hpp"

namespace mla::cuda::topk {

constexpr int kThreads = 512, kWarps = kThreads / 32;  // of a block
constexpr uint32_t kLast = 0x7fffffff;
constexpr int kBins = 2048;
constexpr int kListed = 4096, kListedPerThread = kListed / kThreads;  // candidates that one block decides among
// Levels of a score's bits, then of its position's complement.
constexpr int kKeyLevels = 3, kLevels = 6;
__device__ constexpr int kShift[kLevels] = {21, 10, 0, 20, 10, 0};

// Higher is better, as an unsigned number; no score has 0.
__device__ inline uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(score == score ? score + 0.0f : -INFINITY);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float score_of(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

struct State {
  std::byte* data;
  int64_t row_bytes;
  int topk;
  struct Row {
    int32_t count, side;
    int32_t in_order;  ///< positions ascend, side is 0
  };
  __device__ Row* row(int64_t r) const { return reinterpret_cast<Row*>(data + r * row_bytes); }
  __device__ uint32_t* keys(int64_t r, int side) const {
    return reinterpret_cast<uint32_t*>(data + r * row_bytes + 64) + side * 2 * topk;
  }
  __device__ int32_t* positions(int64_t r, int side) const { return reinterpret_cast<int32_t*>(keys(r, side) + topk); }
};
static_assert(topk_capacity(1) + 16 >= 2 && topk_capacity(kMostTopk) + 16 >= 2 * kMostTopk);
inline State state_of(const ops::TopkState& s) {
  return {s.data, static_cast<int64_t>(topk_state_bytes(s.topk)), static_cast<int>(s.topk)};
}

// Sum over threads before this one, and over all.
__device__ inline uint32_t scan_before(uint32_t x, uint32_t (&warps)[kWarps], uint32_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t sum = sum_upto(x, lane);
  __syncthreads();  // an earlier scan's sums are read
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  const uint32_t of = lane < kWarps ? warps[lane] : 0;
  total = __reduce_add_sync(0xffffffffu, of);
  const uint32_t before = __reduce_add_sync(0xffffffffu, lane < warp ? of : 0);
  return before + sum - x;
}

// The digit of the last selected of `need` candidates by a histogram of digits: how many lie above it, and at it.
struct Digit {
  uint32_t digit, above, at, total;
};

// bins: this thread's four of the histogram, the highest four for the first thread. By all threads; total < need: none.
__device__ inline Digit find_digit(uint4 bins, uint32_t need, uint32_t (&warps)[kWarps], Digit& shared) {
  uint32_t total;
  const uint32_t higher = scan_before(bins.x + bins.y + bins.z + bins.w, warps, total);
  if (higher < need && need <= higher + bins.x + bins.y + bins.z + bins.w) {
    const uint32_t part[4] = {bins.w, bins.z, bins.y, bins.x};
    uint32_t sum = higher;
    int b = 0;
    while (need > sum + part[b]) sum += part[b++];
    shared = {static_cast<uint32_t>(kBins - 1 - 4 * static_cast<int>(threadIdx.x) - b), sum, part[b], total};
  }
  __syncthreads();
  Digit found = shared;
  found.total = total;
  return found;
}

// How far candidates are decided. They compare by key, then by `early`, which is kLast - position: selected are those
// above (key, early) in the bits decided.
struct Threshold {
  uint32_t key = 0, early = 0, need;
  int key_shift = 32, early_shift = 31;

  __device__ void narrow(int level, const Digit& d) {
    if (level < kKeyLevels) {
      key |= d.digit << kShift[level];
      key_shift = kShift[level];
    } else {
      early |= d.digit << kShift[level];
      early_shift = kShift[level];
    }
    need -= d.above;
  }
};

// Of a thread's n candidates (key 0: none), early_of(i) being the i-th one's position as a threshold has it.

// Counts a level's digits of those that higher levels leave undecided. equal: a bit each, of those whose key is the
// last selected one's, once keys are decided. Code that is n times the same is kept to a few instructions: it must stay
// in the instruction cache.
template <int n, class EarlyOf>
__device__ inline void count_digits(const uint32_t (&key)[n], uint32_t equal, int level, const Threshold& t,
                                    uint32_t (&bins)[kBins], EarlyOf early_of) {
  const int low = kShift[level];
  if (level == 0) {
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (key[i] != 0) atomicAdd(&bins[key[i] >> kShift[0]], 1u);
  } else if (level < kKeyLevels) {
    const uint32_t span = 1u << t.key_shift;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const uint32_t rest = key[i] - t.key;
      if (rest < span) atomicAdd(&bins[rest >> low], 1u);
    }
  } else {
    for (uint32_t m = equal; m; m &= m - 1) {
      const uint32_t rest = early_of(__ffs(m) - 1) - t.early;
      if (rest < 1u << t.early_shift) atomicAdd(&bins[rest >> low], 1u);
    }
  }
}
template <int n>
__device__ inline uint32_t equal_to(const uint32_t (&key)[n], uint32_t last) {
  uint32_t equal = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) equal |= static_cast<uint32_t>(key[i] == last) << i;
  return equal;
}

// What is selected, and what is not decided yet: a bit a candidate.
struct Marks {
  uint32_t chosen = 0, open = 0;
};
template <int n, class EarlyOf>
__device__ inline Marks marks_of(const uint32_t (&key)[n], const Threshold& t, EarlyOf early_of) {
  Marks m;
  if (t.key_shift == 32) {
#pragma unroll
    for (int i = 0; i < n; ++i) m.open |= static_cast<uint32_t>(key[i] != 0) << i;
  } else {
    const uint32_t span = 1u << t.key_shift;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const uint32_t rest = key[i] - t.key;
      m.chosen |= static_cast<uint32_t>(key[i] >= t.key && rest >= span) << i;
      m.open |= static_cast<uint32_t>(rest < span) << i;
    }
  }
  if (t.early_shift < 31)
    for (uint32_t open = m.open; open; open &= open - 1) {
      const int i = __ffs(open) - 1;
      const uint32_t early = early_of(i);
      if (early - t.early < 1u << t.early_shift) continue;
      m.open ^= 1u << i;
      if (early > t.early) m.chosen |= 1u << i;
    }
  return m;
}

// One block decides among the candidates that it holds, of key and early (no candidate: key 0), from the level behind
// `level` on. whole: all that the threshold leaves undecided are selected.
__device__ inline void decide(uint2 (&candidate)[kListedPerThread], int level, bool whole, Threshold& t,
                              uint32_t (&bins)[kBins], uint32_t (&warps)[kWarps], Digit& shared) {
  for (++level; !whole && level < kLevels; ++level) {
    for (int b = threadIdx.x; b < kBins; b += kThreads) bins[b] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kListedPerThread; ++i) {
      const uint32_t rest = level < kKeyLevels ? candidate[i].x - t.key : candidate[i].y - t.early;
      const bool undecided =
          level < kKeyLevels ? rest >> t.key_shift == 0 : candidate[i].x == t.key && rest < 1u << t.early_shift;
      if (candidate[i].x != 0 && undecided) atomicAdd(&bins[rest >> kShift[level]], 1u);
    }
    __syncthreads();
    const Digit d =
        find_digit(*reinterpret_cast<const uint4*>(bins + kBins - 4 - 4 * threadIdx.x), t.need, warps, shared);
    t.narrow(level, d);
    whole = d.at == t.need;
  }
}
// Is one of them selected?
__device__ inline bool selected(const uint2& candidate, const Threshold& t) {
  return candidate.x != 0 && candidate.x >= t.key &&
         (t.early_shift == 31 || candidate.x > t.key || candidate.y >= t.early);
}

}  // namespace mla::cuda::topk
