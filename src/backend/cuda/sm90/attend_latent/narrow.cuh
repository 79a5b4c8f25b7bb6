// attend_latent for tiles of 16 or 32 rows: operands swapped, so that rows are wgmma's N and need no padding to 64.
//   S^T[64 positions, N] = K Q^T,  O^T[512, N] += V^T P^T
#pragma once

#include "backend/cuda/sm90/attend_latent/load.cuh"
#include "backend/cuda/sm90/attend_latent/math.cuh"

namespace mla::cuda::latent {

// Tile: a struct of constants, one a kernel.
struct Narrow16 {
  static constexpr int rows = 16;   // wgmma's N
  static constexpr int boxes = 24;  // ring of 64 x 64 cache boxes, 8 KB each; a block takes 9 in turn
};
struct Narrow32 {
  static constexpr int rows = 32, boxes = 20;
};

template <class Tile>
struct NarrowShared {
  static constexpr int score_pitch = block_tokens + 4;
  alignas(1024) char ring[Tile::boxes][box_bytes];
  alignas(1024) char q[9][Tile::rows * 128];
  alignas(1024) char p[Tile::rows * 128];  // P: rows x 64 positions, swizzled
  union alignas(16) {
    float scores[2][Tile::rows * score_pitch];  // each warpgroup's half of the 576 products, transposed
    MergeSpace merge;
  };
  float rescale[Tile::rows], sum[Tile::rows];
  alignas(16) Item item[2];
  Item split_item[2];  // a worker's pieces of split tiles, unless batch-invariant
  Split split;
  int changed;  // the CTA's latest block whose maxima moved, counted from 1
  alignas(8) uint64_t full[Tile::boxes], empty[Tile::boxes], q_full, q_empty;
};

template <class Tile, class T>
__global__ void __launch_bounds__(threads, 1)
    narrow_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map) {
  using Shared = NarrowShared<Tile>;
  extern __shared__ __align__(1024) char shared_bytes[];
  Shared& s = *reinterpret_cast<Shared*>(shared_bytes);
  const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::boxes; ++i) {
      mbarrier_init(smem_address(&s.full[i]), 128);
      mbarrier_init(smem_address(&s.empty[i]), 4);  // warps; a rope box is released by the last of both warpgroups
    }
    mbarrier_init(smem_address(&s.q_full), 1);
    mbarrier_init(smem_address(&s.q_empty), 8);
    mbarrier_init_fence();
    s.changed = 0;
    tma_prefetch_map(q_map);
  }
  if (warp == 8) {  // beside the barriers' birth and the previous kernel's end
    const Split split = make_split<Tile::rows>(p, blockIdx.x);
    if (lane == 0) s.split = split;
  }
  __syncthreads();

  if (warpgroup == 2) {  // ---- load
    Walk<Tile::rows> walk(p, s.split, blockIdx.x);
    Item it;
    RowCopies rows;
    int slot = 0, lap = 1;  // lap: parity of the slot's empty barrier to wait for
    int count = 0;
    bool more = walk.next(it);
    if (more) rows = RowCopies(p, it);
    wait_for_previous_grids();
    while (more) {
      // While every worker copies, a load waits for all copies before it, some 10000 cycles: the next item's lengths,
      // page numbers and queries are asked for while this item is copied.
      Item following;
      RowCopies following_rows;
      bool another = false, looked = false;
      const auto look_ahead = [&] {
        looked = true;
        another = walk.next(following);
        if (!another) return;
        following_rows = RowCopies(p, following);
        if (warp == 8 && lane < 9) tma_prefetch_box(q_map, lane * 64, following.row0);
      };
      const auto start = [&] {  // the item's queries
        if (warp != 8) return;
        mbarrier_wait(smem_address(&s.q_empty), (count & 1) ^ 1);
        if (lane == 0) {
          s.item[count & 1] = it;
          mbarrier_arrive_expect(smem_address(&s.q_full), 9 * Tile::rows * 128);
        }
        __syncwarp();
        if (lane < 9) tma_load(smem_address(s.q[lane]), q_map, smem_address(&s.q_full), lane * 64, it.row0);
        __syncwarp();
      };
      // Queries wait for the last scores of the item before; two blocks of the cache go ahead of them.
      const int queries_at = it.block + min(it.blocks, count == 0 ? 1 : 2), end = it.block + it.blocks;
      const auto slot_of_column = [&](int column) {
        const int b = column == 8 ? 8 : (column % 4) * 2 + column / 4;
        return slot + b < Tile::boxes ? slot + b : slot + b - Tile::boxes;
      };
      for (int j = it.block; j < end; ++j) {
        if (j == queries_at) start();
        for (int b = 0; b < 9; ++b) {
          const int mine = slot + b < Tile::boxes ? slot + b : slot + b - Tile::boxes;
          mbarrier_wait(smem_address(&s.empty[mine]), mine < slot ? lap ^ 1 : lap);
        }
        rows.copy<0, 9>(p, warp - 8, 4, [&](int column) { return smem_address(s.ring[slot_of_column(column)]); });
        rows.advance(p, j + 1);
        for (int column = 0; column < 9; ++column)
          mbarrier_arrive_after_cp_async(smem_address(&s.full[slot_of_column(column)]));
        slot += 9;
        if (slot >= Tile::boxes) slot -= Tile::boxes, lap ^= 1;
        if (!looked && j > it.block + 1) look_ahead();
      }
      if (queries_at == end) start();
      if (!looked) look_ahead();
      ++count;
      it = following, rows = following_rows, more = another;
    }
    if (warp == 8) {
      mbarrier_wait(smem_address(&s.q_empty), (count & 1) ^ 1);
      if (lane == 0) {
        s.item[count & 1].blocks = -1;
        mbarrier_arrive(smem_address(&s.q_full));
      }
    }
    return;
  }

  // ---- math
  wait_for_previous_grids();
  allow_next_grid();
  constexpr int row_threads = math_threads / Tile::rows, chunks = Tile::rows / 16;  // of 4 positions a thread
  const int h = warpgroup, g = lane / 4, pair = lane % 4 * 2, warp_row = warp % 4 * 16;
  const int row = threadIdx.x / row_threads, row_lane = threadIdx.x % row_threads;
  float o[4][Tile::rows / 2];
  int first_slot = 0, lap = 0;  // of the block; parity of its full barriers
  int stamp = 0;                // blocks so far
  int partials = 0;
  const auto slot_of = [&](int b, int& parity) {
    int slot = first_slot + b;
    parity = lap;
    if (slot >= Tile::boxes) slot -= Tile::boxes, parity ^= 1;
    return slot;
  };

  // Before the first item, one of no rows, so that the code below is fetched while the first copies are on their way.
  for (int count = -1;; ++count) {
    const bool dry = count < 0;
    if (!dry) mbarrier_wait(smem_address(&s.q_full), count & 1);
    const Item& it = s.item[count & 1];
    if (!dry && it.blocks < 0) break;
    const int blocks = dry ? 1 : it.blocks, block0 = dry ? 0 : it.block, positions = dry ? block_tokens : it.positions;
    // Row sees positions below:
    const int limit = dry ? 0 : min(it.context + p.by_heads.divide(it.first_row + row) + 1, positions);
    if (!dry) convert_queries<T>(&s.q[0][0], 9 * Tile::rows * 128);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int k = 0; k < Tile::rows / 2; ++k) o[i][k] = 0;
    float top = -INFINITY, sum = 0;  // top: log2 units; sum: of this thread's positions

    for (int j = 0; j < blocks; ++j) {
      ++stamp;
      int parity;
      float d[Tile::rows / 2];
      // S^T: this warpgroup's four boxes and half of the rope box
      for (int i = 0; i < 5 && !dry; ++i) {
        const int slot = slot_of(i < 4 ? 2 * i + h : 8, parity);
        mbarrier_wait(smem_address(&s.full[slot]), parity);
      }
      fence_async_proxy();
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 5; ++i) {
        const int b = i < 4 ? 2 * i + h : 8, column = i < 4 ? 4 * h + i : 8;
        const int slot = slot_of(b, parity);
        const uint64_t keys = operand_128b(smem_address(s.ring[slot])),
                       queries = operand_128b(smem_address(s.q[column]));
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (i == 4 && k >= 2) break;
          const int step = (i == 4 ? 2 * h : 0) + k;
          Wgmma<Tile::rows, T>::ss(d, operand_advance(keys, step * 32), operand_advance(queries, step * 32), i + k > 0);
        }
      }
      wgmma_commit();
      const int valid = positions - (block0 + j) * block_tokens;
      if (valid < block_tokens) {  // what lies past the sequence must not be multiplied, not even by 0
        for (int i = 0; i < 4; ++i) {
          const int slot = slot_of(2 * i + h, parity);
          for (int at = valid * 8 + threadIdx.x % 128; at < block_tokens * 8; at += 128)
            *reinterpret_cast<uint4*>(s.ring[slot] + at * 16) = {0, 0, 0, 0};
        }
        fence_async_proxy();
      }
      wgmma_wait<0>();
      wgmma_pin(d);
      if (j == blocks - 1) {
        __syncwarp();
        if (lane == 0 && !dry) mbarrier_arrive(smem_address(&s.q_empty));
      }
