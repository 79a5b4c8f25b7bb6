// index_score: the sparse indexer's scores of cached positions. For item t, query i < q_count and position j in
// [kv_begin, kv_end) with j <= visible + i, and column c = j - kv_begin - first where it is one of the scores':
//   scores[row + i, c] = sum over heads h of scale * weights[q_begin + i, h] * relu(q[q_begin + i, h] . k_j)
// with k_j the dequantised key; fp8_e4m3 queries count as their codes, their scales lie in weights (index_query).
// Columns that a row does not see, and those past kv_end, keep what they held. NaN inputs give NaN scores.
// The caller walks a long context window by window, the items unchanged, so that scores never take queries x context; a
// score's bits depend on its query, its key, the kind of both and the arithmetic alone, whatever the window.
#pragma once

#include "mla/index_cache.hpp"
#include "mla/view.hpp"
#include "mla/work.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"
#include "ops/scratch.hpp"

namespace mla::ops {

struct IndexScoreArgs {
  AnyView<Token, IndexHead, IndexDim> q;  ///< f32, bf16 or fp8_e4m3, IndexDim dense
  View<const float, Token, IndexHead> weights;
  float scale = 1.0f;  ///< Ni^-0.5 Di^-0.5, or 1 where weights hold it
  IndexCacheView cache;
  BlockTable block_table;
  /// Their rows ascending and disjoint; of one without rows nothing else is looked at.
  List<IndexItem> items;
  int64_t first = 0;               ///< the window: column 0 is position kv_begin + first of every item
  View<float, Token, Key> scores;  ///< Key dense; as many positions as it has columns
  IndexArithmetic arithmetic = IndexArithmetic::exact;
  Scratch scratch;
};

void check(const IndexScoreArgs& a);
Cost cost(const IndexScoreArgs& a);
/// Writes the columns that each row sees.
void reference(const IndexScoreArgs& a, View<double, Token, Key> scores);

}  // namespace mla::ops
