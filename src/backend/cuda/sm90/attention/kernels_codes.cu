#include <initializer_list>
#include <span>
#include <type_traits>
#include <vector>

#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/tensor_map.hpp"
#include "backend/cuda/sm90/attention/codes.cuh"
#include "backend/cuda/sm90/attention/kernels.hpp"

namespace mla::cuda::latent {

void launch_codes(const AttendLatent& a, const AttendLatentChoice& choice, const Params& p, std::string_view shape,
                  cudaStream_t stream) {
  const uint64_t row_bytes = entry, q_extents[2] = {entry, static_cast<uint64_t>(a.limits.tokens) * a.limits.heads},
                 cache_extents[3] = {entry, static_cast<uint64_t>(a.page_size), static_cast<uint64_t>(a.pages)},
                 cache_strides[2] = {row_bytes, static_cast<uint64_t>(p.page_stride)};
  const auto rows = static_cast<uint32_t>(choice.box_rows);
  const auto map = [&](std::string_view name, const void* base, auto& extents, auto strides, uint32_t columns,
                       std::initializer_list<uint32_t> box_rows) {
    std::vector<uint32_t> box{columns};
    box.insert(box.end(), box_rows.begin(), box_rows.end());
    return tensor_map("attend_latent", name, MapType::u8, base, extents, strides, box,
                      columns == 128 ? Swizzle::b128 : Swizzle::b64);
  };
  const std::span<const uint64_t> q_strides(&row_bytes, 1), strides(cache_strides);
  const CodeMaps maps{.q = map("q", a.q, q_extents, q_strides, 128, {64}),
                      .q_rope = map("q", a.q, q_extents, q_strides, 64, {64}),
                      .cache = map("cache", a.cache, cache_extents, strides, 128, {rows, 1}),
                      .cache_rope = map("cache", a.cache, cache_extents, strides, 64, {rows, 1})};
  static_assert(sizeof(CodesShared) <= 232448);
  const auto go = [&]<int ctas, bool invariant>(std::integral_constant<int, ctas>, std::bool_constant<invariant>) {
    const LaunchConfig config{.grid = dim3(choice.workers * ctas),
                              .block = dim3(code_threads),
                              .shared_bytes = sizeof(CodesShared),
                              .cluster = ctas,
                              .overlap = choice.overlap};
    launch(codes_kernel<ctas, invariant>, config, stream, "attend_latent",
           ctas == 1 ? "kernel of e4m3 products, 64 rows" : "kernel of e4m3 products, 128 rows", shape, p, maps);
  };
  const auto of_split = [&](auto ctas) {
    choice.split_blocks ? go(ctas, std::true_type()) : go(ctas, std::false_type());
  };
  if (choice.ctas() == 1) of_split(std::integral_constant<int, 1>());
  else of_split(std::integral_constant<int, 2>());
}

}  // namespace mla::cuda::latent
