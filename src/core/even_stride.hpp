// Several dimensions numbered as one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace mla {

/// The stride of dimensions [0, last] taken as one, the last running fastest; nothing where they lie unevenly. `alone`:
/// of a single element, which has none.
template <size_t n>
constexpr std::optional<int64_t> even_stride(const std::array<int64_t, n>& extents,
                                             const std::array<int64_t, n>& strides, size_t last, int64_t alone) {
  int64_t count = 1, stride = alone;
  bool found = false;
  for (size_t i = last + 1; i-- > 0;) {
    if (extents[i] == 1) continue;
    if (found && strides[i] != stride * count) return std::nullopt;
    if (!found) stride = strides[i];
    found = true;
    count *= extents[i];
  }
  return stride;
}

}  // namespace mla
