// Attention for tiles of 16 or 32 rows: operands swapped, so that rows are wgmma's N and need no padding to 64.
//   S^T[64 positions, N] = K Q^T,  O^T[512, N] += V^T P^T
#pragma once

#include "backend/cuda/sm90/attention/load.cuh"
#include "backend/cuda/sm90/attention/math.cuh"
#include "backend/cuda/sm90/attention/merge.cuh"

namespace mla::cuda::latent {

// Tile: a struct of constants, one a kernel.
struct Narrow16 {
  static constexpr int rows = 16;  // wgmma's N
};
struct Narrow32 {
  static constexpr int rows = 32;
};

template <class Tile>
struct NarrowShared {
  static constexpr int score_pitch = block_tokens + 4;
  alignas(1024) char kv[2][9][box_bytes];  // two blocks, by column boxes; later the merge's
  alignas(1024) char q[9][Tile::rows * 128];
  alignas(1024) char p[Tile::rows * 128];                 // P: rows x 64 positions, swizzled
  alignas(16) float scores[2][Tile::rows * score_pitch];  // each warpgroup's half of the 576 products, transposed
  float rescale[Tile::rows], sum[Tile::rows], other[Tile::rows], inverse[Tile::rows];
  alignas(16) Item item[2];
  Splits splits;
  Split split;
  int changed;  // the CTA's latest block whose maxima moved, counted from 1
  alignas(8) uint64_t full[2], empty[2], q_full, q_empty;
};

template <class Tile, class T, bool invariant>
__global__ void __launch_bounds__(threads, 1)
    narrow_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map) {
  using Shared = NarrowShared<Tile>;
  extern __shared__ __align__(1024) char shared_bytes[];
  Shared& s = *reinterpret_cast<Shared*>(shared_bytes);
  using Order = TransposedOrder<Tile::rows, T, invariant>;
  constexpr int merge_bytes = sizeof Shared::kv;
  const auto part_of = [](const Item& it) { return Part{it.rows, it.row0}; };
  const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(smem_address(&s.full[i]), 128);
      mbarrier_init(smem_address(&s.empty[i]), 8);  // warps
    }
    mbarrier_init(smem_address(&s.q_full), 1);
    mbarrier_init(smem_address(&s.q_empty), 8);
    mbarrier_init_fence();
    s.changed = s.splits.count = s.splits.merges[0] = s.splits.merges[1] = 0;
    tma_prefetch_map(q_map);
  }
  // Beside the barriers' birth and the previous kernel's end, each loading warp for itself:
  Item it;
  RowCopies<4> rows;
  if (warpgroup == 2) {
    const Split split = begin_work<Tile::rows, invariant>(p, blockIdx.x, warp - 8, it, rows);
    if (it.blocks >= 0) {
      if (it.blocks <= 2) rows.prefetch(p, it.blocks);
      if (warp == 8 && lane < 9) tma_prefetch_box(q_map, lane * 64, it.row0);
    }
    if (threadIdx.x == math_threads) s.split = split, s.item[0] = it;
  } else if (warp == 1 && !p.starts) {
    prefetch_table(p);
  }
  __syncthreads();

  if (warpgroup == 2) {         // ---- load
    int copied = 0, count = 0;  // blocks, items
    Walk<Tile::rows, invariant> walk;
    bool more = it.blocks >= 0;
    if (!p.settled) wait_for_previous_grids();
    __syncwarp();
    while (warp_uniform(more)) {
      // While every worker copies, a load waits for all copies before it, some 10000 cycles: the next item's lengths,
      // page numbers and queries are asked for while this item is copied.
      Item following;
      RowCopies<4> following_rows;
      bool another = false, looked = false;
      const auto look_ahead = [&] {
        looked = true;
        if (count == 0) walk = {p, s.split, static_cast<int>(blockIdx.x)}, walk.next(p, s.split, following);
        another = walk.next(p, s.split, following);
        if (!another) return;
        following_rows = RowCopies<4>(p, following, warp - 8);
        if (warp == 8 && lane < 9) tma_prefetch_box(q_map, lane * 64, following.row0);
      };
      const auto start = [&] {  // the item and its queries
        if (warp == 8 && count > 0) hand_over<Tile::rows>(s, q_map, it, count);
      };
      // Queries wait for the last scores of the item before; two blocks of the cache go ahead of them.
      const int begin = warp_uniform(it.block), end = begin + warp_uniform(it.blocks), queries_at = min(begin + 2, end);
      // Of what an early worker has no room for yet, half is asked into L2, two blocks at most.
      const bool ahead = Order::relays && p.settled && it.early();
      for (int j = begin; j < end; ++j) {
        if (j == queries_at) start();
        const int buffer = copied & 1;
        mbarrier_wait(smem_address(&s.empty[buffer]), (copied >> 1 & 1) ^ 1);
        rows.copy<0, 9, true>(p, rows.rows(p, warp - 8), warp - 8, smem_address(s.kv[buffer]));
        mbarrier_arrive_after_cp_async(smem_address(&s.full[buffer]));
        rows.advance(p);
        ++copied;
        if (j == begin + 1 && ahead) rows.prefetch(p, (end - j - 1) / 2);
        if (!looked && j > begin + 1) look_ahead();
      }
      if (queries_at == end) start();
      if (!looked) look_ahead();
      if (threadIdx.x == math_threads)
        remember_split<Order>(p, s.splits, s.item[count & 1], part_of(s.item[count & 1]), merge_bytes);
      __syncwarp();
      ++count;
      it = following, rows = following_rows, more = another;
    }
    if (warp == 8) hand_over_none(s, count);
    return;
  }

  // ---- math
  take_turn();
  if (warp == 0) load_first_queries<Tile::rows>(s, q_map);
  constexpr int row_threads = math_threads / Tile::rows, chunks = Tile::rows / 16;  // of 4 positions a thread
  const int h = warpgroup, g = lane / 4, pair_row = lane % 4 * 2, warp_row = warp % 4 * 16;
  const int row = threadIdx.x / row_threads, row_lane = threadIdx.x % row_threads;
  float o[4][Tile::rows / 2];
  int stamp = 0;  // blocks so far
  for (int count = 0;; ++count) {
    mbarrier_wait(smem_address(&s.q_full), count & 1);
    const Item& it = s.item[count & 1];
    if (it.blocks < 0) break;
    const int blocks = it.blocks, block0 = it.block, positions = it.positions;
    // Row sees positions below:
    const int limit = min(it.context + p.by_heads.divide(it.first_row + row) + 1, positions);
    const int hidden = hidden_from(p, it) - block0 * block_tokens;
    convert_queries<T>(p, &s.q[0][0], 9 * Tile::rows * 128);
    for_pieces<invariant>(p, it, blocks, [&](int piece, int begin, int end) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int k = 0; k < Tile::rows / 2; ++k) o[i][k] = 0;
      float top = -INFINITY, peak = -INFINITY, sum = 0;  // top, peak: log2 units; sum: of this thread's positions

      for (int j = begin; j < end; ++j) {
        const int buffer = stamp & 1;
        // S^T: this warpgroup's four boxes and half of the rope box
        float d[Tile::rows / 2];
        mbarrier_wait(smem_address(&s.full[buffer]), stamp >> 1 & 1);
        ++stamp;
        fence_async_proxy();
        wgmma_fence();
        using Product = Wgmma<Tile::rows, T>;
        const uint64_t keys = warp_operand_128b(smem_address(s.kv[buffer][4 * h])),
                       queries = warp_operand_128b(smem_address(s.q[4 * h])),
                       rope_keys = warp_operand_128b(smem_address(s.kv[buffer][8]) + h * 64),
                       rope_queries = warp_operand_128b(smem_address(s.q[8]) + h * 64);
        static_for<16>([&](auto i) {
          Product::template ss_at<i / 4 * box_bytes + i % 4 * 32, i / 4 * Tile::rows * 128 + i % 4 * 32>(
              d, keys, queries, i > 0);
        });
        static_for<2>([&](auto k) { Product::template ss_at<k * 32, k * 32>(d, rope_keys, rope_queries, 1); });
        wgmma_commit();
        const int valid = positions - (block0 + j) * block_tokens;
        if (valid < block_tokens) {  // what lies past the sequence must not be multiplied, not even by 0
          for (int i = 0; i < 4; ++i) {
            for (int at = valid * 8 + threadIdx.x % 128; at < block_tokens * 8; at += 128)
              *reinterpret_cast<uint4*>(s.kv[buffer][4 * h + i] + at * 16) = {0, 0, 0, 0};
          }
          fence_async_proxy();
        }
        wgmma_wait<0>();
        wgmma_pin(d);
        if (j == blocks - 1) {
          __syncwarp();
          if (lane == 0) mbarrier_arrive(smem_address(&s.q_empty));
        }
#pragma unroll
        for (int k = 0; k < Tile::rows / 2; ++k)
          s.scores[h][(k / 4 * 8 + pair_row + k % 2) * Shared::score_pitch + warp_row + g + k % 4 / 2 * 8] = d[k];
        barrier_sync(math_barrier, math_threads);
        if ((j + 1) * block_tokens > hidden && hidden < positions - block0 * block_tokens)
          zero_nonfinite<T>(s.kv[buffer][4 * h], max(hidden - j * block_tokens, 0), block_tokens);

        // softmax: row_threads threads a row, 4 positions of each 4 * row_threads
        float x[chunks][4], best = -INFINITY;
#pragma unroll
        for (int i = 0; i < chunks; ++i) {
          const int at = (i * row_threads + row_lane) * 4;
          const float4 a = *reinterpret_cast<const float4*>(&s.scores[0][row * Shared::score_pitch + at]);
          const float4 b = *reinterpret_cast<const float4*>(&s.scores[1][row * Shared::score_pitch + at]);
          x[i][0] = a.x + b.x, x[i][1] = a.y + b.y, x[i][2] = a.z + b.z, x[i][3] = a.w + b.w;
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            x[i][k] = (block0 + j) * block_tokens + at + k < limit ? x[i][k] * p.scale_log2 : -INFINITY;
            best = fmaxf(best, x[i][k]);
          }
        }
#pragma unroll
        for (int k = row_threads / 2; k; k /= 2) best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, k));
        peak = fmaxf(peak, best);
        if (best - top > lazy_growth) {
          const float factor = exp2_approx(top - best);
          sum *= factor;
          top = best;
          if (row_lane == 0) s.rescale[row] = factor, s.changed = stamp;
        } else if (row_lane == 0) {
          s.rescale[row] = 1.0f;
        }
        const float shift = top == -INFINITY ? 0.0f : top;
