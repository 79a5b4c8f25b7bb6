// Memory whose absence says what it was for.
#pragma once

#include <string>

#include "mla/device.hpp"
#include "mla/error.hpp"

namespace mla {

/// Buffer(bytes, device); its DeviceError begins with what the memory was to hold.
inline Buffer named_buffer(const std::string& what, size_t bytes, Device device = {}) {
  try {
    return Buffer(bytes, device);
  } catch (const DeviceError& e) {
    throw DeviceError(what + ": " + e.what());
  }
}

}  // namespace mla
