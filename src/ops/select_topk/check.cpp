#include <algorithm>

#include "ops/index_item.hpp"
#include "ops/select_topk/op.hpp"

namespace mla::ops {
namespace {

void check_state(std::string_view op, const TopkState& s, std::span<const IndexItem> items) {
  require_range(op, "topk", s.topk, 1, kMostTopk + 1);
  if (!s.data && !items.empty()) throw ShapeError(std::string(op) + ": no state");
}

void check_output(std::string_view op, std::span<const IndexItem> items, int64_t tokens) {
  for (const IndexItem& i : items) require_range(op, "item q_begin", i.q_begin, 0, tokens - i.q_count + 1);
}

void check_indices(std::string_view op, View<int32_t, Token, Topk> indices, std::span<const IndexItem> items,
                   int64_t topk) {
  require_equal(op, "indices Topk", indices.extent<Topk>(), "topk", topk);
  require_dense<Topk>(op, "indices", indices);
  check_output(op, items, indices.extent<Token>());
}

constexpr int64_t kAnyColumns = int64_t{1} << 31;

}  // namespace

void check(const SelectTopkArgs& a) {
  constexpr std::string_view op = "select_topk";
  require_view(op, "scores", a.scores);
  require_view(op, "positions", a.positions);
  check_state(op, a.state, a.items);
  require_dense<Key>(op, "scores", a.scores);
  if (a.positions) {
    require_dense<Key>(op, "positions", a.positions);
    require_same<Token>(op, "positions", a.positions, "scores", a.scores);
    require_same<Key>(op, "positions", a.positions, "scores", a.scores);
  }
  require_range(op, "first", a.first, 0, kAnyColumns);
  require_items(op, a.items, std::min(a.scores.extent<Token>(), a.state.rows));
  require_view(op, "indices", a.indices);
  if (a.indices) check_indices(op, a.indices, a.items, a.state.topk);
}

void check(const FinishTopkArgs& a) {
  constexpr std::string_view op = "finish_topk";
  require_view(op, "indices", a.indices);
  require_view(op, "scores", a.scores);
  check_state(op, a.state, a.items);
  require_items(op, a.items, a.state.rows);
  check_indices(op, a.indices, a.items, a.state.topk);
  require_range(op, "held rank", a.held.rank, 0, a.held.sharding.ranks());
  if (!a.scores) return;
  require_same<Topk>(op, "scores", a.scores, "indices", a.indices);
  require_same<Token>(op, "scores", a.scores, "indices", a.indices);
  require_dense<Topk>(op, "scores", a.scores);
}

void check(const FillTopkArgs& a) {
  constexpr std::string_view op = "fill_topk";
  require_view(op, "indices", a.indices);
  require_dense<Topk>(op, "indices", a.indices);
  for (const IndexItem& i : a.items) {
    require_range(op, "item q_count", i.q_count, 0, a.indices.extent<Token>() + 1);
    require_range(op, "item kv_begin", i.kv_begin, 0, kAnyColumns);
    require_range(op, "item kv_end", i.kv_end, i.kv_begin, kAnyColumns);
    if (i.q_count > 0)
      require_range(op, "item's visible positions", i.columns(i.q_count - 1), 0, a.indices.extent<Topk>() + 1);
  }
  check_output(op, a.items, a.indices.extent<Token>());
}

}  // namespace mla::ops
