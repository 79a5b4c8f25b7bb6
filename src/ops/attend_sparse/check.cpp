#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/attend_sparse/op.hpp"
#include "ops/attention_items.hpp"
#include "ops/require.hpp"

namespace mla::ops {
namespace {

void check_sinks(std::string_view op, std::span<const float> sinks, int64_t heads) {
  if (sinks.empty()) return;
  require_equal(op, "sinks length", static_cast<int64_t>(sinks.size()), "out Head", heads);
  for (size_t h = 0; h < sinks.size(); ++h)
    if (std::isnan(sinks[h]))
      throw ShapeError(std::string(op) + ": sink of head " + std::to_string(h) + " is nan, allowed -inf to inf");
}

}  // namespace

void check(const AttendSparseArgs& a) {
  constexpr std::string_view op = "attend_sparse";
  require_view(op, "q", a.q);
  require_view(op, "out", a.out);
  require_view(op, "lse", a.lse);
  require_view(op, "max_logits", a.max_logits);
  require_view(op, "partial_out", a.partial_out);
  require_view(op, "partial_lse", a.partial_lse);
  require_view(op, "partial_max", a.partial_max);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  require_range(op, "sources", static_cast<int64_t>(a.sources.size()), 1, kMost);
  int64_t keys = 0, rows = std::min({a.q.extent<Token>(), a.out.extent<Token>(), a.lse.extent<Token>()});
  if (a.max_logits) rows = std::min(rows, a.max_logits.extent<Token>());
  for (const SparseSource& s : a.sources) {
    s.cache.spec.validate();
    require_pages(op, "cache", s.cache);
    require_view(op, "slots", s.slots);
    require_equal(op, "q Entry", a.q.extent<Entry>(), "cache latent + rope", s.cache.spec.entry());
    require_equal(op, "out Value", a.out.extent<Value>(), "cache value width", s.cache.spec.value_width());
    require_range(op, "cache pages", s.cache.pages, 0, (kMost + 1) / s.cache.spec.page_size + 1);
    require_dense<Topk>(op, "slots", s.slots);
    keys += s.slots.extent<Topk>();
    require_range(op, "slots Topk of all sources", keys, 0, kMost + 1);
    for (int32_t n : s.lengths) require_range(op, "lengths entry", n, 0, s.slots.extent<Topk>() + 1);
  }
  require_same<Head>(op, "out", a.out, "q", a.q);
  require_same<Head>(op, "lse", a.lse, "q", a.q);
  if (a.max_logits) require_same<Head>(op, "max_logits", a.max_logits, "q", a.q);
  require_dense<Entry>(op, "q", a.q);
  require_dense<Value>(op, "out", a.out);
  require_dtype(op, "q", a.q.dtype(), {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3});
  require_dtype(op, "out", a.out.dtype(), {Dtype::f32, Dtype::bf16});
  check_sinks(op, a.sinks, a.q.extent<Head>());
  require_range(op, "part_keys", a.part_keys, 0, kMost + 1);
  for (const SparseItem& i : a.items) {
    require_query_rows(op, i, a.q.extent<Token>());
    const int64_t q_end = int64_t{i.q_begin} + i.q_count;
    for (const SparseSource& s : a.sources) {
      require_range(op, "item q_begin + q_count", q_end, 0, s.slots.extent<Token>() + 1);
      if (!s.lengths.empty())
        require_range(op, "item q_begin + q_count", q_end, 0, static_cast<int64_t>(s.lengths.size()) + 1);
    }
    require_range(op, "item k_begin", i.k_begin, 0, keys + 1);
    require_range(op, "item k_end", i.k_end, i.k_begin, keys + 1);
    if (a.part_keys > 0) require_equal(op, "item k_begin % part_keys", i.k_begin % a.part_keys, "needed", 0);
    require_place(op, a, i, rows);
    if (i.partial >= 0 && a.partial_max) {
      require_same<Head>(op, "partial_max", a.partial_max, "q", a.q);
      require_range(op, "item partial", i.partial, 0, a.partial_max.extent<Partial>() - i.q_count + 1);
    }
  }
  if (!a.scratch.data && !a.items.empty()) throw ShapeError("attend_sparse: no scratch");
}

void check(const MergeSparseArgs& a) {
  constexpr std::string_view op = "merge_sparse";
  require_view(op, "partial_out", a.partial_out);
  require_view(op, "partial_lse", a.partial_lse);
  require_view(op, "partial_max", a.partial_max);
  require_view(op, "out", a.out);
  require_view(op, "lse", a.lse);
  require_view(op, "max_logits", a.max_logits);
  require_same<Head>(op, "partial_out", a.partial_out, "out", a.out);
  require_same<Value>(op, "partial_out", a.partial_out, "out", a.out);
  require_same<Partial>(op, "partial_lse", a.partial_lse, "partial_out", a.partial_out);
  require_same<Head>(op, "partial_lse", a.partial_lse, "out", a.out);
  require_same<Token>(op, "lse", a.lse, "out", a.out);
  require_same<Head>(op, "lse", a.lse, "out", a.out);
  if (a.max_logits) {
    require_same<Token>(op, "max_logits", a.max_logits, "out", a.out);
    require_same<Head>(op, "max_logits", a.max_logits, "out", a.out);
    require_same<Partial>(op, "partial_max", a.partial_max, "partial_out", a.partial_out);
    require_same<Head>(op, "partial_max", a.partial_max, "out", a.out);
  }
  require_dense<Value>(op, "out", a.out);
  require_dense<Value>(op, "partial_out", a.partial_out);
  check_sinks(op, a.sinks, a.out.extent<Head>());
  for (const SplitRows& s : a.items) {
    require_range(op, "rows", s.rows, 0, a.out.extent<Token>() + 1);
    require_range(op, "row", s.row, 0, a.out.extent<Token>() - s.rows + 1);
    require_range(op, "splits", s.splits, 1, int64_t{1} << 31);
    require_range(op, "partial", s.partial, 0,
                  a.partial_out.extent<Partial>() - static_cast<int64_t>(s.splits) * s.rows + 1);
  }
}

}  // namespace mla::ops
