#pragma once

namespace mla::cuda {

/// The sum over the warp's lanes up to this one, which is `lane`; by all lanes.
template <class T>
__device__ inline T sum_upto(T x, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, x, d);
    if (lane >= d) x += other;
  }
  return x;
}

}  // namespace mla::cuda
