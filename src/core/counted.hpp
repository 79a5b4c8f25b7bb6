// Numbers of things, as text.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <string>

namespace mla {

/// "1 row", "2 rows"; "2 processes".
inline std::string counted(int64_t n, const std::string& thing) {
  return std::to_string(n) + " " + thing + (n == 1 ? "" : thing.ends_with('s') ? "es" : "s");
}

/// "512 B", "1.5 KiB", "2.0 GiB".
inline std::string readable_bytes(uint64_t n) {
  constexpr std::array kUnits{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (n < 1024) return std::to_string(n) + " B";
  double value = static_cast<double>(n);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %s", value, kUnits[unit]);
  return text;
}

}  // namespace mla
