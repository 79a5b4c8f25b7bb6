// index_gather: runs of cached indexer keys into flat rows. For piece p and i < p.count:
// row p.row + i = key at position p.start + i of p.request. Any start.
// f32 and bf16 rows are dequantised (values that the destination holds exactly are copied exactly). fp8_e4m3 rows, from
// an fp8 cache only, are the stored codes with their scales beside them: the same bytes, for other ranks.
#pragma once

#include "mla/index_cache.hpp"
#include "mla/view.hpp"
#include "mla/work.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"

namespace mla::ops {

struct IndexGatherArgs {
  IndexCacheView cache;
  BlockTable block_table;
  List<GatherPiece> pieces;
  AnyMutableView<Key, IndexDim> keys;  ///< f32, bf16 or fp8_e4m3, IndexDim dense
  View<float, Key> scales;             ///< fp8_e4m3 keys only
};

void check(const IndexGatherArgs& a);
Cost cost(const IndexGatherArgs& a);
/// Dequantised, whatever the dtype of keys.
void reference(const IndexGatherArgs& a, View<double, Key, IndexDim> keys);

}  // namespace mla::ops
