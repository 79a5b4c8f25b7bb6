// e4m3 codes to bf16 with AVX-512 VBMI: a code's two bytes, each from a table of 128, put side by side. 64 codes take
// about seven cycles; by words, which every CPU with AVX-512 BF16 can permute, they take twelve.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>

#define MLA_BYTES [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]]

namespace mla::cpu {

/// The low and the high bytes of 128 magnitudes.
struct ByteTables {
  __m512i low[2], high[2];
};

/// 64 codes as bf16, signs included. Bytes are unpacked from halves of 16: first are codes 0 to 7, 16 to 23, 32 to 39
/// and 48 to 55, second the others.
MLA_BYTES inline void widen(const ByteTables& table, __m512i code, __m512i& first, __m512i& second) {
  const __m512i low = _mm512_permutex2var_epi8(table.low[0], code, table.low[1]),
                magnitude = _mm512_permutex2var_epi8(table.high[0], code, table.high[1]),
                high = _mm512_ternarylogic_epi64(magnitude, code, _mm512_set1_epi8(static_cast<char>(0x80)),
                                                 0x78);  // magnitude ^ (code & sign)
  first = _mm512_unpacklo_epi8(low, high);
  second = _mm512_unpackhi_epi8(low, high);
}

/// The lanes of up to 64 codes of which n are left.
inline uint64_t code_lanes(int64_t n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

}  // namespace mla::cpu
#endif
