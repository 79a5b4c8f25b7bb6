#include "backend/cpu/core/dot_rate.hpp"

#include "backend/cpu/core/tile_registers.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <chrono>

#ifndef __clang__  // GCC bug 105593, as in block_attention_bf16.cpp
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define MLA_BF16_DOT [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]]

namespace mla::cpu {
namespace {

// Highway 1.0.3 has no target with AVX-512 BF16, so this loop names its instructions. It has more chains than either
// has latency times ports.
constexpr int kChains = 12;
constexpr int64_t kSteps = 400;

template <bool dots>
MLA_BF16_DOT inline __m512 step(__m512 sum, __m512 x) {
  const __m512bh pairs = (__m512bh)_mm512_castps_si512(x);
  return dots ? _mm512_dpbf16_ps(sum, pairs, pairs) : _mm512_fmadd_ps(x, x, sum);
}

// Written out: GCC 12 keeps an array of sums in memory, whose latency would then be measured.
template <bool dots>
MLA_BF16_DOT [[gnu::noinline]] float chains(float start, int64_t steps) {
  const __m512 x = _mm512_set1_ps(start);
  __m512 a = x, b = x, c = x, d = x, e = x, f = x, g = x, h = x, i = x, j = x, k = x, l = x;
  for (int64_t n = 0; n < steps; ++n) {
    // Equal chains would be merged into one: the empty statement makes each value its own.
    asm(""
        : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f), "+v"(g), "+v"(h), "+v"(i), "+v"(j), "+v"(k), "+v"(l));
    a = step<dots>(a, x), b = step<dots>(b, x), c = step<dots>(c, x), d = step<dots>(d, x);
    e = step<dots>(e, x), f = step<dots>(f, x), g = step<dots>(g, x), h = step<dots>(h, x);
    i = step<dots>(i, x), j = step<dots>(j, x), k = step<dots>(k, x), l = step<dots>(l, x);
  }
  return _mm512_cvtss_f32(a + b + c + d + e + f + g + h + i + j + k + l);
}

template <class F>
double seconds_of(F&& work) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

template <bool dots>
double seconds() {
  volatile float start = 0.5f;
  [[maybe_unused]] volatile float end;  // what is stored is computed
  return seconds_of([&] { end = chains<dots>(start, kSteps); });
}

// Of two things' times the ratio, taken in turn: its median. Neither an interruption, nor a clock that rises, nor one
// that jumps when the thread changes its core sets it.
template <class A, class B>
double ratio(A&& a, B&& b) {
  std::array<double, 15> ratios;
  for (double& r : ratios) {
    const double first = a(), second = b();
    r = second > 0 ? first / second : 0;
  }
  std::nth_element(ratios.begin(), ratios.begin() + ratios.size() / 2, ratios.end());
  return ratios[ratios.size() / 2];
}

}  // namespace

double bf16_dot_chains(int64_t steps) {
  volatile float start = 0.5f, end;
  end = chains<true>(start, steps);
  (void)end;
  return 2.0 * 32.0 * kChains * static_cast<double>(steps);
}

double bf16_dot_rate() { return ratio(seconds<false>, seconds<true>); }

double amx_rate() {
  constexpr int64_t kTileSteps = 200;
  double flops = 0;
  const double times = ratio(seconds<false>, [&] { return seconds_of([&] { flops = amx_chains(kTileSteps); }); });
  return flops * times / (2.0 * 16.0 * kChains * static_cast<double>(kSteps));
}

}  // namespace mla::cpu

#else  // never called: native_bf16_dot() is false

namespace mla::cpu {
double bf16_dot_chains(int64_t) { return 0; }
double bf16_dot_rate() { return 0; }
double amx_rate() { return 0; }
}  // namespace mla::cpu

#endif
