#pragma once

#include <cstdint>

namespace mla::test {

/// Allocations by operator new and malloc's family since the program began, whoever made them. One may count twice.
int64_t allocation_count();

}  // namespace mla::test