#pragma unroll
      for (int k = 0; k < Tile::rows / 2; ++k)
        s.scores[h][(k / 4 * 8 + pair + k % 2) * Shared::score_pitch + warp_row + g + k % 4 / 2 * 8] = d[k];
      barrier_sync(math_barrier, math_threads);

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

      if (j > 0 && s.changed == stamp) {
#pragma unroll
        for (int k = 0; k < Tile::rows / 2; ++k) {
          const float factor = s.rescale[k / 4 * 8 + pair + k % 2];
#pragma unroll
          for (int i = 0; i < 4; ++i) o[i][k] *= factor;
        }
      }
      // O^T: this warpgroup's 256 latents
      const uint64_t probabilities = operand_128b(smem_address(s.p));
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_pin(o[i]);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint64_t values = operand_128b(smem_address(s.ring[slot_of(2 * i + h, parity)]));
#pragma unroll
        for (int k = 0; k < 4; ++k)
          Wgmma<Tile::rows, T>::template ss<Major::mn, Major::k>(o[i], operand_advance(values, k * 2048),
                                                                 operand_advance(probabilities, k * 32), 1);
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_pin(o[i]);
      if (dry) break;
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) mbarrier_arrive(smem_address(&s.empty[slot_of(2 * i + h, parity)]));
        // The rope box was read before the barriers above.
        if (h == 0) mbarrier_arrive(smem_address(&s.empty[slot_of(8, parity)]));
      }
      first_slot += 9;
      if (first_slot >= Tile::boxes) first_slot -= Tile::boxes, lap ^= 1;
    }
    if (blocks == 0) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem_address(&s.q_empty));
    }

    // ---- epilogue
