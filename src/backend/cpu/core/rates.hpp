// How fast this CPU is: which arithmetic its instructions do best, and what attention reaches with it. Known machines
// are looked up, others measured. `mla bench --fit` prints what this one's line would be.
#pragma once

#include <cstdint>
#include <string>

#include "mla/plan.hpp"

namespace mla::cpu {

/// As cpuid counts them; empty vendor: not an x86.
struct CpuId {
  std::string vendor;
  int family = 0, model = 0;
};
CpuId this_cpu();

/// The CPU has bf16 dot products (AVX-512 BF16, ARM's FEAT_BF16), whatever is restricted.
bool has_bf16_dot();

/// Arithmetic a second of bf16 products over that of f32 multiply-adds; 0: the CPU has none.
struct Bf16Rates {
  double dot = 0;  ///< dot products of pairs
  double amx = 0;  ///< AMX's tile products
};

/// From the table of known CPUs, or measured in some 100 us, once. Of what the CPU has, whatever is restricted.
const Bf16Rates& bf16_rates();
/// Measured, known or not.
Bf16Rates measure_bf16_rates();
/// Whether this CPU is in the table.
bool known_cpu();

/// Of a core, with operands of `compute`: what serves them now decides.
CostModel cost_model(Dtype compute, int64_t heads);

}  // namespace mla::cpu
