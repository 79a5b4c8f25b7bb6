#include <cstring>
#include <string>

#include "backend/cuda/core/divisor.cuh"
#include "backend/cuda/core/find_item.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/warpgroup.cuh"
#include "backend/cuda/sm90/attend_sparse/lists.hpp"

namespace mla::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kEach = 8;  // slots of a thread in a round

// A block a row: each round its threads count what exists of eight slots each, and store it behind the threads' before.
__global__ void __launch_bounds__(kThreads) list_rows_kernel(const SlotLists a, const Divisor by_page) {
  __shared__ int of_warp[2][kWarps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  wait_for_previous_grids();
  allow_next_grid();
  if (a.counters)
    for (int i = static_cast<int>(blockIdx.x) * kThreads + thread; i < a.counter_count;
         i += static_cast<int>(gridDim.x) * kThreads)
      a.counters[i] = 0;
  const int32_t number = a.first_row + static_cast<int32_t>(blockIdx.x);
  const auto rows = [&](int32_t i) { return static_cast<int64_t>(a.items[i].q_count); };
  const Found found = a.items                   ? find_item(a.item_count, number, rows, rows)
                      : number < a.item.q_count ? Found{.item = 0, .tile = number}
                                                : Found{};
  LatentItem request{.request = static_cast<int32_t>(blockIdx.x)};
  if (found.item >= 0) {
    const SparseItem item = a.items ? a.items[found.item] : a.item;
    const int64_t row = int64_t{item.q_begin} + found.tile;
    const int32_t length = a.lengths ? min(max(a.lengths[row / a.queries * a.length_stride], 0), a.topk) : a.topk,
                  end = min(item.k_end, length);
    const int32_t* const slots = a.slots + row * a.slot_stride;
    int32_t* const table = a.table + blockIdx.x * a.table_stride;
    int count = 0;
#pragma unroll 1
    for (int begin = item.k_begin, round = 0; begin < end; begin += kThreads * kEach, ++round) {
      const int first = begin + thread * kEach;
      int32_t slot[kEach];
      unsigned exist = 0;
      if (first + kEach <= end && reinterpret_cast<uintptr_t>(slots + begin) % 16 == 0) {
        memcpy(slot, __builtin_assume_aligned(slots + first, 16), sizeof slot);
      } else {
#pragma unroll
        for (int i = 0; i < kEach; ++i) slot[i] = first + i < end ? slots[first + i] : -1;
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) exist |= static_cast<unsigned>(slot[i] >= 0 && slot[i] < a.held) << i;
      int upto = __popc(exist);
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int left = __shfl_up_sync(0xffffffffu, upto, d);
        if (lane >= d) upto += left;
      }
      if (lane == 31) of_warp[round % 2][warp] = upto;
      __syncthreads();
      int before = 0, all = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const int n = of_warp[round % 2][w];
        before += w < warp ? n : 0, all += n;
      }
      int to = count + before + upto - __popc(exist);
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (exist >> i & 1) {
          const int page = by_page.divide(slot[i]);
          table[to++] = page * a.page_units + (slot[i] - page * a.page_size) * a.row_units;
        }
      count += all;
    }
    request.q_begin = static_cast<int32_t>(row), request.q_count = 1;
    request.kv_end = request.visible = count;
  }
  if (thread == 0) a.requests[blockIdx.x] = request;
}

}  // namespace

void list_rows(const SlotLists& a, cudaStream_t stream) {
  launch(list_rows_kernel, {.grid = dim3(static_cast<unsigned>(a.rows)), .block = dim3(kThreads), .overlap = true},
         stream, "attend_sparse", "lists of slots",
         "rows " + std::to_string(a.rows) + ", topk " + std::to_string(a.topk), a, Divisor(a.page_size));
}

}  // namespace mla::cuda
