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

bool loads_as_bf16(CacheFormat format) { return format != CacheFormat::f32 && format != CacheFormat::f16; }

void load_rows_bf16(const CacheSpec& spec, const std::byte* page, int64_t first, int64_t count, bf16* rows, int64_t row_stride) {
  const int64_t n = spec.entry();
  switch (spec.format) {
    case CacheFormat::bf16:
      for (int64_t t = 0; t < count; ++t)
        std::memcpy(rows + t * row_stride, page + (first + t) * n * 2, static_cast<size_t>(n) * 2);
      return;
    case CacheFormat::fp8:
      for (int64_t t = 0; t < count; ++t)
        convert_fp8_bf16(reinterpret_cast<const fp8_e4m3*>(page) + (first + t) * n, rows + t * row_stride, n, spec.k_scale);
      return;
    case CacheFormat::fp8_ds_mla:
      for (int64_t t = 0; t < count; ++t) {
        const std::byte* row = page + (first + t) * 656;
        float scales[4];
        std::memcpy(scales, row + 512, sizeof(scales));
        for (int64_t g = 0; g < 4; ++g)
          convert_fp8_bf16(reinterpret_cast<const fp8_e4m3*>(row) + g * 128, rows + t * row_stride + g * 128, 128, scales[g]);
        std::memcpy(rows + t * row_stride + 512, row + 528, 128);
      }
      return;
    default:
      for (int64_t t = 0; t < count; ++t) {
        float row[512];
        cache::format(spec.format).decode(spec, page, first + t, 1, row, n);  // fp8_ds_v4: 512 numbers
        convert(row, rows + t * row_stride, n);
      }
  }
}

}  // namespace mla::cpu
