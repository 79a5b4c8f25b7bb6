// The end of an item in kernels whose two output warpgroups hold 64 x 512 f32 sums of a CTA by columns: what a row's
// sums are multiplied by, and how they become outputs or a piece's partial.
#pragma once

#include <type_traits>

#include "backend/cuda/core/tma.cuh"
#include "backend/cuda/sm90/attention/math.cuh"
#include "backend/cuda/sm90/attention/merge.cuh"

namespace mla::cuda::latent {

/// Of row `row` of this CTA's 64, whose piece `piece` is done: stores its lse and largest logit, and returns what its
/// outputs are to be multiplied by. sum: of its probabilities relative to 2^top; scales: may there be some on the
/// device?
template <int ctas, bool scales>
__device__ __forceinline__ float finish_row(const Params& p, const Item& it, int piece, int row, float sum, float top,
                                            const volatile float& peak) {
  const float lse2 = sum == 0 ? -INFINITY : top + __log2f(sum);
  float inverse = sum == 0 ? 0.0f : p.value_scale / sum;  // NaN stays
  if constexpr (scales) inverse = sum == 0 ? 0.0f : inverse * given(p.k_scale);
  row += ctas > 1 ? static_cast<int>(cluster_rank()) * 64 : 0;
  if (row >= it.rows) return inverse;
  const int64_t at = partial_row(it.slot0, 64 * ctas, row, it.pieces, piece);
  if (it.pieces == 1) store_lse(p, it.row0 + row, lse2);
  else p.partial_lse[2 * at] = lse2;
  if (p.extras) {
    if (it.pieces == 1) inverse *= kept(p, it.row0 + row, lse2);
    if (p.peaks) {
      const float max2 = it.blocks ? peak : -INFINITY;
      if (it.pieces == 1) store_max(p, it.row0 + row, max2, sum);
      else p.partial_max[at] = max2;
    }
  }
  return inverse;
}

/// Sums o of this thread's rows `row` and `row` + 8, 256 columns of warpgroup h, of piece `piece` of an item, the last
/// one or not: to out, or to the piece's partial. With the last all are then published, or the one is joined with the
/// other of its pair. Shared: inverse, exponent, piece_read, splits. room_of(h, i): 32 KB of shared memory for each of
/// two pieces that are joined, which nobody else uses any more once all math threads are here.
template <class Order, int ctas, class Shared, class Room>
__device__ __forceinline__ void finish_outputs(const Params& p, Shared& s, const Item& it, int piece, bool last,
                                               const Part& part, float (&o)[2][64], int rank, Room room_of) {
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32, h = warp / 4;
  const int row = warp % 4 * 16 + lane / 4;
  const int rows = it.rows - rank * 64;  // of this CTA; may be none
  const int64_t out_row = it.row0 + rank * 64;
  const bool in0 = row < rows, in1 = row + 8 < rows, pair = Order::joins && shared_by_two(it);
  bool joins = pair && piece == 0;
  if (joins) {
    if (threadIdx.x == 0) s.splits.joined = wait_for_pieces(p, p.counters + it.counter * ctas + rank, 1) != 0;
    barrier_sync(math_barrier, math_threads);
    joins = s.splits.joined;
  }
  float a = 0, b = 0;  // what outputs of the two rows are to be multiplied by
  if (it.blocks) a = s.inverse[row], b = s.inverse[row + 8];
  if (it.pieces > 1) {
    // As a partial has them: f16 relative to a power of two for each row.
    float top0 = 0, top1 = 0;
#pragma unroll
    for (int k = 0; k < 64; ++k) {
      float& top = k & 2 ? top1 : top0;
      top = fmaxf(top, fmaxf(fabsf(o[0][k]), fabsf(o[1][k])));
    }
#pragma unroll
    for (int k = 1; k < 4; k *= 2) {
      top0 = fmaxf(top0, __shfl_xor_sync(0xffffffffu, top0, k));
      top1 = fmaxf(top1, __shfl_xor_sync(0xffffffffu, top1, k));
    }
    if (lane % 4 == 0) {
      s.exponent[h][row] = HalfScale::exponent(top0 * a), s.exponent[h][row + 8] = HalfScale::exponent(top1 * b);
    }
    barrier_sync(math_barrier, math_threads);
    if (Order::invariant && !last && threadIdx.x == 0) mbarrier_arrive(smem_address(&s.piece_read));
    const HalfScale scale0(max(s.exponent[0][row], s.exponent[1][row])),
        scale1(max(s.exponent[0][row + 8], s.exponent[1][row + 8]));
    a *= scale0.to, b *= scale1.to;
    const auto units = [&](int slot) {  // of a partial: this thread's first of 16, 32 apart
      return reinterpret_cast<uint4*>(p.partial_out) + (static_cast<int64_t>(slot) * ctas + rank) * 4096 +
             warp % 4 * 1024 + h * 512 + lane;
    };
    const auto lse_of = [&](int row, int piece) {
      return reinterpret_cast<float2*>(p.partial_lse) +
             partial_row(it.slot0, 64 * ctas, rank * 64 + row, it.pieces, piece);
    };
    // Two pieces that are to be joined lie in this warpgroup's half of two buffers, which nobody fills any more,
    // 128 units apart: the other's is copied there.
    const auto room = [&](int i) { return room_of(h, i) + threadIdx.x % 128; };
    if (joins) {
      const uint4* other = units(partial_slot(it, 1));
#pragma unroll 1
      for (int i = 0; i < 16; ++i)
        if (warp % 4 * 16 < rows) cp_async_16(smem_address(room(1) + i * 128), other + i * 32);
      cp_async_commit();
    }
    uint4* to = joins ? room(0) : units(partial_slot(it, piece));
    const int apart = joins ? 128 : 32;
    if (warp % 4 * 16 < rows)
#pragma unroll
      for (int i = 0; i < 16; ++i, to += apart) {
        const float* mine = o[i / 8] + i % 8 * 8;
        const uint4 eight{Pack<__half>::two(mine[0] * a, mine[1] * a), Pack<__half>::two(mine[2] * b, mine[3] * b),
                          Pack<__half>::two(mine[4] * a, mine[5] * a), Pack<__half>::two(mine[6] * b, mine[7] * b)};
        if (joins) *to = eight;
        else store_unit(to, eight);
      }
    if (joins) {
      const auto join = [&](int row, bool in, float back) {
        const float2 mine = in ? __ldcg(lse_of(row, 0)) : Order::no_lse(),
                     theirs = in ? __ldcg(lse_of(row, 1)) : Order::no_lse();
        Join join(mine.x, theirs.x);
        if (in && h == 0 && lane % 4 == 0) store_lse(p, static_cast<int>(out_row) + row, join.lse2);
        if (p.extras) {
          join.inverse *= kept(p, static_cast<int>(out_row) + row, join.lse2);
          if (p.peaks && in && h == 0 && lane % 4 == 0) {
            const float* max = p.partial_max + partial_row(it.slot0, 64 * ctas, rank * 64 + row, it.pieces, 0);
            store_max(p, static_cast<int>(out_row) + row, fmaxf(__ldcg(max), __ldcg(max + 1)), join.lse2);
          }
        }
        join.first *= back, join.second *= theirs.y;
        return join;
      };
      const Join join0 = join(row, in0, scale0.back), join1 = join(row + 8, in1, scale1.back);
      cp_async_wait<0>();
      if (threadIdx.x == 0) p.counters[it.counter * ctas + rank] = 0;
#pragma unroll 2
      for (int i = 0; i < 16; ++i) {
        float sum[8] = {};
        Order::add(sum, room(0)[i * 128], join0.first, join1.first);
        Order::add(sum, room(1)[i * 128], join0.second, join1.second);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[e] *= Order::second(e) ? join1.inverse : join0.inverse;
        Order::store(p, out_row + row, in0, in1, h * 256 + i * 16, sum);
      }
    } else {
      if (h == 0 && lane % 4 == 0) {
        if (in0) lse_of(row, piece)->y = scale0.back;
        if (in1) lse_of(row + 8, piece)->y = scale1.back;
      }
      if (last) publish<Order>(p, s.splits, it, part);
      else barrier_sync(math_barrier, math_threads);  // exponents have been read
    }
  } else {
#pragma unroll
    for (int k = 0; k < 64; ++k) o[0][k] *= k & 2 ? b : a, o[1][k] *= k & 2 ? b : a;
    const auto store = [&]<bool f32>(std::bool_constant<f32>) {
      const int64_t at = Order::template first_element<f32>(out_row + row, h * 256);
#pragma unroll
      for (int i = 0; i < 16; ++i)
        Order::template store<f32>(p, at + i * 16, in0, in1, reinterpret_cast<const float(&)[8]>(o[i / 8][i % 8 * 8]));
    };
    if (p.out_f32) store(std::true_type());
    else store(std::false_type());
  }
}

}  // namespace mla::cuda::latent
