// Which buffers of the CPU are maps of their own.
#pragma once

#include <cstddef>

namespace mla {

/// Smaller ones come from the heap, which is faster, and where AddressSanitizer sees what lies around them.
constexpr size_t kLeastMap = size_t{1} << 16;

}  // namespace mla
