// index_append: writes new tokens' indexer keys into the index cache. slots[t] = page * page_size + offset; a negative
// slot writes nothing. The number of tokens is slots.size(); keys may have more rows (padding), which are not read.
#pragma once

#include "mla/index_cache.hpp"
#include "mla/view.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"

namespace mla::ops {

struct IndexAppendArgs {
  View<const float, Token, IndexDim> keys;  ///< normed, rotated, as they are to be scored
  List<int32_t> slots;
  IndexCacheView cache;
};

void check(const IndexAppendArgs& a);
Cost cost(const IndexAppendArgs& a);
/// One token at a time through the portable codec, straight from the definition.
void reference(const IndexAppendArgs& a);

}  // namespace mla::ops
