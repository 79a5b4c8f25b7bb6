// Cached rows as f32: tuned for the formats whose bytes convert without thought, through the portable codec for all
// others.
#pragma once

#include <cstdint>

#include "mla/cache.hpp"
#include "mla/dtype.hpp"

namespace mla::cpu {

/// Tokens [first, first + count) of a page as rows of spec.entry() f32 at row_stride floats.
void load_rows(const CacheSpec& spec, const std::byte* page, int64_t first, int64_t count, float* rows,
               int64_t row_stride);

/// Formats whose rows the bf16 form below holds as they are: all but f32 and f16. (An fp8_ds_mla scale that is no power
/// of two rounds its products to bf16, as that form's operands do.)
bool loads_as_bf16(CacheFormat format);
/// The same rows in bf16. Only where native_bf16_dot() holds.
void load_rows_bf16(const CacheSpec& spec, const std::byte* page, int64_t first, int64_t count, bf16* rows,
                    int64_t row_stride);

/// Asks for the bytes of one token, which will be loaded soon: rows that do not follow one another are not foreseen by
/// the hardware.
void prefetch_row(const CacheSpec& spec, const std::byte* page, int64_t offset);

}  // namespace mla::cpu
