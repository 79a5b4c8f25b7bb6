// Why no GPU can be used, in words.
#pragma once

#include <string>

namespace mla {

/// driver: the newest CUDA that the NVIDIA driver serves, as CUDA counts (1000 * major + 10 * minor), 0: there is no
/// driver; needed: the CUDA that libmla was built with, whose major version is what counts.
inline std::string driver_text(int driver, int needed) {
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  const std::string least = std::to_string(needed / 1000) + ".0";
  if (driver == 0) return "no NVIDIA driver is installed, one for CUDA " + least + " or newer is needed";
  if (driver / 1000 < needed / 1000)
    return "the NVIDIA driver serves CUDA " + version(driver) + " at most, one for CUDA " + least +
           " or newer is needed";
  return "the NVIDIA driver, for CUDA " + version(driver) + ", shows no GPU";
}

}  // namespace mla
