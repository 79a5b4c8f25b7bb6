#include <algorithm>

#include "ops/attend_expanded/op.hpp"
#include "ops/attention_items.hpp"
#include "ops/quantize/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {

void check(const AttendExpandedArgs& a) {
  constexpr std::string_view op = "attend_expanded";
  require_view(op, "q", a.q);
  require_view(op, "k_nope", a.k_nope);
  require_view(op, "k_pe", a.k_pe);
  require_view(op, "v", a.v);
  require_view(op, "out", a.out);
  require_view(op, "lse", a.lse);
  require_same<Head>(op, "k_nope", a.k_nope, "q", a.q);
  require_same<Head>(op, "v", a.v, "q", a.q);
  require_same<Head>(op, "out", a.out, "q", a.q);
  require_same<Head>(op, "lse", a.lse, "q", a.q);
  require_same<Key>(op, "k_pe", a.k_pe, "k_nope", a.k_nope);
  require_same<Key>(op, "v", a.v, "k_nope", a.k_nope);
  require_same<Value>(op, "out", a.out, "v", a.v);
  require_equal(op, "q QueryKey", a.q.extent<QueryKey>(), "k_nope Nope + k_pe Rope",
                a.k_nope.extent<Nope>() + a.k_pe.extent<Rope>());
  require_dense<QueryKey>(op, "q", a.q);
  require_dense<Nope>(op, "k_nope", a.k_nope);
  require_dense<Rope>(op, "k_pe", a.k_pe);
  require_dense<Value>(op, "v", a.v);
  require_dense<Value>(op, "out", a.out);
  require_dtype(op, "q", a.q.dtype(), {Dtype::f32, Dtype::bf16});
  if (a.out) require_dtype(op, "out", a.out.dtype(), {Dtype::f32, Dtype::bf16});
  require_dtype(op, "k_nope", a.k_nope.dtype(), {Dtype::f32, Dtype::bf16});
  require_dtype(op, "k_pe", a.k_pe.dtype(), {a.k_nope.dtype()});
  require_dtype(op, "v", a.v.dtype(), {a.k_nope.dtype()});
  if (a.quantized) check_quantized_heads(op, a.quantized, 0, a.q.extent<Head>(), a.v.extent<Value>());
  for (const ExpandedItem& i : a.items) {
    const bool quantised = a.quantized && i.last;
    int64_t rows = std::min(a.q.extent<Token>(), a.lse.extent<Token>());
    if (!quantised || a.accumulate) rows = std::min(rows, a.out.extent<Token>());
    if (quantised) rows = std::min(rows, a.quantized.tokens);
    require_query_rows(op, i, rows);
    require_range(op, "item k_count", i.k_count, 0, a.k_nope.extent<Key>() + 1);
    require_range(op, "item k_begin", i.k_begin, 0, a.k_nope.extent<Key>() - i.k_count + 1);
  }
  if (!a.scratch.data && !a.items.empty()) throw ShapeError("attend_expanded: no scratch");
}

}  // namespace mla::ops
