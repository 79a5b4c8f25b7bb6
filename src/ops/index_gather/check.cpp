#include "ops/index_gather/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {

void check(const IndexGatherArgs& a) {
  constexpr std::string_view op = "index_gather";
  const IndexCacheSpec& spec = a.cache.spec;
  require_pages(op, "cache", a.cache);
  require_view(op, "block_table", a.block_table);
  require_view(op, "keys", a.keys);
  require_view(op, "scales", a.scales);
  require_equal(op, "keys IndexDim", a.keys.extent<IndexDim>(), "cache dim", spec.dim);
  require_dense<IndexDim>(op, "keys", a.keys);
  require_dtype(op, "keys", a.keys.dtype(), {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3});
  if (a.keys.dtype() == Dtype::fp8_e4m3) {
    if (spec.format != IndexCacheFormat::fp8)
      throw ShapeError("index_gather: keys are fp8_e4m3, the cache is " + std::string(to_string(spec.format)));
    require_same<Key>(op, "scales", a.scales, "keys", a.keys);
  }
  for (size_t i = 0; i < a.pieces.size(); ++i) {
    const GatherPiece& p = a.pieces[i];
    auto range = [&](const char* what, int64_t found, int64_t lo, int64_t hi) {
      if (found < lo || found >= hi) require_range(op, "piece " + std::to_string(i) + " " + what, found, lo, hi);
    };
    range("request", p.request, 0, a.block_table.extent<Request>());
    range("count", p.count, 0, a.keys.extent<Key>() + 1);
    range("row", p.row, 0, a.keys.extent<Key>() - p.count + 1);
    range("start", p.start, 0, a.block_table.extent<Page>() * spec.page_size - p.count + 1);
    if (p.count == 0) continue;
    for (int64_t page = p.start / spec.page_size; page <= (int64_t{p.start} + p.count - 1) / spec.page_size; ++page)
      range("page id", a.block_table(p.request, page), 0, a.cache.pages);
  }
}

}  // namespace mla::ops
