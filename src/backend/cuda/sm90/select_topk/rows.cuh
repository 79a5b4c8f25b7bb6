// Rows of scores to select from, and which kernel takes them.
#pragma once

#include <cstdint>

#include "backend/cuda/core/select.cuh"
#include "mla/work.hpp"

namespace mla::cuda {
class Queue;
}  // namespace mla::cuda

namespace mla::cuda::sm90 {

/// Of a first window: row item.row + i of the state from columns that the item sees, positions item.kv_begin and on.
struct TopkRows {
  topk::State state;
  const IndexItem* items;
  int item_count;
  const float* scores;
  int64_t scores_row;
  bool by_fours;  ///< do rows begin at multiples of 16 bytes?
  int64_t first, columns;
  int32_t* indices;  ///< null: selections stay in the state
  int64_t indices_row;
};

/// Rows of `columns` at most, each by a CTA.
void select_short_rows(const Queue& queue, const TopkRows& a, int64_t rows, int64_t columns);

}  // namespace mla::cuda::sm90
