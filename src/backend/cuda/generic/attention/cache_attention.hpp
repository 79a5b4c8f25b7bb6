// Latent queries over cached rows: what attend_latent and attend_sparse are launches of.
#pragma once

#include "backend/cuda/core/queue.hpp"
#include "ops/attend_latent/op.hpp"
#include "ops/attend_sparse/op.hpp"

namespace mla::cuda::generic {

/// Splits of unsplit items are chosen from the host's items alone, and joined in a second launch.
void attend_positions(const Queue& queue, const ops::AttendLatentArgs& a);
/// Whole items without part_keys are cut from the host's items alone. One launch, or with parts within items a pair for
/// as many rows as scratch holds parts of.
void attend_lists(const Queue& queue, const ops::AttendSparseArgs& a);

}  // namespace mla::cuda::generic
