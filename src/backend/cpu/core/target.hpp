// Which instruction set serves. Kernels are compiled for every target of Highway's and dispatched at run time; kernels
// that use AVX-512 BF16 dot products sit beside them and are taken when native_bf16_dot() or bf16_dot_pays() says so.
#pragma once

#include <string_view>

namespace mla::cpu {

/// The CPU has AVX-512 BF16 (vdpbf16ps) and the current restriction allows it.
bool native_bf16_dot();

/// Attention multiplies bf16 operands as such: native_bf16_dot() holds, and this core's dot products were measured to
/// be faster than f32 multiply-adds, or the target was asked for by name. Otherwise the operands are widened to f32,
/// which is exact. Products with weights take dot products wherever there are any: they wait for memory.
bool bf16_dot_pays();

/// Limits dispatch to a target and below: "avx512_bf16", "avx512", "avx2", "sse4", "portable"; "" lifts the limit. For
/// tests and benchmarks, while no op runs. InputError for an unknown name, UnsupportedError when this CPU lacks the
/// target.
void restrict_target(std::string_view name);

}  // namespace mla::cpu
