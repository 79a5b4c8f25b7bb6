#include <algorithm>

#include "ops/attend_expanded/op.hpp"
#include "ops/quantize/op.hpp"

namespace mla::ops {

Cost cost(const AttendExpandedArgs& a) {
  const double heads = static_cast<double>(a.q.extent<Head>()), qk = static_cast<double>(a.q.extent<QueryKey>()),
               rope = static_cast<double>(a.k_pe.extent<Rope>()), v = static_cast<double>(a.v.extent<Value>()),
               size = static_cast<double>(size_of(a.k_nope.dtype()));
  Cost c;
  for (const ExpandedItem& i : a.items) {
    // Row r sees clamp(visible + r + 1, 0, k_count) keys: an arithmetic series between two clamped ends.
    const int64_t first =
        std::clamp<int64_t>(-static_cast<int64_t>(i.visible), 0, i.q_count);  // rows before it see nothing
    const int64_t full =
        std::clamp<int64_t>(static_cast<int64_t>(i.k_count) - i.visible - 1, first, i.q_count);  // and from here all
    const double growing = static_cast<double>(full - first),
                 pairs = growing * (static_cast<double>(i.visible) + 1) +
                         growing * (static_cast<double>(first) + static_cast<double>(full) - 1) / 2 +
                         static_cast<double>(i.q_count - full) * i.k_count;
    const double written = a.quantized && i.last ? quantized_bytes(a.quantized, i.q_count)
                                                 : heads * i.q_count * v * static_cast<double>(size_of(a.out.dtype()));
    c += {.bytes = heads * (i.q_count * qk * static_cast<double>(size_of(a.q.dtype())) +
                            i.k_count * (qk - rope + v) * size) +
                   written + i.k_count * rope * size,
          .flops = 2 * pairs * heads * (qk + v)};
  }
  return c;
}

}  // namespace mla::ops
