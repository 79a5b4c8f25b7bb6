#include "ops/map_indices/op.hpp"

namespace mla::ops {

void reference(const MapToSlotsArgs& a, View<int32_t, Token, Topk> slots) {
  for (int64_t row = 0; row < static_cast<int64_t>(a.requests.size()); ++row)
    for (int64_t k = 0; k < a.positions.extent<Topk>(); ++k) {
      const int64_t t = a.positions(row, k), request = a.requests[row];
      int64_t slot = -1;
      if (request >= 0 && t >= 0 && t / a.page_size < a.block_table.extent<Page>() &&
          (a.lengths.empty() || t < a.lengths[request])) {
        const int64_t page = a.block_table(request, t / a.page_size);
        if (page >= 0 && page < a.pages) slot = page * a.page_size + t % a.page_size;
      }
      slots(row, k) = static_cast<int32_t>(slot);
    }
}

void reference(const MapToWorkspaceArgs& a, View<int32_t, Token, Topk> rows) {
  for (int64_t row = 0; row < static_cast<int64_t>(a.requests.size()); ++row)
    for (int64_t k = 0; k < a.positions.extent<Topk>(); ++k) {
      const int64_t t = a.positions(row, k), request = a.requests[row];
      rows(row, k) = request >= 0 && t >= 0 && t < a.counts[request] ? static_cast<int32_t>(a.starts[request] + t) : -1;
    }
}

void reference(const PickRowsArgs& a, View<int32_t, Token, Topk> picked) {
  for (int64_t row = 0; row < static_cast<int64_t>(a.rows.size()); ++row)
    for (int64_t k = 0; k < a.positions.extent<Topk>(); ++k) picked(row, k) = a.positions(a.rows[row], k);
}

}  // namespace mla::ops
