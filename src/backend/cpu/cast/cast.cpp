// Memory-bound and a few percent of a step; the loops below vectorise where the conversion has no branch.
#include <algorithm>

#include "backend/cpu/backend.hpp"

namespace mla::cpu {
namespace {

template <class T>
void cast_row(const float* x, T* y, int64_t n, int64_t step, float scale) {
  if (step == 1)
    for (int64_t i = 0; i < n; ++i) y[i] = from_float<T>(x[i] / scale);
  else
    for (int64_t i = 0; i < n; ++i) y[i * step] = from_float<T>(x[i] / scale);
}

}  // namespace

void cast(Stream& stream, const ops::CastArgs& a) {
  constexpr int64_t kElementsPerTask = 16384;
  const auto from = a.x.as<float>();
  const int64_t rows = ops::rows_of(a), heads = a.y.extent<Head>(), n = a.y.extent<In>(), step = a.y.stride<In>();
  const int64_t block = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, heads * n));
  stream.pool().run((rows + block - 1) / block, [&](int64_t task, int) {
    for (int64_t t = task * block; t < std::min(rows, (task + 1) * block); ++t) {
      const int64_t to = a.y_rows.empty() ? t : a.y_rows[t];
      for (int64_t h = 0; to >= 0 && h < heads; ++h) {
        const float* x = &from(a.x_rows.empty() ? t : a.x_rows[t], h, 0);
        void* y = a.y.at(to, h, 0);
        const float scale = a.scales ? a.scales(h) : a.scale;
        switch (a.y.dtype()) {
          case Dtype::f32: cast_row(x, static_cast<float*>(y), n, step, scale); break;
          case Dtype::bf16: cast_row(x, static_cast<bf16*>(y), n, step, scale); break;
          case Dtype::f16: cast_row(x, static_cast<f16*>(y), n, step, scale); break;
          case Dtype::fp8_e4m3: cast_row(x, static_cast<fp8_e4m3*>(y), n, step, scale); break;
        }
      }
    }
  });
}

}  // namespace mla::cpu
