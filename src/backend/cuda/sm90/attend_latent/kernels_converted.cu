#include <type_traits>

#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/sm90/attend_latent/kernels.hpp"
#include "backend/cuda/sm90/attend_latent/wide.cuh"

namespace mla::cuda::latent {
namespace {

template <class Tile, bool invariant>
void launch_tile(const AttendLatentChoice& choice, const Params& p, const CUtensorMap& q_map, std::string_view shape,
                 cudaStream_t stream) {
  static_assert(sizeof(WideShared<Tile>) <= 232448);
  const LaunchConfig config{.grid = dim3(choice.workers * Tile::ctas),
                            .block = dim3(wide_threads),
                            .shared_bytes = sizeof(WideShared<Tile>),
                            .cluster = Tile::ctas,
                            .overlap = choice.overlap};
  launch(wide_kernel<Tile, __nv_bfloat16, invariant>, config, stream, "attend_latent", "wide kernel of e4m3, 128 rows",
         shape, p, q_map, CUtensorMap{});
}

}  // namespace

void launch_converted(bool ds_mla, const AttendLatentChoice& choice, const Params& p, const CUtensorMap& q_map,
                      std::string_view shape, cudaStream_t stream) {
  using Fp8 = WideConverted<Fp8Rows>;
  using DsMla = WideConverted<Fp8DsMlaRows>;
  const bool invariant = choice.split_blocks > 0;
  const auto go = ds_mla      ? invariant ? launch_tile<DsMla, true> : launch_tile<DsMla, false>
                       : invariant ? launch_tile<Fp8, true>
                              : launch_tile<Fp8, false>;
  go(choice, p, q_map, shape, stream);
}

}  // namespace mla::cuda::latent
