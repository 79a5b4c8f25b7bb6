#include <cstring>
#include <string>

#include "backend/cuda/core/find_item.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/warp_scan.cuh"
#include "backend/cuda/core/warpgroup.cuh"
#include "backend/cuda/sm90/attend_sparse/lists.hpp"
#include "backend/cuda/sm90/attention/slots.cuh"

namespace mla::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kEach = 8;  // slots of a thread in a round

// A block a row: each round its threads count what exists of eight slots each, and store it behind the threads' before.
__global__ void __launch_bounds__(kThreads) list_rows_kernel(const __grid_constant__ SlotLists a, const ListTable to,
                                                             const Divisor by_page0, const Divisor by_page1) {
  __shared__ int of_warp[2][kWarps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  take_turn();
  const int32_t number = a.first_row + static_cast<int32_t>(blockIdx.x);
  const auto rows = [&](int32_t i) { return static_cast<int64_t>(a.items[i].q_count); };
  const Found found = a.items                   ? find_item(a.item_count, number, rows, rows)
                      : number < a.item.q_count ? Found{.item = 0, .tile = number}
                                                : Found{};
  LatentItem request{.request = static_cast<int32_t>(blockIdx.x)};
  if (found.item >= 0) {
    const SparseItem item = a.items ? a.items[found.item] : a.item;
    const int64_t row = int64_t{item.q_begin} + found.tile;
    int32_t* const table = to.table + blockIdx.x * to.stride;
    int count = 0, round = 0, before = 0;  // before: slots of the sources before
#pragma unroll 1
    for (int i = 0; i < a.sources; ++i) {
      const SlotSource& from = a.source[i];
      const Divisor by_page = i ? by_page1 : by_page0;
      const auto first_unit = static_cast<uint32_t>((from.cache - to.cache) / 16);
      const int end = slots_that_count(a, from, row, item.k_end, before);
      const int32_t* const slots = from.slots + row * from.slot_stride;
#pragma unroll 1
      for (int begin = max(item.k_begin - before, 0); begin < end; begin += kThreads * kEach, ++round) {
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
        for (int i = 0; i < kEach; ++i) exist |= static_cast<unsigned>(slot[i] >= 0 && slot[i] < from.held) << i;
        const int upto = sum_upto(__popc(exist), lane);
        if (lane == 31) of_warp[round % 2][warp] = upto;
        __syncthreads();
        int earlier = 0, all = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          const int n = of_warp[round % 2][w];
          earlier += w < warp ? n : 0, all += n;
        }
        int at = count + earlier + upto - __popc(exist);
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          if (exist >> i & 1) table[at++] = static_cast<int32_t>(first_unit + unit_of(from, by_page, slot[i]));
        count += all;
      }
      before += from.topk;
    }
    request.q_begin = static_cast<int32_t>(row), request.q_count = 1;
    request.kv_end = request.visible = count;
  }
  if (thread == 0) to.requests[blockIdx.x] = request;
}

}  // namespace

void list_rows(const SlotLists& a, const ListTable& to, cudaStream_t stream) {
  launch(list_rows_kernel, {.grid = dim3(static_cast<unsigned>(to.rows)), .block = dim3(kThreads), .overlap = true},
         stream, "attend_sparse", "lists of slots",
         "rows " + std::to_string(to.rows) + ", topk " + std::to_string(a.source[0].topk), a, to,
         Divisor(static_cast<uint32_t>(a.source[0].page_size)), Divisor(static_cast<uint32_t>(a.source[1].page_size)));
}

}  // namespace mla::cuda
