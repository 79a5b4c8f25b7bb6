// Products whose sums are cut: batch-invariant ones of few outputs, which would leave most of a GPU idle.
#pragma once

#include <cstdint>

#include "mla/view.hpp"

namespace mla::cuda {
class Queue;
}  // namespace mla::cuda

namespace mla::cuda::generic {

/// Sums [slices, most_rows, out], of which the first `rows` rows count, to y: those of a row in the order of slices.
struct SumSlices {
  const float* slices = nullptr;
  int64_t count = 1, most_rows = 0;
  AnyMutableView<Token, Out> y;  ///< f32 or bf16
};
/// One launch.
void sum_slices(const Queue& queue, const SumSlices& s);

}  // namespace mla::cuda::generic
