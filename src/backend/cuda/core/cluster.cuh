// Thread block clusters: ranks, the cluster's barrier, and shared memory of the cluster's other CTAs.
#pragma once

#include <cstdint>
#include <cstring>

namespace mla::cuda {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
/// For barriers that mbarrier_init_fence() released, or when nothing is: release waits for all of the thread's stores.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
/// Every thread of every CTA of the cluster.
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

/// Shared-memory address of CTA `rank` for this CTA's address: for the .shared::cluster accesses below.
__device__ __forceinline__ uint32_t map_to_cta(uint32_t address, uint32_t rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}

/// Words at a mapped address, seen by others behind the cluster's next barrier.
__device__ __forceinline__ uint32_t load_remote(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ uint4 load_remote_four(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
template <class T>
__device__ __forceinline__ void store_remote(uint32_t address, const T& x) {
  uint32_t words[sizeof(T) / 4];
  memcpy(words, &x, sizeof(T));
#pragma unroll
  for (uint32_t i = 0; i < sizeof(T) / 4; ++i)
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address + 4 * i), "r"(words[i]) : "memory");
}
__device__ __forceinline__ uint32_t add_remote(uint32_t address, uint32_t x) {
  uint32_t before;
  asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(x) : "memory");
  return before;
}

/// Stores four words at a mapped address and adds their 16 bytes to what the mapped barrier beside them has received:
/// whoever waits for that barrier sees them.
__device__ __forceinline__ void store_remote_async(uint32_t address, int32_t a, int32_t b, int32_t c, int32_t d,
                                                   uint32_t bar) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d), "r"(bar)
      : "memory");
}

/// The same of one word, 4 bytes.
__device__ __forceinline__ void store_remote_async(uint32_t address, uint32_t word, uint32_t bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(word), "r"(bar)
               : "memory");
}

}  // namespace mla::cuda
