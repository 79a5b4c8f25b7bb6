// Messages about files that others wrote.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/one_line.hpp"
#include "mla/error.hpp"

namespace mla {

inline std::string shape_text(const std::vector<int64_t>& shape) {
  std::string s;
  for (int64_t e : shape) s += (s.empty() ? "[" : ", ") + std::to_string(e);
  return (s.empty() ? "[" : s) + "]";
}

/// CheckpointError "where: why".
[[noreturn]] inline void refuse(std::string_view where, std::string_view why) {
  throw CheckpointError(std::string(where).append(": ").append(why));
}

}  // namespace mla
