// The online softmax of a block, lanes = rows. Included once for each Highway target.
#if defined(MLA_SOFTMAX_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef MLA_SOFTMAX_INL_HPP
#undef MLA_SOFTMAX_INL_HPP
#else
#define MLA_SOFTMAX_INL_HPP
#endif

#include "backend/cpu/core/block_attention.hpp"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

#ifndef MLA_MASKED_SCORE
#define MLA_MASKED_SCORE
namespace mla::cpu {
/// The score of a key that a row does not see: finite, so that differences stay numbers, and far below any real score.
constexpr float kMaskedScore = -1e30f;
}  // namespace mla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// In: scores [count][width], unscaled. Out: probabilities relative to the new maximum; alpha[width], the factor for
// what was summed before. Updates the tile's maximum and sum.
HWY_INLINE void Softmax(const RowTile& tile, const KeyBlock& b, float* HWY_RESTRICT scores, float* HWY_RESTRICT alpha) {
  const hn::ScalableTag<float> df;
  const hn::RebindToSigned<decltype(df)> di;
  using V = hn::Vec<decltype(df)>;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df)), w = tile.width;
  const bool masked = b.first_key + b.count - 1 > tile.first_last;
  const V scale = hn::Set(df, b.scale), none = hn::Set(df, kMaskedScore), half_none = hn::Set(df, 0.5f * kMaskedScore);
  for (int64_t g = 0; g < w; g += lanes) {
    const V before = hn::LoadU(df, tile.m + g);
    V m = before;
    const auto last = hn::LoadU(di, tile.last + g);
    for (int64_t t = 0; t < b.count; ++t) {
      V s = hn::Mul(hn::LoadU(df, scores + t * w + g), scale);
      if (masked) {
        const auto hidden = hn::Gt(hn::Set(di, static_cast<int32_t>(b.first_key + t)), last);
        s = hn::IfThenElse(hn::RebindMask(df, hidden), none, s);
      }
      hn::StoreU(s, df, scores + t * w + g);
      m = hn::Max(m, s);
    }
    const V a = hn::Exp(df, hn::Sub(before, m));
    V sum = hn::Mul(hn::LoadU(df, tile.l + g), a);
    for (int64_t t = 0; t < b.count; ++t) {
      const V s = hn::LoadU(df, scores + t * w + g);
      V p = hn::Exp(df, hn::Sub(s, m));
      if (masked) p = hn::IfThenElseZero(hn::Gt(s, half_none), p);
      sum = hn::Add(sum, p);
      hn::StoreU(p, df, scores + t * w + g);
    }
    hn::StoreU(m, df, tile.m + g);
    hn::StoreU(sum, df, tile.l + g);
    hn::StoreU(a, df, alpha + g);
  }
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
