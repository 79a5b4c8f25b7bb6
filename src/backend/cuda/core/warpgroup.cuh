// Warps and warpgroups: roles, named barriers, register shares, and small exchanges.
#pragma once

#include <cstdint>

#include "backend/cuda/core/overlap.cuh"

namespace mla::cuda {

/// True in one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t chosen;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(chosen));
  return chosen != 0;
}

/// A value that is the same in all lanes, known to be so by the compiler.
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

/// threadIdx.x, read anew: a value that takes no register until it is needed.
__device__ __forceinline__ int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

/// Named barriers 1 to 15 (0 is __syncthreads). threads: of all who sync and arrive, a multiple of 32.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// barrier_sync that tells every thread whether x held in any: by votes and a word of shared memory. words: two for
/// these threads alone, below the first turn; turn: grows from call to call, and where no other barrier lies between
/// two of them, by an odd number of steps of 2.
__device__ __forceinline__ bool barrier_any(int id, int threads, bool x, int (&words)[2], int turn) {
  int& word = words[turn / 2 % 2];
  if (__any_sync(0xffffffffu, x) && threadIdx.x % 32 == 0) word = turn;
  barrier_sync(id, threads);
  return *static_cast<volatile int*>(&word) == turn;
}

/// barrier_sync that tells every thread of how many x held.
__device__ __forceinline__ int barrier_count(int id, int threads, bool x) {
  int count;
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "bar.red.popc.u32 %0, %1, %2, p;\n}"
      : "=r"(count)
      : "r"(id), "r"(threads), "r"(static_cast<int>(x))
      : "memory");
  return count;
}

/// The warpgroup's registers per thread from here on; needs __launch_bounds__(threads, 1). Multiples of 8.
template <int registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

/// What the thread wrote before, and what barriers ordered before that, is seen by whoever sees what it writes after;
/// and the other way round. __threadfence() is stronger, and slower.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

/// Stores four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

/// Loads four 8x8 matrices of 16-bit elements, rows addressed as for store_matrix_x4.
__device__ __forceinline__ void load_matrix_x4(uint32_t row, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(row)
               : "memory");
}

/// The same, each matrix transposed: lane l gets elements (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t row, uint32_t& a, uint32_t& b, uint32_t& c,
                                                          uint32_t& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace mla::cuda
