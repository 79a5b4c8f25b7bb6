// Four rows of the usual shape at once: [latent | rope] of 512 or fp8_ds_v4's 448, and 64. A warp holds them in
// rounds of eight elements a lane, all lanes busy: first the rows' latent parts, one after the other, then, in the last
// round, their rope parts. A round's loads depend on nothing but the rows' places, so that a batch's loads are all
// under way before its first element is converted.
#pragma once

#include "backend/cuda/core/cache_row.cuh"
#include "backend/cuda/core/reciprocal.hpp"

namespace mla::cuda {

template <CacheFormat f>
struct RowBatch {
  static constexpr int kRows = 4, kN = 8, kLatent = f == CacheFormat::fp8_ds_v4 ? 448 : 512, kRope = 64;
  static constexpr int kRounds = kRows * kLatent / (32 * kN) + 1;
  static_assert(kRows * kRope == 32 * kN && kRows * kLatent % (32 * kN) == 0);

  static bool fits(const CacheMemory& c) { return c.latent == kLatent && c.rope == kRope && c.wide(kN); }
  static constexpr bool rope(int round) { return round == kRounds - 1; }
  /// Have all lanes the row that they had in the round before?
  static constexpr bool same_row(int round) { return kLatent == 2 * 32 * kN && round % 2 == 1; }
  /// Of the batch, in [0, kRows).
  __device__ static int row(int round, int lane) {
    if (rope(round)) return lane / (kRope / kN);
    // A round meets at most two rows.
    const int row = 32 * round / (kLatent / kN), end = (row + 1) * (kLatent / kN) - 32 * round;
    return end < 32 && lane >= end ? row + 1 : row;
  }
  /// First of the lane's elements, in the latent or the rope part of its row.
  __device__ static int at(int round, int lane) {
    return rope(round) ? kN * lane % kRope : kN * (32 * round + lane) - kLatent * row(round, lane);
  }
};

/// e4m3 codes of f(x) of eight bf16 numbers, two a word. The codes' signs are the numbers' own, zero's and NaN's too.
template <class F>
__device__ inline uint2 encode8(const uint32_t (&x)[4], F&& f) {
  uint32_t out[2];
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const uint32_t a = x[2 * w], b = x[2 * w + 1];
    const uint32_t low = narrow_pair<fp8_e4m3>(f(__uint_as_float(a << 16)), f(__uint_as_float(a & 0xffff0000u))),
                   high = narrow_pair<fp8_e4m3>(f(__uint_as_float(b << 16)), f(__uint_as_float(b & 0xffff0000u)));
    const uint32_t signs = __byte_perm(a, b, 0x7531);  // the high byte of each
    out[w] = ((low | high << 16) & 0x7f7f7f7fu) | (signs & 0x80808080u);
  }
  return make_uint2(out[0], out[1]);
}

}  // namespace mla::cuda
