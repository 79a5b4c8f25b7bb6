// Which instruction set serves. Kernels are compiled for every target of Highway's and dispatched at run time; kernels
// that use AVX-512 BF16 dot products sit beside them and are taken when native_bf16_dot() says so.
#pragma once

#include <string_view>

namespace mla::cpu {

/// The CPU has AVX-512 BF16 (vdpbf16ps) and the current restriction allows it.
bool native_bf16_dot();

/// Limits dispatch to a target and below: "avx512_bf16", "avx512", "avx2", "sse4", "portable"; "" lifts the limit. For
/// tests and benchmarks, while no op runs. InputError for an unknown name, UnsupportedError when this CPU lacks the
/// target.
void restrict_target(std::string_view name);

}  // namespace mla::cpu
