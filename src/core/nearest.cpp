#include "core/nearest.hpp"

#include <algorithm>
#include <array>
#include <cstddef>

namespace mla {
namespace {

constexpr size_t kLongest = 40;

/// Optimal string alignment; both at most kLongest.
size_t edits(std::string_view a, std::string_view b) {
  std::array<std::array<size_t, kLongest + 1>, kLongest + 1> d;
  for (size_t i = 0; i <= a.size(); ++i)
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  return d[a.size()][b.size()];
}

}  // namespace

std::string did_you_mean(std::string_view name, std::span<const std::string_view> known) {
  std::string_view best;
  size_t fewest = name.size() / 3 + 1;
  for (const std::string_view k : known) {
    if (name.size() > kLongest || k.size() > kLongest) continue;
    const size_t n = edits(name, k);
    if (n < fewest) best = k, fewest = n;
  }
  return best.empty() ? "" : "; did you mean '" + std::string(best) + "'?";
}

}  // namespace mla
