// A radix select on (score descending, position ascending) from the scores' highest 11 bits on. The candidates of a
// row, its selection so far and the window's columns, lie in the registers of one block or, in long rows, of several:
// scores are read once. A level counts the digits of the candidates that higher digits leave undecided, and its
// histogram tells which digit the last selected one has. The row's blocks add up their histograms in global memory and
// wait for each other; they take their places in the order in which they start, so that those waited for run or will.
// As soon as few candidates are undecided, one level for most scores, they are listed, and the block that is last to do
// so decides among them alone. Equal scores are told apart by three more levels of their positions.
// A set that is not in order is put so by finish_topk, which ranks positions in a bitmap.
#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/held_rows.cuh"
#include "backend/cuda/core/index_items.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/core/select.cuh"
#include "backend/cuda/gpu_model.hpp"
#include "backend/cuda/sm90/select_topk/select_topk.hpp"

namespace mla::cuda {
namespace {

using namespace topk;

constexpr int kMostPerThread = 32, kMostChunk = kThreads * kMostPerThread;  // candidates of a thread, of a block
constexpr int kBuffers = 2;
constexpr int64_t kRowsPerLaunch = 1024;
struct Select {
  State state;
  const IndexItem* items;
  int item_count;
  int64_t first_row;
  int rows, splits;  // blocks a row
  const float* scores;
  int64_t scores_row;
  const int32_t* positions;
  int64_t positions_row;
  int64_t first, columns;  // the window; columns of this launch begin at `skip` of it
  int skip;
  bool begin;
  uint32_t* histograms;                          // [kBuffers][rows][kBins]
  uint2* listed;                                 // [rows][kListed] of key and early
  unsigned *ticket, *arrived, *taken, *listing;  // zero between launches
};

__device__ void wait_until(const unsigned* counter, unsigned value) {
  while (*static_cast<const volatile unsigned*>(counter) < value) {
  }
  __threadfence();
}

// kPerThread: candidates of a thread. Where few rows leave multiprocessors idle, more blocks share a row.
template <int kPerThread>
__global__ void __launch_bounds__(kThreads, 2) select_kernel(const Select a) {
  constexpr int kChunk = kThreads * kPerThread;
  __shared__ __align__(16) uint32_t bins[kBins];
  __shared__ uint32_t warps[kWarps];
  __shared__ IndexItem shared_item;
  __shared__ unsigned place, list_place;
  __shared__ Digit shared_digit;
  take_turn();
  unsigned me = blockIdx.x;
  if (a.splits > 1) {
    if (threadIdx.x == 0) {
      place = atomicAdd(a.ticket, 1u);
      if (place == gridDim.x - 1) atomicExch(a.ticket, 0u);
    }
    __syncthreads();
    me = place;
  }
  const int r = static_cast<int>(me) / a.splits;
  const int64_t row = a.first_row + r;
  const int split = static_cast<int>(me % a.splits);
  if (!find_item<kThreads>(a.items, a.item_count, &IndexItem::row, row, shared_item)) return;
  const IndexItem item = clipped(shared_item, a.first, a.columns);
  State::Row* state = a.state.row(row);
  const int n = max(0, item.columns(row - item.row) - a.skip);
  const int held = a.begin ? 0 : state->count, side = a.begin ? 0 : state->side;
  // A row with nothing new stays as it is. All of a row's blocks know.
  if (n == 0) {
    if (a.begin && split == 0 && threadIdx.x == 0) *state = {0, 0, 1};
    return;
  }

  // Candidate c is one of the selection's where c < 0, else column c.
  const int base = split * kChunk + static_cast<int>(threadIdx.x) - held;
  const uint32_t* old_keys = a.state.keys(row, side) + held;
  const int32_t* old_positions = a.state.positions(row, side) + held;
  const float* scores = a.scores + row * a.scores_row + a.skip;
  const int32_t* given = a.positions ? a.positions + row * a.positions_row + a.skip : nullptr;
  const auto key_at = [&](int c) { return c < 0 ? old_keys[c] : key_of(scores[c]); };
  const auto early_at = [&](int c) {
    return kLast - static_cast<uint32_t>(c < 0 ? old_positions[c] : given ? given[c] : item.kv_begin + a.skip + c);
  };
  uint32_t key[kPerThread];  // 0: no candidate
  if (split * kChunk >= held && !given) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int c = base + i * kThreads;
      key[i] = c < n ? key_of(scores[c]) : 0;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int c = base + i * kThreads;
      const bool column = c >= 0 && c < n && (!given || given[c] >= 0);
      key[i] = c < 0 ? old_keys[c] : column ? key_of(scores[c]) : 0;
    }
  }

