#include "backend/cpu/core/dot_rate.hpp"

#include "backend/cpu/core/bf16_dot.hpp"
#include "backend/cpu/core/tile_registers.hpp"

#ifdef MLA_HAS_BF16_DOT

#include <algorithm>
#include <array>
#include <chrono>

namespace mla::cpu {
namespace {

constexpr int64_t kSteps = 400;

// A link of each chain. There are more chains than either instruction has latency times ports. own(): equal chains
// would be merged into one; the empty statement makes each value its own.
#if defined(__x86_64__)
struct Link {
  static constexpr int64_t kLanes = Sixteen::kLanes;
  __m512 x;
  MLA_BF16_DOT explicit Link(float start) : x(_mm512_set1_ps(start)) {}
  MLA_BF16_DOT void own() { asm("" : "+v"(x)); }
  template <bool dots>
  MLA_BF16_DOT void add(Link a) {
    const __m512bh pairs = (__m512bh)_mm512_castps_si512(a.x);
    x = dots ? _mm512_dpbf16_ps(x, pairs, pairs) : _mm512_fmadd_ps(a.x, a.x, x);
  }
  MLA_BF16_DOT float first() const { return _mm512_cvtss_f32(x); }
};
#else
struct Link {  // four ports by four cycles are sixteen chains: two a link
  static constexpr int64_t kLanes = 2 * Four::kLanes;
  float32x4_t x, y;
  MLA_BF16_DOT explicit Link(float start) : x(vdupq_n_f32(start)), y(x) {}
  MLA_BF16_DOT void own() { asm("" : "+w"(x), "+w"(y)); }
  template <bool dots>
  MLA_BF16_DOT void add(Link a) {
    const bfloat16x8_t pairs = vreinterpretq_bf16_f32(a.x);
    x = dots ? vbfdotq_f32(x, pairs, pairs) : vfmaq_f32(x, a.x, a.x);
    y = dots ? vbfdotq_f32(y, pairs, pairs) : vfmaq_f32(y, a.x, a.x);
  }
  MLA_BF16_DOT float first() const { return vgetq_lane_f32(vaddq_f32(x, y), 0); }
};
#endif

// Written out: GCC 12 keeps an array of sums in memory, whose latency would then be measured.
constexpr int64_t kChains = 12;
template <bool dots>
MLA_BF16_DOT [[gnu::noinline]] float chains(float start, int64_t steps) {
  const Link x(start);
  Link a = x, b = x, c = x, d = x, e = x, f = x, g = x, h = x, i = x, j = x, k = x, l = x;
  for (int64_t n = 0; n < steps; ++n) {
    a.own(), b.own(), c.own(), d.own(), e.own(), f.own(), g.own(), h.own(), i.own(), j.own(), k.own(), l.own();
    a.add<dots>(x), b.add<dots>(x), c.add<dots>(x), d.add<dots>(x), e.add<dots>(x), f.add<dots>(x);
    g.add<dots>(x), h.add<dots>(x), i.add<dots>(x), j.add<dots>(x), k.add<dots>(x), l.add<dots>(x);
  }
  float sum = 0;
  for (const Link& last : {a, b, c, d, e, f, g, h, i, j, k, l}) sum += last.first();
  return sum;
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
  return 4.0 * static_cast<double>(Link::kLanes * kChains * steps);
}

double bf16_dot_rate() { return ratio(seconds<false>, seconds<true>); }

double amx_rate() {
  constexpr int64_t kTileSteps = 200;
  double flops = 0;
  const double times = ratio(seconds<false>, [&] { return seconds_of([&] { flops = amx_chains(kTileSteps); }); });
  return flops * times / (2.0 * static_cast<double>(Link::kLanes * kChains * kSteps));
}

}  // namespace mla::cpu

#else  // never called: native_bf16_dot() is false

namespace mla::cpu {
double bf16_dot_chains(int64_t) { return 0; }
double bf16_dot_rate() { return 0; }
double amx_rate() { return 0; }
}  // namespace mla::cpu

#endif