#pragma unroll
    for (int k = row_threads / 2; k; k /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, k);
    // Of a tile on the line that two workers share, one has its piece done at its start, the other joins it to what it
    // holds at its end.
    const bool shared = !dry && it.pieces == 2 && it.slot_step == 2, joins = shared && it.piece == 0;
    const bool whole = !dry && (it.pieces == 1 || joins);
    const int rows = dry ? 0 : it.rows;
    const int64_t slot_row = dry ? 0 : static_cast<int64_t>(it.slot) * Tile::rows;
    const int64_t other_row = joins ? static_cast<int64_t>(partial_slot(it, 1)) * Tile::rows : 0;
    if (joins) {
      if (threadIdx.x == 0) wait_for_count(p.counters + it.counter, 1), p.counters[it.counter] = 0;
      barrier_sync(math_barrier, math_threads);
    }
    if (row_lane == 0) {
      float inverse = sum > 0 ? 1.0f / sum : 0.0f, lse2 = sum > 0 ? top + __log2f(sum) : -INFINITY;
      if (row < rows) {
        if (joins) {
          const float other = __ldcg(p.partial_lse + other_row + row), most = fmaxf(lse2, other);
          const float shift = most == -INFINITY ? 0.0f : most;
          const float mine = exp2_approx(lse2 - shift), its = exp2_approx(other - shift), all = mine + its;
          inverse *= all > 0 ? mine / all : 0.0f;
          s.rescale[row] = all > 0 ? its / all : 0.0f;
          lse2 = all > 0 ? most + __log2f(all) : -INFINITY;
        }
        if (whole) store_lse(p, it.row0 + row, lse2);
        else p.partial_lse[slot_row + row] = lse2;
      }
      s.sum[row] = inverse;
    }
    const int lane_column = lane / 16 * 256 + lane % 16 * 4;
    float4 others[Tile::rows / 8];  // of the 64 latents at hand
    const auto load_others = [&](int i) {
#pragma unroll
      for (int m = 0; m < Tile::rows / 8; ++m)
        if (joins && warp + 8 * m < rows)
          others[m] = __ldcg(reinterpret_cast<const float4*>(p.partial_out + (other_row + warp + 8 * m) * width +
                                                             lane_column + i * 64));
    };
    load_others(0);
    barrier_sync(math_barrier, math_threads);
    // 64 latents of each warpgroup at a time go through shared memory, to be stored in whole lines.
    constexpr int pitch = 132;
    static_assert(Tile::rows * pitch <= 2 * Tile::rows * Shared::score_pitch);
    float* staged = s.scores[0];
    float scale[Tile::rows / 4];
