// merge: joins partial softmaxes (O, LSE), f32, LSE in nats. m = max(lse); O = sum(e^(lse - m) O) / sum(e^(lse - m)).
// An empty part has lse -inf and its O is never multiplied; +inf is read as -inf, and so is NaN unless O begins with
// NaN: such a part makes the row NaN, lse too. All parts empty: O = 0, lse = -inf.
#pragma once

#include "mla/view.hpp"
#include "mla/work.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"

namespace mla::ops {

/// out, lse <- merge((out, lse), (other, other_lse)), in place. Each side has its own strides.
struct MergeArgs {
  View<float, Token, Head, Value> out;
  View<float, Token, Head> lse;
  View<const float, Token, Head, Value> other;
  View<const float, Token, Head> other_lse;
  List<int32_t> rows;  ///< row of out for each row of other; empty: the same row. Distinct.
};

/// Joins split-KV partials in the order of their splits.
struct MergeSplitsArgs {
  View<const float, Partial, Head, Value> partial_out;
  View<const float, Partial, Head> partial_lse;
  List<SplitRows> items;
  AnyMutableView<Token, Head, Value> out;  ///< f32, bf16 or f16: rounded once
  View<float, Token, Head> lse;
};

void check(const MergeArgs& a);
bool writes_nothing(const MergeArgs& a);
void check(const MergeSplitsArgs& a);
Cost cost(const MergeArgs& a);
Cost cost(const MergeSplitsArgs& a);
void reference(const MergeArgs& a, View<double, Token, Head, Value> out, View<double, Token, Head> lse);
void reference(const MergeSplitsArgs& a, View<double, Token, Head, Value> out, View<double, Token, Head> lse);

}  // namespace mla::ops
