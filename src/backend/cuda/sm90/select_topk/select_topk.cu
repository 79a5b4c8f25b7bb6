// A row is a cluster's: each thread has a few neighbouring columns in registers. A level's histogram lies in the shared
// memory of the cluster's CTAs; each adds up a part of its digits over all of them, and the one in whose part the last
// selected falls tells the others. Candidates that one digit leaves undecided are listed with the first CTA, which
// decides among them and tells where each CTA's selected begin: they are stored in order of positions.
#include <algorithm>
#include <atomic>
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
#include "backend/cuda/sm90/select_topk/select_topk.hpp"

namespace mla::cuda::sm90 {
namespace {

using namespace topk;

constexpr int kMostPerThread = 32, kMostBlocks = 16;

struct Rows {
  State state;
  const IndexItem* items;
  int item_count;
  const float* scores;
  int64_t scores_row;
  bool by_fours;  // do rows begin at multiples of 16 bytes?
  int64_t first, columns;
  int blocks;  // of a row
};

// What the first CTA tells each.
struct Decided {
  uint32_t key, early;
  int early_shift;
  uint32_t begin, count;  // where the CTA's selected begin, how many the row has
};

template <int per_thread>
__global__ void __launch_bounds__(kThreads, 2) select_kernel(const Rows a) {
  constexpr int chunk = kThreads * per_thread;
  __shared__ __align__(16) uint32_t bins[kBins];
  // The first CTA's list. Before, each CTA's sums of its part of a histogram: all have read theirs when a digit is
  // told.
  __shared__ __align__(16) uint2 list[kListed];
  __shared__ uint32_t warps[kWarps];
  __shared__ uint32_t totals[kMostBlocks];  // of CTAs: of a histogram's parts, then of what they select
  __shared__ uint32_t listed;
  __shared__ IndexItem shared_item;
  __shared__ Digit shared_digit;
  __shared__ Decided decided;
  __shared__ uint32_t place;
  const int thread = static_cast<int>(threadIdx.x), blocks = a.blocks, rank = static_cast<int>(cluster_rank());
  const int64_t row = blockIdx.x / static_cast<unsigned>(blocks);
  const int first = (rank * kThreads + thread) * per_thread;
  const float* const scores = a.scores + row * a.scores_row;
  if (thread == 0) listed = 0;
  wait_for_previous_grids();
  allow_next_grid();
  // Asked for before it is known how many count: the others are there, whatever they hold.
  float x[per_thread];
#pragma unroll
  for (int i = 0; i < per_thread; i += 4) {
    if (a.by_fours && first + i + 4 <= a.columns) {
      const float4 four = *reinterpret_cast<const float4*>(scores + first + i);
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    } else {
#pragma unroll
      for (int j = i; j < i + 4; ++j) x[j] = first + j < a.columns ? scores[first + j] : 0;
    }
  }
  if (!find_item<kThreads>(a.items, a.item_count, &IndexItem::row, row, shared_item)) return;
  const IndexItem item = clipped(shared_item, a.first, a.columns);
  State::Row* const state = a.state.row(row);
  const int n = max(0, item.columns(row - item.row));
  if (n == 0) {
    if (rank == 0 && thread == 0) *state = {0, 0, 1};
    return;
  }
  uint32_t key[per_thread];  // 0: no candidate
#pragma unroll
  for (int i = 0; i < per_thread; ++i) key[i] = first + i < n ? key_of(x[i]) : 0;
  const auto early_at = [&](int column) { return kLast - static_cast<uint32_t>(item.kv_begin + column); };

  const auto early_of = [&](int i) { return early_at(first + i); };
  Threshold t{.need = static_cast<uint32_t>(a.state.topk)};
  const uint32_t segment = static_cast<uint32_t>(kBins / blocks);  // digits of a CTA's part
  uint32_t* const sums = reinterpret_cast<uint32_t*>(list);
  // By all threads of the cluster, whose bins are counted. None where there are fewer than `need`.
  const auto find_shared = [&] {
    for (uint32_t b = thread; b < segment; b += kThreads) sums[b] = 0;
    cluster_sync();  // all bins are there
#pragma unroll
    for (int i = 0; i < kBins / kThreads; ++i) {
      const uint32_t at = static_cast<uint32_t>(thread + i * kThreads), bin = at % segment;
      const uint32_t more = load_remote(map_to_cta(smem_address(bins + rank * segment + bin), at / segment));
      if (more) atomicAdd(sums + bin, more);
    }
    __syncthreads();
    const uint32_t low = segment - 4 - 4 * static_cast<uint32_t>(thread);  // this thread's four, if there are so many
    const bool has = 4 * static_cast<uint32_t>(thread) < segment;
    const uint4 four = has ? *reinterpret_cast<const uint4*>(sums + low) : uint4{};
    uint32_t own;
    const uint32_t mine = four.x + four.y + four.z + four.w;
    uint32_t higher = scan_before(mine, warps, own);
    if (thread < blocks) store_remote(map_to_cta(smem_address(totals + rank), thread), own);
    cluster_sync();  // totals are there
    uint32_t total = 0;
    for (int b = 0; b < blocks; ++b) {
      if (b > rank) higher += totals[b];
      total += totals[b];
    }
    if (has && higher < t.need && t.need <= higher + mine) {
      const uint32_t part[4] = {four.w, four.z, four.y, four.x};
      uint32_t sum = higher;
      int b = 0;
      while (t.need > sum + part[b]) sum += part[b++];
      const Digit found{static_cast<uint32_t>(rank) * segment + low + 3 - b, sum, part[b], total};
      for (int to = 0; to < blocks; ++to) store_remote(map_to_cta(smem_address(&shared_digit), to), found);
    }
    cluster_sync();  // the digit is there
    Digit found = shared_digit;
    found.total = total;
    return found;
  };

  int level = 0;
  bool whole = false;  // all undecided candidates are selected
  uint32_t equal = 0;  // a bit a candidate whose key is the last selected one's, once keys are decided
  for (; level < kLevels; ++level) {
    for (int b = thread; b < kBins; b += kThreads) bins[b] = 0;
    __syncthreads();
    count_digits(key, equal, level, t, bins, early_of);
    Digit d;
    if (blocks == 1) {
      __syncthreads();
      d = find_digit(*reinterpret_cast<const uint4*>(bins + kBins - 4 - 4 * thread), t.need, warps, shared_digit);
    } else {
      d = find_shared();
    }
    whole = d.total <= t.need;
    if (whole) break;
    t.narrow(level, d);
    whole = d.at == t.need;
    if (whole || d.at <= kListed) break;
    if (level == kKeyLevels - 1) equal = equal_to(key, t.key);
  }

  auto [chosen, open] = marks_of(key, t, early_of);
  uint32_t begin = 0, count, total;
  if (whole) {
    chosen |= open;
  } else {
    // All undecided candidates to the first CTA's list, and how many are selected in front of them.
    const uint32_t before = scan_before(static_cast<uint32_t>(__popc(chosen) | __popc(open) << 16), warps, total);
    if (thread == 0) {
      store_remote(map_to_cta(smem_address(totals + rank), 0), total & 0xffff);
      place = total >> 16 ? add_remote(map_to_cta(smem_address(&listed), 0), total >> 16) : 0;
    }
    __syncthreads();
    for (uint32_t at = place + (before >> 16), m = open; m && at < kListed; m &= m - 1, ++at) {
      const int column = first + __ffs(m) - 1;
      store_remote(map_to_cta(smem_address(list + at), 0), uint2{key_of(scores[column]), early_at(column)});
    }
    cluster_sync();  // the list is there
    if (rank == 0) {
      const uint32_t held = min(listed, static_cast<uint32_t>(kListed));
      uint2 candidate[kListedPerThread];
#pragma unroll
      for (int i = 0; i < kListedPerThread; ++i) {
        const uint32_t c = thread + i * kThreads;
        candidate[i] = c < held ? list[c] : uint2{0, 0};
      }
      decide(candidate, level, whole, t, bins, warps, shared_digit);
#pragma unroll
      for (int i = 0; i < kListedPerThread; ++i)
        if (selected(candidate[i], t))
          atomicAdd(totals + (static_cast<int>(kLast - candidate[i].y) - item.kv_begin) / chunk, 1u);
      __syncthreads();
      if (thread < 32) {
        const uint32_t own = thread < blocks ? totals[thread] : 0;
        uint32_t upto = own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
          const uint32_t other = __shfl_up_sync(0xffffffffu, upto, d);
          if (thread >= d) upto += other;
        }
        const uint32_t all = __shfl_sync(0xffffffffu, upto, 31);
        if (thread < blocks)
          store_remote(map_to_cta(smem_address(&decided), thread),
                       Decided{t.key, t.early, t.early_shift, upto - own, all});
      }
    }
    cluster_sync();  // it is decided
    t.key = decided.key, t.early = decided.early, t.early_shift = decided.early_shift;
    begin = decided.begin;
    for (uint32_t m = open; m; m &= m - 1) {
      const int column = first + __ffs(m) - 1;
      if (selected({key_of(scores[column]), early_at(column)}, t)) chosen |= m & -m;
    }
  }
  uint32_t at = scan_before(static_cast<uint32_t>(__popc(chosen)), warps, total);
  count = total;
  if (!whole) {
    count = decided.count;
  } else if (blocks > 1) {
    if (thread < blocks) store_remote(map_to_cta(smem_address(totals + rank), thread), total);
    cluster_sync();
    count = 0;
    for (int b = 0; b < blocks; ++b) {
      if (b < rank) begin += totals[b];
      count += totals[b];
    }
  }
  uint32_t* const keys = a.state.keys(row, 0);
  int32_t* const positions = a.state.positions(row, 0);
  const auto most = static_cast<uint32_t>(a.state.topk);
  for (at += begin; chosen && at < most; chosen &= chosen - 1, ++at) {
    const int column = first + __ffs(chosen) - 1;
    keys[at] = key_of(scores[column]);
    positions[at] = item.kv_begin + column;
  }
  if (rank == 0 && thread == 0) *state = {static_cast<int32_t>(min(count, most)), 0, 1};
}

// CTAs that a cluster may have here; 16 are more than every device promises.
int most_blocks() {
  static std::atomic<int> known[64];
  int device = 0;
  check(cudaGetDevice(&device), "select_topk", "current device");
  std::atomic<int>& most = known[device & 63];
  if (most == 0) {
    const auto kernel = select_kernel<kMostPerThread>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "select_topk", "clusters");
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(kMostBlocks), config.blockDim = dim3(kThreads);
    int found = 0;
    check(cudaOccupancyMaxPotentialClusterSize(&found, kernel, &config), "select_topk", "clusters");
    most = found >= kMostBlocks ? kMostBlocks : 8;
  }
  return most;
}

}  // namespace

