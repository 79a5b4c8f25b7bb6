#include "ops/gather/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {

void check(const GatherArgs& a) {
  const CacheSpec& spec = a.cache.spec;
  require_pages("gather", "cache", a.cache);
  require_view("gather", "block_table", a.block_table);
  require_view("gather", "kv_c", a.kv_c);
  require_view("gather", "k_pe", a.k_pe);
  require_equal("gather", "kv_c Latent", a.kv_c.extent<Latent>(), "cache latent", spec.latent);
  require_equal("gather", "k_pe Rope", a.k_pe.extent<Rope>(), "cache rope", spec.rope);
  require_same<Key>("gather", "k_pe", a.k_pe, "kv_c", a.kv_c);
  require_dense<Latent>("gather", "kv_c", a.kv_c);
  require_dense<Rope>("gather", "k_pe", a.k_pe);
  require_dtype("gather", "kv_c", a.kv_c.dtype(), {Dtype::f32, Dtype::bf16, Dtype::f16});
  if (a.k_pe.dtype() != a.kv_c.dtype())
    throw ShapeError("gather: k_pe is " + std::string(to_string(a.k_pe.dtype())) + ", kv_c is " +
                     std::string(to_string(a.kv_c.dtype())));
  for (size_t i = 0; i < a.pieces.size(); ++i) {
    const GatherPiece& p = a.pieces[i];
    auto range = [&](const char* what, int64_t found, int64_t lo, int64_t hi) {
      if (found < lo || found >= hi) require_range("gather", "piece " + std::to_string(i) + " " + what, found, lo, hi);
    };
    range("request", p.request, 0, a.block_table.extent<Request>());
    range("count", p.count, 0, a.kv_c.extent<Key>() + 1);
    range("row", p.row, 0, a.kv_c.extent<Key>() - p.count + 1);
    range("start", p.start, 0, a.block_table.extent<Page>() * spec.page_size - p.count + 1);
    if (p.count == 0) continue;
    for (int64_t page = p.start / spec.page_size; page <= (int64_t{p.start} + p.count - 1) / spec.page_size; ++page)
      range("page id", a.block_table(p.request, page), 0, a.cache.pages);
  }
}

}  // namespace mla::ops
