#include "ops/map_indices/op.hpp"

namespace mla::ops {

void reference(const MapToSlotsArgs& a, View<int32_t, Token, Topk> slots) {
  for (int64_t row = 0; row < static_cast<int64_t>(a.requests.size()); ++row)
    for (int64_t k = 0; k < a.positions.extent<Topk>(); ++k) {
      const int64_t t = a.positions(row, k), request = a.requests[row];
      int64_t slot = -1;
      const CacheSharding& sharding = a.held.sharding;
      if (request >= 0 && t >= 0 && (a.lengths.empty() || t < a.lengths[request]) && sharding.owner(t) == a.held.rank &&
          sharding.index(t) / a.page_size < a.block_table.extent<Page>()) {
        const int64_t at = sharding.index(t), page = a.block_table(request, at / a.page_size);
        if (page >= 0 && page < a.pages) slot = page * a.page_size + at % a.page_size;
      }
      slots(row, k) = static_cast<int32_t>(slot);
    }
}

void reference(const MapToWorkspaceArgs& a, View<int32_t, Token, Topk> rows) {
  for (int64_t row = 0; row < static_cast<int64_t>(a.requests.size()); ++row)
    for (int64_t k = 0; k < a.positions.extent<Topk>(); ++k) {
      const int64_t t = a.positions(row, k), request = a.requests[row];
      const CacheSharding& sharding = a.held.sharding;
      const bool there =
          request >= 0 && t >= 0 && sharding.owner(t) == a.held.rank && sharding.index(t) < a.counts[request];
      rows(row, k) = there ? static_cast<int32_t>(a.starts[request] + sharding.index(t)) : -1;
    }
}

void reference(const MapToMaskArgs& a, View<uint32_t, Token, Word> mask) {
  for (size_t row = 0; row < a.rows.size(); ++row) {
    if (a.rows[row] < 0) continue;
    for (int64_t w = 0; w < mask.extent<Word>(); ++w) mask(a.rows[row], w) = 0;
    for (int64_t k = 0; k < a.positions.extent<Topk>(); ++k) {
      const int64_t t = a.positions(static_cast<int64_t>(row), k);
      if (t >= 0 && t / 32 < mask.extent<Word>()) mask(a.rows[row], t / 32) |= uint32_t{1} << t % 32;
    }
  }
}

void reference(const PickRowsArgs& a, View<int32_t, Token, Topk> picked) {
  for (int64_t row = 0; row < static_cast<int64_t>(a.rows.size()); ++row)
    for (int64_t k = 0; k < a.positions.extent<Topk>(); ++k) picked(row, k) = a.positions(a.rows[row], k);
}

}  // namespace mla::ops
