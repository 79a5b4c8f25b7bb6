// Lists of slots as kernels read them.
#pragma once

#include "backend/cuda/core/divisor.cuh"
#include "backend/cuda/sm90/attention/slots.hpp"

namespace mla::cuda {

/// Of a source's slots of a query row, those that count among keys [0, k_end) of its list; `before`: the topk of the
/// sources before.
__device__ inline int32_t slots_that_count(const SlotLists& lists, const SlotSource& of, int64_t row, int32_t k_end,
                                           int32_t before) {
  const int32_t most = min(max(k_end - before, 0), of.topk);
  return of.lengths ? min(max(of.lengths[row / lists.queries * of.length_stride], 0), most) : most;
}

/// Where a slot of the source's lies, in units of 16 bytes from its cache's start.
__device__ inline uint32_t unit_of(const SlotSource& of, const Divisor& by_page, int32_t slot) {
  const int32_t page = by_page.divide(slot);
  return static_cast<uint32_t>(page) * of.page_units + static_cast<uint32_t>(slot - page * of.page_size) * of.row_units;
}

}  // namespace mla::cuda
