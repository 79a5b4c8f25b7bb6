// What the choice between the GPU's kernels depends on, of the stream that a call is made on.
#pragma once

#include "backend/backend.hpp"

namespace mla::cuda {

class Queue;
backend::GpuModel model_of(const Queue& queue);

}  // namespace mla::cuda
