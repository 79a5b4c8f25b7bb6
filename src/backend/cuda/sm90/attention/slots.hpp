// Lists of slots: which cached rows each query row attends to, where not all of a request's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/work.hpp"

namespace mla::cuda {

/// What is selected from one cache.
struct SlotSource {
  const int32_t* slots = nullptr;  ///< [query rows, topk] by slot_stride, on device; below 0 or from `held` on: none
  int64_t slot_stride = 0;
  /// [query rows / queries] by length_stride, on device: slots that count in each of so many rows; null: all.
  const int32_t* lengths = nullptr;
  int64_t length_stride = 1;
  int32_t topk = 0;
  int32_t held = 0;  ///< slots of the cache
  const std::byte* cache = nullptr;
  int32_t page_size = 1;
  uint32_t page_units = 0, row_units = 0;  ///< from page to page and row to row, in units of 16 bytes
};

/// The list of a query row: its slots of each source, one source after another.
struct SlotLists {
  const SparseItem* items = nullptr;  ///< [item_count], on device; rows are numbered through them. Null: `item` alone
  int32_t item_count = 0;
  SparseItem item;
  int32_t first_row = 0;  ///< number of the first row that is wanted
  int32_t queries = 1;
  int32_t sources = 1;
  SlotSource source[2];
};

}  // namespace mla::cuda