#pragma unroll
    for (int k = 0; k < Tile::rows / 4; ++k) scale[k] = s.sum[k / 2 * 8 + pair + k % 2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int k = 0; k < Tile::rows / 2; ++k)
        staged[(k / 4 * 8 + pair + k % 2) * pitch + h * 64 + warp_row + g + k % 4 / 2 * 8] =
            o[i][k] * scale[k / 4 * 2 + k % 2];
      barrier_sync(math_barrier, math_threads);
#pragma unroll
      for (int m = 0; m < Tile::rows / 8; ++m) {
        const int r = warp + 8 * m;
        float4 v = *reinterpret_cast<const float4*>(staged + r * pitch + lane * 4);
        const int column = lane_column + i * 64;
        if (r < rows) {
          if (joins) {
            const float w = s.rescale[r];
            v.x += w * others[m].x, v.y += w * others[m].y, v.z += w * others[m].z, v.w += w * others[m].w;
          }
          if (!whole) *reinterpret_cast<float4*>(p.partial_out + (slot_row + r) * width + column) = v;
          else if (p.out_f32)
            *reinterpret_cast<float4*>(static_cast<float*>(p.out) + (it.row0 + int64_t{r}) * width + column) = v;
          else
            *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + (it.row0 + int64_t{r}) * width + column) = {
                Pack<__nv_bfloat16>::two(v.x, v.y), Pack<__nv_bfloat16>::two(v.z, v.w)};
        }
      }
      if (i < 3) {
        load_others(i + 1);
        barrier_sync(math_barrier, math_threads);
      }
    }
    if (dry) {
      Item none{};
      none.pieces = 2, none.slot0 = 1, none.slot_step = 2;
      barrier_sync(math_barrier, math_threads);
      merge_share<Tile::rows>(p, none, 1, 0, 1, 0, s.merge, true);
    } else if (!whole) {
      if (!shared) {
        if (threadIdx.x == 0 && !p.split_blocks) s.split_item[partials] = it;
        ++partials;
      }
      publish(p, it.counter);
    } else {
      barrier_sync(math_barrier, math_threads);  // s.sum is written again
    }
  }

  // ---- merge
  if (p.split_blocks) {
    if (!partials) return;
    Walk<Tile::rows> walk(p, s.split, blockIdx.x);
    Item it;
    while (walk.next(it))
      if (it.pieces > 1) merge_share<Tile::rows>(p, it, it.rows, it.row0, 1, 0, s.merge);
  } else {
    for (int i = 0; i < partials; ++i) {
      const Item it = s.split_item[i];
      merge_share<Tile::rows>(p, it, it.rows, it.row0, 1, 0, s.merge);
    }
  }
}

}  // namespace mla::cuda::latent
