// Messages about files that others wrote.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mla/error.hpp"

namespace mla {

/// Text on one line: control characters as \xNN, and the middle left out of what is too long to read.
inline std::string printable(std::string_view text) {
  constexpr size_t kMost = 1000;
  constexpr char kHex[] = "0123456789abcdef";
  std::string s;
  for (size_t i = 0; i < text.size(); ++i) {
    if (i == kMost / 2 && text.size() > kMost) {
      s += " ... ";
      i = text.size() - kMost / 2;
    }
    const unsigned char c = static_cast<unsigned char>(text[i]);
    if (c >= 0x20 && c != 0x7f) s += text[i];
    else s += {'\\', 'x', kHex[c >> 4], kHex[c & 15]};
  }
  return s;
}

inline std::string shape_text(const std::vector<int64_t>& shape) {
  std::string s;
  for (int64_t e : shape) s += (s.empty() ? "[" : ", ") + std::to_string(e);
  return (s.empty() ? "[" : s) + "]";
}

/// CheckpointError "where: why", on one line whatever a file put into either.
[[noreturn]] inline void refuse(std::string_view where, std::string_view why) {
  throw CheckpointError(printable(where) + ": " + printable(why));
}

}  // namespace mla
