#include "ops/append/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {
namespace {

void check_slots(std::string_view op, std::span<const int32_t> slots, const CacheView& cache) {
  const int64_t limit = cache.pages * cache.spec.page_size;
  for (size_t t = 0; t < slots.size(); ++t)
    if (slots[t] >= limit)
      throw ShapeError(std::string(op) + ": slot of token " + std::to_string(t) + " is " + std::to_string(slots[t]) +
                       ", the cache has " + std::to_string(limit));
}

template <class K, class P>
void check_rows(std::string_view op, const K& kv_c, const P& k_pe, int64_t tokens, const CacheView& cache,
                std::initializer_list<Dtype> dtypes = {Dtype::f32, Dtype::bf16}) {
  require_pages(op, "cache", cache);
  require_view(op, "kv_c", kv_c);
  require_view(op, "k_pe", k_pe);
  require_equal(op, "kv_c Latent", kv_c.template extent<Latent>(), "cache latent", cache.spec.latent);
  require_equal(op, "k_pe Rope", k_pe.template extent<Rope>(), "cache rope", cache.spec.rope);
  require_dtype(op, "kv_c", kv_c.dtype(), dtypes);
  require_dtype(op, "k_pe", k_pe.dtype(), {kv_c.dtype()});
  require_dense<Latent>(op, "kv_c", kv_c);
  require_dense<Rope>(op, "k_pe", k_pe);
  require_range(op, "slots length", tokens, 0, kv_c.template extent<Token>() + 1);
  require_range(op, "slots length", tokens, 0, k_pe.template extent<Token>() + 1);
}

}  // namespace

void check(const AppendArgs& a) {
  check_rows("append", a.kv_c, a.k_pe, static_cast<int64_t>(a.slots.size()), a.cache,
             {Dtype::f32, Dtype::bf16, Dtype::f16});
  check_slots("append", a.slots, a.cache);
}

void check(const RopeAppendArgs& a) {
  const int64_t tokens = static_cast<int64_t>(a.slots.size());
  check_rows("rope_append", a.kv_c, a.k_pe, tokens, a.cache);
  check_slots("rope_append", a.slots, a.cache);
  if (!a.table) throw ShapeError("rope_append: no table");
  require_view("rope_append", "q_pe", a.q_pe);
  require_equal("rope_append", "positions length", static_cast<int64_t>(a.positions.size()), "slots length", tokens);
  require_range("rope_append", "slots length", tokens, 0, a.q_pe.extent<Token>() + 1);
  require_equal("rope_append", "q_pe Rope", a.q_pe.extent<Rope>(), "cache rope", a.cache.spec.rope);
  require_dtype("rope_append", "q_pe", a.q_pe.dtype(), {a.kv_c.dtype()});
  require_dense<Rope>("rope_append", "q_pe", a.q_pe);
  if (a.placed.q) {
    require_view("rope_append", "placed q", a.placed.q);
    require_dtype("rope_append", "placed q", a.placed.q.dtype(), {a.q_pe.dtype()});
    require_same<Head>("rope_append", "placed q", a.placed.q, "q_pe", a.q_pe);
    require_same<Rope>("rope_append", "placed q", a.placed.q, "q_pe", a.q_pe);
    require_dense<Rope>("rope_append", "placed q", a.placed.q);
    require_range("rope_append", "placed tokens", a.query_rows(), 0, a.placed.q.extent<Token>() + 1);
    for (int32_t t : a.placed.tokens) require_range("rope_append", "placed token", t, 0, tokens);
  }
  if (!a.table->rotates()) return;
  require_equal("rope_append", "table's rope", 2 * a.table->pairs(), "cache rope", a.cache.spec.rope);
  for (int32_t p : a.positions) require_range("rope_append", "position", p, 0, a.table->positions());
}

void check(const NormRopeAppendArgs& a) {
  check(a.rope_append());
  require_equal("norm_rope_append", "weight length", static_cast<int64_t>(a.weight.size()), "cache latent",
                a.cache.spec.latent);
  check(a.norm());
}

void check(const CopyPagesArgs& a) {
  if (a.cache.pages > 0 && !a.cache.data) throw ShapeError("copy_pages: cache has no data");
  if (a.cache.pages > 0 && a.cache.page_stride < a.cache.page_bytes)
    throw ShapeError("copy_pages: cache page_stride is " + std::to_string(a.cache.page_stride) + ", a page takes " +
                     std::to_string(a.cache.page_bytes) + " bytes");
  for (const PageCopy& c : a.copies) {
    require_range("copy_pages", "source page", c.from, 0, a.cache.pages);
    require_range("copy_pages", "destination page", c.to, 0, a.cache.pages);
  }
}

}  // namespace mla::ops
