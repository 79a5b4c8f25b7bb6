#include "backend/cpu/core/load_rows.hpp"

#include <cstring>

#include "backend/cpu/core/convert.hpp"
#include "cache/format.hpp"

namespace mla::cpu {

void load_rows(const CacheSpec& spec, const std::byte* page, int64_t first, int64_t count, float* rows, int64_t row_stride) {
  const int64_t n = spec.entry();
  switch (spec.format) {
    case CacheFormat::f32:
      for (int64_t t = 0; t < count; ++t)
        std::memcpy(rows + t * row_stride, page + (first + t) * n * 4, static_cast<size_t>(n) * 4);
      return;
    case CacheFormat::bf16:
      for (int64_t t = 0; t < count; ++t) convert(reinterpret_cast<const bf16*>(page) + (first + t) * n, rows + t * row_stride, n);
      return;
    case CacheFormat::fp8:
      for (int64_t t = 0; t < count; ++t)
        convert(reinterpret_cast<const fp8_e4m3*>(page) + (first + t) * n, rows + t * row_stride, n, spec.k_scale);
      return;
    case CacheFormat::fp8_ds_mla:
      for (int64_t t = 0; t < count; ++t) {
        const std::byte* row = page + (first + t) * 656;
        float scales[4];
        std::memcpy(scales, row + 512, sizeof(scales));
        for (int64_t g = 0; g < 4; ++g)
          convert(reinterpret_cast<const fp8_e4m3*>(row) + g * 128, rows + t * row_stride + g * 128, 128, scales[g]);
        convert(reinterpret_cast<const bf16*>(row + 528), rows + t * row_stride + 512, 64);
      }
      return;
    default: cache::format(spec.format).decode(spec, page, first, count, rows, row_stride);
  }
}

}  // namespace mla::cpu
