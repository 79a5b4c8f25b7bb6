#include "ops/index_query/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {

void check(const IndexQueryArgs& a) {
  constexpr std::string_view op = "index_query";
  require_view(op, "q", a.q);
  require_view(op, "weights", a.weights);
  require_view(op, "codes", a.codes);
  require_view(op, "scaled_weights", a.scaled_weights);
  require_same<Token>(op, "weights", a.weights, "q", a.q);
  require_same<IndexHead>(op, "weights", a.weights, "q", a.q);
  require_same<Token>(op, "codes", a.codes, "q", a.q);
  require_same<IndexHead>(op, "codes", a.codes, "q", a.q);
  require_same<IndexDim>(op, "codes", a.codes, "q", a.q);
  require_same<Token>(op, "scaled_weights", a.scaled_weights, "q", a.q);
  require_same<IndexHead>(op, "scaled_weights", a.scaled_weights, "q", a.q);
  require_dense<IndexDim>(op, "q", a.q);
  require_dense<IndexDim>(op, "codes", a.codes);
  if (!a.rotates()) return;
  require_range(op, "table's rope", 2 * a.table->pairs(), 0, a.q.extent<IndexDim>() + 1);
  require_equal(op, "positions length", static_cast<int64_t>(a.positions.size()), "q Token", a.q.extent<Token>());
  for (int32_t p : a.positions) require_range(op, "position", p, 0, a.table->positions());
}

bool writes_nothing(const IndexQueryArgs& a) { return is_empty(a.scaled_weights); }

}  // namespace mla::ops
