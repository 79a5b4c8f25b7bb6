#include "ops/merge/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {

void check(const MergeArgs& a) {
  require_view("merge", "out", a.out);
  require_view("merge", "lse", a.lse);
  require_view("merge", "other", a.other);
  require_view("merge", "other_lse", a.other_lse);
  require_same<Head>("merge", "other", a.other, "out", a.out);
  require_same<Value>("merge", "other", a.other, "out", a.out);
  require_same<Token>("merge", "lse", a.lse, "out", a.out);
  require_same<Head>("merge", "lse", a.lse, "out", a.out);
  require_same<Token>("merge", "other_lse", a.other_lse, "other", a.other);
  require_same<Head>("merge", "other_lse", a.other_lse, "other", a.other);
  require_dense<Value>("merge", "out", a.out);
  require_dense<Value>("merge", "other", a.other);
  if (a.rows.empty())
    return require_range("merge", "other Token", a.other.extent<Token>(), 0, a.out.extent<Token>() + 1);
  require_equal("merge", "rows length", static_cast<int64_t>(a.rows.size()), "other Token", a.other.extent<Token>());
  for (int32_t row : a.rows) require_range("merge", "rows entry", row, 0, a.out.extent<Token>());
}

void check(const MergeSplitsArgs& a) {
  require_view("merge_splits", "partial_out", a.partial_out);
  require_view("merge_splits", "partial_lse", a.partial_lse);
  require_view("merge_splits", "out", a.out);
  require_view("merge_splits", "lse", a.lse);
  require_dtype("merge_splits", "out", a.out.dtype(), {Dtype::f32, Dtype::bf16, Dtype::f16});
  require_same<Head>("merge_splits", "partial_out", a.partial_out, "out", a.out);
  require_same<Value>("merge_splits", "partial_out", a.partial_out, "out", a.out);
  require_same<Partial>("merge_splits", "partial_lse", a.partial_lse, "partial_out", a.partial_out);
  require_same<Head>("merge_splits", "partial_lse", a.partial_lse, "out", a.out);
  require_same<Token>("merge_splits", "lse", a.lse, "out", a.out);
  require_same<Head>("merge_splits", "lse", a.lse, "out", a.out);
  require_dense<Value>("merge_splits", "out", a.out);
  require_dense<Value>("merge_splits", "partial_out", a.partial_out);
  for (const SplitRows& s : a.items) {
    require_range("merge_splits", "rows", s.rows, 0, a.out.extent<Token>() + 1);
    require_range("merge_splits", "row", s.row, 0, a.out.extent<Token>() - s.rows + 1);
    require_range("merge_splits", "splits", s.splits, 1, int64_t{1} << 31);
    require_range("merge_splits", "partial", s.partial, 0,
                  a.partial_out.extent<Partial>() - static_cast<int64_t>(s.splits) * s.rows + 1);
  }
}

bool writes_nothing(const MergeArgs& a) { return is_empty(a.other_lse); }

}  // namespace mla::ops
