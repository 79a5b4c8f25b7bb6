#include "backend/cpu/core/rates.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/bf16_dot.hpp"
#include "backend/cpu/core/block_attention.hpp"
#include "backend/cpu/core/dot_rate.hpp"
#include "backend/cpu/core/target.hpp"
#include "backend/cpu/core/tile_registers.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(MLA_HAS_BF16_DOT)
#include <sys/auxv.h>
#endif

namespace mla::cpu {
namespace {

// A CPU's line: measured by `mla bench --fit`.
struct Known {
  const char* vendor;
  int family, model;
  Bf16Rates rates;
};

// `mla bench --fit` prints such lines. A rate is a property of the core's design: clocks and caches do not enter.
constexpr Known kKnown[] = {
    {"GenuineIntel", 6, 167, {.dot = 0.5, .amx = 17}},  // a Xeon with AMX, as a hypervisor shows it
    {"GenuineIntel", 6, 207, {.dot = 0.5, .amx = 17}},  // Xeon, Emerald Rapids
};

const Known* find_this_cpu() {
  const CpuId id = this_cpu();
  const auto* found = std::find_if(std::begin(kKnown), std::end(kKnown), [&](const Known& k) {
    return id.vendor == k.vendor && id.family == k.family && id.model == k.model;
  });
  return found == std::end(kKnown) ? nullptr : found;
}

// Of a core. f32 and AMX were fitted by `mla bench --fit` on a Xeon (docs/log/2026-11-24-rates.md), dot products are
// rows of `mla bench` on a Zen 5 (docs/log/2026-11-23-performance.md).
constexpr CostModel kF32{.latent_flops = 160e9, .expanded_flops = 176e9, .projection_flops = 245e9, .bytes = 3.5e9},
    kDot{.latent_flops = 210e9, .expanded_flops = 280e9, .projection_flops = 450e9, .bytes = 20e9},
    kAmx{.latent_flops = 840e9, .expanded_flops = 820e9, .projection_flops = 2180e9, .bytes = 8.2e9};

}  // namespace

bool has_bf16_dot() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#elif defined(MLA_HAS_BF16_DOT)
  return getauxval(AT_HWCAP2) & HWCAP2_BF16;
#else
  return false;
#endif
}

CpuId this_cpu() {
  CpuId id;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d)) {
    std::array<char, 13> name{};
    std::memcpy(&name[0], &b, 4);
    std::memcpy(&name[4], &d, 4);
    std::memcpy(&name[8], &c, 4);
    id.vendor = name.data();
  }
  if (__get_cpuid(1, &a, &b, &c, &d)) {
    const int family = static_cast<int>(a >> 8 & 15), model = static_cast<int>(a >> 4 & 15);
    id.family = family == 15 ? family + static_cast<int>(a >> 20 & 255) : family;
    id.model = family == 15 || family == 6 ? model + (static_cast<int>(a >> 16 & 15) << 4) : model;
  }
#endif
  return id;
}

Bf16Rates measure_bf16_rates() {
  if (!has_bf16_dot()) return {};
  // A dot product does twice a multiply-add's arithmetic.
  return {.dot = 2 * bf16_dot_rate(), .amx = has_amx_bf16() ? amx_rate() : 0};
}

bool known_cpu() { return find_this_cpu() != nullptr; }

const Bf16Rates& bf16_rates() {
  static const Bf16Rates rates = [] {
    const Known* known = find_this_cpu();
    if (!known) return measure_bf16_rates();
    // A hypervisor or a kernel may keep back what the CPU has.
    return Bf16Rates{.dot = has_bf16_dot() ? known->rates.dot : 0, .amx = has_amx_bf16() ? known->rates.amx : 0};
  }();
  return rates;
}

// A block of AMX's attention has 256 keys; of more than a few threads each then has one at 4K of context: 67 us with 16
// of a Xeon's (16 heads), where splits of 512 take 123. Two threads take 5% longer.
int64_t split_keys() { return bf16_products() == Bf16Products::amx ? kAmxBlockKeys : kSplitKeys; }

CostModel cost_model(Dtype compute, int64_t) {
  switch (compute == Dtype::bf16 ? bf16_products() : Bf16Products::widened) {
    case Bf16Products::widened: return kF32;
    case Bf16Products::dot: return kDot;
    case Bf16Products::amx: return kAmx;
  }
  return kDot;
}

}  // namespace mla::cpu
