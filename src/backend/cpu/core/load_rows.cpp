#include "backend/cpu/core/load_rows.hpp"

#include <cstring>
#include <string>

#include "backend/cpu/core/convert.hpp"
#include "cache/format.hpp"
#include "cache/fp8_ds_mla/layout.hpp"
#include "cache/fp8_ds_v4/layout.hpp"
#include "mla/error.hpp"

namespace mla::cpu {
namespace {

template <class T>
const T* as(const std::byte* p) {
  return reinterpret_cast<const T*>(p);
}

// `e4m3` converts a group of codes times its scale, `rope` the unquantised part.
template <class T, class E4m3, class Rope>
void load_ds_mla(const std::byte* row, T* out, E4m3&& e4m3, Rope&& rope) {
  using namespace cache::fp8_ds_mla;
  for (int64_t g = 0; g < kGroups; ++g)
    e4m3(as<fp8_e4m3>(row) + g * kGroup, out + g * kGroup, kGroup, cache::get<float>(row + kScalesAt, g));
  rope(as<bf16>(row + kRopeAt), out + kLatent, kRope);
}

template <class T, class E4m3, class Rope>
void load_ds_v4(const CacheSpec& spec, const std::byte* page, int64_t offset, T* out, E4m3&& e4m3, Rope&& rope) {
  using namespace cache::fp8_ds_v4;
  const std::byte *row = page + row_at(offset), *scales = page + scales_at(spec, offset);
  for (int64_t g = 0; g < kGroups; ++g)
    e4m3(as<fp8_e4m3>(row) + g * kGroup, out + g * kGroup, kGroup, from_ue8m0(cache::get<uint8_t>(scales, g)));
  rope(as<bf16>(row + kLatent), out + kLatent, kRope);
}

// Tokens [first, first + count) of a page, one by one: load(offset, row).
template <class T, class Load>
void each(int64_t first, int64_t count, T* rows, int64_t row_stride, Load&& load) {
  for (int64_t t = 0; t < count; ++t) load(first + t, rows + t * row_stride);
}

}  // namespace

void load_rows(const CacheSpec& spec, const std::byte* page, int64_t first, int64_t count, float* rows,
               int64_t row_stride) {
  const int64_t n = spec.entry();
  auto rows_by = [&](auto&& load) { each(first, count, rows, row_stride, load); };
  auto e4m3 = [](const fp8_e4m3* x, float* y, int64_t k, float scale) { convert(x, y, k, scale); };
  auto rope = [](const bf16* x, float* y, int64_t k) { convert(x, y, k); };
  switch (spec.format) {
    case CacheFormat::f32:
      return rows_by([&](int64_t at, float* row) { std::memcpy(row, page + at * n * 4, static_cast<size_t>(n) * 4); });
    case CacheFormat::bf16: return rows_by([&](int64_t at, float* row) { convert(as<bf16>(page) + at * n, row, n); });
    case CacheFormat::f16: return rows_by([&](int64_t at, float* row) { convert(as<f16>(page) + at * n, row, n); });
    case CacheFormat::fp8:
      return rows_by([&](int64_t at, float* row) { convert(as<fp8_e4m3>(page) + at * n, row, n, spec.k_scale); });
    case CacheFormat::fp8_ds_mla:
      return rows_by(
          [&](int64_t at, float* row) { load_ds_mla(page + at * cache::fp8_ds_mla::kToken, row, e4m3, rope); });
    case CacheFormat::fp8_ds_v4:
      return rows_by([&](int64_t at, float* row) { load_ds_v4(spec, page, at, row, e4m3, rope); });
    default: cache::format(spec.format).decode(spec, page, first, count, rows, row_stride);
  }
}

void prefetch_row(const CacheSpec& spec, const std::byte* page, int64_t offset) {
  constexpr int64_t kLine = 64;
  auto lines = [](const std::byte* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(from + i);
    __builtin_prefetch(from + bytes - 1);
  };
  switch (spec.format) {
    case CacheFormat::f32: return lines(page + offset * spec.entry() * 4, spec.entry() * 4);
    case CacheFormat::bf16:
    case CacheFormat::f16: return lines(page + offset * spec.entry() * 2, spec.entry() * 2);
    case CacheFormat::fp8: return lines(page + offset * spec.entry(), spec.entry());
    case CacheFormat::fp8_ds_mla: return lines(page + offset * cache::fp8_ds_mla::kToken, cache::fp8_ds_mla::kToken);
    case CacheFormat::fp8_ds_v4:
      lines(page + cache::fp8_ds_v4::row_at(offset), cache::fp8_ds_v4::row_at(1));
      return lines(page + cache::fp8_ds_v4::scales_at(spec, offset), 1);
    default: return;  // what does not say where its rows lie is not fetched ahead
  }
}

bool loads_as_bf16(CacheFormat format) {
  return format == CacheFormat::bf16 || format == CacheFormat::fp8 || format == CacheFormat::fp8_ds_mla ||
         format == CacheFormat::fp8_ds_v4;
}

void load_rows_bf16(const CacheSpec& spec, const std::byte* page, int64_t first, int64_t count, bf16* rows,
                    int64_t row_stride) {
  const int64_t n = spec.entry();
  auto rows_by = [&](auto&& load) { each(first, count, rows, row_stride, load); };
  auto copy = [](const bf16* x, bf16* y, int64_t k) { std::memcpy(y, x, static_cast<size_t>(k) * 2); };
  switch (spec.format) {
    case CacheFormat::bf16: return rows_by([&](int64_t at, bf16* row) { copy(as<bf16>(page) + at * n, row, n); });
    case CacheFormat::fp8:
      return rows_by(
          [&](int64_t at, bf16* row) { convert_fp8_bf16(as<fp8_e4m3>(page) + at * n, row, n, spec.k_scale); });
    case CacheFormat::fp8_ds_mla:
      return rows_by([&](int64_t at, bf16* row) {
        load_ds_mla(page + at * cache::fp8_ds_mla::kToken, row, convert_fp8_bf16, copy);
      });
    case CacheFormat::fp8_ds_v4:
      return rows_by([&](int64_t at, bf16* row) { load_ds_v4(spec, page, at, row, convert_fp8_bf16, copy); });
    default:
      throw UnsupportedError("rows of cache format " + std::string(to_string(spec.format)) + " do not load as bf16");
  }
}

}  // namespace mla::cpu
