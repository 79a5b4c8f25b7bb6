// A row is a CTA's, its keys in shared memory. The last selected key is cornered by counting, about where scores spread
// as these do would have it, until a few scores are undecided; those rank each other. Memory is asked once, and the
// code is short: beside products that keep memory and its caches busy, fetching either is what a decode step waits for.
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

constexpr int kMostColumns = 16384, kUnit = 128;  // columns that a warp has at a time
constexpr int kUndecided = 128;                   // scores that rank each other, a thread each

// Three counts of a thread's in one register.
constexpr int kField = 10;
constexpr uint32_t kCount = (1u << kField) - 1;

// passes: of four columns a thread, asked for at a time; blocks: of a multiprocessor.
template <int threads_, int passes_, int blocks_>
struct Cut {
  static constexpr int threads = threads_, passes = passes_, blocks = blocks_, warps = threads / 32, pass = 4 * threads;
  static_assert(threads >= kUndecided && kMostColumns / threads <= static_cast<int>(kCount));
};

template <int warps>
struct Shared {
  IndexItem item;
  uint32_t least[warps], most[warps], counts[2][3][warps];
  float2 sums[warps];  // of scores, and of their squares
  __align__(16) uint32_t undecided[kUndecided];
  __align__(16) uint32_t units[kMostColumns / kUnit];
  uint32_t held, last, need;
};
template <int warps>
constexpr int kKeysAt = (sizeof(Shared<warps>) + 15) / 16 * 16;

// Keys [low, low + span): of those in it `need` are selected, of those above all.
struct Range {
  uint32_t low, span, need;
  uint32_t reach, above;  // how many have low or more, and how many lie above the range

  __device__ uint32_t held() const { return reach - above; }
  __device__ bool has(uint32_t key) const { return key - low < span; }
  __device__ bool below(uint32_t key) const { return key >= low && key - low >= span; }
  __device__ uint32_t clamped(float score) const {  // inside it, a NaN too
    return min(max(key_of(score), low + 1), low + span - 1);
  }
};

// Where to count next: three bounds, of which a good one leaves little. A bad one costs a round, no more.
struct Bounds {
  uint32_t at[3];

  __device__ static Bounds around(const Range& r, float score, float away) {
    return {{r.clamped(score - away), r.clamped(score), r.clamped(score + away)}};
  }
  // As if scores were normal; the logistic quantile is close enough. wanted: the share of them that is selected.
  __device__ static Bounds of_normal(const Range& r, float mean, float deviation, float wanted) {
    return around(r, mean + deviation * 0.6f * __logf((1 - wanted) / wanted), 0.4f * deviation);
  }
  // As if the range's were spread evenly.
  __device__ static Bounds of_even(const Range& r) {
    const float low = score_of(r.low), span = score_of(r.low + r.span - 1) - low;
    const float share = __fdividef(static_cast<float>(r.held() - r.need), static_cast<float>(r.held()));
    return around(r, fmaf(span, share, low), span * (1.0f / 12));
  }
  __device__ static Bounds quarters(const Range& r) {
    const uint32_t quarter = (r.span + 3) / 4, last = r.low + r.span - 1;
    return {{r.low + quarter, min(r.low + 2 * quarter, last), min(r.low + 3 * quarter, last)}};
  }
};

