// attend_expanded: multi-head attention over flat keys and values (the compute-friendly form).
// For item t, query row i < q_count, head h: keys j in [0, k_count) with j <= i + visible are seen
// and, where the item is masked, set in the row's mask; out = softmax(scale * ([q_nope | q_pe] . [k_nope | k_pe])) v,
// lse in nats. A row that sees nothing: out 0, lse -inf.
// K comes as two operands; k_pe is shared by all heads and never copied per head. V keeps its own width.
// Operands are f32 or bf16, or all of them are e4m3 codes, whose values are code times scale (ExpandedScales).
// NaN and infinities: docs/numerics.md.
#pragma once

#include "mla/quant.hpp"
#include "mla/view.hpp"
#include "mla/work.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"
#include "ops/scratch.hpp"

namespace mla::ops {

/// First rows of an item's scales.
struct ScaleRows {
  int32_t q = 0, k = 0;
};

/// Scales of e4m3 operands, finite and above 0. Query row 128 b + r of an item, r < 128, has row `q + b` of its
/// ScaleRows in q; key row 128 b + r has row `k + b` in k and v. Strides of 0 share a scale between groups or heads.
/// Without data: 1.
struct ExpandedScales {
  static constexpr int64_t kRows = 128;
  View<const float, Group, Head> q;
  /// Of k_nope, and of k_pe, whose codes all heads share: what its values have in common with a head's k_nope beyond
  /// these codes, q's rope part carries.
  View<const float, Group, Head> k;
  View<const float, Group, Head> v;
  List<ScaleRows> rows;  ///< one an item; empty: every row of every item has row 0
  constexpr explicit operator bool() const { return q.data() || k.data() || v.data() || !rows.empty(); }
};

/// Sums of products of e4m3 where tensor cores keep some 14 bits of them. Elsewhere both are f32 sums.
enum class ExpandedSums : uint8_t {
  precise,  ///< over at most 512 keys; f32 between those
  raw,      ///< over all keys: the error grows with their number
};

struct AttendExpandedArgs {
  static constexpr int32_t kTurnedKeys = 16;
  AnyView<Token, Head, QueryKey> q;  ///< f32, bf16 or e4m3, [nope | rope], rotated; QueryKey dense
  AnyView<Key, Head, Nope> k_nope;   ///< f32 or bf16, e4m3 as q is; Nope dense; rows and heads strided at will
  AnyView<Key, Rope> k_pe;           ///< dtype of k_nope, Rope dense; Rope may be 0
  /// dtype of k_nope, Value dense; e4m3: Value or Key dense. Key dense: items' k_begin are multiples of kTurnedKeys,
  /// for GPUs copy these rows from addresses of 16 bytes.
  AnyView<Key, Head, Value> v;
  ExpandedScales scales;  ///< of e4m3 operands only
  ExpandedSums sums = ExpandedSums::precise;
  List<ExpandedItem> items;
  /// Of masked items: q's row t sees an item's key j where bit c % 32 of mask(t, c / 32) is set, c = mask_begin + j.
  /// Word dense.
  View<const uint32_t, Token, Word> mask;
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
