// A row is a CTA's, its keys in shared memory. The last selected key is cornered by counting, a quarter of what is left
// a step, until a few scores are undecided; those rank each other. Memory is asked once, and the code is short: beside
// products that keep memory and its caches busy, fetching either is what a decode step waits for.
#include <string>

#include "backend/cuda/core/index_items.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/sm90/select_topk/rows.cuh"
#include "backend/cuda/sm90/select_topk/select_topk.hpp"

namespace mla::cuda::sm90 {
namespace {

using namespace topk;

constexpr int kPass = 4 * kThreads;  // columns, four a thread
constexpr int kMostPasses = 8;
constexpr int kUndecided = 128;  // scores that rank each other, a thread each

// Three counts of a thread's in one register.
constexpr int kField = 10;
constexpr uint32_t kCount = (1u << kField) - 1;

struct Shared {
  IndexItem item;
  uint32_t warps[kWarps], counts[2][3][kWarps];
  __align__(16) uint32_t undecided[kUndecided];
  uint32_t held, last, need;
};
constexpr int kKeysAt = (sizeof(Shared) + 15) / 16 * 16;

// Keys [low, low + span): of those in it `need` are selected, of those above all.
struct Range {
  uint32_t low, span, need;
  uint32_t reach, above;  // how many have low or more, and how many lie above the range

