#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/sm90/attend_latent/fp8_narrow.cuh"
#include "backend/cuda/sm90/attend_latent/fp8_wide.cuh"
#include "backend/cuda/sm90/attend_latent/kernels.hpp"

namespace mla::cuda::latent {

void launch_fp8(bool ds_mla, const AttendLatentChoice& choice, const Params& p, const CUtensorMap& q_map,
                std::string_view shape, cudaStream_t stream) {
  const auto go = [&]<class Shared>(auto kernel, int block, const Shared*, std::string_view name) {
    static_assert(sizeof(Shared) <= 232448);
    const LaunchConfig config{
        .grid = dim3(choice.workers), .block = dim3(block), .shared_bytes = sizeof(Shared), .overlap = choice.overlap};
    launch(kernel, config, stream, "attend_latent", name, shape, p, q_map);
  };
  if (ds_mla) {
    if (choice.tile_rows == 16)
      go(fp8_narrow_kernel<Fp8DsMlaRows, Fp8Tile16>, threads,
         static_cast<const Fp8NarrowShared<Fp8DsMlaRows, Fp8Tile16>*>(nullptr), "fp8_ds_mla kernel, 16 rows");
    else
      go(fp8_wide_kernel<Fp8DsMlaRows>, threads, static_cast<const Fp8WideShared<Fp8DsMlaRows>*>(nullptr),
         "fp8_ds_mla kernel, 64 rows");
  } else if (choice.tile_rows == 16) {
    go(fp8_narrow_kernel<Fp8Rows, Fp8Tile16>, threads, static_cast<const Fp8NarrowShared<Fp8Rows, Fp8Tile16>*>(nullptr),
       "fp8 kernel, 16 rows");
  } else if (choice.tile_rows == 32) {
    go(fp8_narrow_kernel<Fp8Rows, Fp8Tile32>, threads, static_cast<const Fp8NarrowShared<Fp8Rows, Fp8Tile32>*>(nullptr),
       "fp8 kernel, 32 rows");
  } else {
    go(fp8_wide_kernel<Fp8Rows>, threads, static_cast<const Fp8WideShared<Fp8Rows>*>(nullptr), "fp8 kernel, 64 rows");
  }
}

}  // namespace mla::cuda::latent
