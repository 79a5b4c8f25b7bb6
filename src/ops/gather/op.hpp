// gather: dequantises runs of cached tokens into flat rows. For piece p and i < p.count:
// row p.row + i = dequant(cache[block_table[p.request, (p.start + i) / page_size], (p.start + i) % page_size]).
// Any start; destination f32, bf16 or f16. Values that the destination dtype holds exactly are copied exactly.
#pragma once

#include "mla/cache.hpp"
#include "mla/view.hpp"
#include "mla/work.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"

namespace mla::ops {

struct GatherArgs {
  CacheView cache;
  BlockTable block_table;
  List<GatherPiece> pieces;
  AnyMutableView<Key, Latent> kv_c;
  AnyMutableView<Key, Rope> k_pe;  ///< same dtype as kv_c
};

void check(const GatherArgs& a);
Cost cost(const GatherArgs& a);
void reference(const GatherArgs& a, View<double, Key, Entry> rows);

}  // namespace mla::ops
