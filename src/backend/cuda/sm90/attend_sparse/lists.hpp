// Lists of slots as what attend_latent reads: each row a request of its own, whose pages are the slots that exist.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/sm90/attention/slots.hpp"
#include "mla/work.hpp"

namespace mla::cuda {

struct ListTable {
  int32_t rows = 0;  ///< that are wanted, from SlotLists::first_row on
  /// [rows, stride]: where the slots lie that exist among keys [k_begin, k_end) of each row's list, in its order; units
  /// of 16 bytes from `cache` on.
  int32_t* table = nullptr;
  int64_t stride = 0;
  const std::byte* cache = nullptr;
  LatentItem* requests = nullptr;  ///< [rows]: how many, for which query row; rows past the items': no query rows
};

/// One launch, which may begin while the stream's previous kernel ends.
void list_rows(const SlotLists& lists, const ListTable& to, cudaStream_t stream);

}  // namespace mla::cuda
