// Numbers of things, as text.
#pragma once

#include <cstdint>
#include <string>

namespace mla {

/// "1 row", "2 rows".
inline std::string counted(int64_t n, const std::string& thing) {
  return std::to_string(n) + " " + thing + (n == 1 ? "" : "s");
}

}  // namespace mla
