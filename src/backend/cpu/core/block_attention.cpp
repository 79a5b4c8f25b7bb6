#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/core/block_attention.cpp"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"
//
#include "backend/cpu/core/block_attention.hpp"
#include "backend/cpu/core/softmax-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {

// scores[n][..] = sum over d of q[d][..] * k[n][d], for N keys and G vectors of rows. The accumulators fill the
// registers; each multiplication takes its key element as a broadcast from memory.
template <int G, int N, class D>
HWY_NOINLINE void ScoreTile(D df, const float* HWY_RESTRICT q, int64_t width, const float* HWY_RESTRICT k,
                            int64_t stride, int64_t dim, float* HWY_RESTRICT scores) {
  using V = hn::Vec<D>;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  V acc[N][G];
#pragma GCC unroll 32
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) acc[n][g] = hn::Zero(df);
  // Rows are reached as a few base pointers plus small multiples of the stride: what x86 addressing and sixteen
  // registers can hold.
  constexpr int kPerBase = 8;
  for (int64_t d = 0; d < dim; ++d) {
    V rows[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) rows[g] = hn::LoadU(df, q + d * width + g * lanes);
#pragma GCC unroll 32
    for (int n = 0; n < N; ++n) {
      const float* base = k + static_cast<int64_t>(n / kPerBase) * kPerBase * stride;
      const V element = hn::Set(df, base[(n % kPerBase) * stride + d]);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) acc[n][g] = hn::MulAdd(rows[g], element, acc[n][g]);
    }
  }
#pragma GCC unroll 32
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) hn::StoreU(acc[n][g], df, scores + n * width + g * lanes);
}

// o[d][..] = o[d][..] * alpha + sum over keys of p[key][..] * v[key][d], for N dims.
template <int G, int N, class D>
HWY_NOINLINE void ValueTile(D df, const float* HWY_RESTRICT p, int64_t width, const float* HWY_RESTRICT v,
                            int64_t stride, int64_t keys, const float* HWY_RESTRICT alpha, float* HWY_RESTRICT o) {
  using V = hn::Vec<D>;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  V acc[N][G];
#pragma GCC unroll 32
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
      acc[n][g] = hn::Mul(hn::LoadU(df, o + n * width + g * lanes), hn::LoadU(df, alpha + g * lanes));
  for (int64_t t = 0; t < keys; ++t) {
    V rows[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) rows[g] = hn::LoadU(df, p + t * width + g * lanes);
#pragma GCC unroll 32
    for (int n = 0; n < N; ++n) {
      const V element = hn::Set(df, v[t * stride + n]);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) acc[n][g] = hn::MulAdd(rows[g], element, acc[n][g]);
    }
  }
#pragma GCC unroll 32
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) hn::StoreU(acc[n][g], df, o + n * width + g * lanes);
}

template <int G, int kKeys, int kDims, class D>
void BlockOf(D df, const RowTile& tile, const KeyBlock& b, float* scores) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df)), w = tile.width;
  const float* q = static_cast<const float*>(tile.q);
  const float* k = static_cast<const float*>(b.k);
  const float* v = static_cast<const float*>(b.v);
  for (int64_t n = 0; n < b.count; n += kKeys)
    for (int64_t g = 0; g < w; g += G * lanes)
      ScoreTile<G, kKeys>(df, q + g, w, k + n * b.k_stride, b.k_stride, b.qk_dim, scores + n * w + g);
  auto values = [&](int64_t from, int64_t to, const float* factor) {
    const float *p = scores + from * w, *rows = v + from * b.v_stride;
    for (int64_t g = 0; g < w; g += G * lanes) {
      int64_t d = 0;
      for (; d + kDims <= b.v_dim; d += kDims)
        ValueTile<G, kDims>(df, p + g, w, rows + d, b.v_stride, to - from, factor + g, tile.o + d * w + g);
      for (; d + 4 <= b.v_dim; d += 4)
        ValueTile<G, 4>(df, p + g, w, rows + d, b.v_stride, to - from, factor + g, tile.o + d * w + g);
      for (; d < b.v_dim; ++d)
        ValueTile<G, 1>(df, p + g, w, rows + d, b.v_stride, to - from, factor + g, tile.o + d * w + g);
    }
  };
  float alpha[kTileRows];
  bool skip[kBlockKeys];
  if (!Softmax(df, tile, b, scores, alpha, skip)) return values(0, b.count, alpha);
  // Runs of keys between those that are left out; every row's sums keep their order.
  values(0, 0, alpha);
  std::fill_n(alpha, w, 1.0f);
  for (int64_t t = 0, end; t < b.count; t = end + 1) {
    end = std::find(skip + t, skip + b.count, true) - skip;
    if (end > t) values(t, end, alpha);
  }
}

bool AllFiniteFloats(const float* x, int64_t n) { return FiniteFloats(x, n); }

bool FiniteValuesOf(const KeyBlock& block) { return FiniteValues(block); }

bool SoftmaxBlock(const RowTile& tile, const KeyBlock& block, float* scores, float* alpha, bool* skip) {
  if (tile.width == kTinyTile) return Softmax(hn::CappedTag<float, kTinyTile>(), tile, block, scores, alpha, skip);
  return Softmax(hn::ScalableTag<float>(), tile, block, scores, alpha, skip);
}

