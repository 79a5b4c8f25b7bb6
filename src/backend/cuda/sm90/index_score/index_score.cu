// The warpgroup's product for index_score; the kernel around it is generic/index_score/tensor.cuh. Roofline and
// figures: README.md.
#include "backend/cuda/core/tma.cuh"
#include "backend/cuda/core/wgmma.cuh"
#include "backend/cuda/generic/index_score/tensor.cuh"

namespace mla::cuda::generic {
namespace {

// Four warps' 64 keys at a time, from registers.
template <class T, int N>
struct WarpgroupProduct {
  static __device__ void publish() { fence_async_proxy(); }
  static __device__ void multiply(float (&acc)[N / 2], uint32_t (&keys)[kSteps][4], uint32_t queries) {
    using Element = std::conditional_t<std::is_same_v<T, f16>, __half, __nv_bfloat16>;
    const uint64_t b = operand_128b(queries);
    wgmma_pin(acc);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) wgmma_pin(keys[s]);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      Wgmma<N, Element>::rs(acc, keys[s], operand_advance(b, s / 4 * (N * 128) + s % 4 * 32), s > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(acc);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) wgmma_pin(keys[s]);
  }
};

}  // namespace

void score_by_warpgroups(const Queue& queue, const IndexScore& a, int64_t blocks, const std::string& shape) {
  if (a.format == IndexCacheFormat::fp8) launch_by_heads<fp8_e4m3, f16, WarpgroupProduct>(queue, a, blocks, shape);
  else launch_by_heads<bf16, bf16, WarpgroupProduct>(queue, a, blocks, shape);
}

}  // namespace mla::cuda::generic