  const auto early_of = [&](int i) { return early_at(base + i * kThreads); };
  Threshold t{.need = static_cast<uint32_t>(a.state.topk)};
  unsigned* arrived = a.arrived + r;
  unsigned arrivals = 0;
  int level = 0;
  bool whole = false;  // all undecided candidates are selected
  uint32_t equal = 0;  // a bit a candidate whose key is the last selected one's, once keys are decided
  for (; level < kLevels; ++level) {
    uint32_t* sums = a.histograms + static_cast<uint32_t>(level % kBuffers * a.rows + r) * kBins;
    for (int b = threadIdx.x; b < kBins; b += kThreads) {
      bins[b] = 0;
      if (a.splits > 1 && split == 0) sums[b] = 0;
    }
    __syncthreads();
    if (a.splits > 1 && split == 0 && threadIdx.x == 0) {
      __threadfence();
      atomicAdd(arrived, 1u);  // the sums are zero
    }
    count_digits(key, equal, level, t, bins, early_of);
    __syncthreads();
    const int mine = kBins - 4 - 4 * static_cast<int>(threadIdx.x);
    uint4 x = *reinterpret_cast<const uint4*>(bins + mine);
    if (a.splits > 1) {
      if (threadIdx.x == 0) wait_until(arrived, arrivals + 1);
      __syncthreads();
      if (x.x) atomicAdd(sums + mine, x.x);
      if (x.y) atomicAdd(sums + mine + 1, x.y);
      if (x.z) atomicAdd(sums + mine + 2, x.z);
      if (x.w) atomicAdd(sums + mine + 3, x.w);
      __syncthreads();
      arrivals += static_cast<unsigned>(a.splits) + 1;
      if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(arrived, 1u);
        wait_until(arrived, arrivals);
      }
      __syncthreads();
      x = __ldcg(reinterpret_cast<const uint4*>(sums + mine));
    }
    const Digit d = find_digit(x, t.need, warps, shared_digit);
    whole = d.total <= t.need;
    if (whole) break;
    t.narrow(level, d);
    whole = d.at == t.need;
    if (whole || d.at <= kListed) break;
    if (level == kKeyLevels - 1) equal = equal_to(key, t.key);
  }

  auto [chosen, open] = marks_of(key, t, early_of);
  if (whole) {
    chosen |= open;
    open = 0;
  }
  uint32_t total;
  const uint32_t before = scan_before(static_cast<uint32_t>(__popc(chosen) | __popc(open) << 16), warps, total);
  if (threadIdx.x == 0) {
    place = total & 0xffff ? atomicAdd(a.taken + r, total & 0xffff) : 0;
    list_place = total >> 16 ? atomicAdd(a.listing + r, total >> 16) : 0;
  }
  __syncthreads();
  uint32_t* keys = a.state.keys(row, side ^ 1);
  int32_t* positions = a.state.positions(row, side ^ 1);
  uint2* listed = a.listed + static_cast<int64_t>(r) * kListed;
  const uint32_t topk = static_cast<uint32_t>(a.state.topk);
  for (uint32_t at = place + (before & 0xffff); chosen && at < topk; chosen &= chosen - 1, ++at) {
    const int c = base + (__ffs(chosen) - 1) * kThreads;
    keys[at] = key_at(c);
    positions[at] = static_cast<int32_t>(kLast - early_at(c));
  }
  for (uint32_t at = list_place + (before >> 16); open && at < kListed; open &= open - 1, ++at) {
    const int c = base + (__ffs(open) - 1) * kThreads;
    listed[at] = {key_at(c), early_at(c)};
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    place = atomicAdd(arrived, 1u) == arrivals + static_cast<unsigned>(a.splits) - 1;
    __threadfence();
  }
  __syncthreads();
  if (!place) return;

  // The last block of the row decides among those listed.
  const uint32_t count = min(__ldcg(a.listing + r), static_cast<unsigned>(kListed));
  uint32_t at = __ldcg(a.taken + r);
  uint2 candidate[kListedPerThread];
