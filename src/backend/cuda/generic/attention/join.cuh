// Joins partial rows of one softmax in their order: m = max(lse); O = sum(e^(lse - m) O) / sum(e^(lse - m)).
#pragma once

#include <cmath>
#include <cstdint>

#include "backend/cuda/generic/attention/block.cuh"

namespace mla::cuda::generic {

/// Partial rows, f32; max may be null.
struct Parts {
  const float* out = nullptr;
  int64_t out_row = 0, out_head = 0;
  const float* lse = nullptr;
  int64_t lse_row = 0, lse_head = 0;
  const float* max = nullptr;
  int64_t max_row = 0, max_head = 0;
};

/// +inf stands for an empty part; NaN is a row's that is NaN.
__device__ inline float usable(float lse) { return lse == INFINITY ? -INFINITY : lse; }
/// The same of a part that comes from outside: a NaN lse beside a number is an empty part's.
__device__ inline float usable_part(float lse, const Destination& d, int64_t row, int head) {
  if (lse == lse) return usable(lse);
  const int64_t at = row * d.out_row + head * d.out_head;
  const float first = d.dtype == Dtype::f32   ? static_cast<const float*>(d.out)[at]
                      : d.dtype == Dtype::f16 ? widen(static_cast<const f16*>(d.out)[at])
                                              : widen(static_cast<const bf16*>(d.out)[at]);
  return first == first ? -INFINITY : lse;
}
/// What a row's exponents are taken relative to: its largest lse, or 0 of a row that sees nothing or is NaN.
__device__ inline float base_of(float largest) { return largest > -INFINITY ? largest : 0.0f; }

/// What a row of softmax sum e^lse keeps beside its sink.
__device__ inline float kept(const float* sinks, int head, float lse) {
  return !sinks || lse == -INFINITY ? 1.0f : 1.0f / (1.0f + expf(sinks[head] - lse));
}

/// A block joins rows first, first + step, .. of `parts` into row `to` of d.
__device__ inline void join_row(const Parts& parts, int64_t first, int64_t step, int count, const Destination& d,
                                int64_t to, int head, int width, const float* sinks) {
  const float* const lse = parts.lse + first * parts.lse_row + head * parts.lse_head;
  const float* const out = parts.out + first * parts.out_row + head * parts.out_head;
  const int64_t lse_step = step * parts.lse_row, out_step = step * parts.out_row;
  float m = -INFINITY, sum = 0.0f;
  for (int i = 0; i < count; ++i) m = fmaxf(m, usable(lse[i * lse_step]));
  m = base_of(m);
  for (int i = 0; i < count; ++i) sum += expf(usable(lse[i * lse_step]) - m);
  const float joined = sum == 0.0f ? -INFINITY : m + logf(sum);
  const float factor = sum == 0.0f ? 0.0f : kept(sinks, head, joined) / sum;
  for (int c = static_cast<int>(threadIdx.x); c < width; c += static_cast<int>(blockDim.x)) {
    float x = 0.0f;
    if (factor != 0.0f) {
#pragma unroll 4
      for (int i = 0; i < count; ++i) {
        const float l = usable(lse[i * lse_step]);
        if (l != -INFINITY) x = fmaf(expf(l - m), out[i * out_step + c], x);
      }
      x *= factor;
    }
    const int64_t at = to * d.out_row + head * d.out_head + c;
    if (d.dtype == Dtype::f32) static_cast<float*>(d.out)[at] = x;
    else if (d.dtype == Dtype::f16) static_cast<f16*>(d.out)[at] = narrow<f16>(x);
    else static_cast<bf16*>(d.out)[at] = narrow<bf16>(x);
  }
  if (threadIdx.x == 0) {
    d.lse[to * d.lse_row + head * d.lse_head] = joined;
    if (d.max) {
      float largest = -INFINITY;
      const float* const max = parts.max + first * parts.max_row + head * parts.max_head;
      for (int i = 0; i < count; ++i) {
        const float one = max[i * step * parts.max_row];
        largest = one == one && largest == largest ? fmaxf(largest, one) : NAN;
      }
      d.max[to * d.max_row + head * d.max_head] = largest;
    }
  }
}

}  // namespace mla::cuda::generic
