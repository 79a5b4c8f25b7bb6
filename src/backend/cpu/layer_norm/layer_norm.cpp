// Memory-bound: a row (128 numbers in the indexer) is read once and stays in L1 for its mean, its variance about that
// mean and its result. Rows of every length take one order of sums, fixed by the vector width.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/layer_norm/layer_norm.cpp"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"
//
#include <algorithm>
#include <cmath>

#include "backend/cpu/backend.hpp"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Sum of f(x[i]): four vectors in flight, the tail one by one, joined in double.
template <class D, class F, class G>
HWY_INLINE double Sum(D d, const float* HWY_RESTRICT x, int64_t n, F&& vector, G&& scalar) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    s0 = hn::Add(s0, vector(hn::LoadU(d, x + i)));
    s1 = hn::Add(s1, vector(hn::LoadU(d, x + i + lanes)));
    s2 = hn::Add(s2, vector(hn::LoadU(d, x + i + 2 * lanes)));
    s3 = hn::Add(s3, vector(hn::LoadU(d, x + i + 3 * lanes)));
  }
  for (; i + lanes <= n; i += lanes) s0 = hn::Add(s0, vector(hn::LoadU(d, x + i)));
  double sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
  for (; i < n; ++i) sum += scalar(x[i]);
  return sum;
}

void LayerNormRow(const float* x, const float* weight, const float* bias, double eps, float* y, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const double length = static_cast<double>(n);
  const float mean = static_cast<float>(Sum(
                                            d, x, n, [](auto v) { return v; }, [](float v) { return v; }) /
                                        length);
  const auto means = hn::Set(d, mean);
  const double squares = Sum(
      d, x, n,
      [&](auto v) {
        const auto c = hn::Sub(v, means);
        return hn::Mul(c, c);
      },
      [&](float v) { return (v - mean) * (v - mean); });
  const float inverse = static_cast<float>(1.0 / std::sqrt(squares / length + eps));
  const auto inverses = hn::Set(d, inverse);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto scaled = hn::Mul(hn::Mul(hn::Sub(hn::LoadU(d, x + i), means), inverses), hn::LoadU(d, weight + i));
    hn::StoreU(hn::Add(scaled, hn::LoadU(d, bias + i)), d, y + i);
  }
  for (; i < n; ++i) y[i] = (x[i] - mean) * inverse * weight[i] + bias[i];
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mla::cpu {
HWY_EXPORT(LayerNormRow);

void layer_norm(Stream& stream, const ops::LayerNormArgs& a) {
  constexpr int64_t kElementsPerTask = 8192;
  const int64_t rows = a.x.extent<Token>(), n = a.x.extent<In>();
  const int64_t block = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, n));
  stream.pool().run((rows + block - 1) / block, [&](int64_t task, int) {
    for (int64_t t = task * block; t < std::min(rows, (task + 1) * block); ++t)
      HWY_DYNAMIC_DISPATCH(LayerNormRow)(&a.x(t, 0), a.weight.data(), a.bias.data(), a.eps, &a.y(t, 0), n);
  });
}

}  // namespace mla::cpu
#endif
