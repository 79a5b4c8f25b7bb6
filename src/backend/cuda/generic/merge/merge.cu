// Memory-bound: each row of O is read once from every part and written once. A warp joins columns of one row and
// head.
#include <algorithm>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/item_rows.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/core/queue.hpp"

namespace mla::cuda {
namespace generic {
namespace {

__device__ inline float empty_lse() { return -INFINITY; }
/// What came from outside as +inf or NaN counts as empty. But NaN beside a NaN is attention's own: of a row that is
/// NaN.
__device__ inline float usable_lse(float lse, const float* out) {
  if (lse == lse) return lse < INFINITY ? lse : -INFINITY;
  return *out == *out ? -INFINITY : lse;
}
/// What exponents are taken relative to: the largest lse, or 0 of a row that sees nothing or is NaN.
__device__ inline float base_of(float largest) { return largest > -INFINITY ? largest : 0.0f; }

/// Rows of O and their lse.
template <class T, class L = T>
struct Part {
  T* out = nullptr;
  L* lse = nullptr;
  int64_t out_row = 0, out_head = 0, lse_row = 0, lse_head = 0;
  __device__ T* row(int64_t t, int64_t h) const { return out + t * out_row + h * out_head; }
  __device__ L* lse_at(int64_t t, int64_t h) const { return lse + t * lse_row + h * lse_head; }
};
template <class T, class L, class D>
Part<T, L> part_of(const View<T, D, Head, Value>& out, const View<L, D, Head>& lse) {
  return {out.data(),
          lse.data(),
          out.template stride<D>(),
          out.template stride<Head>(),
          lse.template stride<D>(),
          lse.template stride<Head>()};
}
/// Four neighbours at a time.
template <class T, class L>
bool aligned(const Part<T, L>& p) {
  return reinterpret_cast<uintptr_t>(p.out) % (4 * sizeof(T)) == 0 && p.out_row % 4 == 0 && p.out_head % 4 == 0;
}

template <bool wide, int rounds>
__global__ void __launch_bounds__(kBlockThreads)
    merge_kernel(Part<float> to, Part<const float> other, const int32_t* rows, uint32_t count, uint32_t heads,
                 int width) {
  constexpr int n = wide ? 4 : 1;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint32_t unit = blockIdx.x * (kBlockThreads / 32) + threadIdx.x / 32;
  if (unit >= count) return;
  const uint32_t t = unit / heads, h = unit - t * heads;
  const int64_t row = rows ? rows[t] : t;
  float* const out = to.row(row, h);
  const float* const add = other.row(t, h);
  const float a = usable_lse(*to.lse_at(row, h), out), b = usable_lse(*other.lse_at(t, h), add),
              m = base_of(fmaxf(a, b));
  float wa = expf(a - m), wb = expf(b - m), lse = empty_lse();
  const float sum = wa + wb;
  if (sum != 0) {
    wa /= sum;
    wb /= sum;
    lse = m + logf(sum);
  }
  __syncwarp();  // all have read it
  if (lane == 0) *to.lse_at(row, h) = lse;
  if (wb == 0 && wa != 0 && sum == sum) return;
  // A part of weight 0 is not read.
  for (int first = n * lane; first < width; first += 32 * n * rounds) {
    float x[rounds][n] = {}, y[rounds][n] = {};
#pragma unroll
    for (int k = 0; k < rounds; ++k)
      if (const int i = first + 32 * n * k; i < width) {
        if (wa != 0) load<wide>(out + i, x[k]);
        if (wb != 0) load<wide>(add + i, y[k]);
      }
#pragma unroll
    for (int k = 0; k < rounds; ++k)
      if (const int i = first + 32 * n * k; i < width) {
#pragma unroll
        for (int e = 0; e < n; ++e) x[k][e] = wa == 0 ? wb == 0 ? 0.0f : y[k][e] : wa * x[k][e] + wb * y[k][e];
        store<wide>(x[k], out + i);
      }
  }
}

// Units of an item: rows, then heads, then spans of `blocks` times 32 n columns. The first splits' rows are on their
// way while lanes find the splits' weights, 32 at a time.
template <class T, bool wide, int blocks>
__global__ void __launch_bounds__(kBlockThreads, 3)
    merge_splits_kernel(Part<T, float> to, Part<const float> from, const SplitRows* items, int32_t count, int heads,
                        int width) {
  take_turn();
  constexpr int n = wide ? 4 : 1, unroll = 8 / blocks;
  const int lane = static_cast<int>(threadIdx.x % 32), spans = (width + blocks * 32 * n - 1) / (blocks * 32 * n);
  const auto units_of = [&](const SplitRows& s) { return int64_t{s.rows} * heads * spans; };
  for_item_rows(items, count, 1, units_of, [&](const SplitRows& s, int64_t unit, int32_t) {
    const int span = static_cast<int>(unit % spans), first = (span * blocks * 32 + lane) * n;
    const int64_t h = unit / spans % heads, r = unit / spans / heads;
    float x[unroll][blocks][n];
    const auto load_rows = [&](int split) {
#pragma unroll
      for (int j = 0; j < unroll; ++j)
#pragma unroll
        for (int b = 0; b < blocks; ++b)
          if (const int i = first + b * 32 * n; split + j < s.splits && i < width)
            load<wide>(from.row(s.partial + int64_t{split + j} * s.rows + r, h) + i, x[j][b]);
    };
    load_rows(0);

    const auto lse_of = [&](int split) {
      const int64_t row = s.partial + int64_t{split} * s.rows + r;
      return split < s.splits ? usable_lse(*from.lse_at(row, h), from.row(row, h)) : empty_lse();
    };
    const float mine = lse_of(lane);
    float m = mine;
    for (int split = lane + 32; split < s.splits; split += 32) m = fmaxf(m, lse_of(split));
    m = base_of(warp_max(m));
    float sum = expf(mine - m);
    for (int split = lane + 32; split < s.splits; split += 32) sum += expf(lse_of(split) - m);
    sum = warp_sum(sum);
    const bool empty = sum == 0;

    float out[blocks][n] = {}, weight = 0;
    for (int split = 0; !empty && split < s.splits; split += unroll) {
      if (split > 0) load_rows(split);
      if (split % 32 == 0) weight = expf((split == 0 ? mine : lse_of(split + lane)) - m) / sum;
#pragma unroll
      for (int j = 0; j < unroll; ++j) {
        const float w = __shfl_sync(0xffffffffu, weight, (split + j) % 32);
        if (w == 0) continue;  // past the last split, or an empty part, whose row may hold anything
#pragma unroll
        for (int b = 0; b < blocks; ++b)
#pragma unroll
          for (int e = 0; e < n; ++e) out[b][e] += w * x[j][b][e];
      }
    }
#pragma unroll
    for (int b = 0; b < blocks; ++b)
      if (const int i = first + b * 32 * n; i < width) {
        T rounded[n];
        narrow_all(out[b], rounded);
        store<wide>(rounded, to.row(s.row + r, h) + i);
      }
    if (span == 0 && lane == 0) *to.lse_at(s.row + r, h) = empty ? empty_lse() : m + logf(sum);
  });
}

std::string shape_of(int64_t rows, int64_t heads, int64_t width) {
  return "rows " + std::to_string(rows) + ", heads " + std::to_string(heads) + ", width " + std::to_string(width);
}

}  // namespace
}  // namespace generic

void merge(Stream& stream, const ops::MergeArgs& a) {
  using namespace generic;
  const Queue& queue = stream.queue();
  const int64_t rows = a.other.extent<Token>(), heads = a.out.extent<Head>(), width = a.out.extent<Value>(),
                units = rows * heads;
  if (units == 0) return;
  const Part<float> to = part_of(a.out, a.lse);
  const Part<const float> other = part_of(a.other, a.other_lse);
  const std::string what = shape_of(rows, heads, width);
  if (units > INT32_MAX) throw ShapeError("merge: too many rows for one call (" + what + ")");
  const bool wide = width % 4 == 0 && aligned(to) && aligned(other);
  const LaunchConfig config{
      .grid = dim3(static_cast<unsigned>((units + kBlockThreads / 32 - 1) / (kBlockThreads / 32))),
      .block = dim3(kBlockThreads)};
  launch(!wide          ? merge_kernel<false, 1>
         : width <= 128 ? merge_kernel<true, 1>
                        : merge_kernel<true, 4>,
         config, queue.stream(), "merge", "merge_kernel", what, to, other, queue.reads(a.rows, "merge", "rows"),
         static_cast<uint32_t>(units), static_cast<uint32_t>(heads), static_cast<int>(width));
}

void merge_splits(Stream& stream, const ops::MergeSplitsArgs& a) {
  using namespace generic;
  const Queue& queue = stream.queue();
  const int64_t heads = a.out.extent<Head>(), width = a.out.extent<Value>();
  const Part<const float> from = part_of(a.partial_out, a.partial_lse);
  int64_t rows = 0;
  for (const SplitRows& s : a.items) rows += s.rows;
  if (rows * heads == 0) return;
  const auto go = [&](auto kernel, const auto& to, int64_t columns) {
    const int64_t units = rows * heads * std::max<int64_t>(1, (width + columns - 1) / columns);
    const ItemGrid grid(units, queue.multiprocessors(), kBlockThreads, 1);
    launch(kernel, {.grid = dim3(grid.blocks), .block = dim3(kBlockThreads), .overlap = queue.hopper()}, queue.stream(),
           "merge_splits", "merge_splits_kernel", shape_of(rows, heads, width), to, from,
           queue.reads(a.items, "merge_splits", "items"), static_cast<int32_t>(a.items.size()), static_cast<int>(heads),
           static_cast<int>(width));
  };
  const auto with = [&](auto element) {
    using T = decltype(element);
    const Part<T, float> to = generic::part_of(a.out.as<T>(), a.lse);
    // A warp takes a whole row of 512 where rows are many: its weights are found once.
    if (width % 4 != 0 || !aligned(to) || !aligned(from)) go(merge_splits_kernel<T, false, 1>, to, 32);
    else if (width >= 512 && rows * heads >= int64_t{queue.multiprocessors()} * 32)
      go(merge_splits_kernel<T, true, 4>, to, 512);
    else go(merge_splits_kernel<T, true, 1>, to, 128);
  };
  if (a.out.dtype() == Dtype::f32) with(float{});
  else if (a.out.dtype() == Dtype::bf16) with(bf16{});
  else with(f16{});
}

}  // namespace mla::cuda
