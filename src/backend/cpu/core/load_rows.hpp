// Cached rows as f32: tuned for the formats whose bytes convert without thought, through the portable codec for all others.
#pragma once

#include <cstdint>

#include "mla/cache.hpp"

namespace mla::cpu {

/// Tokens [first, first + count) of a page as rows of spec.entry() f32 at row_stride floats.
void load_rows(const CacheSpec& spec, const std::byte* page, int64_t first, int64_t count, float* rows, int64_t row_stride);

}  // namespace mla::cpu
