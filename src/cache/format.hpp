// What a cache format must provide: its layout and a portable codec. Each format is one folder beside this file and one
// line in formats.hpp; every op and backend reads any format through these functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "mla/cache.hpp"

namespace mla::cache {

struct Format {
  CacheFormat id;
  std::string_view name;
  std::string_view summary;  ///< one line for `mla info`
  /// Throws when spec's dimensions do not suit the format.
  void (*validate)(const CacheSpec& spec);
  size_t (*page_bytes)(const CacheSpec& spec);
  int64_t (*value_width)(const CacheSpec& spec);
  /// Writes one token: latent[spec.latent] and rope[spec.rope], f32.
  void (*encode)(const CacheSpec& spec, std::byte* page, int64_t offset, const float* latent, const float* rope);
  /// Reads tokens [first, first + count) of a page into rows of spec.entry() f32 at row_stride floats.
  void (*decode)(const CacheSpec& spec, const std::byte* page, int64_t first, int64_t count, float* rows,
                 int64_t row_stride);
};

const Format& format(CacheFormat id);

}  // namespace mla::cache
