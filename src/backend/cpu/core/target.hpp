// Which instruction set serves. Kernels are compiled for every target of Highway's and dispatched at run time; kernels
// that use bf16 dot products or AMX sit beside them and are taken when the functions below say so.
#pragma once

#include <string_view>
#include <vector>

namespace mla::cpu {

/// The CPU has bf16 dot products (AVX-512 BF16's vdpbf16ps, ARM's bfdot) and the current restriction allows them.
bool native_bf16_dot();
/// It has native_bf16_dot() and AMX's bf16 products, the kernel lets this process use them, and the restriction allows
/// it.
bool native_amx();

/// How attention multiplies bf16 operands: as such, in dot products or tile registers, or widened to f32, which is
/// exact.
enum class Bf16Products { widened, dot, amx };

/// What was measured to be fastest on this core, or was asked for by name. (Products with weights take dot products
/// wherever there are any: they wait for memory.)
Bf16Products bf16_products();

/// The architecture's targets, best first: "amx_bf16", "avx512_bf16", "avx512", "avx2", "sse4" and "portable" of
/// x86-64, "neon_bf16" and "neon", the baseline, of ARM.
std::vector<std::string_view> targets();
/// Limits dispatch to a target and below; "" lifts the limit, "portable" is known everywhere. For tests and benchmarks,
/// while no op runs. InputError for an unknown name, UnsupportedError when this CPU lacks the target.
void restrict_target(std::string_view name);

}  // namespace mla::cpu
