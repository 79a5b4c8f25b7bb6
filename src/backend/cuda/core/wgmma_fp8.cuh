// wgmma of e4m3: D[64, N] += A[64, 32] B[32, N], both from shared memory, f32 sums in registers. Their rows are 128
// bytes of k in 128-byte swizzle (operand_128b, Major::k), 32 of them a product; D lies in registers as wgmma.cuh says.
// Sums keep some 14 bits: see ops/index_score/cut_product.hpp.
#pragma once

#include "backend/cuda/core/wgmma.cuh"

namespace mla::cuda {

template <int N>
struct WgmmaFp8;

#define MLA_F8_R0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define MLA_F8_R1 MLA_F8_R0 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define MLA_F8_R2                                                                                                     \
  MLA_F8_R1                                                                                                           \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"
#define MLA_F8_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MLA_F8_SIXTEEN(i) MLA_F8_FOUR(i), MLA_F8_FOUR(i + 4), MLA_F8_FOUR(i + 8), MLA_F8_FOUR(i + 12)
#define MLA_F8_D0 MLA_F8_SIXTEEN(0)
#define MLA_F8_D1 MLA_F8_D0, MLA_F8_SIXTEEN(16)
#define MLA_F8_D2 MLA_F8_D1, MLA_F8_SIXTEEN(32), MLA_F8_SIXTEEN(48)

// R, D: the lists above; A, B, P: the operand numbers that follow N / 2 sums.
#define MLA_WGMMA_FP8(N, R, D, A, B, P)                                                                    \
  template <>                                                                                              \
  struct WgmmaFp8<N> {                                                                                     \
    __device__ static __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N     \
                   "k32.f32.e4m3.e4m3 {" R "}, %" A ", %" B ", p, 1, 1;\n}"                                \
                   : D                                                                                     \
                   : "l"(a), "l"(b), "r"(accumulate));                                                     \
    }                                                                                                      \
  };
MLA_WGMMA_FP8(32, MLA_F8_R0, MLA_F8_D0, "16", "17", "18")
MLA_WGMMA_FP8(64, MLA_F8_R1, MLA_F8_D1, "32", "33", "34")
MLA_WGMMA_FP8(128, MLA_F8_R2, MLA_F8_D2, "64", "65", "66")
#undef MLA_WGMMA_FP8
#undef MLA_F8_R0
#undef MLA_F8_R1
#undef MLA_F8_R2
#undef MLA_F8_FOUR
#undef MLA_F8_SIXTEEN
#undef MLA_F8_D0
#undef MLA_F8_D1
#undef MLA_F8_D2

}  // namespace mla::cuda
