// Tasks are rows, and ranges of columns of the rows that are cut; ranges are joined in the order of their columns.
#include <algorithm>
#include <array>
#include <limits>
#include <span>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/select_topk/cut.hpp"
#include "backend/cpu/select_topk/kernel.hpp"

namespace mla::cpu {
namespace {

Selection selection(const ops::TopkState& s, int64_t row) {
  return {&s.row(row), s.keys(row), s.positions(row), s.topk, topk_capacity(s.topk)};
}

int64_t count_rows(std::span<const IndexItem> items) {
  int64_t rows = 0;
  for (const IndexItem& i : items) rows += i.q_count;
  return rows;
}

// f(item, query of the item) of a row, counted over all items.
template <class F>
void at_row(std::span<const IndexItem> items, int64_t row, F&& f) {
  const IndexItem* item = items.data();
  for (; row >= item->q_count; ++item) row -= item->q_count;
  f(*item, row);
}

// The same for every row, in parallel.
template <class F>
void for_rows(Stream& stream, std::span<const IndexItem> items, F&& f) {
  stream.pool().run(count_rows(items), [&](int64_t row, int) { at_row(items, row, f); });
}

// Ascending positions. Tiles in order leave them so; otherwise a radix sort to and fro within the buffers, whose
// capacity is at least 2 topk.
void sort_by_position(Selection& s) {
  const int64_t n = s.row->count;
  int32_t falls = 0;  // without a branch: compilers make vectors of it
  for (int64_t i = 1; i < n; ++i) falls |= s.positions[i] < s.positions[i - 1];
  if (falls == 0) return;
  constexpr int kBits = 8;
  const int32_t largest = *std::max_element(s.positions, s.positions + n);
  int32_t *keys = s.keys + s.topk, *positions = s.positions + s.topk;
  for (int shift = 0; shift < 31 && largest >> shift != 0; shift += kBits) {
    auto digit = [&](int32_t x) { return static_cast<size_t>(x >> shift) & ((1u << kBits) - 1); };
    std::array<int32_t, (1 << kBits) + 1> begin{};
    for (int64_t i = 0; i < n; ++i) ++begin[digit(s.positions[i]) + 1];
    for (size_t d = 1; d < begin.size(); ++d) begin[d] += begin[d - 1];
    for (int64_t i = 0; i < n; ++i) {
      const int32_t to = begin[digit(s.positions[i])]++;
      keys[to] = s.keys[i];
      positions[to] = s.positions[i];
    }
    std::swap(s.keys, keys);
    std::swap(s.positions, positions);
  }
}

// The best of a selection in order of positions, with their keys.
Selection finished(Selection s) {
  select_reduce(s);
  sort_by_position(s);
  return s;
}

void write_positions(const Selection& s, const ops::HeldTokens& held, int32_t* to) {
  const int64_t n = s.row->count;
  if (held.all()) std::copy_n(s.positions, n, to);
  else std::transform(s.positions, s.positions + n, to, [&](int32_t own) { return held.position(own); });
  std::fill(to + n, to + s.topk, -1);
}

// A row's selection before the call.
ops::TopkState::Row opened(const ops::SelectTopkArgs& a, int64_t row) {
  // Every key is above the lowest number.
  if (a.begin) return {.count = 0, .key = std::numeric_limits<int32_t>::min(), .position = 0};
  return a.state.row(row);
}

const int32_t* positions_of(const ops::SelectTopkArgs& a, int64_t row) {
  return a.positions ? &a.positions(row, 0) : nullptr;
}

void write_indices(const ops::SelectTopkArgs& a, const SelectWindow& w, const Selection& s) {
  if (a.indices) write_positions(finished(s), {}, &a.indices(w.output, 0));
}

void select_row(const ops::SelectTopkArgs& a, const SelectWindow& w) {
  const Selection s = selection(a.state, w.row);
  *s.row = opened(a, w.row);
  if (w.columns > 0) select_feed(s, &a.scores(w.row, 0), w.columns, positions_of(a, w.row), w.first);
  write_indices(a, w, s);
}

// A range's selection lies in the scratch of the worker of its number, whoever works on it.
Selection range_selection(const ops::SelectTopkArgs& a, int64_t range) {
  return selection({a.scratch.worker(static_cast<int>(range)), 1, a.state.topk}, 0);
}

// The best of a range, from its row's threshold on. A guess is of the whole row: it is the same in all ranges and
// bounds what they keep together.
void select_range(const ops::SelectTopkArgs& a, const CutRow& row, int64_t range, bool guess) {
  const SelectWindow& w = row.window;
  const Selection s = range_selection(a, range);
  *s.row = opened(a, w.row);
  s.row->count = 0;
  const float* scores = &a.scores(w.row, 0);
  const int32_t* positions = positions_of(a, w.row);
  if (guess) select_guess(s, scores, w.columns, positions);
  const int64_t begin = row.begin(range), end = row.begin(range + 1);
  select_offer(s, scores + begin, end - begin, positions ? positions + begin : nullptr,
               static_cast<int32_t>(w.first + begin));
  select_reduce(s);
}

// Counts what the ranges of a row kept, and says whether the guess has to be taken back.
void count_passed(const ops::SelectTopkArgs& a, CutRow& row) {
  row.passed = 0;
  for (int64_t r = 0; r < row.ranges; ++r) row.passed += range_selection(a, row.first_range + r).row->count;
  // Where so few are kept no range was reduced: each has the threshold that it began with.
  row.misguessed =
      row.passed < a.state.topk && range_selection(a, row.first_range).row->key > opened(a, row.window.row).key;
}

// The highest threshold of a row's ranges holds for the row: what it refuses has topk better ones, in its range or, if
// it is the guess, in all of them. The candidate at its position is one of these.
void take_threshold(const ops::SelectTopkArgs& a, const CutRow& row, const Selection& s) {
  for (int64_t r = 0; r < row.ranges; ++r) {
    const ops::TopkState::Row& part = *range_selection(a, row.first_range + r).row;
    const int32_t position = part.position + (part.position < std::numeric_limits<int32_t>::max() ? 1 : 0);
    if (part.key < s.row->key || (part.key == s.row->key && position >= s.row->position)) continue;
    s.row->key = part.key;
    s.row->position = position;
  }
}

// Raises the threshold by a guess from what the ranges kept.
void guess_among_ranges(const ops::SelectTopkArgs& a, const CutRow& row, const Selection& s) {
  const int64_t step = row.passed / kSelectSample + 1;
  int64_t sampled = 0;
  for (int64_t r = 0; r < row.ranges; ++r) {
    const Selection part = range_selection(a, row.first_range + r);
    for (int64_t i = 0; i < part.row->count && sampled < kSelectSample; i += step) s.keys[sampled++] = part.keys[i];
  }
  select_guess_among(s, sampled, row.passed);
}

// A row's selection from those of its ranges, in the order of their columns.
void join_ranges(const ops::SelectTopkArgs& a, const CutRow& row) {
  const Selection s = selection(a.state, row.window.row);
  const ops::TopkState::Row open = opened(a, row.window.row);
  auto join = [&](bool guess) {
    *s.row = open;
    take_threshold(a, row, s);
    if (guess) guess_among_ranges(a, row, s);
    for (int64_t r = 0; r < row.ranges; ++r) select_join(s, range_selection(a, row.first_range + r));
  };
  // More than there is room for would be reduced several times.
  const bool guess = open.count == 0 && row.passed > s.capacity;
  join(guess);
  if (guess && s.row->count < s.topk) join(false);
  write_indices(a, row.window, s);
}

}  // namespace

size_t select_topk_scratch(const backend::ScratchShape& s) {
  return s.topk > 0 ? topk_state_bytes(std::min(s.topk, kMostTopk)) : 0;
}

void select_topk(Stream& stream, const ops::SelectTopkArgs& a) {
  ThreadPool& pool = stream.pool();
  const int threads = pool.concurrent();
  const bool may_cut =
      threads > 1 && a.scratch.data && a.scratch.per_worker >= select_topk_scratch({.topk = a.state.topk});
  RowCut cut = may_cut ? RowCut(a, threads) : RowCut();
  // Ranges first: they are the longest tasks.
  pool.run(cut.ranges() + count_rows(a.items), [&](int64_t task, int) {
    if (task < cut.ranges()) {
      select_range(a, cut.row_of(task), task, /*guess=*/true);
      return;
    }
    at_row(a.items, task - cut.ranges(), [&](const IndexItem& item, int64_t i) {
      const SelectWindow w(a, item, i);
      if (!cut.has(w)) select_row(a, w);
    });
  });
  bool again = false;
  for (CutRow& row : cut.rows()) {
    count_passed(a, row);
    again = again || row.misguessed;
  }
  if (again) {
    pool.run(cut.ranges(), [&](int64_t range, int) {
      const CutRow& row = cut.row_of(range);
      if (row.misguessed) select_range(a, row, range, /*guess=*/false);
    });
    for (CutRow& row : cut.rows()) count_passed(a, row);
  }
  pool.run(std::ssize(cut.rows()), [&](int64_t row, int) { join_ranges(a, cut.rows()[static_cast<size_t>(row)]); });
}

void finish_topk(Stream& stream, const ops::FinishTopkArgs& a) {
  for_rows(stream, a.items, [&](const IndexItem& item, int64_t i) {
    const Selection s = finished(selection(a.state, item.row + i));
    write_positions(s, a.held, &a.indices(item.q_begin + i, 0));
    if (!a.scores) return;
    const int64_t n = s.row->count;
    float* scores = &a.scores(item.q_begin + i, 0);
    for (int64_t k = 0; k < n; ++k) scores[k] = key_score(s.keys[k]);
    std::fill(scores + n, scores + s.topk, -std::numeric_limits<float>::infinity());
  });
}

void fill_topk(Stream& stream, const ops::FillTopkArgs& a) {
  for_rows(stream, a.items, [&](const IndexItem& item, int64_t i) {
    int32_t* to = &a.indices(item.q_begin + i, 0);
    const int32_t n = item.columns(i);
    for (int32_t c = 0; c < n; ++c) to[c] = item.kv_begin + c;
    std::fill(to + n, to + a.indices.extent<Topk>(), -1);
  });
}

}  // namespace mla::cpu
