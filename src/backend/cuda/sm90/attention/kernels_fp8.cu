#include <type_traits>

#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/sm90/attention/fp8_narrow.cuh"
#include "backend/cuda/sm90/attention/fp8_wide.cuh"
#include "backend/cuda/sm90/attention/kernels.hpp"

namespace mla::cuda::latent {

namespace {

template <class Rows, bool invariant, bool listed = false>
void launch_rows(const AttendLatentChoice& choice, const Params& p, const CUtensorMap& q_map, std::string_view shape,
                 cudaStream_t stream) {
  const auto go = [&]<class Shared>(auto kernel, std::type_identity<Shared>, std::string_view name) {
    static_assert(sizeof(Shared) <= 232448);
    const LaunchConfig config{.grid = dim3(choice.workers),
                              .block = dim3(threads),
                              .shared_bytes = sizeof(Shared),
                              .overlap = choice.overlap};
    launch(kernel, config, stream, "attend_latent", name, shape, p, q_map);
  };
  if constexpr (Rows::scaled) {  // more rows are converted
    go(fp8_narrow_kernel<Rows, Fp8Tile16, invariant, listed>,
       std::type_identity<Fp8NarrowShared<Rows, Fp8Tile16, listed>>(), "fp8_ds_mla kernel, 16 rows");
  } else {
    if (choice.tile_rows == 16)
      return go(fp8_narrow_kernel<Rows, Fp8Tile16, invariant>, std::type_identity<Fp8NarrowShared<Rows, Fp8Tile16>>(),
                "fp8 kernel, 16 rows");
    if (choice.tile_rows == 32)
      return go(fp8_narrow_kernel<Rows, Fp8Tile32, invariant>, std::type_identity<Fp8NarrowShared<Rows, Fp8Tile32>>(),
                "fp8 kernel, 32 rows");
    go(fp8_wide_kernel<invariant>, std::type_identity<Fp8WideShared>(), "fp8 kernel, 64 rows");
  }
}

}  // namespace

void launch_fp8(bool ds_mla, bool listed, const AttendLatentChoice& choice, const Params& p, const CUtensorMap& q_map,
                std::string_view shape, cudaStream_t stream) {
  const bool invariant = choice.split_blocks > 0;
  const auto go = listed   ? invariant ? launch_rows<Fp8DsMlaRows, true, true> : launch_rows<Fp8DsMlaRows, false, true>
                    : ds_mla ? invariant ? launch_rows<Fp8DsMlaRows, true> : launch_rows<Fp8DsMlaRows, false>
                  : invariant ? launch_rows<Fp8Rows, true>
                              : launch_rows<Fp8Rows, false>;
  go(choice, p, q_map, shape, stream);
}

}  // namespace mla::cuda::latent
