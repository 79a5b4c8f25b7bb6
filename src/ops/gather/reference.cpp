#include <vector>

#include "cache/format.hpp"
#include "ops/gather/op.hpp"

namespace mla::ops {

void reference(const GatherArgs& a, View<double, Key, Entry> rows) {
  const CacheSpec& spec = a.cache.spec;
  std::vector<float> row(static_cast<size_t>(spec.entry()));
  for (const GatherPiece& p : a.pieces)
    for (int32_t i = 0; i < p.count; ++i) {
      const int64_t position = int64_t{p.start} + i;
      const int32_t page = a.block_table(p.request, position / spec.page_size);
      cache::format(spec.format)
          .decode(spec, a.cache.page(page), position % spec.page_size, 1, row.data(), spec.entry());
      for (int64_t d = 0; d < spec.entry(); ++d) rows(p.row + i, d) = row[d];
    }
}

}  // namespace mla::ops
