#include "ops/index_append/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {

void check(const IndexAppendArgs& a) {
  constexpr std::string_view op = "index_append";
  require_pages(op, "cache", a.cache);
  require_view(op, "keys", a.keys);
  require_equal(op, "keys IndexDim", a.keys.extent<IndexDim>(), "cache dim", a.cache.spec.dim);
  require_dense<IndexDim>(op, "keys", a.keys);
  require_range(op, "slots length", static_cast<int64_t>(a.slots.size()), 0, a.keys.extent<Token>() + 1);
  const int64_t limit = a.cache.pages * a.cache.spec.page_size;
  for (size_t t = 0; t < a.slots.size(); ++t)
    if (a.slots[t] >= limit)
      throw ShapeError("index_append: slot of token " + std::to_string(t) + " is " + std::to_string(a.slots[t]) +
                       ", the cache has " + std::to_string(limit));
}

}  // namespace mla::ops
