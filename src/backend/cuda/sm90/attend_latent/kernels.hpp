// The kernels of attend_latent by cache element type: kernels_bf16.cu and kernels_f16.cu hold one each.
#pragma once

#include <cuda.h>

#include <string_view>

#include "backend/cuda/sm90/attend_latent/attend_latent.hpp"

namespace mla::cuda::latent {

struct Params;

template <class T>
void launch_kernel(const AttendLatentChoice& choice, const Params& p, const CUtensorMap& q_map,
                   const CUtensorMap& cache_map, std::string_view shape, cudaStream_t stream);

}  // namespace mla::cuda::latent