  __device__ bool has(uint32_t key) const { return key - low < span; }
  __device__ bool below(uint32_t key) const { return key >= low && key - low >= span; }
};

template <int passes>
__global__ void __launch_bounds__(kThreads, 2) select_short_kernel(const TopkRows a) {
  extern __shared__ __align__(16) std::byte memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  uint4* const row_keys = reinterpret_cast<uint4*>(memory + kKeysAt);  // each thread's own
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t row = blockIdx.x;
  const float* const scores = a.scores + row * a.scores_row;
  take_turn();
  // Asked for before it is known how many count: the others are there, whatever they hold.
  float4 x[passes];
#pragma unroll
  for (int p = 0; p < passes; ++p) {
    const int64_t c = p * kPass + 4 * thread;
    x[p] = {0, 0, 0, 0};
    if (a.by_fours && c + 4 <= a.columns) {
      x[p] = *reinterpret_cast<const float4*>(scores + c);
    } else {
      if (c < a.columns) x[p].x = scores[c];
      if (c + 1 < a.columns) x[p].y = scores[c + 1];
      if (c + 2 < a.columns) x[p].z = scores[c + 2];
      if (c + 3 < a.columns) x[p].w = scores[c + 3];
    }
  }
  if (!find_item<kThreads>(a.items, a.item_count, &IndexItem::row, row, s.item)) return;
  const IndexItem item = clipped(s.item, a.first, a.columns);
  const int columns = max(0, item.columns(row - item.row)), topk = a.state.topk;
  uint32_t* const keys = a.indices ? nullptr : a.state.keys(row, 0);
  int32_t* const positions =
      a.indices ? a.indices + (item.q_begin + row - item.row) * a.indices_row : a.state.positions(row, 0);
  if (!a.indices && thread == 0) *a.state.row(row) = {min(columns, topk), 0, 1};
  for (int k = columns + thread; a.indices && k < topk; k += kThreads) positions[k] = -1;

  // No score has key 0.
  uint32_t least = ~0u, most = 0;
#pragma unroll
  for (int p = 0; p < passes; ++p) {
    const int c = p * kPass + 4 * thread;
    if (c >= columns) break;
    const uint32_t key[4] = {key_of(x[p].x), c + 1 < columns ? key_of(x[p].y) : 0, c + 2 < columns ? key_of(x[p].z) : 0,
                             c + 3 < columns ? key_of(x[p].w) : 0};
    row_keys[c / 4] = {key[0], key[1], key[2], key[3]};
#pragma unroll
    for (const uint32_t k : key) least = min(least, k - 1), most = max(most, k);
  }
  least = __reduce_min_sync(0xffffffffu, least), most = __reduce_max_sync(0xffffffffu, most);
  if (lane == 0) s.counts[0][0][warp] = least, s.counts[0][1][warp] = most;
  if (thread == 0) s.held = 0;
  __syncthreads();
  const auto each = [&](auto&& f) {  // four keys of this thread's at a time
#pragma unroll 1
    for (int c = 4 * thread; c < columns; c += kPass) f(row_keys[c / 4]);
  };

  const auto enough = static_cast<uint32_t>(topk);
  Range r{.low = 1, .span = ~0u, .need = enough, .reach = static_cast<uint32_t>(columns), .above = 0};
  if (columns > topk) {
    r.low = __reduce_min_sync(0xffffffffu, s.counts[0][0][lane % kWarps]) + 1;
    r.span = __reduce_max_sync(0xffffffffu, s.counts[0][1][lane % kWarps]) - r.low + 1;
    int turn = 1;
#pragma unroll 1
    for (; r.span > 1 && r.reach - r.above > kUndecided && r.reach - r.above != r.need; turn ^= 1) {
      const uint32_t quarter = (r.span + 3) / 4, end = r.low + r.span;
      const uint32_t bound[3] = {r.low + quarter, min(r.low + 2 * quarter, end - 1), min(r.low + 3 * quarter, end - 1)};
      uint32_t n = 0;
      each([&](const uint4& four) {
        const uint32_t key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (const uint32_t k : key)
#pragma unroll
          for (int b = 0; b < 3; ++b) n += static_cast<uint32_t>(k >= bound[b]) << (kField * b);
      });
      uint32_t reach[3];
#pragma unroll
      for (int b = 0; b < 3; ++b) {
        const uint32_t of = __reduce_add_sync(0xffffffffu, n >> (kField * b) & kCount);
        if (lane == 0) s.counts[turn][b][warp] = of;
      }
      __syncthreads();
#pragma unroll
      for (int b = 0; b < 3; ++b)
        reach[b] = __reduce_add_sync(0xffffffffu, lane < kWarps ? s.counts[turn][b][lane] : 0);
      // The highest quarter whose lower end `topk` reach.
      if (reach[2] >= enough) r.low = bound[2], r.reach = reach[2];
      else if (reach[1] >= enough) r.low = bound[1], r.reach = reach[1], r.above = reach[2];
      else if (reach[0] >= enough) r.low = bound[0], r.reach = reach[0], r.above = reach[1];
      else r.above = reach[0];
      r.span = (reach[2] >= enough   ? end
                : reach[1] >= enough ? bound[2]
                : reach[0] >= enough ? bound[1]
                                     : bound[0]) -
               r.low;
      r.need = enough - r.above;
    }
    const uint32_t undecided = r.reach - r.above;
    if (undecided != r.need && r.span > 1) {
      each([&](const uint4& four) {
        const uint32_t key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (const uint32_t k : key)
          if (r.has(k)) s.undecided[atomicAdd(&s.held, 1u)] = k;
      });
      __syncthreads();
      if (thread < static_cast<int>(undecided)) {
        const uint32_t own = s.undecided[thread];
        uint32_t above = 0, reach = 0;
#pragma unroll 4
        for (uint32_t i = 0; i < undecided; ++i) {
          const uint32_t other = s.undecided[i];
          above += other > own, reach += other >= own;
        }
        if (above < r.need && r.need <= reach)
          s.last = own, s.need = r.need - above;  // alike by all that hold this key
      }
      __syncthreads();
      r.low = s.last, r.span = 1, r.need = s.need;
    }
  } else {
    r.need = 0, r.low = 0, r.span = 1;  // above it lie all
  }

  // Above the range all are selected, in it as many as are needed, from the first on.
  uint32_t in_front = 0;  // of both kinds, half a register each
#pragma unroll 1
  for (int first = 0; first < columns; first += kPass) {
    const int c = first + 4 * thread;
    const uint4 four = c < columns ? row_keys[c / 4] : uint4{0, 0, 0, 0};
    const uint32_t key[4] = {four.x, four.y, four.z, four.w};
    uint32_t own = 0, total;
#pragma unroll
    for (const uint32_t k : key)
      own += static_cast<uint32_t>(r.below(k)) | static_cast<uint32_t>(k != 0 && r.has(k)) << 16;
    uint32_t before = in_front + scan_before(own, s.warps, total);
    in_front += total;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool in = key[i] != 0 && r.has(key[i]);
      if (r.below(key[i]) || (in && before >> 16 < r.need)) {
        const uint32_t at = (before & 0xffff) + min(before >> 16, r.need);
        if (keys) keys[at] = key[i];
        positions[at] = item.kv_begin + c + i;
      }
      before += static_cast<uint32_t>(r.below(key[i])) | static_cast<uint32_t>(in) << 16;
    }
  }
}
static_assert(4 * kMostPasses <= kCount && kPass * kMostPasses < 1 << 16);

}  // namespace

// What a row takes grows with its length, 0.9 us for 1,000 scores; a cluster's share of a long one costs less, unless
// scores are alike. Beside others on a multiprocessor rows wait for each other.
bool serves_short_rows(const backend::GpuModel& gpu, int64_t rows, int64_t columns) {
  return columns <= kPass * (rows <= gpu.multiprocessors ? kMostPasses : 3);
}

void select_short_rows(const Queue& queue, const TopkRows& a, int64_t rows, int64_t columns) {
  const int64_t passes = (columns + kPass - 1) / kPass;
  launch(passes <= 3 ? select_short_kernel<3> : select_short_kernel<kMostPasses>,
         {.grid = dim3(static_cast<unsigned>(rows)),
          .block = dim3(kThreads),
          .shared_bytes = kKeysAt + static_cast<size_t>(passes * kPass) * sizeof(uint32_t),
          .overlap = true},
         queue.stream(), "select_topk", "select short rows",
         "rows " + std::to_string(rows) + ", columns " + std::to_string(columns) + ", topk " +
             std::to_string(a.state.topk),
         a);
}

}  // namespace mla::cuda::sm90