#pragma unroll
        for (int i = 0; i < chunks; ++i) {
          const int at = (i * row_threads + row_lane) * 4;
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            x[i][k] = exp2_approx(x[i][k] - shift);
            sum += x[i][k];
          }
          *reinterpret_cast<uint2*>(s.p + row * 128 + ((at / 8) ^ (row % 8)) * 16 + at % 8 * 2) = {
              Pack<T>::two(x[i][0], x[i][1]), Pack<T>::two(x[i][2], x[i][3])};
        }
        fence_async_proxy();
        barrier_sync(math_barrier, math_threads);

        if (j > begin && s.changed == stamp) {
#pragma unroll
          for (int k = 0; k < Tile::rows / 2; ++k) {
            const float factor = s.rescale[k / 4 * 8 + pair_row + k % 2];
#pragma unroll
            for (int i = 0; i < 4; ++i) o[i][k] *= factor;
          }
        }
        // O^T: this warpgroup's 256 latents
        const uint64_t probabilities = warp_operand_128b(smem_address(s.p)),
                       values = warp_operand_128b(smem_address(s.kv[buffer][4 * h]));
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_pin(o[i]);
        wgmma_fence();
        static_for<16>([&](auto i) {
          Product::template ss_at<i / 4 * box_bytes + i % 4 * 2048, i % 4 * 32, Major::mn, Major::k>(o[i / 4], values,
                                                                                                     probabilities, 1);
        });
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_pin(o[i]);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_address(&s.empty[buffer]));
      }
      if (blocks == 0) {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_address(&s.q_empty));
      }

      // ---- epilogue
