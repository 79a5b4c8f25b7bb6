// wgmma of e4m3: D[64, N] += A[64, 32] B[32, N], B from shared memory, A from there or from registers, f32 sums in
// registers. In shared memory their rows are k, 32 of it a product, in rows of 128 bytes with 128-byte swizzle
// (operand_128b, Major::k) or of 64 bytes with 64-byte swizzle (operand_64b). D lies in registers as wgmma.cuh says. A
// in registers, lane l: a[0] has k = 4 (l % 4) to + 3 of row l / 4, a[2] the same 16 of k on, a[1] and a[3] those of
// the row 8 below. Sums keep some 14 bits: see ops/index_score/cut_product.hpp.
#pragma once

#include "backend/cuda/core/wgmma.cuh"

namespace mla::cuda {

/// Rows of 64 bytes with 64-byte swizzle, groups of 8 rows on 512-byte boundaries; the next 32 of k: + 32 bytes.
__device__ __forceinline__ uint64_t operand_64b(uint32_t address) {
  return uint64_t{2} << 62 | uint64_t{512 >> 4} << 32 | uint64_t{1} << 16 | ((address & 0x3ffff) >> 4);
}

template <int N>
struct WgmmaFp8;

#define MLA_F8_R0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define MLA_F8_R1 MLA_F8_R0 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define MLA_F8_R2                                                                                                     \
  MLA_F8_R1                                                                                                           \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"
#define MLA_F8_R3                                                                                                      \
  MLA_F8_R2                                                                                                            \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%" \
  "92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%"   \
  "116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define MLA_F8_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MLA_F8_SIXTEEN(i) MLA_F8_FOUR(i), MLA_F8_FOUR(i + 4), MLA_F8_FOUR(i + 8), MLA_F8_FOUR(i + 12)
#define MLA_F8_D0 MLA_F8_SIXTEEN(0)
#define MLA_F8_D1 MLA_F8_D0, MLA_F8_SIXTEEN(16)
#define MLA_F8_D2 MLA_F8_D1, MLA_F8_SIXTEEN(32), MLA_F8_SIXTEEN(48)

#define MLA_F8_D3 MLA_F8_D2, MLA_F8_SIXTEEN(64), MLA_F8_SIXTEEN(80), MLA_F8_SIXTEEN(96), MLA_F8_SIXTEEN(112)

// R, D: the lists above; A0 to A5: the operand numbers that follow N / 2 sums.
#define MLA_WGMMA_FP8(N, R, D, A0, A1, A2, A3, A4, A5)                                                            \
  template <>                                                                                                     \
  struct WgmmaFp8<N> {                                                                                            \
    __device__ static __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" A2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N           \
                   "k32.f32.e4m3.e4m3 {" R "}, %" A0 ", %" A1 ", p, 1, 1;\n}"                                     \
                   : D                                                                                            \
                   : "l"(a), "l"(b), "r"(accumulate));                                                            \
    }                                                                                                             \
    __device__ static __forceinline__ void rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" A5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N           \
                   "k32.f32.e4m3.e4m3 {" R "}, {%" A0 ",%" A1 ",%" A2 ",%" A3 "}, %" A4 ", p, 1, 1;\n}"           \
                   : D                                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                        \
    }                                                                                                             \
  };
MLA_WGMMA_FP8(32, MLA_F8_R0, MLA_F8_D0, "16", "17", "18", "19", "20", "21")
MLA_WGMMA_FP8(64, MLA_F8_R1, MLA_F8_D1, "32", "33", "34", "35", "36", "37")
MLA_WGMMA_FP8(128, MLA_F8_R2, MLA_F8_D2, "64", "65", "66", "67", "68", "69")
MLA_WGMMA_FP8(256, MLA_F8_R3, MLA_F8_D3, "128", "129", "130", "131", "132", "133")
#undef MLA_WGMMA_FP8
#undef MLA_F8_R0
#undef MLA_F8_R1
#undef MLA_F8_R2
#undef MLA_F8_R3
#undef MLA_F8_FOUR
#undef MLA_F8_SIXTEEN
#undef MLA_F8_D0
#undef MLA_F8_D1
#undef MLA_F8_D2
#undef MLA_F8_D3

}  // namespace mla::cuda