bool KeepOutOf(const RowTile& tile, const KeyBlock& block, const float* scores, int64_t from, bool odd, bool* skip) {
  return KeepOut(tile, block, scores, from, odd, skip);
}

void Block(const RowTile& tile, const KeyBlock& block, float* scores) {
  // 32 registers hold 24 accumulators beside the rows and a broadcast, 16 hold 12. Few rows take half of a vector of
  // 16, which costs half of one where it is two passes.
  const hn::ScalableTag<float> df;
  const hn::CappedTag<float, kTinyTile> tiny;
  const size_t lanes = hn::Lanes(df);
  if (lanes == 16 && tile.width == kTinyTile) BlockOf<1, 24, 16>(tiny, tile, block, scores);
  else if (lanes == 16 && tile.width == kSmallTile) BlockOf<1, 24, 16>(df, tile, block, scores);
  else if (lanes == 16) BlockOf<2, 12, 8>(df, tile, block, scores);
  else if (lanes == 8 && tile.width == kTinyTile) BlockOf<1, 12, 8>(df, tile, block, scores);
  else if (lanes <= 8) BlockOf<2, 6, 4>(df, tile, block, scores);
  else HWY_ABORT("vectors of %d floats are not expected", static_cast<int>(lanes));
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <cmath>
#include <limits>

namespace mla::cpu {

HWY_EXPORT(Block);
HWY_EXPORT(SoftmaxBlock);
HWY_EXPORT(KeepOutOf);
HWY_EXPORT(FiniteValuesOf);
HWY_EXPORT(AllFiniteFloats);

void attend_block_f32(const RowTile& tile, const KeyBlock& block, float* scores) {
  HWY_DYNAMIC_DISPATCH(Block)(tile, block, scores);
}

bool softmax_block(const RowTile& tile, const KeyBlock& block, float* scores, float* alpha, bool* skip) {
  return HWY_DYNAMIC_DISPATCH(SoftmaxBlock)(tile, block, scores, alpha, skip);
}

bool keep_out(const RowTile& tile, const KeyBlock& block, const float* scores, int64_t from, bool odd, bool* skip) {
  return HWY_DYNAMIC_DISPATCH(KeepOutOf)(tile, block, scores, from, odd, skip);
}

bool finite_values(const KeyBlock& block) { return HWY_DYNAMIC_DISPATCH(FiniteValuesOf)(block); }

void begin_tile(RowTile& tile, int64_t v_dim) {
  if (tile.o_stride == 0) std::fill_n(tile.o, v_dim * tile.width, 0.0f);
  std::fill_n(tile.m, tile.width, -std::numeric_limits<float>::infinity());
  std::fill_n(tile.l, tile.width, 0.0f);
  tile.fresh = true;
  std::fill_n(tile.last + tile.rows, tile.width - tile.rows, -1);
  tile.first_last = *std::min_element(tile.last, tile.last + tile.rows);
  tile.last_last = *std::max_element(tile.last, tile.last + tile.rows);
}

float finish_row(const RowTile& tile, int64_t r, int64_t v_dim, float* out) {
  const float sum = tile.l[r];
  if (sum == 0) {
    std::fill_n(out, v_dim, 0.0f);
    return -std::numeric_limits<float>::infinity();
  }
  const float inverse = 1.0f / sum;
  if (tile.o_stride > 0) {
    finish_values_amx(tile.o + r * tile.o_stride, v_dim, inverse, out);
  } else {
    for (int64_t d = 0; d < v_dim; ++d) out[d] = tile.o[d * tile.width + r] * inverse;
  }
  if (sum > 0 && HWY_DYNAMIC_DISPATCH(AllFiniteFloats)(out, v_dim)) return tile.m[r] + std::log(sum);
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  std::fill_n(out, v_dim, kNaN);
  return kNaN;
}

void set_query_f32(const RowTile& tile, int64_t lane, const float* row, int64_t qk_dim) {
  float* q = static_cast<float*>(tile.q) + lane;
  for (int64_t d = 0; d < qk_dim; ++d) q[d * tile.width] = row[d];
}

void set_query_bf16(const RowTile& tile, int64_t lane, const float* row, int64_t qk_dim) {
  uint32_t* q = static_cast<uint32_t*>(tile.q) + lane;
  for (int64_t d = 0; d < qk_dim; d += 2) {
    const uint32_t low = to_bf16(row[d]).bits, high = d + 1 < qk_dim ? to_bf16(row[d + 1]).bits : 0;
    q[d / 2 * tile.width] = low | high << 16;
  }
}

bool usable_query(const RowTile& tile, int64_t lane, const KeyBlock& block) {
  auto usable = [](float x) { return x < std::numeric_limits<float>::infinity(); };
  if (!block.paired) {
    const float* q = static_cast<const float*>(tile.q) + lane;
    for (int64_t d = 0; d < block.qk_dim; ++d)
      if (!usable(q[d * tile.width])) return false;
    return true;
  }
  const uint32_t* q = static_cast<const uint32_t*>(tile.q) + lane;
  for (int64_t d = 0; d < (block.qk_dim + 1) / 2; ++d)
    for (const uint32_t half : {q[d * tile.width] & 0xffff, q[d * tile.width] >> 16})
      if (!usable(to_float(bf16{static_cast<uint16_t>(half)}))) return false;
  return true;
}

}  // namespace mla::cpu
#endif
