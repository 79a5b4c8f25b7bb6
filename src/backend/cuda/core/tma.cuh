// The copy engine: tensor boxes and plain bulk copies between device and shared memory. One thread issues a copy.
// Loads complete on an mbarrier that expects their bytes; stores complete in bulk groups of the issuing thread.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mla::cuda {

/// L2 policies: of what is read once, so that others stay longer, of what others read, too, and of what should stay.
/// What createpolicy.fractional makes of L2::evict_first and L2::evict_last: constants take no registers.
constexpr uint64_t evict_first = 0x12f0000000000000, evict_normal = 0x1000000000000000, evict_last = 0x14f0000000000000;

/// Box at coordinates (innermost first; 2 to 5 of them) of map into shared memory at dst.
template <class... Coordinates>
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap& map, uint32_t bar, Coordinates... at) {
  const int c[] = {at...};
  const auto m = reinterpret_cast<uint64_t>(&map);
  constexpr int dims = sizeof...(at);
  static_assert(dims >= 2 && dims <= 5);
  if constexpr (dims == 2)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            dst),
        "l"(m), "r"(bar), "r"(c[0]), "r"(c[1])
        : "memory");
  else if constexpr (dims == 3)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(dst),
        "l"(m), "r"(bar), "r"(c[0]), "r"(c[1]), "r"(c[2])
        : "memory");
  else if constexpr (dims == 4)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(dst),
        "l"(m), "r"(bar), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3])
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2];" ::"r"(dst),
        "l"(m), "r"(bar), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4])
        : "memory");
}

/// The same 2-d box to the same address, and completion on the same barrier address, in every CTA of the mask.
__device__ __forceinline__ void tma_load_multicast(uint32_t dst, const CUtensorMap& map, uint32_t bar, uint16_t ctas,
                                                   int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(dst),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(bar), "h"(ctas), "r"(x), "r"(y)
      : "memory");
}

/// The same for 3-d boxes.
__device__ __forceinline__ void tma_load_multicast(uint32_t dst, const CUtensorMap& map, uint32_t bar, uint16_t ctas,
                                                   int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(dst),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(bar), "h"(ctas), "r"(x), "r"(y), "r"(z)
      : "memory");
}

/// The same for 5-d boxes.
__device__ __forceinline__ void tma_load_multicast(uint32_t dst, const CUtensorMap& map, uint32_t bar, uint16_t ctas,
                                                   int x, int y, int z, int u, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(dst),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(bar), "h"(ctas), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
      : "memory");
}

/// Brings a 2-d box into L2 ahead of its load.
__device__ __forceinline__ void tma_prefetch_box(const CUtensorMap& map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(reinterpret_cast<uint64_t>(&map)),
               "r"(x), "r"(y)
               : "memory");
}

/// Box from shared memory at src to coordinates (2 to 4) of map.
template <class... Coordinates>
__device__ __forceinline__ void tma_store(const CUtensorMap& map, uint32_t src, Coordinates... at) {
  const int c[] = {at...};
  const auto m = reinterpret_cast<uint64_t>(&map);
  constexpr int dims = sizeof...(at);
  static_assert(dims >= 2 && dims <= 4);
  if constexpr (dims == 2)
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(m), "r"(src),
                 "r"(c[0]), "r"(c[1])
                 : "memory");
  else if constexpr (dims == 3)
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(m), "r"(src),
                 "r"(c[0]), "r"(c[1]), "r"(c[2])
                 : "memory");
  else
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(m),
                 "r"(src), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3])
                 : "memory");
}

/// bytes contiguous bytes (a multiple of 16, both ends 16-byte aligned) from device to shared memory.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}

/// The same, kept by L2 as anything else is.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar)
               : "memory");
}

/// bytes contiguous bytes from this CTA's shared memory to another's of its cluster, completing on a barrier there:
/// `to` and `bar` are mapped addresses (map_to_cta).
__device__ __forceinline__ void bulk_copy_to_cta(uint32_t to, uint32_t from, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(bar)
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// The same on their way to the second level cache.
__device__ __forceinline__ void bulk_prefetch(const void* src, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}
/// Until at most `pending` of the thread's committed groups still read shared memory.
template <int pending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
/// Until at most `pending` of them are incomplete.
template <int pending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

/// Orders the thread's shared-memory accesses before later ones of wgmma and the copy engine (then a barrier).
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// 16 bytes of registers to shared memory.
__device__ __forceinline__ void store_shared_16(uint32_t dst, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

/// 16 bytes from device to shared memory by an ordinary thread.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace mla::cuda
