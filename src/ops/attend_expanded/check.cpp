#include <algorithm>
#include <string>
#include <utility>

#include "ops/attend_expanded/op.hpp"
#include "ops/attention_items.hpp"
#include "ops/quantize/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {
namespace {

void check_scales(std::string_view op, const AttendExpandedArgs& a) {
  const ExpandedScales& s = a.scales;
  if (!s) return;
  if (a.q.dtype() != Dtype::fp8_e4m3)
    throw ShapeError("attend_expanded: scales are of e4m3 operands, q is " + std::string(to_string(a.q.dtype())));
  if (!s.rows.empty())
    require_equal(op, "scales' rows", static_cast<int64_t>(s.rows.size()), "items",
                  static_cast<int64_t>(a.items.size()));
  const auto groups = [](int64_t rows) { return std::max<int64_t>(0, rows - 1) / ExpandedScales::kRows; };
  const auto check_one = [&](std::string_view name, const View<const float, Group, Head>& x, auto last_row) {
    if (!x) return;
    require_view(op, name, x);
    require_same<Head>(op, name, x, "q", a.q);
    if (s.rows.empty() && !a.items.empty()) require_range(op, std::string(name) + " row", 0, 0, x.extent<Group>());
    for (size_t i = 0; i < s.rows.size(); ++i) {
      const auto [first, last] = last_row(i);
      require_range(op, std::string(name) + " row of an item", first, 0, x.extent<Group>());
      require_range(op, std::string(name) + " last row of an item", last, first, x.extent<Group>());
    }
  };
  const auto queries = [&](size_t i) {
    return std::pair<int64_t, int64_t>(s.rows[i].q, s.rows[i].q + groups(a.items[i].q_count));
  };
  const auto keys = [&](size_t i) {
    return std::pair<int64_t, int64_t>(s.rows[i].k, s.rows[i].k + groups(a.items[i].k_count));
  };
  check_one("q scales", s.q, queries);
  check_one("k scales", s.k, keys);
  check_one("v scales", s.v, keys);
}

}  // namespace

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
  const bool codes = a.q.dtype() == Dtype::fp8_e4m3;
  if (!codes || a.v.stride<Key>() != 1) require_dense<Value>(op, "v", a.v);
  require_dense<Value>(op, "out", a.out);
  require_dtype(op, "q", a.q.dtype(), {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3});
  if (a.out) require_dtype(op, "out", a.out.dtype(), {Dtype::f32, Dtype::bf16});
  if (codes) require_dtype(op, "k_nope beside q of e4m3", a.k_nope.dtype(), {Dtype::fp8_e4m3});
  else require_dtype(op, "k_nope", a.k_nope.dtype(), {Dtype::f32, Dtype::bf16});
  require_dtype(op, "k_pe", a.k_pe.dtype(), {a.k_nope.dtype()});
  require_dtype(op, "v", a.v.dtype(), {a.k_nope.dtype()});
  check_scales(op, a);
  if (a.mask) {
    require_view(op, "mask", a.mask);
    require_dense<Word>(op, "mask", a.mask);
  }
  if (a.quantized) check_quantized_heads(op, a.quantized, 0, a.q.extent<Head>(), a.v.extent<Value>());
  for (const ExpandedItem& i : a.items) {
    const bool quantised = a.quantized && i.last;
    int64_t rows = std::min(a.q.extent<Token>(), a.lse.extent<Token>());
    if (!quantised || a.accumulate) rows = std::min(rows, a.out.extent<Token>());
    if (quantised) rows = std::min(rows, a.quantized.tokens);
    require_query_rows(op, i, rows);
    require_range(op, "item k_count", i.k_count, 0, a.k_nope.extent<Key>() + 1);
    if (codes && a.v.stride<Value>() != 1 && i.q_count > 0 && i.k_count > 0 && i.k_begin % a.kTurnedKeys != 0)
      throw ShapeError("attend_expanded: item k_begin is " + std::to_string(i.k_begin) +
                       ", v with its keys innermost takes multiples of " + std::to_string(a.kTurnedKeys));
    require_range(op, "item k_begin", i.k_begin, 0, a.k_nope.extent<Key>() - i.k_count + 1);
    if (!i.masked || i.q_count == 0 || i.k_count == 0) continue;
    if (!a.mask) throw ShapeError("attend_expanded: an item is masked, there is no mask");
    require_query_rows(op, i, a.mask.extent<Token>());
    require_range(op, "item mask_begin", i.mask_begin, 0, 32 * a.mask.extent<Word>() - i.k_count + 1);
  }
  if (!a.scratch.data && !a.items.empty()) throw ShapeError("attend_expanded: no scratch");
}

}  // namespace mla::ops
