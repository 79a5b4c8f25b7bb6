// Numbers that may stand once in a list.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace mla {

/// Two places, in order, of the least number from 0 on that stands twice.
inline std::optional<std::pair<size_t, size_t>> find_twice(std::span<const int32_t> list) {
  std::vector<std::pair<int32_t, size_t>> found;  // with their places
  for (size_t i = 0; i < list.size(); ++i)
    if (list[i] >= 0) found.emplace_back(list[i], i);
  std::sort(found.begin(), found.end());
  const auto twice =
      std::adjacent_find(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first == b.first; });
  if (twice == found.end()) return std::nullopt;
  return std::pair(twice[0].second, twice[1].second);
}

}  // namespace mla
