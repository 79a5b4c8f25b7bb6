// How what ranks share out evenly is cut.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace mla {

/// Where range r of `count` elements in `ranks` ranges begins, as even as may be: the first count % ranks have one
/// more.
inline int64_t even_begin(int64_t count, int r, int ranks) {
  return count / ranks * r + std::min<int64_t>(r, count % ranks);
}

/// `count` elements in as many ranges as there are ranks, as even as may be; where each begins, the end last.
inline std::vector<int64_t> even_ranges(int64_t count, int ranks) {
  std::vector<int64_t> at;
  for (int r = 0; r <= ranks; ++r) at.push_back(even_begin(count, r, ranks));
  return at;
}

}  // namespace mla
