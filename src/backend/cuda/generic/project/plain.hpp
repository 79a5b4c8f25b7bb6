// Weights as products take them.
#pragma once

#include "mla/device.hpp"
#include "mla/weights.hpp"

namespace mla::cuda::generic {

struct PlainLinear final : Linear {
  Buffer memory;  ///< [heads, out, in] of dtype
};

}  // namespace mla::cuda::generic
