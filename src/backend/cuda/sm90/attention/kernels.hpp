// The kernels by cache format: kernels_bf16.cu, kernels_f16.cu, kernels_fp8.cu,
// kernels_converted.cu and kernels_codes.cu.
#pragma once

#include <cuda.h>

#include <string_view>

#include "backend/cuda/sm90/attention/attention.hpp"

namespace mla::cuda::latent {

struct Params;
struct Start;

template <class T>
void launch_kernel(const AttendLatentChoice& choice, const Params& p, const CUtensorMap& q_map,
                   const CUtensorMap& cache_map, std::string_view shape, cudaStream_t stream);

/// fp8 or fp8_ds_mla. listed: fp8_ds_mla by Params::lists.
void launch_fp8(bool ds_mla, bool listed, const AttendLatentChoice& choice, const Params& p, const CUtensorMap& q_map,
                std::string_view shape, cudaStream_t stream);

/// Any cache of e4m3 by the wide kernel, rows converted to bf16 (AttendLatentChoice::converts). listed: by
/// Params::lists, as fp8_ds_v4 always is and fp8 never.
void launch_converted(CacheFormat format, bool listed, const AttendLatentChoice& choice, const Params& p,
                      const CUtensorMap& q_map, std::string_view shape, cudaStream_t stream);

/// fp8 by queries of e4m3: products of codes.
void launch_codes(const AttendLatent& a, const AttendLatentChoice& choice, const Params& p, std::string_view shape,
                  cudaStream_t stream);

/// What each worker begins with, to starts[workers].
void launch_starts(bool fp8, const AttendLatentChoice& choice, const Params& p, Start* starts, std::string_view shape,
                   cudaStream_t stream);

}  // namespace mla::cuda::latent
