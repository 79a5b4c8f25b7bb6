#include "backend/cpu/core/dot_rate.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <chrono>

#ifndef __clang__  // GCC bug 105593, as in block_attention_bf16.cpp
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define MLA_BF16_DOT [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]]

namespace mla::cpu {
namespace {

// More chains than either instruction has latency times ports.
constexpr int kChains = 12;
constexpr int64_t kSteps = 400;

// Every value is written by a statement the compiler cannot see through: chains stay apart, and none folds.
template <bool dots>
MLA_BF16_DOT [[gnu::noinline]] float chains(float start, int64_t steps) {
  __m512 sum[kChains];
  const __m512 x = _mm512_set1_ps(start);
  for (__m512& s : sum) s = x;
  for (int64_t i = 0; i < steps; ++i)
    for (__m512& s : sum) {
      s = dots ? _mm512_dpbf16_ps(s, (__m512bh)_mm512_castps_si512(x), (__m512bh)_mm512_castps_si512(x))
               : _mm512_fmadd_ps(x, x, s);
      asm("" : "+v"(s));
    }
  for (int i = 1; i < kChains; ++i) sum[0] = _mm512_add_ps(sum[0], sum[i]);
  return _mm512_cvtss_f32(sum[0]);
}

template <bool dots>
double seconds() {
  using Clock = std::chrono::steady_clock;
  volatile float start = 0.5f, end;
  const auto begin = Clock::now();
  end = chains<dots>(start, kSteps);
  (void)end;
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

double bf16_dot_rate() {
  // The least of several turns each, taken alternately: neither an interruption nor a clock that rises sets the ratio.
  double dot = 1, fma = 1;
  for (int round = 0; round < 12; ++round) {
    dot = std::min(dot, seconds<true>());
    fma = std::min(fma, seconds<false>());
  }
  return fma / dot;
}

}  // namespace mla::cpu

#else  // never called: native_bf16_dot() is false

namespace mla::cpu {
double bf16_dot_rate() { return 0; }
}  // namespace mla::cpu

#endif
