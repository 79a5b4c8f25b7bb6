// What kernels share: views of any element type, conversions, and reductions over a warp or block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "mla/dtype.hpp"
#include "mla/view.hpp"

namespace mla::cuda {

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
__device__ inline float widen(f16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ inline float widen(fp8_e4m3 x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3)));
}

/// Nearest even; e4m3 saturates at 448, NaN stays NaN: the bits that the portable conversions give.
template <class T>
__device__ T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) {
  return x;
}
template <>
__device__ inline bf16 narrow<bf16>(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
template <>
__device__ inline f16 narrow<f16>(float x) {
  return {__half_as_ushort(__float2half_rn(x))};
}
template <>
__device__ inline fp8_e4m3 narrow<fp8_e4m3>(float x) {
  return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int d = 16; d; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
  return x;
}

/// f(T{}) with the element type of a dtype, among f32 and bf16: what activations are.
template <class F>
void for_activation(Dtype dtype, F&& f) {
  if (dtype == Dtype::f32) f(float{});
  else f(bf16{});
}

}  // namespace mla::cuda
