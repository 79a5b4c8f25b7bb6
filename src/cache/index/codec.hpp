// Keys of the sparse indexer: layouts and the portable codec. Di is spec.dim, Q is spec.page_size.
//
//   f32, bf16   page    | key of token 0 | key of token 1 | ... Q tokens       Di * 4 or 2 bytes a token
//
//   fp8         page    | Q rows of Di e4m3 codes          | Q f32 scales |    Di + 4 bytes a token, 132 for Di 128
//                         row t is bytes Di t .. Di t + Di - 1, its scale is at Q Di + 4 t: value = e4m3 * scale
//
// Writer scale: max(amax, 1e-4) / 448, rounded up to a power of two with power_of_two_scales. The reader takes any
// finite f32 scale as it stands. A page size that Di times does not divide by 4 leaves the scales unaligned: they are
// copied, never dereferenced.
#pragma once

#include "cache/codec.hpp"
#include "mla/index_cache.hpp"

namespace mla::cache::index {

/// Scale of a row, or of a quantised query, whose largest magnitude is amax.
inline float writer_scale(float amax, bool powers_of_two) {
  const float scale = std::max(amax, 1e-4f) / 448.0f;
  return powers_of_two ? power_of_two(ceil_log2(scale)) : scale;
}

/// Byte in the page where a token's row begins, and where its scale lies (fp8).
inline int64_t row_at(const IndexCacheSpec& spec, int64_t offset) {
  return offset * spec.dim * (spec.format == IndexCacheFormat::f32 ? 4 : spec.format == IndexCacheFormat::bf16 ? 2 : 1);
}
inline int64_t scale_at(const IndexCacheSpec& spec, int64_t offset) { return spec.page_size * spec.dim + offset * 4; }

/// Writes one token: key[spec.dim], f32.
void encode(const IndexCacheSpec& spec, std::byte* page, int64_t offset, const float* key);
/// Reads one token, dequantised.
void decode(const IndexCacheSpec& spec, const std::byte* page, int64_t offset, float* key);

}  // namespace mla::cache::index
