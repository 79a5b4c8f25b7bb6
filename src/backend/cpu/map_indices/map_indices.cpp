// Memory-bound, but for the look-up in the block table: a row of it stays in the first cache and is gathered from.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/map_indices/map_indices.cpp"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"
//
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#ifndef MLA_MAP_INDICES_TABLE
#define MLA_MAP_INDICES_TABLE
namespace mla::cpu {
namespace {

struct Table {
  const int32_t* pages;  ///< of one request
  int64_t limit;         ///< positions below this have a column
  int64_t page_size, page_count;
};

// One position, by division: for page sizes that are no power of two, and tails.
inline int32_t slot_of(const Table& t, int32_t position) {
  if (position < 0 || position >= t.limit) return -1;
  const uint32_t at = static_cast<uint32_t>(position), size = static_cast<uint32_t>(t.page_size);
  const int32_t page = t.pages[at / size];
  return page < 0 || page >= t.page_count ? -1 : static_cast<int32_t>(page * t.page_size + at % size);
}

}  // namespace
}  // namespace mla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void MapRow(const Table& table, const int32_t* positions, int64_t n, int32_t* slots) {
  int64_t i = 0;
  // A limit of 2^31 has no 32-bit form; nor is one needed, for no position reaches it.
  if (std::has_single_bit(static_cast<uint64_t>(table.page_size)) && table.limit > 0) {
    const hn::ScalableTag<int32_t> d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    const int shift = std::countr_zero(static_cast<uint64_t>(table.page_size));
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    const auto none = hn::Set(d, -1), last = hn::Set(d, static_cast<int32_t>(std::min(table.limit - 1, kMost))),
               last_page = hn::Set(d, static_cast<int32_t>(std::min(table.page_count - 1, kMost))),
               offset = hn::Set(d, static_cast<int32_t>(table.page_size - 1));
    for (; i + lanes <= n; i += lanes) {
      const auto t = hn::LoadU(d, positions + i);
      const auto held = hn::AndNot(hn::Gt(t, last), hn::Gt(t, none));
      const auto safe = hn::IfThenElseZero(held, t);
      const auto page = hn::GatherIndex(d, table.pages, hn::ShiftRightSame(safe, shift));
      const auto exists = hn::And(held, hn::AndNot(hn::Gt(page, last_page), hn::Gt(page, none)));
      const auto slot = hn::Or(hn::ShiftLeftSame(page, shift), hn::And(safe, offset));
      hn::StoreU(hn::IfThenElse(exists, slot, none), d, slots + i);
    }
  }
  for (; i < n; ++i) slots[i] = slot_of(table, positions[i]);
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "backend/cpu/backend.hpp"

namespace mla::cpu {
namespace {

HWY_EXPORT(MapRow);

// f(row) for rows in tasks of some ten microseconds.
template <class F>
void each_row(Stream& stream, int64_t rows, int64_t topk, F&& f) {
  constexpr int64_t kEntriesPerTask = 32768;
  const int64_t per_task = std::max<int64_t>(1, kEntriesPerTask / std::max<int64_t>(1, topk));
  stream.pool().run((rows + per_task - 1) / per_task, [&](int64_t task, int) {
    for (int64_t row = task * per_task; row < std::min(rows, (task + 1) * per_task); ++row) f(row);
  });
}

}  // namespace

void map_to_slots(Stream& stream, const ops::MapToSlotsArgs& a) {
  const int64_t topk = a.positions.extent<Topk>();
  if (topk == 0) return;
  each_row(stream, static_cast<int64_t>(a.requests.size()), topk, [&](int64_t row) {
    const int64_t request = a.requests[row];
    int64_t limit = std::min(a.block_table.extent<Page>() * a.page_size, int64_t{1} << 31);
    if (request < 0) limit = 0;
    else if (!a.lengths.empty() && a.held.all()) limit = std::clamp<int64_t>(a.lengths[request], 0, limit);
    const int32_t* from = &a.positions(row, 0);
    if (!a.held.all()) {
      // First to the rank's own numbers; lengths count positions.
      const int64_t length = request >= 0 && !a.lengths.empty() ? a.lengths[request] : int64_t{1} << 31;
      int32_t* const own = &a.slots(row, 0);
      for (int64_t k = 0; k < topk; ++k) own[k] = from[k] < length ? a.held.index(from[k]) : -1;
      from = own;
    }
    const Table table{limit > 0 ? &a.block_table(request, 0) : nullptr, limit, a.page_size, a.pages};
    HWY_DYNAMIC_DISPATCH(MapRow)(table, from, topk, &a.slots(row, 0));
  });
}

void map_to_workspace(Stream& stream, const ops::MapToWorkspaceArgs& a) {
  const int64_t topk = a.positions.extent<Topk>();
  each_row(stream, static_cast<int64_t>(a.requests.size()), topk, [&](int64_t row) {
    const int32_t request = a.requests[row], start = request < 0 ? 0 : a.starts[request],
                  count = request < 0 ? 0 : a.counts[request];
    for (int64_t k = 0; k < topk; ++k) {
      const int32_t t = a.held.all() ? a.positions(row, k) : a.held.index(a.positions(row, k));
      a.rows(row, k) = t >= 0 && t < count ? start + t : -1;
    }
  });
}

void map_to_mask(Stream& stream, const ops::MapToMaskArgs& a) {
  const int64_t topk = a.positions.extent<Topk>(), words = a.mask.extent<Word>();
  if (words == 0) return;
  const int64_t columns = 32 * words;
  each_row(stream, static_cast<int64_t>(a.rows.size()), topk + words, [&](int64_t row) {
    if (a.rows[row] < 0) return;
    uint32_t* const mask = &a.mask(a.rows[row], 0);
    std::fill_n(mask, words, 0u);
    for (int64_t k = 0; k < topk; ++k)
      if (const int32_t t = a.positions(row, k); t >= 0 && t < columns) mask[t / 32] |= uint32_t{1} << t % 32;
  });
}

void pick_rows(Stream& stream, const ops::PickRowsArgs& a) {
  const int64_t topk = a.positions.extent<Topk>();
  if (topk == 0) return;
  each_row(stream, static_cast<int64_t>(a.rows.size()), topk,
           [&](int64_t row) { std::copy_n(&a.positions(a.rows[row], 0), topk, &a.picked(row, 0)); });
}

}  // namespace mla::cpu
#endif