bool serves(const backend::GpuModel& gpu, const ops::SelectTopkArgs& a, int64_t rows, int64_t columns) {
  constexpr int64_t chunk = int64_t{kThreads} * kMostPerThread, most = 8;
  if (!gpu.hopper || !a.begin || a.positions.data() || columns > most * chunk) return false;
  // Clusters that cannot all run at a time lose to blocks that count in device memory.
  return columns <= chunk || rows * ((columns + chunk - 1) / chunk) <= int64_t{gpu.multiprocessors};
}

void select_topk(const Queue& queue, const ops::SelectTopkArgs& a, int64_t rows, int64_t columns) {
  Rows r{.state = state_of(a.state),
         .items = queue.reads(a.items, "select_topk", "items"),
         .item_count = static_cast<int>(a.items.size()),
         .scores = a.scores.data(),
         .scores_row = a.scores.stride<Token>(),
         .by_fours = a.scores.stride<Token>() % 4 == 0 && reinterpret_cast<uintptr_t>(a.scores.data()) % 16 == 0,
         .first = a.first,
         .columns = a.scores.extent<Key>()};
  const int most = most_blocks();
  // As few columns a thread as two CTAs a multiprocessor have room for.
  const auto fits = [&]<int per_thread>(std::integral_constant<int, per_thread>) {
    constexpr int64_t chunk = int64_t{kThreads} * per_thread;
    int64_t blocks = 1;
    while (blocks * chunk < columns) blocks *= 2;
    if (blocks > most || (per_thread < kMostPerThread && rows * blocks > int64_t{2} * queue.multiprocessors()))
      return false;
    r.blocks = static_cast<int>(blocks);
    launch(select_kernel<per_thread>,
           {.grid = dim3(static_cast<unsigned>(rows * blocks)),
            .block = dim3(kThreads),
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
