#pragma once

#include <utility>

namespace mla::cuda {

/// each(i) for i below n, a constant.
template <int n, class Each>
__device__ __forceinline__ void static_for(Each each) {
  [&]<int... i>(std::integer_sequence<int, i...>) { (each(std::integral_constant<int, i>()), ...); }
  (std::make_integer_sequence<int, n>());
}

}  // namespace mla::cuda
