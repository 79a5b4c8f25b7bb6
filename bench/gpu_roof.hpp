// What a GPU can do, measured through the library itself.
#pragma once

#include "bench/roof.hpp"
#include "mla/device.hpp"

namespace mla::bench {

/// read_gbps: a large copy's bytes read and written; bf16_gflops and fma_gflops: large matrix products of bf16 and f32
/// operands. Best of a few rounds, in about a second.
Roof measure_roof(Stream& gpu);

}  // namespace mla::bench
