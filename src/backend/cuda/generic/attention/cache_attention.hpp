// Latent queries over cached rows: what attend_latent and attend_sparse are launches of.
#pragma once

#include "backend/cuda/core/queue.hpp"
#include "ops/attend_latent/op.hpp"
#include "ops/attend_sparse/op.hpp"

namespace mla::cuda::generic {

/// Scales that the device alone knows: of fp8 queries beside the call's own, and of an fp8 cache in place of its own.
struct DeviceScales {
  const float *q = nullptr, *k = nullptr;
};

/// Beside what the ops' contracts name, queries and outputs of f16. Splits of unsplit items are chosen from the host's
/// items alone, and joined in a second launch.
void attend_positions(const Queue& queue, const ops::AttendLatentArgs& a, const DeviceScales& scales = {});
/// Queries and outputs as above. Whole items without part_keys are cut from the host's items alone. One launch, or with
/// parts within items a pair for as many rows as scratch holds parts of.
void attend_lists(const Queue& queue, const ops::AttendSparseArgs& a);

}  // namespace mla::cuda::generic
