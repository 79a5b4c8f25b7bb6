// Highway 1.0.3 has no target with AVX-512 BF16, so this loop names its instructions.
#include "bench/kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

namespace mla::bench {

__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) double bf16_chains(int64_t iterations) {
  volatile int opaque = 0x3f003f00;  // two bf16 of 0.5; else the loop folds to a constant
  const __m512bh a = (__m512bh)_mm512_set1_epi32(opaque), b = (__m512bh)_mm512_set1_epi32(opaque);
  __m512 x0 = _mm512_setzero_ps(), x1 = x0, x2 = x0, x3 = x0, x4 = x0, x5 = x0, x6 = x0, x7 = x0, x8 = x0, x9 = x0,
         x10 = x0, x11 = x0;
  for (int64_t i = 0; i < iterations; ++i) {
    // Equal chains would be merged into one: the empty statement makes each value its own.
    asm(""
        : "+v"(x0), "+v"(x1), "+v"(x2), "+v"(x3), "+v"(x4), "+v"(x5), "+v"(x6), "+v"(x7), "+v"(x8), "+v"(x9), "+v"(x10),
          "+v"(x11));
    x0 = _mm512_dpbf16_ps(x0, a, b);
    x1 = _mm512_dpbf16_ps(x1, a, b);
    x2 = _mm512_dpbf16_ps(x2, a, b);
    x3 = _mm512_dpbf16_ps(x3, a, b);
    x4 = _mm512_dpbf16_ps(x4, a, b);
    x5 = _mm512_dpbf16_ps(x5, a, b);
    x6 = _mm512_dpbf16_ps(x6, a, b);
    x7 = _mm512_dpbf16_ps(x7, a, b);
    x8 = _mm512_dpbf16_ps(x8, a, b);
    x9 = _mm512_dpbf16_ps(x9, a, b);
    x10 = _mm512_dpbf16_ps(x10, a, b);
    x11 = _mm512_dpbf16_ps(x11, a, b);
  }
  const __m512 sum = x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7 + x8 + x9 + x10 + x11;
  volatile float sink = _mm512_cvtss_f32(sum);
  (void)sink;
  return 2.0 * 12.0 * 32.0 * static_cast<double>(iterations);
}

}  // namespace mla::bench
#else
namespace mla::bench {
double bf16_chains(int64_t) { return 0; }
}  // namespace mla::bench
#endif
