#include "ops/require.hpp"
#include "ops/rope/op.hpp"

namespace mla::ops {

void check(const RopeArgs& a) {
  if (!a.table) throw ShapeError("rope: no table");
  const int64_t tokens = static_cast<int64_t>(a.positions.size());
  auto dims = [&](const char* name, int64_t rows, int64_t rope) {
    require_equal("rope", std::string(name) + " Token", rows, "positions", tokens);
    if (a.table->rotates()) require_equal("rope", std::string(name) + " Rope", rope, "table's", 2 * a.table->pairs());
  };
  require_view("rope", "q", a.q);
  require_view("rope", "k", a.k);
  if (a.q) {
    dims("q", a.q.extent<Token>(), a.q.extent<Rope>());
    require_dtype("rope", "q", a.q.dtype(), {Dtype::f32, Dtype::bf16});
    require_dense<Rope>("rope", "q", a.q);
  }
  if (a.k) {
    dims("k", a.k.extent<Token>(), a.k.extent<Rope>());
    require_dtype("rope", "k", a.k.dtype(), {Dtype::f32, Dtype::bf16});
    require_dense<Rope>("rope", "k", a.k);
  }
  if (a.table->rotates())
    for (int32_t p : a.positions) require_range("rope", "position", p, 0, a.table->positions());
}

bool writes_nothing(const RopeArgs& a) { return is_empty(a.q) && is_empty(a.k); }

}  // namespace mla::ops
