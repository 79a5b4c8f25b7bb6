// rope: rotates the rope dims of queries and of the shared key, in place.
// Pair i of position p turns by p * inv_freq[i]: (a, b) -> (a cos - b sin, b cos + a sin). Interleaved pairs are (2i,
// 2i+1), NeoX pairs (i, i + R/2). A table that does not rotate (NoPE, or R = 0) leaves everything as it is.
#pragma once

#include "mla/rotary.hpp"
#include "mla/view.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"

namespace mla::ops {

struct RopeArgs {
  AnyMutableView<Token, Head, Rope> q;  ///< f32 or bf16; may be empty (null)
  AnyMutableView<Token, Rope> k;        ///< f32 or bf16; may be empty (null)
  List<int32_t> positions;              ///< [Token], each in [0, table->positions())
  const RotaryTable* table = nullptr;
};

void check(const RopeArgs& a);
bool writes_nothing(const RopeArgs& a);
Cost cost(const RopeArgs& a);
/// float64 from the angles themselves (not from the f32 table): out-of-place results of q and k.
void reference(const RopeArgs& a, const RopeConfig& config, View<double, Token, Head, Rope> q,
               View<double, Token, Rope> k);

}  // namespace mla::ops