#pragma unroll
  for (int i = 0; i < kListedPerThread; ++i) {
    const uint32_t c = threadIdx.x + i * kThreads;
    candidate[i] = c < count ? __ldcg(listed + c) : uint2{0, 0};
  }
  decide(candidate, level, whole, t, bins, warps, shared_digit);
  if (count > 0) {
    uint32_t in = 0;
#pragma unroll
    for (int i = 0; i < kListedPerThread; ++i) {
      if (!selected(candidate[i], t)) candidate[i].x = 0;
      in += candidate[i].x != 0;
    }
    at += scan_before(in, warps, total);
#pragma unroll
    for (int i = 0; i < kListedPerThread; ++i) {
      if (candidate[i].x == 0 || at >= topk) continue;
      keys[at] = candidate[i].x;
      positions[at++] = static_cast<int32_t>(kLast - candidate[i].y);
    }
    total += __ldcg(a.taken + r);
  } else {
    total = at;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  *state = {static_cast<int32_t>(min(total, topk)), side ^ 1, 0};
  a.taken[r] = a.listing[r] = *arrived = 0;
}

// Positions of a window as a bitmap, and how many lie before each word.
constexpr int kWords = 4096, kWordsPerThread = kWords / kThreads;
constexpr int64_t kSpan = int64_t{kWords} * 32;
static_assert(kWordsPerThread % 4 == 0 && kMostTopk < 0xffff);

__global__ void __launch_bounds__(kThreads)
    finish_kernel(State state, const IndexItem* items, int item_count, int32_t* indices, int64_t indices_row,
                  float* scores, int64_t scores_row, HeldRows held) {
  __shared__ __align__(16) uint32_t words[kWords];
  __shared__ __align__(4) uint16_t before[kWords];
  __shared__ uint32_t warps[kWarps];
  __shared__ IndexItem item;
  __shared__ int32_t lowest;
  uint4* const mine = reinterpret_cast<uint4*>(words + threadIdx.x * kWordsPerThread);
  const auto clear = [&] {
#pragma unroll
    for (int w = 0; w < kWordsPerThread / 4; ++w) mine[w] = {0, 0, 0, 0};
  };
  clear();
  take_turn();
  const int64_t row = blockIdx.x;
  if (!find_item<kThreads>(items, item_count, &IndexItem::row, row, item)) return;
  const int64_t to = item.q_begin + (row - item.row);
  const int n = state.row(row)->count, side = state.row(row)->side;
  const uint32_t* keys = state.keys(row, side);
  const int32_t* positions = state.positions(row, side);
  int32_t* out = indices + to * indices_row;
  float* best = scores ? scores + to * scores_row : nullptr;
  const bool in_order = state.row(row)->in_order;
  for (int k = threadIdx.x; in_order && k < n; k += kThreads) {
    out[k] = held.position(positions[k]);
    if (best) best[k] = score_of(keys[k]);
  }
  int done = in_order ? n : 0;
  for (int64_t from = 0; done < n;) {
    // The first window begins at 0, a later one at the lowest position that no earlier one held.
    if (from > 0) {
      clear();
      if (threadIdx.x == 0) lowest = 0x7fffffff;
      __syncthreads();
      int32_t least = 0x7fffffff;
      for (int k = threadIdx.x; k < n; k += kThreads)
        if (positions[k] >= from) least = min(least, positions[k]);
      for (int d = 16; d; d /= 2) least = min(least, __shfl_xor_sync(0xffffffffu, least, d));
      if (threadIdx.x % 32 == 0) atomicMin(&lowest, least);
      __syncthreads();
      from = lowest;
    }
    for (int k = threadIdx.x; k < n; k += kThreads) {
      const int64_t p = positions[k] - from;
      if (p >= 0 && p < kSpan) atomicOr(&words[p / 32], 1u << (p % 32));
    }
    __syncthreads();
    uint32_t upto[kWordsPerThread], set = 0, total;
#pragma unroll
    for (int w = 0; w < kWordsPerThread; w += 4) {
      const uint4 four = mine[w / 4];
      upto[w] = set, set += __popc(four.x);
      upto[w + 1] = set, set += __popc(four.y);
      upto[w + 2] = set, set += __popc(four.z);
      upto[w + 3] = set, set += __popc(four.w);
    }
    const uint32_t first = scan_before(set, warps, total);
#pragma unroll
    for (int w = 0; w < kWordsPerThread; w += 2)
      *reinterpret_cast<uint32_t*>(before + threadIdx.x * kWordsPerThread + w) =
          (first + upto[w]) | (first + upto[w + 1]) << 16;
    __syncthreads();
    for (int k = threadIdx.x; k < n; k += kThreads) {
      const int64_t p = positions[k] - from;
      if (p < 0 || p >= kSpan) continue;
      const int word = static_cast<int>(p / 32),
                rank = done + before[word] + __popc(words[word] & ((1u << (p % 32)) - 1));
      out[rank] = held.position(static_cast<int32_t>(from + p));
      if (best) best[rank] = score_of(keys[k]);
    }
    done += static_cast<int>(total);
    from += kSpan;
    __syncthreads();
  }
  for (int k = n + threadIdx.x; k < state.topk; k += kThreads) {
    out[k] = -1;
    if (best) best[k] = -INFINITY;
  }
}

