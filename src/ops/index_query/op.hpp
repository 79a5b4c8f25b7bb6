// index_query: indexer queries to fp8. For each (token, head): s = 2^ceil(log2(max(amax, 1e-4) / 448)),
// codes = e4m3(q / s), scaled_weights = weights * s. Both are exact inverses of one another for the score, which is
// linear in a positive factor of q: weights * relu(s codes . k) = (weights * s) * relu(codes . k). NaN does not count
// in amax, an infinite element saturates.
#pragma once

#include "mla/rotary.hpp"
#include "mla/view.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"

namespace mla::ops {

struct IndexQueryArgs {
  View<const float, Token, IndexHead, IndexDim> q;  ///< IndexDim dense
  View<const float, Token, IndexHead> weights;
  View<fp8_e4m3, Token, IndexHead, IndexDim> codes;  ///< IndexDim dense
  View<float, Token, IndexHead> scaled_weights;      ///< may be weights' own memory
  /// The first elements of each row are rotated first, as rope would rotate them; q is left alone. Null: none are.
  const RotaryTable* table = nullptr;
  List<int32_t> positions = {};  ///< of the tokens, with a table

  bool rotates() const { return table && table->rotates(); }
};

void check(const IndexQueryArgs& a);
bool writes_nothing(const IndexQueryArgs& a);
Cost cost(const IndexQueryArgs& a);
/// Bit for bit, through the portable conversions.
void reference(const IndexQueryArgs& a);

}  // namespace mla::ops
