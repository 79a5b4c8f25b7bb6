#include "ops/require.hpp"

#include <cmath>
#include <cstdio>

namespace mla::ops {

namespace detail {

void refuse_view(std::string_view op, std::string_view name, const Extents& v) {
  const std::string what = std::string(op) + ": " + std::string(name);
  for (size_t i = 0; i < v.rank; ++i)
    if (v.extents[i] < 0)
      throw ShapeError(what + " " + std::string(v.names[i]) + " is " + std::to_string(v.extents[i]) +
                       ", must not be negative");
  bool empty = false;
  for (size_t i = 0; i < v.rank; ++i) empty = empty || v.extents[i] == 0;
  if (!empty && !v.data) throw ShapeError(what + " has no data");
  if (const uintptr_t past = reinterpret_cast<uintptr_t>(v.data) % v.element; !empty && past != 0)
    throw ShapeError(what + " is at an address that is " + std::to_string(past) + " past a multiple of " +
                     std::to_string(v.element));
  throw ShapeError(what + " has more than 2^59 elements");
}

}  // namespace detail

void require_eps(std::string_view op, double eps) {
  if (!(eps >= 0 && std::isfinite(eps))) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", eps);
    throw ShapeError(std::string(op) + ": eps is " + text + ", a finite number from 0 on is needed");
  }
}

namespace {

template <class Cache>
void require(std::string_view op, std::string_view name, const Cache& cache, size_t element) {
  auto fail = [&](const std::string& why) { throw ShapeError(std::string(op) + ": " + std::string(name) + " " + why); };
  constexpr int64_t kMost = int64_t{1} << 31;
  const int64_t page_size = cache.spec.page_size;
  if (page_size < 1) fail("page size is " + std::to_string(page_size) + ", at least 1 is needed");
  if (cache.pages < 0 || cache.pages > kMost / page_size)
    fail("pages is " + std::to_string(cache.pages) + ", allowed 0 to " + std::to_string(kMost / page_size));
  if (cache.pages == 0) return;
  if (!cache.data) fail("has no data");
  if (const size_t bytes = cache.spec.page_bytes(); cache.page_stride < bytes)
    fail("page_stride is " + std::to_string(cache.page_stride) + ", a page takes " + std::to_string(bytes) + " bytes");
  if (cache.page_stride % element != 0)
    fail("page_stride is " + std::to_string(cache.page_stride) + ", must be a multiple of " + std::to_string(element));
  if (const uintptr_t past = reinterpret_cast<uintptr_t>(cache.data) % element; past != 0)
    fail("is at an address that is " + std::to_string(past) + " past a multiple of " + std::to_string(element));
}

}  // namespace

void require_pages(std::string_view op, std::string_view name, const CacheView& cache) {
  const CacheFormat f = cache.spec.format;
  require(op, name, cache, f == CacheFormat::f32 || f == CacheFormat::fp8_ds_mla ? 4 : f == CacheFormat::fp8 ? 1 : 2);
}

void require_pages(std::string_view op, std::string_view name, const IndexCacheView& cache) {
  const IndexCacheFormat f = cache.spec.format;
  require(op, name, cache, f == IndexCacheFormat::f32 ? 4 : f == IndexCacheFormat::bf16 ? 2 : 1);
}

}  // namespace mla::ops
