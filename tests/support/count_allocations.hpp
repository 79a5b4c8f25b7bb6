#pragma once

#include <cstdint>

namespace mla::test {

/// Allocations by operator new since the program began, those made inside oneDNN left out.
int64_t allocation_count();

}  // namespace mla::test
