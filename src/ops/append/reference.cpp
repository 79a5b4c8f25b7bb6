#include <vector>

#include "cache/format.hpp"
#include "ops/append/op.hpp"

namespace mla::ops {

void reference(const AppendArgs& a) {
  const CacheSpec& spec = a.cache.spec;
  std::vector<float> rope(static_cast<size_t>(spec.rope) + 1);
  std::vector<float> latent(static_cast<size_t>(spec.latent));
  for (size_t t = 0; t < a.slots.size(); ++t) {
    if (a.slots[t] < 0) continue;
    for (int64_t i = 0; i < spec.latent; ++i) latent[i] = a.kv_c(t, i);
    for (int64_t i = 0; i < spec.rope; ++i) rope[i] = a.k_pe(t, i);
    cache::format(spec.format)
        .encode(spec, a.cache.page(a.slots[t] / spec.page_size), a.slots[t] % spec.page_size, latent.data(),
                rope.data());
  }
}

}  // namespace mla::ops
