// attend_expanded by the generic kernel, on a queue.
#pragma once

#include "backend/cuda/core/queue.hpp"
#include "ops/attend_expanded/op.hpp"

namespace mla::cuda::generic {

/// Beside what the op's contract names, operands of f16, all of them, and outputs of f16. One launch. Its blocks are
/// counted from the host's items alone: of the staged ones, no tile of rows past that many is attended.
void attend_flat(const Queue& queue, const ops::AttendExpandedArgs& a);

}  // namespace mla::cuda::generic
