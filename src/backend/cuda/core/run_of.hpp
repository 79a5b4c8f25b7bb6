// Lists of rows that are none: rows that follow one another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace mla::cuda {

/// First row when a list counts up from it one by one, otherwise -1; of none, 0.
inline int64_t run_of(std::span<const int32_t> rows) {
  for (size_t i = 1; i < rows.size(); ++i)
    if (rows[i] != rows[0] + static_cast<int32_t>(i)) return -1;
  return rows.empty() ? 0 : rows[0];
}

}  // namespace mla::cuda
