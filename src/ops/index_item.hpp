// What the ops that walk index items ask of them.
#pragma once

#include <span>

#include "mla/work.hpp"
#include "ops/require.hpp"

namespace mla::ops {

/// Items write rows of one array in parallel: ascending and disjoint, within `rows`.
inline void require_items(std::string_view op, std::span<const IndexItem> items, int64_t rows) {
  int64_t next = 0;
  for (const IndexItem& i : items) {
    require_range(op, "item q_count", i.q_count, 0, rows + 1);
    require_range(op, "item row", i.row, next, rows - i.q_count + 1);
    require_range(op, "item kv_begin", i.kv_begin, 0, int64_t{1} << 31);
    require_range(op, "item kv_end", i.kv_end, i.kv_begin, int64_t{1} << 31);
    next = int64_t{i.row} + i.q_count;
  }
}

}  // namespace mla::ops
