// Memory-bound and a few percent of a step; the loops below vectorise where the conversion has no branch.
#include <algorithm>
#include <iterator>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/convert.hpp"

namespace mla::cpu {
namespace {

template <class X, class T>
void cast_row(const X* x, T* y, int64_t n, int64_t step, float scale, bool through = false) {
  if (through)
    for (int64_t i = 0; i < n; ++i) y[i * step] = from_float<T>(to_float(to_fp8_e4m3(to_float(x[i]) / scale)));
  else if (step == 1)
    for (int64_t i = 0; i < n; ++i) y[i] = from_float<T>(to_float(x[i]) / scale);
  else
    for (int64_t i = 0; i < n; ++i) y[i * step] = from_float<T>(to_float(x[i]) / scale);
}

// Rows of another dtype alone: f16 ones, which are hidden states of a whole step, by vectors.
template <class X, class T>
void convert_row(const X* x, T* y, int64_t n, int64_t step) {
  cast_row(x, y, n, step, 1.0f);
}
void convert_row(const f16* x, float* y, int64_t n, int64_t step) {
  if (step == 1) convert(x, y, n);
  else cast_row(x, y, n, step, 1.0f);
}
void convert_row(const float* x, f16* y, int64_t n, int64_t step) {
  if (step == 1) convert(x, y, n);
  else cast_row(x, y, n, step, 1.0f);
}

template <class X, class T>
void cast_or_convert_row(const X* x, T* y, int64_t n, int64_t step, float scale, bool through) {
  if (scale == 1.0f && !through) convert_row(x, y, n, step);
  else cast_row(x, y, n, step, scale, through);
}

// Rows of codes that lie side by side, by vectors.
void encode_row(const float* x, fp8_e4m3* y, int64_t n, float scale) { convert(x, y, n, scale); }
template <class X>
void encode_row(const X* x, fp8_e4m3* y, int64_t n, float scale) {
  float values[256];
  for (int64_t i = 0; i < n; i += std::ssize(values)) {
    const int64_t count = std::min<int64_t>(n - i, std::ssize(values));
    convert(x + i, values, count);
    convert(values, y + i, count, scale);
  }
}

template <class X>
void cast_from(Stream& stream, const ops::CastArgs& a) {
  constexpr int64_t kElementsPerTask = 16384;
  const auto from = a.x.as<X>();
  const int64_t rows = ops::rows_of(a), heads = a.y.extent<Head>(), n = a.y.extent<In>(), step = a.y.stride<In>();
  const int64_t block = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, heads * n));
  stream.pool().run((rows + block - 1) / block, [&](int64_t task, int) {
    for (int64_t t = task * block; t < std::min(rows, (task + 1) * block); ++t) {
      const int64_t to = a.y_rows.empty() ? t : a.y_rows[t];
      for (int64_t h = 0; to >= 0 && h < heads; ++h) {
        const X* x = &from(a.x_rows.empty() ? t : a.x_rows[t], h, 0);
        void* y = a.y.at(to, h, 0);
        const float scale = a.scales ? a.scales(h) : a.scale;
        switch (a.y.dtype()) {
          case Dtype::f32: cast_or_convert_row(x, static_cast<float*>(y), n, step, scale, a.through_e4m3); break;
          case Dtype::bf16: cast_or_convert_row(x, static_cast<bf16*>(y), n, step, scale, a.through_e4m3); break;
          case Dtype::f16: cast_or_convert_row(x, static_cast<f16*>(y), n, step, scale, a.through_e4m3); break;
          case Dtype::fp8_e4m3:
            if (step == 1) encode_row(x, static_cast<fp8_e4m3*>(y), n, scale);
            else cast_row(x, static_cast<fp8_e4m3*>(y), n, step, scale);
            break;
        }
      }
    }
  });
}

}  // namespace

void cast(Stream& stream, const ops::CastArgs& a) {
  if (a.x.dtype() == Dtype::f32) cast_from<float>(stream, a);
  else if (a.x.dtype() == Dtype::f16) cast_from<f16>(stream, a);
  else cast_from<bf16>(stream, a);
}

}  // namespace mla::cpu
