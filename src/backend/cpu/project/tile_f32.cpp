#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/project/tile_f32.cpp"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"
//
#include <algorithm>

#include "backend/cpu/project/tile_f32.hpp"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kMostTogether = 6;  // rows: with 16 registers 12 sums stay in them, with 32 of them 24
constexpr int64_t kAhead = 16;  // inputs whose weights are fetched early: the caches' own guess is late for few rows

template <int V, int R>
HWY_NOINLINE void Rows(const float* HWY_RESTRICT x, int64_t x_stride, const float* HWY_RESTRICT w, int64_t w_stride,
                       int64_t inputs, float* HWY_RESTRICT sums, int64_t sums_stride, bool accumulate) {
  const hn::ScalableTag<float> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  hn::Vec<decltype(df)> acc[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = hn::Zero(df);
#pragma GCC unroll 2
  for (int64_t i = 0; i < inputs; ++i) {
    const float* at = w + i * w_stride;
    hn::Vec<decltype(df)> weights[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      if (v * lanes % 16 == 0) hwy::Prefetch(at + kAhead * w_stride + v * lanes);
      weights[v] = hn::LoadU(df, at + v * lanes);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const auto value = hn::Set(df, x[r * x_stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] = hn::MulAdd(value, weights[v], acc[r][v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* to = sums + r * sums_stride + v * lanes;
      hn::StoreU(accumulate ? hn::Add(hn::LoadU(df, to), acc[r][v]) : acc[r][v], df, to);
    }
}

void Product(const float* x, int64_t x_stride, int64_t rows, const float* w, int64_t w_stride, int64_t inputs,
             float* sums, int64_t sums_stride, bool accumulate) {
  constexpr int V = HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON ? 4 : 2;  // better targets have lower numbers
  constexpr decltype(&Rows<V, 1>) kBy[] = {Rows<V, 1>, Rows<V, 2>, Rows<V, 3>, Rows<V, 4>, Rows<V, 5>, Rows<V, 6>};
  const int64_t width = V * static_cast<int64_t>(hn::Lanes(hn::ScalableTag<float>()));
  for (int64_t c = 0; c < kTileColumns; c += width)
    for (int64_t r = 0, together; r < rows; r += together) {
      const int64_t groups = (rows - r + kMostTogether - 1) / kMostTogether;
      together = (rows - r + groups - 1) / groups;
      kBy[together - 1](x + r * x_stride, x_stride, w + c, w_stride, inputs, sums + r * sums_stride + c, sums_stride,
                        accumulate);
    }
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mla::cpu {
HWY_EXPORT(Product);

void product_f32(const float* x, int64_t x_stride, int64_t rows, const float* w, int64_t w_stride, int64_t inputs,
                 float* sums, int64_t sums_stride, bool accumulate) {
  HWY_DYNAMIC_DISPATCH(Product)(x, x_stride, rows, w, w_stride, inputs, sums, sums_stride, accumulate);
}

}  // namespace mla::cpu
#endif
