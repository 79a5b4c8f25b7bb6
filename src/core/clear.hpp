#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/device.hpp"

namespace mla {

/// Zeros into `rows` runs of `bytes` bytes, `apart` bytes from one to the next: at least `bytes`. Queued on a GPU.
void clear(Stream& stream, void* to, size_t bytes, int64_t rows, size_t apart);

}  // namespace mla