template <class Cut>
__global__ void __launch_bounds__(Cut::threads, Cut::blocks) select_short_kernel(const TopkRows a) {
  constexpr int kPass = Cut::pass, kWarps = Cut::warps;
  extern __shared__ __align__(16) std::byte memory[];
  Shared<kWarps>& s = *reinterpret_cast<Shared<kWarps>*>(memory);
  uint4* const row_keys = reinterpret_cast<uint4*>(memory + kKeysAt<kWarps>);  // each thread's own
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t row = blockIdx.x;
  const float* const scores = a.scores + row * a.scores_row;
  take_turn();
  float4 x[Cut::passes];
  const auto ask = [&](int from) {
#pragma unroll
    for (int p = 0; p < Cut::passes; ++p) {
      const int64_t c = from + p * kPass + 4 * thread;
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
  };
  ask(0);  // before it is known how many count: the others are there, whatever they hold
  if (!find_item<Cut::threads>(a.items, a.item_count, &IndexItem::row, row, s.item)) return;
  const IndexItem item = clipped(s.item, a.first, a.columns);
  const int columns = max(0, item.columns(row - item.row)), topk = a.state.topk;
  uint32_t* const keys = a.indices ? nullptr : a.state.keys(row, 0);
  int32_t* const positions =
      a.indices ? a.indices + (item.q_begin + row - item.row) * a.indices_row : a.state.positions(row, 0);
  if (!a.indices && thread == 0) *a.state.row(row) = {min(columns, topk), 0, 1};
  for (int k = columns + thread; a.indices && k < topk; k += Cut::threads) positions[k] = -1;

  // No score has key 0.
  uint32_t least = ~0u, most = 0;
  float sum = 0, squares = 0;
#pragma unroll 1
  for (int from = 0; from < columns; from += Cut::passes * kPass) {
    if (from) ask(from);
#pragma unroll
    for (int p = 0; p < Cut::passes; ++p) {
      const int c = from + p * kPass + 4 * thread;
      if (c >= columns) break;
      const float score[4] = {x[p].x, x[p].y, x[p].z, x[p].w};
      uint32_t key[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool in = c + i < columns;
        key[i] = in ? key_of(score[i]) : 0;
        sum += in ? score[i] : 0, squares += in ? score[i] * score[i] : 0;
        least = min(least, key[i] - 1), most = max(most, key[i]);
      }
      row_keys[c / 4] = {key[0], key[1], key[2], key[3]};
    }
  }
  least = __reduce_min_sync(0xffffffffu, least), most = __reduce_max_sync(0xffffffffu, most);
#pragma unroll
  for (int d = 16; d; d /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, d), squares += __shfl_xor_sync(0xffffffffu, squares, d);
  if (lane == 0) s.least[warp] = least, s.most[warp] = most, s.sums[warp] = {sum, squares};
  if (thread == 0) s.held = 0;
  __syncthreads();
  const auto each = [&](auto&& f) {  // four keys of this thread's at a time
#pragma unroll 1
    for (int c = 4 * thread; c < columns; c += kPass) f(row_keys[c / 4]);
  };

  const auto enough = static_cast<uint32_t>(topk);
  Range r{.low = 1, .span = ~0u, .need = enough, .reach = static_cast<uint32_t>(columns), .above = 0};
  if (columns > topk) {
    r.low = __reduce_min_sync(0xffffffffu, s.least[lane % kWarps]) + 1;
    r.span = __reduce_max_sync(0xffffffffu, s.most[lane % kWarps]) - r.low + 1;
    sum = squares = 0;
#pragma unroll 1
    for (int w = 0; w < kWarps; ++w) sum += s.sums[w].x, squares += s.sums[w].y;
    const float count = static_cast<float>(columns), mean = sum / count;
    Bounds next =
        Bounds::of_normal(r, mean, sqrtf(fmaxf(squares / count - mean * mean, 0)), static_cast<float>(topk) / count);
    bool guesses = true;
    int turn = 0;
#pragma unroll 1
    while (r.span > 1 && r.held() > kUndecided && r.held() != r.need) {
      uint32_t n = 0;
      each([&](const uint4& four) {
        const uint32_t key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (const uint32_t k : key)
#pragma unroll
          for (int b = 0; b < 3; ++b) n += static_cast<uint32_t>(k >= next.at[b]) << (kField * b);
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
      turn ^= 1;
      // From the highest bound that `topk` reach to the next one.
      const uint32_t before = r.held();
      uint32_t end = r.low + r.span;
      if (reach[2] >= enough) r.low = next.at[2], r.reach = reach[2];
      else if (reach[1] >= enough) r.low = next.at[1], r.reach = reach[1], r.above = reach[2], end = next.at[2];
      else if (reach[0] >= enough) r.low = next.at[0], r.reach = reach[0], r.above = reach[1], end = next.at[1];
      else r.above = reach[0], end = next.at[0];
      r.span = end - r.low;
      r.need = enough - r.above;
      // Scores that are spread otherwise, many alike among them, take the way that ends in any case.
      guesses &= 4 * r.held() <= before;
      next = guesses ? Bounds::of_even(r) : Bounds::quarters(r);
    }
    const uint32_t undecided = r.held();
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

  // Above the range all are selected, in it as many as are needed, from the first on. Both counts in half a register
  // each: first those of units of 128 columns, which are a warp's at a time.
  const auto counted = [&](const uint32_t(&key)[4]) {
    uint32_t n = 0;
#pragma unroll
    for (const uint32_t k : key)
      n += static_cast<uint32_t>(r.below(k)) | static_cast<uint32_t>(k != 0 && r.has(k)) << 16;
    return n;
  };
#pragma unroll 1
  for (int first = 0; first < columns; first += kPass) {
    const int c = first + 4 * thread;
    const uint4 four = c < columns ? row_keys[c / 4] : uint4{0, 0, 0, 0};
    const uint32_t unit = __reduce_add_sync(0xffffffffu, counted({four.x, four.y, four.z, four.w}));
    if (lane == 0) s.units[first / kUnit + warp] = unit;
  }
  __syncthreads();
  // What lies in front of each unit; lane l has four of them, of which the warp's own are alike in each lane.
  uint32_t in_front;
  {
    const uint4 four = *reinterpret_cast<const uint4*>(&s.units[4 * lane]);
    const int units = (columns + kPass - 1) / kPass * kWarps;
    const uint32_t unit[4] = {four.x, four.y, four.z, four.w};
    uint32_t own[4], all = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) own[i] = all, all += 4 * lane + i < units ? unit[i] : 0;
    in_front = sum_upto(all, lane) - all + own[warp % 4];
  }
#pragma unroll 1
  for (int first = 0; first < columns; first += kPass) {
    const int c = first + 4 * thread;
    const uint4 four = c < columns ? row_keys[c / 4] : uint4{0, 0, 0, 0};
    const uint32_t key[4] = {four.x, four.y, four.z, four.w}, own = counted(key);
    uint32_t before = sum_upto(own, lane) + __shfl_sync(0xffffffffu, in_front, (first / kUnit + warp) / 4) - own;
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
static_assert(kMostColumns < 1 << 16 && kMostColumns / kUnit == 4 * 32);

}  // namespace

// What a row takes grows with its length; a cluster's share of a long one costs less, unless scores are alike. Beside
// others on a multiprocessor rows wait for each other.
bool serves_short_rows(const backend::GpuModel& gpu, int64_t rows, int64_t columns) {
  return columns <= (rows <= gpu.multiprocessors ? kMostColumns : kMostColumns / 2);
}

void select_short_rows(const Queue& queue, const TopkRows& a, int64_t rows, int64_t columns) {
  const auto start = [&]<class Cut>(Cut) {
    const int64_t padded = (columns + Cut::pass - 1) / Cut::pass * Cut::pass;
    launch(select_short_kernel<Cut>,
           {.grid = dim3(static_cast<unsigned>(rows)),
            .block = dim3(Cut::threads),
            .shared_bytes = kKeysAt<Cut::warps> + static_cast<size_t>(padded) * sizeof(uint32_t),
            .overlap = true},
           queue.stream(), "select_topk", "select short rows",
           "rows " + std::to_string(rows) + ", columns " + std::to_string(columns) + ", topk " +
               std::to_string(a.state.topk),
           a);
  };
  if (rows > queue.multiprocessors()) start(Cut<256, 5, 4>());
  else if (columns <= 6144) start(Cut<512, 3, 2>());
  else start(Cut<512, 8, 2>());
}

}  // namespace mla::cuda::sm90
