// Tasks are rows: each row's selection runs in the order of its columns, on one thread.
#include <algorithm>
#include <array>
#include <limits>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/select_topk/kernel.hpp"

namespace mla::cpu {
namespace {

Selection selection(const ops::TopkState& s, int64_t row) {
  return {&s.row(row), s.keys(row), s.positions(row), s.topk, topk_capacity(s.topk)};
}

// f(item, query of the item) for every row, in parallel.
template <class F>
void for_rows(Stream& stream, std::span<const IndexItem> items, F&& f) {
  int64_t rows = 0;
  for (const IndexItem& i : items) rows += i.q_count;
  stream.pool().run(rows, [&](int64_t row, int) {
    const IndexItem* item = items.data();
    for (; row >= item->q_count; ++item) row -= item->q_count;
    f(*item, row);
  });
}

// Ascending positions. Tiles in order leave them so; otherwise a radix sort to and fro within the buffers, whose
// capacity is at least 2 topk.
void sort_by_position(Selection& s) {
  const int64_t n = s.row->count;
  if (std::is_sorted(s.positions, s.positions + n)) return;
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

}  // namespace

void select_topk(Stream& stream, const ops::SelectTopkArgs& a) {
  for_rows(stream, a.items, [&](const IndexItem& whole, int64_t i) {
    const IndexItem item = clipped(whole, a.first, a.scores.extent<Key>());
    const int64_t row = item.row + i;
    const Selection s = selection(a.state, row);
    // Every key is above the lowest number.
    if (a.begin) *s.row = {.count = 0, .key = std::numeric_limits<int32_t>::min(), .position = 0};
    const int64_t columns = item.columns(i);
    if (columns > 0)
      select_feed(s, &a.scores(row, 0), columns, a.positions ? &a.positions(row, 0) : nullptr, item.kv_begin);
    if (a.indices) write_positions(finished(s), {}, &a.indices(item.q_begin + i, 0));
  });
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
