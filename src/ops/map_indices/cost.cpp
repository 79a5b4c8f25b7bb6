#include "ops/map_indices/op.hpp"

namespace mla::ops {
namespace {

Cost entries(size_t rows, int64_t topk) {
  return {.bytes = 8.0 * static_cast<double>(rows) * static_cast<double>(topk), .flops = 0};
}

}  // namespace

// The block table and the starts are small beside the entries.
Cost cost(const MapToSlotsArgs& a) { return entries(a.requests.size(), a.positions.extent<Topk>()); }
Cost cost(const MapToWorkspaceArgs& a) { return entries(a.requests.size(), a.positions.extent<Topk>()); }
Cost cost(const MapToMaskArgs& a) {
  const double rows = static_cast<double>(a.rows.size()),
               entries = static_cast<double>(a.positions.extent<Topk>() + a.mask.extent<Word>());
  return {.bytes = 4 * rows * entries, .flops = 0};
}
Cost cost(const PickRowsArgs& a) { return entries(a.rows.size(), a.positions.extent<Topk>()); }

}  // namespace mla::ops
