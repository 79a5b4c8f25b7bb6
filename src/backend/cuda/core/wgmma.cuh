// wgmma: matrix products of a warpgroup, D[64, N] += A[64, 16] B[16, N], 16-bit operands, f32 accumulators in
// registers.
//
// A comes from shared memory (descriptor) or registers, B from shared memory. Thread t of the warpgroup (warp w, lane
// l) holds D rows 16 w + l/4 and + 8: d[4 j + {0, 1}] are columns 8 j + 2 (l % 4) + {0, 1} of the first row, d[4 j +
// {2, 3}] of the second. A in registers has the same shape: a[0], a[2] columns 2 (l % 4) and + 8 of the first row,
// a[1], a[3] of the second, two elements each.
//
//   wgmma_fence();  Wgmma<64, __nv_bfloat16>::ss<K, K>(d, a, b, accumulate); ...  wgmma_commit();  wgmma_wait<0>();
//
// ss_at<a_bytes, b_bytes>(..): of operands that lie so many bytes on.
//
// Between fence and wait nothing else may touch d (nor a in registers); wgmma_pin(d) tells the compiler so.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace mla::cuda {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Until at most `pending` committed groups run.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/// Keeps reads and writes of these registers on their side of a fence or wait.
template <int n>
__device__ __forceinline__ void wgmma_pin(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int n>
__device__ __forceinline__ void wgmma_pin(uint32_t (&a)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

/// Which dimension of an operand is contiguous in shared memory: the inner one of the product (k), or rows of A /
/// columns of B (mn).
enum class Major : int { k = 0, mn = 1 };

/// Operand in shared memory with 128-byte swizzle: rows of 128 bytes, groups of 8 rows on 1024-byte boundaries; the
/// copy engine's 128-byte swizzle writes it so.
///   Major::k   rows are A rows or B columns, 64 elements of k wide. group: bytes from 8 rows to the next 8. The next
///   16
///              of k: +32 bytes (+2 in the descriptor). `panel` is unused.
///   Major::mn  rows are k, 64 A rows or B columns wide. group: bytes from 8 rows (k) to the next 8; panel: bytes from
///   one
///              64-wide panel to the next. The next 16 of k: + 2 groups.
__device__ __forceinline__ uint64_t operand_128b(uint32_t address, uint32_t group = 1024, uint32_t panel = 16) {
  return uint64_t{1} << 62 | static_cast<uint64_t>(group >> 4) << 32 | static_cast<uint64_t>(panel >> 4) << 16 |
         ((address & 0x3ffff) >> 4);
}
/// operand_128b() of an address that is the same in all lanes, in registers of the warp's own: products that take it
/// with an offset known to the compiler (ss_at) then follow each other without a move between them.
__device__ __forceinline__ uint64_t warp_operand_128b(uint32_t address) {
  return operand_128b(0) + __reduce_max_sync(0xffffffffu, address >> 4);
}
/// Operand in shared memory without swizzle, Major::k: 8 x 8 matrices of 128 bytes, `group` bytes from one to that of
/// the next 8 rows of A or columns of B, `step` to that of the next 8 of k.
__device__ __forceinline__ uint64_t operand_plain(uint32_t address, uint32_t group, uint32_t step) {
  return static_cast<uint64_t>(group >> 4) << 32 | static_cast<uint64_t>(step >> 4) << 16 | ((address & 0x3ffff) >> 4);
}
/// Adds bytes to a descriptor's address.
__device__ __forceinline__ uint64_t operand_advance(uint64_t operand, uint32_t bytes) { return operand + (bytes >> 4); }

template <int N, class T>
struct Wgmma;

#define MLA_R0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define MLA_R1 MLA_R0 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define MLA_R2 MLA_R1 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define MLA_R3 MLA_R2 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define MLA_R4 MLA_R3 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define MLA_R5 MLA_R4 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define MLA_R6 MLA_R5 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define MLA_R7 MLA_R6 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define MLA_R8 MLA_R7 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define MLA_R9 MLA_R8 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define MLA_R10 MLA_R9 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define MLA_R11 MLA_R10 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define MLA_R12 MLA_R11 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define MLA_R13 MLA_R12 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define MLA_R14 MLA_R13 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define MLA_R15 MLA_R14 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define MLA_D0() "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define MLA_D1() \
  MLA_D0(), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define MLA_D2() \
  MLA_D1(), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define MLA_D3() \
  MLA_D2(), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define MLA_D4() \
  MLA_D3(), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define MLA_D5() \
  MLA_D4(), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define MLA_D6() \
  MLA_D5(), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define MLA_D7() \
  MLA_D6(), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define MLA_D8() \
  MLA_D7(), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define MLA_D9() \
  MLA_D8(), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define MLA_D10() \
  MLA_D9(), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define MLA_D11() \
  MLA_D10(), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define MLA_D12() \
  MLA_D11(), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define MLA_D13()                                                                                              \
  MLA_D12(), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), \
      "+f"(d[111])
#define MLA_D14()                                                                                              \
  MLA_D13(), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), \
      "+f"(d[119])
