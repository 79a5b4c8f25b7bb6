#include <vector>

#include "cache/index/codec.hpp"
#include "ops/index_gather/op.hpp"

namespace mla::ops {

void reference(const IndexGatherArgs& a, View<double, Key, IndexDim> keys) {
  const IndexCacheSpec& spec = a.cache.spec;
  std::vector<float> key(static_cast<size_t>(spec.dim));
  for (const GatherPiece& p : a.pieces)
    for (int32_t i = 0; i < p.count; ++i) {
      const int64_t position = int64_t{p.start} + i;
      const int32_t page = a.block_table(p.request, position / spec.page_size);
      cache::index::decode(spec, a.cache.page(page), position % spec.page_size, key.data());
      for (int64_t d = 0; d < spec.dim; ++d) keys(p.row + i, d) = key[d];
    }
}

}  // namespace mla::ops
