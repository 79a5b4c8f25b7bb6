// Errors of the CUDA runtime and driver as mla::DeviceError, naming the op, the kernel and the shape at hand.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>

#include "mla/error.hpp"

namespace mla::cuda {

/// "attend_latent: launch of narrow<16> (tokens 4, heads 16): cudaErrorInvalidValue: invalid argument".
inline void check(cudaError_t status, std::string_view op, std::string_view what, std::string_view shape = {}) {
  if (status == cudaSuccess) return;
  std::string text = std::string(op) + ": " + std::string(what);
  if (!shape.empty()) text += " (" + std::string(shape) + ")";
  throw DeviceError(text + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

}  // namespace mla::cuda
