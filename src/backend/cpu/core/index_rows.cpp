#include "backend/cpu/core/index_rows.hpp"

#include <cstring>

#include "backend/cpu/core/convert.hpp"
#include "cache/index/codec.hpp"

namespace mla::cpu {
namespace {

namespace index = cache::index;

template <class T>
const T* row(const IndexCacheSpec& spec, const std::byte* page, int64_t offset) {
  return reinterpret_cast<const T*>(page + index::row_at(spec, offset));
}

// fp8 rows times scale(offset, t).
template <class Scale>
void load(const IndexCacheSpec& spec, const std::byte* page, int64_t first, int64_t count, float* rows,
          int64_t row_stride, Scale&& scale) {
  for (int64_t t = 0; t < count; ++t) {
    float* to = rows + t * row_stride;
    switch (spec.format) {
      case IndexCacheFormat::f32:
        std::memcpy(to, page + index::row_at(spec, first + t), static_cast<size_t>(spec.dim) * sizeof(float));
        break;
      case IndexCacheFormat::bf16: convert(row<bf16>(spec, page, first + t), to, spec.dim); break;
      case IndexCacheFormat::fp8: convert(row<fp8_e4m3>(spec, page, first + t), to, spec.dim, scale(t)); break;
    }
  }
}

}  // namespace

float index_scale(const IndexCacheSpec& spec, const std::byte* page, int64_t offset) {
  if (spec.format != IndexCacheFormat::fp8) return 1.0f;
  return cache::get<float>(page + index::scale_at(spec, offset), 0);
}

void load_index_rows(const IndexCacheSpec& spec, const std::byte* page, int64_t first, int64_t count, float* rows,
                     int64_t row_stride) {
  load(spec, page, first, count, rows, row_stride, [&](int64_t t) { return index_scale(spec, page, first + t); });
}

void load_index_codes(const IndexCacheSpec& spec, const std::byte* page, int64_t first, int64_t count, float* rows,
                      int64_t row_stride) {
  load(spec, page, first, count, rows, row_stride, [](int64_t) { return 1.0f; });
}

}  // namespace mla::cpu
