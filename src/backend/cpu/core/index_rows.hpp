// Cached indexer keys as rows, any format.
#pragma once

#include <cstdint>

#include "mla/dtype.hpp"
#include "mla/index_cache.hpp"

namespace mla::cpu {

/// Tokens [first, first + count) of a page as rows of spec.dim f32 at row_stride floats, dequantised.
void load_index_rows(const IndexCacheSpec& spec, const std::byte* page, int64_t first, int64_t count, float* rows,
                     int64_t row_stride);

/// The same with an fp8 row's codes as they are.
void load_index_codes(const IndexCacheSpec& spec, const std::byte* page, int64_t first, int64_t count, float* rows,
                      int64_t row_stride);
/// The scale beside a token's codes; 1 for other formats.
float index_scale(const IndexCacheSpec& spec, const std::byte* page, int64_t offset);

}  // namespace mla::cpu
