#include "backend/cpu/project/tile_amx.hpp"

#include "backend/cpu/core/tile_registers.hpp"

#ifdef MLA_HAS_AMX

#include <immintrin.h>

#include <algorithm>

#include "backend/cpu/project/tile_f32.hpp"

namespace mla::cpu {
namespace {

constexpr int64_t kRows = kTileSide, kPairs = kTilePairs;

// 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights. Rows of the first and second sums; pairs of inputs.
TileCut cut_for(int64_t first, int64_t second, int64_t pairs) {
  TileCut cut;
  const int64_t height[] = {first, first, second, second, first, second, pairs, pairs};
  for (int i = 0; i < 8; ++i) {
    cut.rows[i] = static_cast<uint8_t>(height[i]);
    cut.row_bytes[i] = static_cast<uint16_t>(height[i] == 0 ? 0 : i == 4 || i == 5 ? 4 * pairs : 64);
  }
  return cut;
}

// 32 rows or fewer by 32 columns; registers are configured for them and for `depth`, of which all pairs are whole.
MLA_AMX void product_32(const bf16* x, int64_t x_stride, bool second, const bf16* w, int64_t group, int64_t pairs,
                        int64_t depth, float* sums, int64_t sums_stride, bool accumulate) {
  const auto x_step = static_cast<size_t>(x_stride) * sizeof(bf16), sums_step = static_cast<size_t>(sums_stride) * 4;
  constexpr size_t kStep = kAmxColumns * 2 * sizeof(bf16);
  const bf16* x2 = x + kRows * x_stride;
  float* sums2 = sums + kRows * sums_stride;
  if (accumulate) {
    _tile_loadd(0, sums, sums_step);
    _tile_loadd(1, sums + 16, sums_step);
    if (second) {
      _tile_loadd(2, sums2, sums_step);
      _tile_loadd(3, sums2 + 16, sums_step);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (second) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t p = 0; p < pairs; p += depth) {
    const bf16* at = w + p * kAmxColumns * 2;
    _tile_loadd(4, x + 2 * p, x_step);
    _tile_loadd(6, at, kStep);
    _tile_loadd(7, at + group, kStep);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (second) {
      _tile_loadd(5, x2 + 2 * p, x_step);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, sums_step);
  _tile_stored(1, sums + 16, sums_step);
  if (second) {
    _tile_stored(2, sums2, sums_step);
    _tile_stored(3, sums2 + 16, sums_step);
  }
}

// Pairs of inputs whose weights for 32 columns stay in L1 while all rows pass.
constexpr int64_t kNear = 256;

// All pairs lie in whole registers of `depth`.
MLA_AMX void rows_product(const bf16* x, int64_t x_stride, int64_t rows, const bf16* w, int64_t group, int64_t pairs,
                          int64_t depth, float* sums, int64_t sums_stride, bool accumulate) {
  const int64_t whole = rows / (2 * kRows) * (2 * kRows), left = rows - whole;
  const TileCut full = cut_for(kRows, kRows, depth),
                last = cut_for(std::min(left, kRows), std::max<int64_t>(0, left - kRows), depth);
  asm volatile("" ::: "memory");  // the intrinsics do not say that they read it
  _tile_loadconfig(whole > 0 ? &full : &last);
  for (int64_t first = 0; first < pairs; first += kNear, accumulate = true) {
    const int64_t n = std::min(kNear, pairs - first);
    for (int64_t c = 0; c < kTileColumns; c += 2 * kAmxColumns) {
      const bf16* at = w + c / kAmxColumns * group + first * kAmxColumns * 2;
      for (int64_t r = 0; r < whole; r += 2 * kRows)
        product_32(x + r * x_stride + 2 * first, x_stride, true, at, group, n, depth, sums + r * sums_stride + c,
                   sums_stride, accumulate);
      if (left == 0) continue;
      if (whole > 0) _tile_loadconfig(&last);
      product_32(x + whole * x_stride + 2 * first, x_stride, left > kRows, at, group, n, depth,
                 sums + whole * sums_stride + c, sums_stride, accumulate);
      if (whole > 0) _tile_loadconfig(&full);
    }
  }
  _tile_release();
  asm volatile("" ::: "memory");
}

}  // namespace

void amx_product(const bf16* x, int64_t x_stride, int64_t rows, const bf16* w, int64_t group, int64_t pairs,
                 float* sums, int64_t sums_stride, bool accumulate) {
  const int64_t whole = pairs / kPairs * kPairs;
  if (whole > 0) rows_product(x, x_stride, rows, w, group, whole, kPairs, sums, sums_stride, accumulate);
  if (whole < pairs)
    rows_product(x + 2 * whole, x_stride, rows, w + whole * kAmxColumns * 2, group, pairs - whole, pairs - whole, sums,
                 sums_stride, accumulate || whole > 0);
}

}  // namespace mla::cpu

#else

namespace mla::cpu {
void amx_product(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t, float*, int64_t, bool) {}
}  // namespace mla::cpu

#endif
