#include "bench/kernels.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/kernels.cpp"
#include "hwy/foreach_target.h"  // must precede highway.h
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace mla::bench::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Latency 4 at two a cycle asks for 8 chains; 12 leave slack and still fit the 16 registers of AVX2 and SSE.
double FmaChains(int64_t iterations) {
  const hn::ScalableTag<float> d;
  volatile float opaque = 0.5f;  // else the loop folds to a constant
  const auto a = hn::Set(d, opaque), b = hn::Set(d, opaque);
  auto x0 = hn::Set(d, 0.0f), x1 = hn::Set(d, 0.1f), x2 = hn::Set(d, 0.2f), x3 = hn::Set(d, 0.3f),
       x4 = hn::Set(d, 0.4f), x5 = hn::Set(d, 0.5f), x6 = hn::Set(d, 0.6f), x7 = hn::Set(d, 0.7f),
       x8 = hn::Set(d, 0.8f), x9 = hn::Set(d, 0.9f), x10 = hn::Set(d, 1.0f), x11 = hn::Set(d, 1.1f);
  for (int64_t i = 0; i < iterations; ++i) {
    x0 = hn::MulAdd(a, x0, b);
    x1 = hn::MulAdd(a, x1, b);
    x2 = hn::MulAdd(a, x2, b);
    x3 = hn::MulAdd(a, x3, b);
    x4 = hn::MulAdd(a, x4, b);
    x5 = hn::MulAdd(a, x5, b);
    x6 = hn::MulAdd(a, x6, b);
    x7 = hn::MulAdd(a, x7, b);
    x8 = hn::MulAdd(a, x8, b);
    x9 = hn::MulAdd(a, x9, b);
    x10 = hn::MulAdd(a, x10, b);
    x11 = hn::MulAdd(a, x11, b);
  }
  const auto sum =
      hn::Add(hn::Add(hn::Add(hn::Add(x0, x1), hn::Add(x2, x3)), hn::Add(hn::Add(x4, x5), hn::Add(x6, x7))),
              hn::Add(hn::Add(x8, x9), hn::Add(x10, x11)));
  volatile float sink = hn::GetLane(hn::SumOfLanes(d, sum));
  (void)sink;
  return 2.0 * 12.0 * static_cast<double>(hn::Lanes(d)) * static_cast<double>(iterations);
}

float ReadAll(const float* data, size_t count) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  size_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    s0 = hn::Add(s0, hn::LoadU(d, data + i));
    s1 = hn::Add(s1, hn::LoadU(d, data + i + lanes));
    s2 = hn::Add(s2, hn::LoadU(d, data + i + 2 * lanes));
    s3 = hn::Add(s3, hn::LoadU(d, data + i + 3 * lanes));
  }
  float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
  for (; i < count; ++i) sum += data[i];
  return sum;
}

}  // namespace mla::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mla::bench {

HWY_EXPORT(FmaChains);
HWY_EXPORT(ReadAll);
double fma_chains(int64_t iterations) { return HWY_DYNAMIC_DISPATCH(FmaChains)(iterations); }
float read_all(const float* data, size_t count) { return HWY_DYNAMIC_DISPATCH(ReadAll)(data, count); }

}  // namespace mla::bench
#endif
