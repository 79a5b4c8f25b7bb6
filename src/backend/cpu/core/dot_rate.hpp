// How fast this core multiplies bf16.
#pragma once

#include <cstdint>

namespace mla::cpu {

/// Independent chains of bf16 dot products in registers. Returns the flops done. Only where native_bf16_dot() holds.
double bf16_dot_chains(int64_t steps);

/// Dot products a second over f32 multiply-adds a second, of the same vectors (512 bits, 128 on ARM): about 1 where a
/// dot product does twice a multiply-add's arithmetic in its time (Zen 5), about 0.25 on a Xeon with AMX, where it does
/// half of it; no ARM core was measured. Measured in some 50 us. Only where native_bf16_dot() holds.
double bf16_dot_rate();

/// Arithmetic of AMX's tile products a second over that of f32 multiply-adds: 15 on a Xeon with AMX. Only where
/// has_amx_bf16() holds.
double amx_rate();

}  // namespace mla::cpu