#pragma unroll
      for (int k = row_threads / 2; k; k /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, k);
      const bool pair = Order::joins && shared_by_two(it);
      bool joins = pair && piece == 0;
      if (joins) {
        if (threadIdx.x == 0) s.splits.joined = wait_for_pieces(p, p.counters + it.counter, 1) != 0;
        barrier_sync(math_barrier, math_threads);
        joins = s.splits.joined;
      }
      const bool whole = it.pieces == 1 || joins;
      const int rows = it.rows;
      const int64_t slot_row = static_cast<int64_t>(partial_slot(it, piece)) * Tile::rows;
      const int64_t other_row = static_cast<int64_t>(partial_slot(it, 1)) * Tile::rows;
      const auto lse_at = [&](int i) { return partial_row(it.slot0, Tile::rows, row, it.pieces, i); };
      if (row_lane == 0) {
        if (sum == 0 && row < rows && limit > (block0 + begin) * block_tokens && lost_to_query(p, it.row0 + row))
          sum = NAN;
        float lse2 = sum == 0 ? -INFINITY : top + __log2f(sum), total = sum;  // NaN stays
        s.sum[row] = sum == 0 ? 0.0f : 1.0f / sum;
        if (row < rows) {
          if (joins) {
            const Join join(lse2, __ldcg(p.partial_lse + lse_at(1)));
            s.rescale[row] = join.first, s.other[row] = join.second;
            s.inverse[row] = join.inverse;
            lse2 = total = join.lse2;
          }
          if (whole) store_lse(p, it.row0 + row, lse2);
          else p.partial_lse[lse_at(piece)] = lse2;
          if (p.extras) {
            if (whole) (joins ? s.inverse : s.sum)[row] *= kept(p, it.row0 + row, lse2);
            if (p.peaks) {
              if (joins) peak = fmaxf(peak, __ldcg(p.partial_max + lse_at(1)));
              if (whole) store_max(p, it.row0 + row, peak, total);
              else p.partial_max[lse_at(piece)] = peak;
            }
          }
        }
      }
      barrier_sync(math_barrier, math_threads);
      constexpr int chunks_of_8 = Tile::rows / 8;
      const auto unit = [&](int64_t first_row, int i, int j) {  // of a partial
        return reinterpret_cast<float4*>(p.partial_out) + first_row * (width / 4) + j * 1024 + i * 256 + threadIdx.x;
      };
