#include <algorithm>

#include "ops/attend_latent/op.hpp"

namespace mla::ops {

Cost cost(const AttendLatentArgs& a) {
  const double heads = static_cast<double>(a.q.extent<Head>()), entry = static_cast<double>(a.q.extent<Entry>()),
               width = static_cast<double>(a.out.extent<Value>()), size = static_cast<double>(size_of(a.q.dtype()));
  Cost c;
  for (const LatentItem& i : a.items) {
    double pairs = 0;
    for (int64_t r = 0; r < i.q_count; ++r)
      pairs += static_cast<double>(
          std::clamp<int64_t>(static_cast<int64_t>(i.visible) + r + 1 - i.kv_begin, 0, i.kv_end - i.kv_begin));
    c += {.bytes = (i.kv_end - i.kv_begin) * a.cache.spec.token_bytes() +
                   i.q_count * heads * (entry * size + width * static_cast<double>(size_of(a.out.dtype()))),
          .flops = 2 * pairs * heads * (entry + width)};
  }
  return c;
}

}  // namespace mla::ops
