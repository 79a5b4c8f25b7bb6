// Lists of slots as what attend_latent reads: each row a request of its own, whose pages are the slots that exist.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "mla/work.hpp"

namespace mla::cuda {

struct SlotLists {
  const SparseItem* items = nullptr;  ///< [item_count], on device; rows are numbered through them. Null: `item` alone
  int32_t item_count = 0;
  SparseItem item;
  int32_t first_row = 0, rows = 0;  ///< numbers of the rows that are wanted
  const int32_t* slots = nullptr;   ///< [query rows, topk] by slot_stride, on device
  int64_t slot_stride = 0;
  /// [query rows / queries] by length_stride, on device: slots that count in each of so many rows; null: all.
  const int32_t* lengths = nullptr;
  int64_t length_stride = 1;
  int32_t queries = 1;
  int32_t topk = 0;
  int64_t held = 0;  ///< slots of the cache; others are skipped
  int32_t page_size = 1;
  int32_t page_units = 0, row_units = 0;  ///< from page to page and from row to row, in units of 16 bytes
  /// [rows, table_stride]: where the slots lie that exist among keys [k_begin, k_end) of each row's list, in its order;
  /// units of 16 bytes from the cache's start.
  int32_t* table = nullptr;
  int64_t table_stride = 0;
  LatentItem* requests = nullptr;  ///< [rows]: how many, for which query row; rows past the items': no query rows
  unsigned* counters = nullptr;    ///< [counter_count], made 0; null: not wanted
  int32_t counter_count = 0;
};

/// One launch, which may begin while the stream's previous kernel ends.
void list_rows(const SlotLists& lists, cudaStream_t stream);

}  // namespace mla::cuda