#define MLA_D15()                                                                                              \
  MLA_D14(), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), \
      "+f"(d[127])

// R, D(): the lists above; A0 to A7: the operand numbers that follow N / 2 accumulators.
#define MLA_WGMMA_OF(N, TYPE, PTX, R, D, A0, A1, A2, A3, A4, A5, A6, A7)                                              \
  template <>                                                                                                         \
  struct Wgmma<N, TYPE> {                                                                                             \
    template <uint32_t a_bytes, uint32_t b_bytes, Major a_major = Major::k, Major b_major = Major::k>                 \
    __device__ static __forceinline__ void ss_at(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {         \
      asm volatile("{\n.reg .pred p;\n.reg .b64 x, y;\nsetp.ne.b32 p, %" A2 ", 0;\nadd.s64 x, %" A0 ", %" A5          \
                   ";\nadd.s64 y, %" A1 ", %" A6 ";\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX "." PTX     \
                   " {" R "}, x, y, p, 1, 1, %" A3 ", %" A4 ";\n}"                                                    \
                   : D()                                                                                              \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(a_major)), "n"(static_cast<int>(b_major)), \
                     "n"(a_bytes >> 4), "n"(b_bytes >> 4));                                                           \
    }                                                                                                                 \
    template <Major a_major = Major::k, Major b_major = Major::k>                                                     \
    __device__ static __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {            \
      ss_at<0, 0, a_major, b_major>(d, a, b, accumulate);                                                             \
    }                                                                                                                 \
    template <uint32_t b_bytes, Major b_major = Major::k>                                                             \
    __device__ static __forceinline__ void rs_at(float (&d)[N / 2], const uint32_t* a, uint64_t b, int accumulate) {  \
      asm volatile("{\n.reg .pred p;\n.reg .b64 y;\nsetp.ne.b32 p, %" A5 ", 0;\nadd.s64 y, %" A4 ", %" A7             \
                   ";\n"                                                                                              \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX "." PTX " {" R "}, {%" A0 ",%" A1 ",%" A2    \
                   ",%" A3 "}, y, p, 1, 1, %" A6 ";\n}"                                                               \
                   : D()                                                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),                             \
                     "n"(static_cast<int>(b_major)), "n"(b_bytes >> 4));                                              \
    }                                                                                                                 \
    template <Major b_major = Major::k>                                                                               \
    __device__ static __forceinline__ void rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, int accumulate) {     \
      rs_at<0, b_major>(d, a, b, accumulate);                                                                         \
    }                                                                                                                 \
  };
#define MLA_WGMMA(N, R, D, ...)                             \
  MLA_WGMMA_OF(N, __nv_bfloat16, "bf16", R, D, __VA_ARGS__) \
  MLA_WGMMA_OF(N, __half, "f16", R, D, __VA_ARGS__)

MLA_WGMMA(16, MLA_R0, MLA_D0, "8", "9", "10", "11", "12", "13", "14", "15")
MLA_WGMMA(32, MLA_R1, MLA_D1, "16", "17", "18", "19", "20", "21", "22", "23")
MLA_WGMMA(48, MLA_R2, MLA_D2, "24", "25", "26", "27", "28", "29", "30", "31")
MLA_WGMMA(64, MLA_R3, MLA_D3, "32", "33", "34", "35", "36", "37", "38", "39")
MLA_WGMMA(80, MLA_R4, MLA_D4, "40", "41", "42", "43", "44", "45", "46", "47")
MLA_WGMMA(96, MLA_R5, MLA_D5, "48", "49", "50", "51", "52", "53", "54", "55")
MLA_WGMMA(128, MLA_R7, MLA_D7, "64", "65", "66", "67", "68", "69", "70", "71")
MLA_WGMMA(160, MLA_R9, MLA_D9, "80", "81", "82", "83", "84", "85", "86", "87")
MLA_WGMMA(192, MLA_R11, MLA_D11, "96", "97", "98", "99", "100", "101", "102", "103")
MLA_WGMMA(256, MLA_R15, MLA_D15, "128", "129", "130", "131", "132", "133", "134", "135")
#undef MLA_WGMMA
#undef MLA_WGMMA_OF
#undef MLA_R0
#undef MLA_D0
#undef MLA_R1
#undef MLA_D1
#undef MLA_R2
#undef MLA_D2
#undef MLA_R3
#undef MLA_D3
#undef MLA_R4
#undef MLA_D4
#undef MLA_R5
#undef MLA_D5
#undef MLA_R6
#undef MLA_D6
#undef MLA_R7
#undef MLA_D7
#undef MLA_R8
#undef MLA_D8
#undef MLA_R9
#undef MLA_D9
#undef MLA_R10
#undef MLA_D10
#undef MLA_R11
#undef MLA_D11
#undef MLA_R12
#undef MLA_D12
#undef MLA_R13
#undef MLA_D13
#undef MLA_R14
#undef MLA_D14
#undef MLA_R15
#undef MLA_D15

}  // namespace mla::cuda
