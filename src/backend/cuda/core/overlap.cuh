// For kernels launched with LaunchConfig::overlap, which devices of compute capability 9.0 and newer know; for others
// both calls are nothing.
#pragma once

namespace mla::cuda {

/// Until the stream's earlier kernels are complete and their writes seen.
__device__ __forceinline__ void wait_for_previous_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// Lets the stream's next kernel, if launched so, take up the places that this one leaves.
__device__ __forceinline__ void allow_next_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// Both, before a kernel touches what others write or read: its place is then taken without a pause. Where every thread
/// of every block does so, a kernel's end is the end of those before it, too.
__device__ __forceinline__ void take_turn() {
  wait_for_previous_grids();
  allow_next_grid();
}

}  // namespace mla::cuda
