// Definition behind kernels.hpp.
#pragma once

#include <type_traits>

#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/sm90/attention/kernels.hpp"
#include "backend/cuda/sm90/attention/narrow.cuh"
#include "backend/cuda/sm90/attention/wide.cuh"

namespace mla::cuda::latent {

template <class T>
void launch_kernel(const AttendLatentChoice& choice, const Params& p, const CUtensorMap& q_map,
                   const CUtensorMap& cache_map, std::string_view shape, cudaStream_t stream) {
  LaunchConfig config{.grid = dim3(choice.workers * choice.ctas()),
                      .block = dim3(choice.tile_rows <= 32 ? threads : wide_threads),
                      .shared_bytes = 0,
                      .cluster = choice.ctas(),
                      .overlap = choice.overlap};
  const auto go = [&](auto kernel, size_t shared, std::string_view name, const auto&... maps) {
    config.shared_bytes = shared;
    launch(kernel, config, stream, "attend_latent", name, shape, p, maps...);
  };
  static_assert(sizeof(NarrowShared<Narrow16>) <= 232448 && sizeof(NarrowShared<Narrow32>) <= 232448);
  const auto wide = [&]<class Boxes, class Rows>(std::type_identity<Boxes>, std::type_identity<Rows>, auto in_boxes,
                                                 auto row_by_row, std::string_view name) {
    constexpr size_t bytes = sizeof(WideShared<Boxes, false>);
    static_assert(bytes == sizeof(WideShared<Rows, false>) && bytes <= 232448);
    go(choice.box_rows ? in_boxes : row_by_row, bytes, name, q_map, cache_map);
  };
  const auto of_split = [&]<bool invariant>(std::bool_constant<invariant>) {
    switch (choice.tile_rows) {
      case 16:
        return go(narrow_kernel<Narrow16, T, invariant>, sizeof(NarrowShared<Narrow16>), "narrow kernel, 16 rows",
                  q_map);
      case 32:
        return go(narrow_kernel<Narrow32, T, invariant>, sizeof(NarrowShared<Narrow32>), "narrow kernel, 32 rows",
                  q_map);
      case 64:
        return wide(std::type_identity<Wide64<true>>(), std::type_identity<Wide64<false>>(),
                    wide_kernel<Wide64<true>, T, invariant>, wide_kernel<Wide64<false>, T, invariant>,
                    "wide kernel, 64 rows");
      default:
        return wide(std::type_identity<Wide128<true>>(), std::type_identity<Wide128<false>>(),
                    wide_kernel<Wide128<true>, T, invariant>, wide_kernel<Wide128<false>, T, invariant>,
                    "wide kernel, 128 rows");
    }
  };
  choice.split_blocks ? of_split(std::true_type()) : of_split(std::false_type());
}

}  // namespace mla::cuda::latent