constexpr int kFillThreads = 256;

__global__ void __launch_bounds__(kFillThreads)
    fill_kernel(const IndexItem* items, int item_count, int32_t* indices, int64_t indices_row, int64_t topk) {
  __shared__ IndexItem item;
  take_turn();
  const int64_t row = blockIdx.x;
  if (!find_item<kFillThreads>(items, item_count, &IndexItem::q_begin, row, item)) return;
  const int n = item.columns(row - item.q_begin);
  for (int64_t k = threadIdx.x; k < topk; k += kFillThreads)
    indices[row * indices_row + k] = k < n ? static_cast<int32_t>(item.kv_begin + k) : -1;
}

// One behind the last row of the items.
int64_t rows_end(std::span<const IndexItem> items, int32_t IndexItem::*begin) {
  int64_t end = 0;
  for (const IndexItem& i : items)
    if (i.q_count > 0) end = std::max(end, int64_t{i.*begin} + i.q_count);
  return end;
}

// Rows of the state, and the most columns that one of them sees.
struct Extent {
  int64_t rows = 0, columns = 0;
  explicit Extent(const ops::SelectTopkArgs& a) : rows(rows_end(a.items, &IndexItem::row)) {
    for (const IndexItem& i : a.items)
      if (i.q_count > 0)
        columns = std::max<int64_t>(columns, clipped(i, a.first, a.scores.extent<Key>()).columns(i.q_count - 1));
  }
};

}  // namespace

std::string select_topk_kernel(const backend::GpuModel& gpu, const ops::SelectTopkArgs& a) {
  if (!sm90::serves(gpu, a)) return "cuda/generic";
  const Extent extent(a);
  return sm90::serves_short_rows(gpu, extent.rows, extent.columns) ? "cuda/sm90, short rows"
                                                                   : "cuda/sm90, rows by clusters";
}

