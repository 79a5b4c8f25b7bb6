#include <type_traits>

#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/sm90/attention/kernels.hpp"
#include "backend/cuda/sm90/attention/wide.cuh"

namespace mla::cuda::latent {
namespace {

template <class Tile, bool invariant>
void launch_tile(const AttendLatentChoice& choice, const Params& p, const CUtensorMap& q_map, std::string_view shape,
                 cudaStream_t stream) {
  static_assert(sizeof(WideShared<Tile, invariant>) <= 232448);
  const LaunchConfig config{.grid = dim3(choice.workers * Tile::ctas),
                            .block = dim3(wide_threads),
                            .shared_bytes = sizeof(WideShared<Tile, invariant>),
                            .cluster = Tile::ctas,
                            .overlap = choice.overlap};
  launch(wide_kernel<Tile, __nv_bfloat16, invariant>, config, stream, "attend_latent",
         Tile::ctas == 1 ? "wide kernel of e4m3, 64 rows" : "wide kernel of e4m3, 128 rows", shape, p, q_map,
         CUtensorMap{});
}

}  // namespace

void launch_converted(CacheFormat format, bool listed, const AttendLatentChoice& choice, const Params& p,
                      const CUtensorMap& q_map, std::string_view shape, cudaStream_t stream) {
  const auto of_tile = [&]<class Tile>(std::type_identity<Tile>) {
    (choice.split_blocks ? launch_tile<Tile, true> : launch_tile<Tile, false>)(choice, p, q_map, shape, stream);
  };
  const auto of_format = [&]<class Format, bool lists>(std::type_identity<Format>, std::bool_constant<lists>) {
    if (choice.ctas() == 1) of_tile(std::type_identity<WideConverted<Format, 1, lists>>());
    else of_tile(std::type_identity<WideConverted<Format, 2, lists>>());
  };
  using Lists = std::true_type;
  using Pages = std::false_type;
  if (format == CacheFormat::fp8_ds_v4) of_format(std::type_identity<Fp8DsV4Rows>(), Lists());
  else if (format == CacheFormat::fp8) of_format(std::type_identity<Fp8Rows>(), Pages());
  else if (listed) of_format(std::type_identity<Fp8DsMlaRows>(), Lists());
  else of_format(std::type_identity<Fp8DsMlaRows>(), Pages());
}

}  // namespace mla::cuda::latent
