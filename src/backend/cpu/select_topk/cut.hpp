// Which rows of a call are cut into ranges of columns, for threads that would have none of their own.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "ops/select_topk/op.hpp"

namespace mla::cpu {

/// Columns of a range at least.
constexpr int64_t kLeastRange = 8192;
/// Columns at least that other threads take off the one that would have a row alone: 8 us of work. To call them, to
/// sample the row in each range and to join what they kept takes 5 to 8.
constexpr int64_t kLeastHelp = 24576;
constexpr int64_t kMostRanges = 256;

/// What one call offers to a row's selection.
struct SelectWindow {
  int64_t row, output;
  int64_t columns;
  int32_t first;  ///< position of column 0

  SelectWindow() = default;
  SelectWindow(const ops::SelectTopkArgs& a, const IndexItem& whole, int64_t i) {
    const IndexItem item = clipped(whole, a.first, a.scores.extent<Key>());
    row = item.row + i;
    output = item.q_begin + i;
    columns = item.columns(i);
    first = item.kv_begin;
  }
};

struct CutRow {
  SelectWindow window;
  int64_t first_range, ranges;
  int64_t passed;   ///< candidates that the ranges kept together
  bool misguessed;  ///< fewer than topk, for the guessed threshold was too high

  /// First column of a range; ranges are numbered through all rows.
  int64_t begin(int64_t range) const { return window.columns * (range - first_range) / ranges; }
};

class RowCut {
 public:
  /// All rows together have `threads` ranges at most, for each lies in a worker's scratch, and none where rows are
  /// enough for all threads.
  RowCut(const ops::SelectTopkArgs& a, int64_t threads) {
    threads = std::min(threads, kMostRanges);
    int64_t longest = 0, all = 0;
    each_window(a, [&](const SelectWindow& w) {
      longest = std::max(longest, w.columns);
      all += w.columns;
    });
    if (longest <= kLeastHelp) return;
    // A thread's share of the columns, or longer, where rows have no whole numbers of shares.
    length_ = std::max(kLeastRange, (all + threads - 1) / threads);
    for (; ranges_of(longest) > 1; length_ += length_ / 8) {
      int64_t needed = 0;
      each_window(a, [&](const SelectWindow& w) {
        const int64_t ranges = ranges_of(w.columns);
        if (ranges > 1) needed += ranges;
      });
      if (needed <= threads) break;
    }
    if (ranges_of(longest) == 1) return;
    each_window(a, [&](const SelectWindow& w) {
      const int64_t ranges = ranges_of(w.columns);
      if (ranges == 1) return;
      rows_[static_cast<size_t>(count_++)] = {w, ranges_, ranges, 0, false};
      ranges_ += ranges;
    });
  }
  /// Of no row.
  RowCut() = default;

  std::span<CutRow> rows() { return {rows_.data(), static_cast<size_t>(count_)}; }
  int64_t ranges() const { return ranges_; }
  bool has(const SelectWindow& w) const { return count_ > 0 && ranges_of(w.columns) > 1; }
  const CutRow& row_of(int64_t range) const {
    const CutRow* row = rows_.data();
    while (range >= row->first_range + row->ranges) ++row;
    return *row;
  }

 private:
  template <class F>
  static void each_window(const ops::SelectTopkArgs& a, F&& f) {
    for (const IndexItem& item : a.items)
      for (int64_t i = 0; i < item.q_count; ++i) f(SelectWindow(a, item, i));
  }
  // One more from a quarter of a range on: less is not worth a thread.
  int64_t ranges_of(int64_t columns) const {
    const int64_t ranges = std::max<int64_t>(1, (4 * columns + 3 * length_) / (4 * length_));
    return columns - columns / ranges < kLeastHelp ? 1 : ranges;
  }

  int64_t length_ = 0, count_ = 0, ranges_ = 0;
  std::array<CutRow, kMostRanges / 2> rows_;
};

}  // namespace mla::cpu