void select_topk(Stream& stream, const ops::SelectTopkArgs& a) {
  const Queue& queue = stream.queue();
  const auto [rows, columns] = Extent(a);
  if (rows == 0) return;
  if (sm90::serves(model_of(queue), a)) return sm90::select_topk(queue, a, rows, columns);
  const int64_t part = std::min(rows, kRowsPerLaunch);
  const int64_t histogram_bytes = part * kBuffers * kBins * static_cast<int64_t>(sizeof(uint32_t)),
                needed = histogram_bytes + part * kListed * static_cast<int64_t>(sizeof(uint2));
  if (!a.scratch.data || static_cast<int64_t>(a.scratch.per_worker) < needed)
    throw ShapeError("select_topk: scratch is " + std::to_string(a.scratch.data ? a.scratch.per_worker : 0) +
                     " bytes, " + std::to_string(needed) + " are needed");
  Select s{.state = state_of(a.state),
           .items = queue.reads(a.items, "select_topk", "items"),
           .item_count = static_cast<int>(a.items.size()),
           .scores = a.scores.data(),
           .scores_row = a.scores.stride<Token>(),
           .positions = a.positions.data(),
           .positions_row = a.positions.stride<Token>(),
           .first = a.first,
           .columns = a.scores.extent<Key>(),
           .histograms = reinterpret_cast<uint32_t*>(a.scratch.data),
           .listed = reinterpret_cast<uint2*>(a.scratch.data + histogram_bytes),
           .ticket = queue.counters(),
           .arrived = queue.counters() + 1,
           .taken = queue.counters() + 1 + kRowsPerLaunch,
           .listing = queue.counters() + 1 + 2 * kRowsPerLaunch};
  static_assert(1 + 3 * kRowsPerLaunch <= Queue::kCounters);
  // No more blocks wait for each other than surely run together; what is longer is fed in parts.
  const int64_t multiprocessors = queue.multiprocessors(), most = multiprocessors * kMostChunk - a.state.topk;
  const bool overlap = model_of(queue).hopper;
  for (int64_t skip = 0; skip == 0 || skip < columns; skip += most) {
    s.begin = a.begin && skip == 0;
    s.skip = static_cast<int>(skip);
    const int64_t held = s.begin ? 0 : a.state.topk, n = std::min(most, columns - skip);
    s.columns = std::min(a.scores.extent<Key>(), skip + most);
    for (s.first_row = 0; s.first_row < rows; s.first_row += part) {
      s.rows = static_cast<int>(std::min(part, rows - s.first_row));
      const std::string shape = "rows " + std::to_string(s.rows) + ", columns " + std::to_string(n) + ", topk " +
                                std::to_string(a.state.topk);
      const auto fits = [&]<int per_thread>(std::integral_constant<int, per_thread>) {
        constexpr int64_t chunk = int64_t{kThreads} * per_thread;
        const int64_t splits = std::max<int64_t>(1, (held + n + chunk - 1) / chunk);
        if (per_thread < kMostPerThread && splits > 1 && s.rows * splits > multiprocessors) return false;
        s.splits = static_cast<int>(splits);
        launch(select_kernel<per_thread>,
               {.grid = dim3(static_cast<unsigned>(s.rows * splits)), .block = dim3(kThreads), .overlap = overlap},
               queue.stream(), "select_topk", "select", shape, s);
        return true;
      };
      [&]<int... per_thread>(std::integer_sequence<int, per_thread...>) {
        (void)(fits(std::integral_constant<int, per_thread>()) || ...);
      }
      (std::integer_sequence<int, 4, 8, 16, kMostPerThread>());
    }
  }
  if (a.indices) finish_topk(stream, {.state = a.state, .items = a.items, .indices = a.indices, .scores = {}});
}

void finish_topk(Stream& stream, const ops::FinishTopkArgs& a) {
  const Queue& queue = stream.queue();
  const int64_t rows = rows_end(a.items, &IndexItem::row);
  if (rows == 0) return;
  launch(finish_kernel,
         {.grid = dim3(static_cast<unsigned>(rows)), .block = dim3(kThreads), .overlap = model_of(queue).hopper},
         queue.stream(), "finish_topk", "finish", "rows " + std::to_string(rows), state_of(a.state),
         queue.reads(a.items, "finish_topk", "items"), static_cast<int>(a.items.size()), a.indices.data(),
         a.indices.stride<Token>(), a.scores.data(), a.scores.stride<Token>(), HeldRows(a.held));
}

void fill_topk(Stream& stream, const ops::FillTopkArgs& a) {
  const Queue& queue = stream.queue();
  const int64_t rows = rows_end(a.items, &IndexItem::q_begin);
  if (rows == 0 || a.indices.extent<Topk>() == 0) return;
  launch(fill_kernel,
         {.grid = dim3(static_cast<unsigned>(rows)), .block = dim3(kFillThreads), .overlap = model_of(queue).hopper},
         queue.stream(), "fill_topk", "fill", "rows " + std::to_string(rows),
         queue.reads(a.items, "fill_topk", "items"), static_cast<int>(a.items.size()), a.indices.data(),
         a.indices.stride<Token>(), a.indices.extent<Topk>());
}

}  // namespace mla::cuda
