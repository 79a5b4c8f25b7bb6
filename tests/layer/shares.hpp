#pragma once

#include <vector>

#include "mla/parallel.hpp"

namespace mla::test {

/// The heads of each of the ranks.
inline std::vector<HeadRange> shares(int64_t heads, int ranks) {
  std::vector<HeadRange> all;
  for (int r = 0; r < ranks; ++r) all.push_back(head_share(heads, r, ranks));
  return all;
}

}  // namespace mla::test
