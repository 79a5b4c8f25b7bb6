// The online softmax of a block, lanes = rows. Included once for each Highway target.
#if defined(MLA_SOFTMAX_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef MLA_SOFTMAX_INL_HPP
#undef MLA_SOFTMAX_INL_HPP
#else
#define MLA_SOFTMAX_INL_HPP
#endif

#include <algorithm>
#include <cstdint>
#include <limits>

#include "backend/cpu/core/block_attention.hpp"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// No element of x[n] has all bits of `special`, an exponent of all ones: NaN and infinity.
template <class T>
HWY_INLINE bool AllFinite(const T* HWY_RESTRICT x, int64_t n, T magnitude, T special) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto largest = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) largest = hn::Max(largest, hn::And(hn::LoadU(d, x + i), hn::Set(d, magnitude)));
  for (; i < n; ++i)
    if ((x[i] & magnitude) >= special) return false;
  return hn::AllTrue(d, hn::Lt(largest, hn::Set(d, special)));
}

HWY_INLINE bool FiniteFloats(const float* x, int64_t n) {
  return AllFinite<int32_t>(reinterpret_cast<const int32_t*>(x), n, 0x7fffffff, 0x7f800000);
}
HWY_NOINLINE bool FinitePairs(const uint32_t* x, int64_t n) {
  return AllFinite<int16_t>(reinterpret_cast<const int16_t*>(x), 2 * n, 0x7fff, 0x7f80);
}

HWY_INLINE bool FiniteValues(const KeyBlock& b) {
  if (b.squares) {
    const uint32_t* v = static_cast<const uint32_t*>(b.v);
    for (int64_t n = 0; n < (b.count + 31) / 32 * value_squares(b.v_dim); ++n, v += kValueSquare)
      if (!FinitePairs(v, kSquareRows * kSquareRows)) return false;
    return true;
  }
  if (b.paired) {
    for (int64_t pair = 0; pair < (b.count + 1) / 2; ++pair)
      if (!for_pair_row(b, pair, FinitePairs)) return false;
    return true;
  }
  const float* v = static_cast<const float*>(b.v);
  for (int64_t t = 0; t < b.count; ++t, v += b.v_stride)
    if (!FiniteFloats(v, b.v_dim)) return false;
  return true;
}

// Keys [from, ..) of the block whose values hold NaN or infinity go to `skip`: a row that does not see one would meet
// it with probability 0, and 0 times NaN is NaN. Rows that do see one become NaN, by their sums. With `odd`, some score
// is no finite number: a row with a NaN or +inf among its scores, or in its query, becomes NaN, too.
HWY_NOINLINE bool KeepOut(const RowTile& tile, const KeyBlock& b, const float* HWY_RESTRICT scores, int64_t from,
                          bool odd, bool* HWY_RESTRICT skip) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
  const int64_t w = tile.width;
  auto sees = [&](int64_t lane, int64_t t) {
    return t < b.count && b.first_key + t <= tile.last[lane] &&
           (!tile.shown || tile.shown[t / 32 * w + lane] >> t % 32 & 1);
  };
  std::fill_n(skip, (b.count + 1) / 2 * 2, false);
  bool any = false;
  auto leave_out = [&](int64_t t) {
    skip[t] = any = true;
    for (int64_t lane = 0; lane < tile.rows; ++lane)
      if (sees(lane, t)) tile.l[lane] = kNaN;
  };
  if (!b.finite && b.paired) {
    for (int64_t t = from / 2 * 2; t < b.count; t += 2) {
      if (for_pair_row(b, t / 2, FinitePairs)) continue;
      for (int half = 0; half < 2; ++half)
        if (!for_pair_row(b, t / 2, [&](const uint32_t* v, int64_t n) {
              return std::none_of(v, v + n, [&](uint32_t x) { return (~x >> 16 * half & 0x7f80) == 0; });
            }))
          leave_out(t + half);
    }
  } else if (!b.finite) {
    const float* v = static_cast<const float*>(b.v) + from * b.v_stride;
    for (int64_t t = from; t < b.count; ++t, v += b.v_stride)
      if (!FiniteFloats(v, b.v_dim)) leave_out(t);
  }
  if (!odd) return any;
  for (int64_t lane = 0; lane < tile.rows; ++lane) {
    const bool own = !usable_query(tile, lane, b);
    for (int64_t t = 0; t < b.count; ++t)
      if (sees(lane, t) && (own || !(scores[t * w + lane] < kInf))) tile.l[lane] = kNaN;
  }
  return any;
}

