// Index items in kernels whose blocks are rows.
#pragma once

#include <cstdint>

#include "mla/work.hpp"

namespace mla::cuda {

/// The item that has `row` among [item.*begin, + item.q_count), by all threads of a block; begin is row or q_begin.
/// False when none has: a row that a smaller step than the captured one leaves out. `found` lies in shared memory.
template <int threads>
__device__ bool find_item(const IndexItem* items, int count, int32_t IndexItem::*begin, int64_t row, IndexItem& found) {
  bool mine = false;
  for (int i = threadIdx.x; i < count; i += threads) {
    const int64_t first = items[i].*begin;
    if (row < first || row >= first + items[i].q_count) continue;
    found = items[i];
    mine = true;
  }
  return __syncthreads_or(mine);
}

}  // namespace mla::cuda
