// attend_expanded: multi-head attention over flat keys and values (the compute-friendly form).
// For item t, query row i < q_count, head h: keys j in [0, k_count) with j <= i + visible are seen;
// out = softmax(scale * ([q_nope | q_pe] . [k_nope | k_pe])) v, lse in nats. A row that sees nothing: out 0, lse -inf.
// K comes as two operands; k_pe is shared by all heads and never copied per head. V keeps its own width.
// NaN and infinities: docs/numerics.md.
#pragma once

#include <span>

#include "mla/quant.hpp"
#include "mla/view.hpp"
#include "mla/work.hpp"
#include "ops/cost.hpp"
#include "ops/scratch.hpp"

namespace mla::ops {

struct AttendExpandedArgs {
  AnyView<Token, Head, QueryKey> q;  ///< f32 or bf16, [nope | rope], rotated; QueryKey dense
  AnyView<Key, Head, Nope> k_nope;   ///< f32 or bf16, Nope dense; rows and heads strided at will
  AnyView<Key, Rope> k_pe;           ///< dtype of k_nope, Rope dense; Rope may be 0
  AnyView<Key, Head, Value> v;       ///< dtype of k_nope, Value dense
  std::span<const ExpandedItem> items;
  float scale = 1.0f;
  AnyMutableView<Token, Head, Value> out;  ///< f32 or bf16; rows of no item are left alone
  View<float, Token, Head> lse;
  /// true: out and lse already hold a part of each row's softmax; the result is merged into it.
  bool accumulate = false;
  /// With a spec other than none: rows of items that are the rows' `last` part are quantised as they are finished and
  /// go here, to the same row, not to out (whose rows may then end before such items' unless accumulate reads them).
  /// UnsupportedError when its groups span heads. Its scales' padding is left to quantize_padding.
  QuantizedView quantized;
  Scratch scratch;
};

void check(const AttendExpandedArgs& a);
Cost cost(const AttendExpandedArgs& a);
void reference(const AttendExpandedArgs& a, View<double, Token, Head, Value> out, View<double, Token, Head> lse);

}  // namespace mla::ops
