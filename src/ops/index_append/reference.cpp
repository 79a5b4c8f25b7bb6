#include <vector>

#include "cache/index/codec.hpp"
#include "ops/index_append/op.hpp"

namespace mla::ops {

void reference(const IndexAppendArgs& a) {
  const IndexCacheSpec& spec = a.cache.spec;
  std::vector<float> key(static_cast<size_t>(spec.dim));
  for (size_t t = 0; t < a.slots.size(); ++t) {
    if (a.slots[t] < 0) continue;
    for (int64_t i = 0; i < spec.dim; ++i) key[i] = a.keys(t, i);
    cache::index::encode(spec, a.cache.page(a.slots[t] / spec.page_size), a.slots[t] % spec.page_size, key.data());
  }
}

}  // namespace mla::ops