// In: scores [count][width], unscaled. Out: probabilities relative to the new maximum; alpha[width], the factor for
// what was summed before. Updates the tile's maximum and sum. True: the values of the keys in skip[count, rounded up
// to even] are to be left out of all products. A hidden key's score is -inf, whatever it was, and so is a masked key's.
// df: of vectors that are no wider than the tile.
template <class D>
HWY_INLINE bool Softmax(D df, const RowTile& tile, const KeyBlock& b, float* HWY_RESTRICT scores,
                        float* HWY_RESTRICT alpha, bool* HWY_RESTRICT skip) {
  const hn::RebindToSigned<D> di;
  const hn::RebindToUnsigned<D> du;
  using V = hn::Vec<D>;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df)), w = tile.width;
  const uint32_t* const shown = tile.shown;
  // By all rows.
  const int64_t seen = shown ? 0 : std::clamp<int64_t>(tile.first_last + 1 - b.first_key, 0, b.count);
  const bool masked = seen < b.count;
  const V scale = hn::Set(df, b.scale), none = hn::Set(df, -std::numeric_limits<float>::infinity());
  const auto magnitude = hn::Set(di, 0x7fffffff);
  auto largest = hn::Zero(di);  // as bits: NaN and infinity lie above all numbers
  float maximum[kTileRows];
  for (int64_t g = 0; g < w; g += lanes) {
    V m = hn::LoadU(df, tile.m + g);
    const auto last = hn::LoadU(di, tile.last + g);
    for (int64_t t = 0; t < b.count; ++t) {
      V s = hn::Mul(hn::LoadU(df, scores + t * w + g), scale);
      largest = hn::Max(largest, hn::And(hn::BitCast(di, s), magnitude));
      if (masked) {
        const auto hidden = hn::Gt(hn::Set(di, static_cast<int32_t>(b.first_key + t)), last);
        s = hn::IfThenElse(hn::RebindMask(df, hidden), none, s);
        if (shown) {
          const auto set = hn::TestBit(hn::LoadU(du, shown + t / 32 * w + g), hn::Set(du, uint32_t{1} << t % 32));
          s = hn::IfThenElse(hn::RebindMask(df, set), s, none);
        }
      }
      hn::StoreU(s, df, scores + t * w + g);
      m = hn::Max(m, s);
    }
    hn::StoreU(m, df, maximum + g);
  }
  const bool odd = !hn::AllTrue(di, hn::Lt(largest, hn::Set(di, 0x7f800000)));
  // The second half of a last pair belongs to no key.
  const bool looks = !b.finite && (masked || (b.paired && b.count % 2 != 0));
  const bool skips = (odd || looks) && KeepOut(tile, b, scores, odd ? 0 : seen, odd, skip);
  for (int64_t g = 0; g < w; g += lanes) {
    const V m = hn::LoadU(df, maximum + g);
    const V from = hn::IfThenElse(hn::Eq(m, none), hn::Zero(df), m);  // nothing seen yet: no difference of infinities
    const V a = hn::Exp(df, hn::Sub(hn::LoadU(df, tile.m + g), from));
    V sum = hn::Mul(hn::LoadU(df, tile.l + g), a);
    for (int64_t t = 0; t < b.count; ++t) {
      const V p = hn::Exp(df, hn::Sub(hn::LoadU(df, scores + t * w + g), from));  // 0 at -inf and at NaN
      sum = hn::Add(sum, p);
      hn::StoreU(p, df, scores + t * w + g);
    }
    hn::StoreU(m, df, tile.m + g);
    hn::StoreU(sum, df, tile.l + g);
    hn::StoreU(a, df, alpha + g);
  }
  return skips;
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
