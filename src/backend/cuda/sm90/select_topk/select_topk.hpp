// select_topk by CTAs and by clusters of them: a row's first window, its positions counted through.
#pragma once

#include <cstdint>

#include "backend/backend.hpp"

namespace mla::cuda {
class Queue;
}  // namespace mla::cuda

namespace mla::cuda::sm90 {

/// Selections that begin with this window, whose columns are positions in order.
bool serves(const backend::GpuModel& gpu, const ops::SelectTopkArgs& a);
/// Whether rows of `columns` at most are a CTA's each.
bool serves_short_rows(const backend::GpuModel& gpu, int64_t rows, int64_t columns);
/// The state's `rows` first rows, of `columns` at most; their selections are in order of positions.
void select_topk(const Queue& queue, const ops::SelectTopkArgs& a, int64_t rows, int64_t columns);

}  // namespace mla::cuda::sm90
