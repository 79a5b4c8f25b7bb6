// The inner loops of the roof, each run by one thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mla::bench {

/// Independent chains of multiply-adds in registers, of the vectors that Highway dispatches to; returns the flops done.
double fma_chains(int64_t iterations);

/// Reads every byte of a buffer; the sum keeps the reads alive.
float read_all(const float* data, size_t count);

}  // namespace mla::bench
