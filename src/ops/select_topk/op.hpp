// select_topk: the best `topk` of the positions that each row sees, fed window by window: a running selection in the
// caller's memory. Better is: higher score, then lower position. NaN counts as -inf, -0 as 0. The result is a set that
// depends on nothing but scores and positions: not on the windows, their order, or threads.
//
//   select_topk(begin = true)  one call a window; each position of a row once, in any order
//   select_topk                ...
//   finish_topk                ascending positions, then -1; or the last window's call, where it is given indices
//   fill_topk                  instead, where everything a row sees fits topk: no scores needed
#pragma once

#include "mla/index_plan.hpp"
#include "mla/view.hpp"
#include "mla/work.hpp"
#include "ops/cost.hpp"
#include "ops/held.hpp"
#include "ops/list.hpp"
#include "ops/scratch.hpp"

namespace mla::ops {

/// Running selection of some rows, in the caller's memory. What lies in it between calls is the backend's own; the
/// CPU's, where a key is a score's bits as an integer of the same order and the 16 to spare take a whole vector's
/// store:
///
///   row   | Row, 64 bytes | capacity + 16 keys | capacity + 16 positions |   topk_state_bytes(topk)
struct TopkState {
  std::byte* data = nullptr;  ///< 64-byte aligned
  int64_t rows = 0;
  int64_t topk = 0;  ///< 1..kMostTopk

  struct Row {
    int32_t count;
    int32_t key, position;  ///< what may still enter: a higher key, or this key at a lower position
  };
  Row& row(int64_t r) const { return *reinterpret_cast<Row*>(data + static_cast<size_t>(r) * topk_state_bytes(topk)); }
  int32_t* keys(int64_t r) const {
    return reinterpret_cast<int32_t*>(data + static_cast<size_t>(r) * topk_state_bytes(topk) + 64);
  }
  int32_t* positions(int64_t r) const { return keys(r) + topk_capacity(topk) + 16; }
};

struct SelectTopkArgs {
  View<const float, Token, Key> scores;  ///< Key dense; columns past a row's last visible one are not read
  /// Row item.row + i sees columns [0, clipped(item, first, columns of scores).columns(i)). Rows ascending and
  /// disjoint.
  List<IndexItem> items;
  int64_t first = 0;  ///< the window: column 0 is position kv_begin + first of every item
  /// Position of each column, the same extents as scores; a negative one is skipped. Empty (null): column c is position
  /// item.kv_begin + first + c.
  View<const int32_t, Token, Key> positions;
  bool begin = false;  ///< these rows' selections begin here: what their state held is dropped
  TopkState state;     ///< row item.row + i of the items
  /// A GPU's; optional on the CPU, whose threads share long rows where each has topk_state_bytes(topk).
  Scratch scratch;
  /// Of rows whose last window this is: their selections, as finish_topk writes them; the state is spent afterwards.
  /// Empty (null): selections stay in the state.
  View<int32_t, Token, Topk> indices = {};
};

/// Row item.q_begin + i of the output from state row item.row + i. The state is spent afterwards.
struct FinishTopkArgs {
  TopkState state;
  List<IndexItem> items;
  View<int32_t, Token, Topk> indices;  ///< Topk dense, state.topk wide
  View<float, Token, Topk> scores;     ///< of the indices, -inf behind them; may be empty (null)
  HeldTokens held = {};                ///< of a split cache: the selection's positions number the rank's own tokens
};

/// Row item.q_begin + i: positions kv_begin .. kv_begin + item.columns(i) - 1, then -1.
struct FillTopkArgs {
  List<IndexItem> items;
  View<int32_t, Token, Topk> indices;  ///< Topk dense
};

void check(const SelectTopkArgs& a);
void check(const FinishTopkArgs& a);
void check(const FillTopkArgs& a);
Cost cost(const SelectTopkArgs& a);
Cost cost(const FinishTopkArgs& a);
Cost cost(const FillTopkArgs& a);
/// The whole selection of one call that sees every position: sorted by the definition. Row item.q_begin + i of indices
/// and, unless empty, of scores.
void reference(const SelectTopkArgs& a, View<int32_t, Token, Topk> indices, View<float, Token, Topk> scores);

}  // namespace mla::ops
