// The largest magnitude of an array in device memory, without a copy of it.
#pragma once

#include "mla/view.hpp"

namespace mla::cuda {
class Queue;
}  // namespace mla::cuda

namespace mla::gpu {

/// Raises *largest, device memory that holds a number at or above 0, to the largest magnitude of x: f32, bf16 or f16,
/// of any strides. NaN does not count, infinity does. One launch.
void raise_to_largest(cuda::Queue& queue, const AnyView<Token, Head, In>& x, float* largest);

}  // namespace mla::gpu
