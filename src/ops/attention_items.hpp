// Checks that the attention ops' work items share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "mla/view.hpp"
#include "ops/require.hpp"

namespace mla::ops {

/// An item's query rows are among `rows`.
template <class Item>
void require_query_rows(std::string_view op, const Item& i, int64_t rows) {
  require_range(op, "item q_count", i.q_count, 0, rows + 1);
  require_range(op, "item q_begin", i.q_begin, 0, rows - i.q_count + 1);
}

/// An item's results have a place: among `rows` of the outputs, or, of an item that is a split, among the partial rows.
template <class Args, class Item>
void require_place(std::string_view op, const Args& a, const Item& i, int64_t rows) {
  if (i.partial < 0) return require_range(op, "item q_begin + q_count", int64_t{i.q_begin} + i.q_count, 0, rows + 1);
  require_same<Head>(op, "partial_out", a.partial_out, "q", a.q);
  require_same<Head>(op, "partial_lse", a.partial_lse, "q", a.q);
  require_same<Value>(op, "partial_out", a.partial_out, "out", a.out);
  require_dense<Value>(op, "partial_out", a.partial_out);
  const int64_t partials = std::min(a.partial_out.template extent<Partial>(), a.partial_lse.template extent<Partial>());
  require_range(op, "item partial", i.partial, 0, partials - i.q_count + 1);
}

}  // namespace mla::ops
