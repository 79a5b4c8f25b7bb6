#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/index_score/kernel.cpp"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"
//
#include <algorithm>

#include "backend/cpu/index_score/kernel.hpp"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// scores[n] += sum over the first `real` lanes of G vectors of heads of w * relu(q . k[n]), for N keys. The
// accumulators fill the registers.
template <int G, int N>
HWY_NOINLINE void ScoreTile(const float* HWY_RESTRICT q, int64_t width, const float* HWY_RESTRICT w, int64_t real,
                            const float* HWY_RESTRICT k, int64_t stride, int64_t dim, float* HWY_RESTRICT scores,
                            Ahead ahead) {
  const hn::ScalableTag<float> df;
  using V = hn::Vec<decltype(df)>;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  V acc[N][G];
#pragma GCC unroll 32
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) acc[n][g] = hn::Zero(df);
  // Rows are reached as a few base pointers plus small multiples of the stride: what x86 addressing holds.
  constexpr int kPerBase = 8;
  for (int64_t d = 0; d < dim; ++d) {
    hwy::Prefetch(ahead.at + d * ahead.step);
    V heads[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) heads[g] = hn::LoadU(df, q + d * width + g * lanes);
#pragma GCC unroll 32
    for (int n = 0; n < N; ++n) {
      const float* base = k + static_cast<int64_t>(n / kPerBase) * kPerBase * stride;
      const V element = hn::Set(df, base[(n % kPerBase) * stride + d]);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) acc[n][g] = hn::MulAdd(heads[g], element, acc[n][g]);
    }
  }
  V weight[G];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) weight[g] = hn::LoadU(df, w + g * lanes);
#pragma GCC unroll 32
  for (int n = 0; n < N; ++n) {
    V sum = hn::Zero(df);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {  // not Max, which may lose a NaN
      const auto is_real = hn::FirstN(df, static_cast<size_t>(std::clamp<int64_t>(real - g * lanes, 0, lanes)));
      const V kept = hn::IfThenZeroElse(hn::Lt(acc[n][g], hn::Zero(df)), acc[n][g]);
      sum = hn::MulAdd(hn::IfThenElseZero(is_real, kept), weight[g], sum);
    }
    scores[n] += hn::GetLane(hn::SumOfLanes(df, sum));
  }
}

template <int G, int N>
void Chunk(int64_t first_head, int64_t width, const IndexBlock& b) {
  const int64_t heads = G * static_cast<int64_t>(hn::Lanes(hn::ScalableTag<float>()));
  const float* q = static_cast<const float*>(b.q) + first_head * b.dim;
  const float* k = static_cast<const float*>(b.k);
  for (int64_t g = 0; g < width; g += heads)
    for (int64_t n = 0; n < b.count; n += N)
      ScoreTile<G, N>(q + g, width, b.weights + first_head + g, b.real_heads - first_head - g, k + n * b.k_stride,
                      b.k_stride, b.dim, b.scores + n, ahead_of(b, n, N, first_head + g, heads, b.dim));
}

void ScoreBlock(const IndexBlock& b) {
  std::fill_n(b.scores, (b.count + kIndexKeyTile - 1) / kIndexKeyTile * kIndexKeyTile, 0.0f);
  const size_t lanes = hn::Lanes(hn::ScalableTag<float>());
  for (int64_t h = 0; h < b.heads; h += kHeadChunk) {
    const int64_t width = std::min(kHeadChunk, b.heads - h);
    // 32 registers hold 24 accumulators beside the heads and a broadcast, 16 hold 12.
    if (lanes == 16 && width == kHeadChunk) Chunk<2, 12>(h, width, b);
    else if (lanes == 16) Chunk<1, 24>(h, width, b);
    else if (lanes <= 8) Chunk<2, 6>(h, width, b);
    else HWY_ABORT("vectors of %d floats are not expected", static_cast<int>(lanes));
  }
}

// 4 x 4 squares in 128-bit vectors: the same on every target.
void Transpose(const uint32_t* from, int64_t from_stride, int64_t rows, int64_t columns, uint32_t* to,
               int64_t to_stride) {
  int64_t r = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::Full128<uint32_t> d;
  const hn::Full128<uint64_t> d64;
  for (; r + 4 <= rows; r += 4) {
    const uint32_t* in = from + r * from_stride;
    uint32_t* out = to + r;
    int64_t c = 0;
    for (; c + 4 <= columns; c += 4) {
      const auto a0 = hn::LoadU(d, in + c), a1 = hn::LoadU(d, in + from_stride + c),
                 a2 = hn::LoadU(d, in + 2 * from_stride + c), a3 = hn::LoadU(d, in + 3 * from_stride + c);
      const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, a0, a1)),
                 low23 = hn::BitCast(d64, hn::InterleaveLower(d, a2, a3)),
                 high01 = hn::BitCast(d64, hn::InterleaveUpper(d, a0, a1)),
                 high23 = hn::BitCast(d64, hn::InterleaveUpper(d, a2, a3));
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, low01, low23)), d, out + c * to_stride);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23)), d, out + (c + 1) * to_stride);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, high01, high23)), d, out + (c + 2) * to_stride);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23)), d, out + (c + 3) * to_stride);
    }
    for (; c < columns; ++c)
      for (int i = 0; i < 4; ++i) out[c * to_stride + i] = in[i * from_stride + c];
  }
#endif
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mla::cpu {
HWY_EXPORT(ScoreBlock);
HWY_EXPORT(Transpose);

void score_block_f32(const IndexBlock& block) { HWY_DYNAMIC_DISPATCH(ScoreBlock)(block); }

void transpose(const uint32_t* from, int64_t from_stride, int64_t rows, int64_t columns, uint32_t* to,
               int64_t to_stride) {
  HWY_DYNAMIC_DISPATCH(Transpose)(from, from_stride, rows, columns, to, to_stride);
}

}  // namespace mla::cpu
#endif
