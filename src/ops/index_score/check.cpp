#include "ops/index_item.hpp"
#include "ops/index_score/op.hpp"

namespace mla::ops {

void check(const IndexScoreArgs& a) {
  constexpr std::string_view op = "index_score";
  const IndexCacheSpec& spec = a.cache.spec;
  require_pages(op, "cache", a.cache);
  require_view(op, "block_table", a.block_table);
  require_view(op, "q", a.q);
  require_view(op, "weights", a.weights);
  require_view(op, "scores", a.scores);
  require_equal(op, "q IndexDim", a.q.extent<IndexDim>(), "cache dim", spec.dim);
  require_same<Token>(op, "weights", a.weights, "q", a.q);
  require_same<IndexHead>(op, "weights", a.weights, "q", a.q);
  require_dense<IndexDim>(op, "q", a.q);
  require_dense<Key>(op, "scores", a.scores);
  require_dtype(op, "q", a.q.dtype(), {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3});
  require_range(op, "first", a.first, 0, int64_t{1} << 31);
  require_items(op, a.items, a.scores.extent<Token>());
  for (const IndexItem& item : a.items) {
    if (item.q_count == 0) continue;  // nothing of it is looked at
    const IndexItem i = clipped(item, a.first, a.scores.extent<Key>());
    require_range(op, "item request", i.request, 0, a.block_table.extent<Request>());
    require_range(op, "item q_begin", i.q_begin, 0, a.q.extent<Token>() - i.q_count + 1);
    require_range(op, "item kv_end", i.kv_end, 0, a.block_table.extent<Page>() * spec.page_size + 1);
    if (i.kv_end > i.kv_begin)
      for (int64_t page = i.kv_begin / spec.page_size; page <= (i.kv_end - 1) / spec.page_size; ++page)
        require_range(op, "page id", a.block_table(i.request, page), 0, a.cache.pages);
  }
  if (!a.scratch.data && !a.items.empty()) throw ShapeError("index_score: no scratch");
}

}  // namespace mla::ops
