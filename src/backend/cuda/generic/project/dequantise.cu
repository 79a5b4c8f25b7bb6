#include <string>
#include <type_traits>

#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/generic/project/dequantise.hpp"
#include "mla/quant.hpp"

namespace mla::cuda::generic {
namespace {

struct Dequantise {
  const uint8_t* codes;
  const float* scales;
  int64_t heads, out, in, first, count;  // outputs [first, first + count) of each head
  int64_t block_rows, block_cols, row_blocks, scale_stride;
};
template <bool e4m3>
__device__ __forceinline__ float value_of(uint8_t code) {
  if constexpr (e4m3) return widen(fp8_e4m3{code});
  else return __uint_as_float((code & 8u) << 28 | (code & 7u) << 22) * 0x1p126f;  // exact; a table would lie in memory
}

// A value is code times scale in f32, rounded to T: what every backend multiplies. A thread takes kPiece codes of an
// output, under one scale; of e2m1 an even number, or one.
template <class T, bool e4m3, int kPiece>
__global__ void dequantise_kernel(Dequantise d, T* to) {
  using Codes = std::conditional_t<kPiece == 1, uint8_t, std::conditional_t<e4m3, uint4, uint2>>;
  const int64_t pieces = d.in / kPiece, total = d.heads * d.count * pieces, step = int64_t{gridDim.x} * kBlockThreads;
  for (int64_t i = int64_t{blockIdx.x} * kBlockThreads + threadIdx.x; i < total; i += step) {
    const int64_t row = i / pieces, c = i % pieces * kPiece, h = row / d.count, o = row % d.count + d.first;
    const int64_t at = (h * d.out + o) * d.in + c;
    const float scale = d.block_rows == 0
                            ? d.scales[0]
                            : d.scales[(h * d.row_blocks + o / d.block_rows) * d.scale_stride + c / d.block_cols];
    const Codes codes = *reinterpret_cast<const Codes*>(d.codes + (e4m3 ? at : at / 2));
    if constexpr (kPiece == 1) {
      to[i] = from_float<T>(value_of<e4m3>(e4m3 ? codes : codes >> (at % 2 * 4) & 15) * scale);
    } else {
      const auto* const bytes = reinterpret_cast<const uint8_t*>(&codes);
      alignas(16) T values[kPiece];
#pragma unroll
      for (int k = 0; k < kPiece; ++k)
        values[k] = from_float<T>(value_of<e4m3>(e4m3 ? bytes[k] : bytes[k / 2] >> (k % 2 * 4) & 15) * scale);
      auto* const out = reinterpret_cast<uint4*>(to + i * kPiece);
#pragma unroll
      for (size_t k = 0; k < sizeof values / 16; ++k) out[k] = reinterpret_cast<const uint4*>(values)[k];
    }
  }
}

}  // namespace

void dequantise(const Queue& queue, const QuantisedLinear& w, int64_t first, int64_t count, void* to) {
  constexpr int kPiece = 16;
  const int64_t total = w.heads * count * w.in;
  if (total == 0) return;
  const bool whole = w.in % kPiece == 0 && (w.scale_rows == 0 || w.scale_cols % kPiece == 0) &&
                     reinterpret_cast<uintptr_t>(to) % 16 == 0;
  const LaunchConfig config =
      strided(total / (whole ? kPiece : 1), kBlockThreads, int64_t{queue.multiprocessors()} * 64);
  const std::string shape =
      "heads " + std::to_string(w.heads) + ", outputs " + std::to_string(count) + ", in " + std::to_string(w.in);
  const Dequantise d{w.codes.as<const uint8_t>(),
                     w.scales.as<const float>(),
                     w.heads,
                     w.out,
                     w.in,
                     first,
                     count,
                     w.scale_rows,
                     w.scale_cols,
                     w.row_blocks,
                     w.scale_stride};
  for_activation(w.dtype, [&](auto element) {
    using T = decltype(element);
    const auto run = [&](auto kernel) {
      launch(kernel, config, queue.stream(), "project", "dequantise", shape, d, static_cast<T*>(to));
    };
    if (w.format == WeightFormat::fp8)
      whole ? run(dequantise_kernel<T, true, kPiece>) : run(dequantise_kernel<T, true, 1>);
    else whole ? run(dequantise_kernel<T, false, kPiece>) : run(dequantise_kernel<T, false, 1>);
  });
}

}  // namespace mla::cuda::generic