#pragma unroll
      for (int k = 0; k < Tile::rows / 2; ++k) {
        const float scale = s.sum[k / 4 * 8 + pair_row + k % 2];
#pragma unroll
        for (int i = 0; i < 4; ++i) o[i][k] *= scale;
      }
      if (!whole) {
#pragma unroll
        for (int j = 0; j < chunks_of_8; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (8 * j < rows)
              store_unit(unit(slot_row, i, j),
                         make_float4(o[i][4 * j], o[i][4 * j + 1], o[i][4 * j + 2], o[i][4 * j + 3]));
        if (end == blocks) publish<Order>(p, s.splits, it, part_of(it));
        return;
      }
      if (joins) {
#pragma unroll
        for (int j = 0; j < chunks_of_8; ++j) {
          float4 other[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) other[i] = 8 * j < rows ? __ldcg(unit(other_row, i, j)) : float4{};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float theirs[4] = {other[i].x, other[i].y, other[i].z, other[i].w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const int r = 8 * j + pair_row + k % 2;
              o[i][4 * j + k] = s.inverse[r] * Join::sum(s.rescale[r], o[i][4 * j + k], s.other[r], theirs[k]);
            }
          }
        }
        if (threadIdx.x == 0) p.counters[it.counter] = 0;
      }
      // 64 latents of each warpgroup at a time go through shared memory, to be stored in whole lines.
      constexpr int pitch = 132;
      static_assert(Tile::rows * pitch <= 2 * Tile::rows * Shared::score_pitch);
      float* staged = s.scores[0];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int k = 0; k < Tile::rows / 2; ++k)
          staged[(k / 4 * 8 + pair_row + k % 2) * pitch + h * 64 + warp_row + g + k % 4 / 2 * 8] = o[i][k];
        barrier_sync(math_barrier, math_threads);
#pragma unroll
        for (int r = warp; r < Tile::rows; r += 8) {
          if (r >= rows) break;
          const float4 v = *reinterpret_cast<const float4*>(staged + r * pitch + lane * 4);
          const int64_t at = (it.row0 + int64_t{r}) * width + lane / 16 * 256 + lane % 16 * 4 + i * 64;
          store_four<T>(p, at, v);
        }
        barrier_sync(math_barrier, math_threads);  // also before s.sum is written again
      }
    });
  }

  // ---- merge
  merge_split_tiles<Order, Tile::rows>(p, s.splits, s.split, blockIdx.x, s.kv[0][0], merge_bytes, part_of);
}

}  // namespace mla::cuda::latent
