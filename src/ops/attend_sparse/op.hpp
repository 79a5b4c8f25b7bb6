// attend_sparse: multi-query attention of latent queries over the cached rows that each query row has selected. Decode
// and prefill alike: a query row is a row, whatever its request.
//
// The list of row t: the slots slots(t, 0 .. lengths[t]) of each source in turn. A slot below 0 or past its cache is
// skipped, wherever it stands; one named twice counts twice. For head h, over the list's rows row_j = [latent | rope]:
// s_j = scale * q . row_j, out = softmax(s) . row_j[0 : value_width], lse in nats without the sink, max_logits = max
// s_j. A sink is one more logit with no value behind it: out *= e^lse / (e^lse + e^sink); -inf changes nothing, +inf
// gives 0. A row without keys: out 0, lse and max_logits -inf, whatever its sinks.
// NaN and infinities: docs/numerics.md.
#pragma once

#include <span>

#include "mla/cache.hpp"
#include "mla/view.hpp"
#include "mla/work.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"
#include "ops/scratch.hpp"

namespace mla::ops {

/// A cache and what is selected from it. A flat workspace of gathered rows is a plain-format cache of page size 1.
struct SparseSource {
  CacheView cache;
  View<const int32_t, Token, Topk> slots;  ///< page * page_size + offset; any numbers
  List<int32_t> lengths;                   ///< slots that count in each row, 0 to Topk; empty: all
};

struct AttendSparseArgs {
  AnyView<Token, Head, Entry> q;  ///< f32, bf16 or fp8_e4m3 (times q_scale), Entry dense
  float q_scale = 1.0f;           ///< fp8 queries only
  /// At least one, joined in one softmax. Page sizes and formats are each source's own; entries and value widths are
  /// equal.
  std::span<const SparseSource> sources;
  List<SparseItem> items;  ///< key ranges count the sources' Topk, one after another
  /// 0: the keys of an item are one softmax. Above: its softmax is taken over parts of this many keys, counted from the
  /// list's first, and the parts are joined in order: the bits that one item a part and merge_sparse give.
  int32_t part_keys = 0;
  bool many_holes = false;  ///< most slots do not exist: it may be worth while to leave them out first
  bool shared_keys =
      false;  ///< rows select much the same keys, as those of one request do: caches had better keep them
  float scale = 1.0f;
  List<float> sinks;                       ///< [heads], or empty; those of split rows are applied by merge_sparse
  AnyMutableView<Token, Head, Value> out;  ///< f32 or bf16; Value = the format's value width
  View<float, Token, Head> lse;
  View<float, Token, Head> max_logits;            ///< without data: not wanted
  View<float, Partial, Head, Value> partial_out;  ///< needed when an item has partial >= 0
  View<float, Partial, Head> partial_lse;
  View<float, Partial, Head> partial_max;  ///< without data: not wanted
  Scratch scratch;
};

/// Joins the partial rows of split rows in the order of their splits, then applies the sinks.
struct MergeSparseArgs {
  View<const float, Partial, Head, Value> partial_out;
  View<const float, Partial, Head> partial_lse;
  View<const float, Partial, Head> partial_max;  ///< needed for max_logits
  List<SplitRows> items;
  List<float> sinks;                       ///< [heads], or empty
  AnyMutableView<Token, Head, Value> out;  ///< f32 or bf16
  View<float, Token, Head> lse;
  View<float, Token, Head> max_logits;  ///< without data: not wanted
};

void check(const AttendSparseArgs& a);
void check(const MergeSparseArgs& a);
/// Reads the slots, which must lie where the host reads them.
Cost cost(const AttendSparseArgs& a);
/// The same without a look at the slots: as if this part of every row's were there, and each row's its own.
Cost cost_of_full_lists(const AttendSparseArgs& a, double part = 1);
Cost cost(const MergeSparseArgs& a);
/// Of unsplit items: splits of a row are not joined here.
void reference(const AttendSparseArgs& a, View<double, Token, Head, Value> out, View<double, Token, Head> lse,
               View<double, Token, Head> max_logits);
void reference(const MergeSparseArgs& a, View<double, Token, Head, Value> out, View<double, Token, Head> lse,
               View<double, Token, Head> max_logits);

}  // namespace mla::ops
