// The fast transform: log2(n) stages of sums and differences in place. Distances below a vector's length go through a
// permutation of its lanes, so every target adds the same numbers in the same order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/hadamard/hadamard.cpp"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"
//
#include <algorithm>
#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void Hadamard(float* x, int64_t n, float factor) {
  const hn::ScalableTag<float> df;
  const hn::RebindToSigned<decltype(df)> di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t distance = 1;
  if (n >= lanes) {
    const auto lane = hn::Iota(di, 0);
    for (; distance < lanes; distance *= 2) {
      const auto bit = hn::Set(di, static_cast<int32_t>(distance));
      const auto partner = hn::IndicesFromVec(df, hn::Xor(lane, bit));
      const auto upper = hn::RebindMask(df, hn::TestBit(lane, bit));
      for (int64_t i = 0; i < n; i += lanes) {
        const auto a = hn::LoadU(df, x + i), b = hn::TableLookupLanes(a, partner);
        hn::StoreU(hn::IfThenElse(upper, hn::Sub(b, a), hn::Add(a, b)), df, x + i);
      }
    }
  }
  for (; distance < n; distance *= 2)
    for (int64_t i = 0; i < n; i += 2 * distance) {
      int64_t j = i;
      if (distance >= lanes)
        for (; j < i + distance; j += lanes) {
          const auto a = hn::LoadU(df, x + j), b = hn::LoadU(df, x + j + distance);
          hn::StoreU(hn::Add(a, b), df, x + j);
          hn::StoreU(hn::Sub(a, b), df, x + j + distance);
        }
      for (; j < i + distance; ++j) {
        const float a = x[j], b = x[j + distance];
        x[j] = a + b;
        x[j + distance] = a - b;
      }
    }
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <cmath>

#include "backend/cpu/backend.hpp"

namespace mla::cpu {
HWY_EXPORT(Hadamard);

void hadamard(Stream& stream, const ops::HadamardArgs& a) {
  constexpr int64_t kRowsPerTask = 64;
  auto rotate = [](float* row, int64_t n) {
    HWY_DYNAMIC_DISPATCH(Hadamard)(row, n, static_cast<float>(1.0 / std::sqrt(static_cast<double>(n))));
  };
  auto each = [&](int64_t rows, auto&& row) {
    stream.pool().run((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
      for (int64_t r = task * kRowsPerTask; r < std::min(rows, (task + 1) * kRowsPerTask); ++r) row(r);
    });
  };
  if (a.q) {
    const int64_t heads = a.q.extent<IndexHead>();
    each(a.q.extent<Token>() * heads,
         [&](int64_t r) { rotate(a.q.data() + a.q.offset(r / heads, r % heads, 0), a.q.extent<IndexDim>()); });
  }
  if (a.k) each(a.k.extent<Token>(), [&](int64_t t) { rotate(a.k.data() + a.k.offset(t, 0), a.k.extent<IndexDim>()); });
}

}  // namespace mla::cpu
#endif
