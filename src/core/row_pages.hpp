// A cache of whole rows as one of pages of a row each: what a head of several that a position holds is read by.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "mla/cache.hpp"
#include "mla/error.hpp"

namespace mla {

/// Row r of page p is page p * (page_stride / row's bytes) + r. UnsupportedError for formats whose pages are more than
/// rows, and where pages do not lie whole rows apart or rows are too many.
inline CacheView rows_as_pages(std::string_view op, const CacheView& cache) {
  if (cache.spec.format == CacheFormat::fp8_ds_v4)
    throw UnsupportedError(std::string(op) + ": several KV heads of fp8_ds_v4, whose scales lie behind a page's rows");
  CacheView rows = cache;
  rows.spec.page_size = 1;
  rows.page_stride = rows.spec.page_bytes();
  if (cache.page_stride % rows.page_stride != 0)
    throw UnsupportedError(std::string(op) + ": pages of several KV heads have a stride of " +
                           std::to_string(cache.page_stride) + " bytes, a multiple of a row's " +
                           std::to_string(rows.page_stride) + " is needed");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto page_rows = static_cast<int64_t>(cache.page_stride / rows.page_stride);
  if (cache.pages > kMost / page_rows)
    throw UnsupportedError(std::string(op) + ": a cache of several KV heads has " + std::to_string(cache.pages) +
                           " pages of " + std::to_string(page_rows) + " rows, at most " + std::to_string(kMost) +
                           " rows are allowed");
  rows.pages = cache.pages * page_rows;
  return rows;
}

}  // namespace mla
