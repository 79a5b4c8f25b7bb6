// Attention over caches of e4m3 with one scale for tiles of 64 rows (rows that carry scales are converted,
// wide.cuh), operands swapped and converted in registers as in the narrow kernel. Two math warpgroups sum 256 latents
// each and make the scores and probabilities of every second block.
#pragma once

#include "backend/cuda/sm90/attention/fp8_rows.cuh"

namespace mla::cuda::latent {

/// Units go through a ring of their own places, so that a block's first units may come before a whole block fits.
struct Fp8WideShared {
  static constexpr int rows = 64;
  static constexpr int fixed = (9 + 2) * rows * 128 + 6144;
  static constexpr int places = (232448 - fixed) / Fp8Rows::unit_bytes;
  alignas(1024) char q[9][rows * 128];
  alignas(1024) char p[2][rows * 128];  // of even blocks and of odd ones: rows x 64 positions, swizzled
  alignas(128) char ring[places][Fp8Rows::unit_bytes];
  float2 factor_shift[rows];  // of scores, to log2 units; what these are taken relative to
  int limit[rows];            // a row sees positions below
  float peak[4][rows], sum[2][4][rows];
  // Of sums and outputs before a block, by parity of the block, and whether any is not 1; of outputs in the end.
  float growth[2][rows], last[rows];
  int changed[2];
  int beyond[2][2];  // by warpgroup: of barrier_any
  alignas(16) Item item[2];
  Splits splits;
  Split split;
  alignas(8) uint64_t full[places], empty[places], q_full, q_empty, p_full[2];
};

template <bool invariant>
__global__ void __launch_bounds__(threads, 1)
    fp8_wide_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map) {
  using Rows = Fp8Rows;
  using Shared = Fp8WideShared;
  constexpr int n = Shared::rows, places = Shared::places;
  extern __shared__ __align__(1024) char shared_bytes[];
  Shared& s = *reinterpret_cast<Shared*>(shared_bytes);
  const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  using Order = RowOrder<n, invariant>;
  constexpr int merge_bytes = sizeof Shared::ring;
  const auto part_of = [](const Item& it) { return Part{it.rows, it.row0}; };
  const int w = warp % 4, g = lane / 4, c = lane % 4;
  constexpr int own = 2;  // barriers own + h: of math warpgroup h alone

  if (threadIdx.x == 0) {
    for (int i = 0; i < places; ++i) {
      mbarrier_init(smem_address(&s.full[i]), 1);
      mbarrier_init(smem_address(&s.empty[i]), 8);
    }
    mbarrier_init(smem_address(&s.q_full), 1);
    mbarrier_init(smem_address(&s.q_empty), 8);
    for (int i = 0; i < 2; ++i) mbarrier_init(smem_address(&s.p_full[i]), 128), s.beyond[i][0] = s.beyond[i][1] = 0;
    mbarrier_init_fence();
    s.splits.count = s.splits.merges[0] = s.splits.merges[1] = 0;
    tma_prefetch_map(q_map);
  }
  UnitLoader<Order, Rows> loader;
  if (warpgroup == 2) {
    loader = {p, q_map, s};
  } else if (warp == 1 && !p.starts) {
    prefetch_table(p);
  }
  __syncthreads();

  // Units of the CTA's block i.
  const auto place_of = [](int block, int unit) { return (block * units + unit) % places; };
  const auto lap_of = [](int block, int unit) { return (block * units + unit) / places & 1; };
  const auto wait_for_block = [&](int block) {
#pragma unroll
    for (int unit = 0; unit < units; ++unit)
      mbarrier_wait(smem_address(&s.full[place_of(block, unit)]), lap_of(block, unit));
  };
  const auto release_block = [&](int block) {
    __syncwarp();
    if (lane < units) mbarrier_arrive(smem_address(&s.empty[place_of(block, lane)]));
  };

  if (warpgroup == 2) {  // ---- load: a warp for each unit; the first also brings queries
    give_registers<40>();
    int block = 0;
    loader.run(p, q_map, s, 1, merge_bytes, part_of, [&](const Item& it, UnitRows<Rows>& rows, int i, int unit) {
      const int place = place_of(block, unit);
      mbarrier_wait(smem_address(&s.empty[place]), lap_of(block, unit) ^ 1);
      load_unit(p, it, rows, i, unit, s.ring[place], smem_address(&s.full[place]));
      ++block;
    });
    return;
  }

  // ---- math
  take_turn();
  if (warp == 0) load_first_queries<n>(s, q_map);
  take_registers<232>();
  constexpr int tiles = 4, mine = n / 4;  // output tiles of 64 latents; rows of S a thread has positions of
  const int h = warpgroup, thread = threadIdx.x % 128;
  // The thread's two positions in a block, p0 even and p0 + 1: rows g and g + 8 of the warp's 16 of S^T.
  const int unit = Rows::unit(g), chunk = 2 * w + Rows::odd_pair(g), p0 = unit_rows * unit + 2 * chunk;
  const bool swapped = Rows::swapped(g);
  const int first_at = (2 * chunk + swapped) * Rows::bytes + c * 16,
            second_at = (2 * chunk + 1 - swapped) * Rows::bytes + c * 16;
  // Probabilities: a thread's two positions are a word, 4 units a 16-byte chunk.
  int p_at[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) p_at[i] = (2 * c + i) * 128 + (chunk ^ (2 * c + i)) * 16 + unit * 4;
  // Matrix m of four has positions 16 u + 2 m + {0, 1} of all units u, and 16 latents.
  const int matrix_unit = lane % 8 / 2, matrix_at = (lane / 8 * 2 + lane % 2) * Rows::bytes + h * (width / 2) + w * 16;
  float o[tiles][n / 2], d[n / 2];
  float sum[2];  // of this warp's positions, of rows 8 g + 2 c + {0, 1}
  uint32_t a[2][8];
  constexpr float no_shift = -3e38f;
  int blocks_before = 0, made0 = 0, made1 = 0;  // of the CTA so far; P by each warpgroup

  for (int count = 0;; ++count) {
    mbarrier_wait(smem_address(&s.q_full), count & 1);
    const Item& it = s.item[count & 1];
    const int item_blocks = it.blocks;
    if (item_blocks < 0) break;
#pragma unroll 1
    for (int row = warp; row < n; row += 8) {
      const float back = convert_query_row<Rows, n>(s.q, row);
      if (lane == 0) {
        s.factor_shift[row] = make_float2(p.scale_log2 * given(p.q_scale) * given(p.k_scale) * back, no_shift);
        s.limit[row] = min(it.context + p.by_heads.divide(it.first_row + row) + 1, it.positions);
      }
    }
    fence_async_proxy();
    barrier_sync(math_barrier, math_threads);
    for_pieces<invariant>(p, it, item_blocks, [&](int piece, int begin, int end) {
      const int blocks = end - begin, block0 = it.block + begin;
      const bool last = end == item_blocks;
      if (invariant && begin) {
        if (threadIdx.x < n) s.factor_shift[thread].y = no_shift;
        barrier_sync(math_barrier, math_threads);
      }
#pragma unroll
      for (int i = 0; i < tiles; ++i)
#pragma unroll
        for (int k = 0; k < n / 2; ++k) o[i][k] = 0;
#pragma unroll
      for (int k = 0; k < 2; ++k) sum[k] = 0;
      int changes = 0;  // of maxima, by this warpgroup
      if (last && h >= blocks) {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_address(&s.q_empty));
      }

      const auto scores = [&](int j) {  // to d
        const int block = blocks_before + j;
        wait_for_block(block);
        // S^T, two steps of 16 elements a batch: while one or two are multiplied the next is converted
        const char* from = s.ring[place_of(block, unit)];
        uint4 x, y;  // 16 bytes of each of the thread's rows: a box of e4m3
        const auto load = [&](int at) {
          x = *reinterpret_cast<const uint4*>(from + first_at + at);
          y = *reinterpret_cast<const uint4*>(from + second_at + at);
        };
        const auto convert = [&](int i, uint32_t(&to)[8]) {
          const uint32_t words[2][4] = {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            const uint32_t four = words[k % 2][i % 2 * 2 + k / 4];
            to[k] = k % 4 < 2 ? e4m3_low(four) : e4m3_high(four);
          }
        };
        const auto queries = [&](int box, int at) {
          return operand_advance(operand_128b(smem_address(s.q[box])), at * 32);
        };
        load(0);
        convert(0, a[0]);
#pragma unroll
        for (int i = 0; i < 18; ++i) {
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 2; ++k)
            Wgmma<n, __half>::rs(d, a[i % 2] + 4 * k, queries(i / 2, i % 2 * 2 + k), i + k > 0);
          wgmma_commit();
          wgmma_wait<1>();
          if (i > 0) wgmma_pin(a[(i + 1) % 2]);
          if (i < 17) convert(i + 1, a[(i + 1) % 2]);
          if (i % 2 == 0 && i < 16) load((i / 2 + 1) * 64);
        }
        wgmma_wait<0>();
        wgmma_pin(d);
      };
      const auto softmax = [&](int j) {  // d to P
        const int block = blocks_before + j;
        // Softmax. Element k of d: row k / 4 * 8 + 2 c + k % 2, the thread's position k % 4 / 2.
        const int base = (block0 + j) * block_tokens + p0;
        const bool masked = (block0 + j + 1) * block_tokens > s.limit[0];
        float v[n / 2], top = 0;
#pragma unroll
        for (int k = 0; k < n / 2; k += k % 2 ? 3 : 1) {
          const int row = k / 4 * 8 + 2 * c + k % 2;
          const float2 fs = s.factor_shift[row];
          d[k] *= fs.x, d[k + 2] *= fs.x;
          if (masked) {
            if (base + swapped >= s.limit[row]) d[k] = -INFINITY;
            if (base + 1 - swapped >= s.limit[row]) d[k + 2] = -INFINITY;
          }
          v[k] = exp2_approx(d[k] - fs.y), v[k + 2] = exp2_approx(d[k + 2] - fs.y);
          top = fmaxf(top, fmaxf(v[k], v[k + 2]));
        }
        if (masked) {
          const int hidden = s.limit[0], at = (block0 + j) * block_tokens + p0;
          if (hidden < it.positions) {
            char* const from = s.ring[place_of(block, unit)];
            if (at + swapped >= hidden) zero_nan_codes(from + first_at);
            if (at + 1 - swapped >= hidden) zero_nan_codes(from + second_at);
          }
        }
        const auto store = [&] {  // to shared memory
#pragma unroll
          for (int k = 0; k < n / 2; k += k % 2 ? 3 : 1) {
            *reinterpret_cast<uint32_t*>(s.p[j % 2] + k / 4 * 1024 + p_at[k % 2]) =
                swapped ? Pack<__half>::two(v[k + 2], v[k]) : Pack<__half>::two(v[k], v[k + 2]);
          }
          fence_async_proxy();
        };
        constexpr float most = 0x1p15f;  // of f16's range; maxima are brought to 2^7 when one is beyond
        store();  // P of the block before last is free: the other warpgroup used it before it made that of the last
        const bool changed = barrier_any(own + h, 128, top > most, s.beyond[h], block + 1);
        if (changed) {
          ++changes;
#pragma unroll
          for (int k = 0; k < mine; ++k) {
            float best = fmaxf(d[k / 2 * 4 + k % 2], d[k / 2 * 4 + 2 + k % 2]);
#pragma unroll
            for (int m = 4; m < 32; m *= 2) best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, m));
            if (g == 0) s.peak[w][k / 2 * 8 + 2 * c + k % 2] = best;
          }
          barrier_sync(own + h, 128);
          if (thread < n) {
            const float best =
                fmaxf(fmaxf(s.peak[0][thread], s.peak[1][thread]), fmaxf(s.peak[2][thread], s.peak[3][thread]));
            const float old = s.factor_shift[thread].y, shift = best - old > 15 ? best - 7 : old;
            const float growth = exp2_approx(old - shift);
            s.factor_shift[thread].y = shift;
            s.growth[j & 1][thread] = growth;
          }
          barrier_sync(own + h, 128);
#pragma unroll
          for (int k = 0; k < n / 2; ++k) {
            const int row = k / 4 * 8 + 2 * c + k % 2;
            v[k] = exp2_approx(d[k] - s.factor_shift[row].y);
          }
#pragma unroll
          for (int k = 0; k < 2; ++k) sum[k] *= s.growth[j & 1][8 * g + 2 * c + k];
          store();
          barrier_sync(own + h, 128);
        }
        // Each for itself, though all are past a barrier: racecheck credits an arrival to the arriving thread alone.
        if (thread == 0) s.changed[j & 1] = changed;
        mbarrier_arrive(smem_address(&s.p_full[j & 1]));
        // Sums over the warp's positions: each exchange halves the rows that a lane goes on with.
        float part[mine];
#pragma unroll
        for (int k = 0; k < mine; ++k) part[k] = v[k / 2 * 4 + k % 2] + v[k / 2 * 4 + k % 2 + 2];
#pragma unroll
        for (int step = 0; step < 3; ++step) {
          const int half = mine >> (step + 1);
          const bool upper = lane & 16 >> step;
#pragma unroll
          for (int k = 0; k < mine / 2; ++k) {
            if (k >= half) break;
            const float send = upper ? part[k] : part[k + half];
            part[k] = (upper ? part[k + half] : part[k]) + __shfl_xor_sync(0xffffffffu, send, 16 >> step);
          }
        }
        sum[0] += part[0], sum[1] += part[1];
      };
      // Sums this warpgroup's latents of a block whose P is there.
      const auto values = [&](int j, bool others) {
        const int block = blocks_before + j;
        wait_for_block(block);
        mbarrier_wait(smem_address(&s.p_full[j & 1]), (j & 1 ? made1 : made0) + j / 2 & 1);
        const uint32_t matrices = smem_address(s.ring[place_of(block, matrix_unit)]) + matrix_at;
        uint32_t m[4];
        const auto load_values = [&](int i) {  // 32 positions of 16 latents: a batch
          load_matrix_x4_transposed(matrices + i / 2 * 64 + i % 2 * (unit_rows / 2 * Rows::bytes), m[0], m[1], m[2],
                                    m[3]);
        };
        const auto convert_values = [&](uint32_t(&to)[8]) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const uint32_t pairs = __byte_perm(m[k], 0, 0x3120);  // both positions of a latent together
            to[2 * k] = e4m3_low(pairs), to[2 * k + 1] = e4m3_high(pairs);
          }
        };
        load_values(0);
        convert_values(a[0]);
        load_values(1);
        if (s.changed[j & 1]) {
          if (others)
            for (int k = 0; k < 2; ++k) sum[k] *= s.growth[j & 1][8 * g + 2 * c + k];
#pragma unroll
          for (int k = 0; k < n / 2; k += k % 2 ? 3 : 1) {
            const int row = k / 4 * 8 + 2 * c + k % 2;
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
              const float factor = s.growth[j & 1][row];
              o[i][k] *= factor, o[i][k + 2] *= factor;
            }
          }
        }
#pragma unroll
        for (int i = 0; i < tiles; ++i) wgmma_pin(o[i]);
#pragma unroll
        for (int i = 0; i < 2 * tiles; ++i) {
          const uint64_t probability = operand_128b(smem_address(s.p[j % 2]));
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 2; ++k)
            Wgmma<n, __half>::rs(o[i / 2], a[i % 2] + 4 * k, operand_advance(probability, i % 2 * 64 + k * 32), 1);
          wgmma_commit();
          wgmma_wait<1>();
          if (i > 0) wgmma_pin(a[(i + 1) % 2]);
          if (i + 1 < 2 * tiles) convert_values(a[(i + 1) % 2]);
          if (i + 2 < 2 * tiles) load_values(i + 2);
        }
        release_block(block);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < tiles; ++i) wgmma_pin(o[i]);
        wgmma_pin(a[0]), wgmma_pin(a[1]);
      };

#pragma unroll 1
      for (int j = h; j < blocks + h; j += 2) {
        if (j < blocks) {
          scores(j);
          if (last && j + 2 >= blocks) {
            __syncwarp();
            if (lane == 0) mbarrier_arrive(smem_address(&s.q_empty));
          }
        }
        if (j > 0) values(j - 1, true);
        if (j < blocks) {
          softmax(j);
          values(j, false);
        }
      }
      if (h == 0 && blocks % 2 == 0 && blocks > 0) values(blocks - 1, true);
      blocks_before += blocks, made0 += (blocks + 1) / 2, made1 += blocks / 2;
      even_barriers(own + h, changes, 3, h ? blocks % 2 : 0);

      // ---- epilogue
#pragma unroll
      for (int k = 0; k < 2; ++k) s.sum[h][w][8 * g + 2 * c + k] = sum[k];
      barrier_sync(math_barrier, math_threads);
      if (threadIdx.x < n) {
        float all = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) all += s.sum[i / 4][i % 4][thread];
        if (all == 0 && thread < it.rows && s.limit[thread] > block0 * block_tokens &&
            lost_to_query(p, it.row0 + thread))
          all = NAN;
        const float lse2 = all == 0 ? -INFINITY : s.factor_shift[thread].y + __log2f(all),
                    factor = all == 0 ? 0.0f
                                      : p.value_scale * given(p.k_scale) / all *
                                            (it.pieces == 1 ? kept(p, it.row0 + thread, lse2) : 1.0f);
        s.last[thread] = factor;
        if (thread < it.rows) {
          if (it.pieces == 1) store_lse(p, it.row0 + thread, lse2);
          else p.partial_lse[partial_row(it.slot0, n, thread, it.pieces, piece)] = lse2;
        }
      }
      barrier_sync(math_barrier, math_threads);
#pragma unroll
      for (int k = 0; k < n / 2; k += k % 2 ? 3 : 1) {
        const int row = k / 4 * 8 + 2 * c + k % 2;
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
          const float factor = s.last[row];
          o[i][k] *= factor, o[i][k + 2] *= factor;
        }
      }
      const bool whole = it.pieces == 1;
      const int rows = it.rows;
      const int64_t out_row = whole ? it.row0 : static_cast<int64_t>(partial_slot(it, piece)) * n;
      // Lanes of a row have 16 latents in a row: whole sectors.
      const int column = h * (width / 2) + w * 16 + 2 * g;
      const auto store = [&](auto put) {  // put(offset, two values)
#pragma unroll
        for (int k = 0; k < n / 2; k += k % 2 ? 3 : 1) {
          const int row = k / 4 * 8 + 2 * c + k % 2;
          if (row >= rows) continue;
#pragma unroll
          for (int i = 0; i < tiles; ++i)
            put((out_row + row) * width + column + i * 64, make_float2(o[i][k], o[i][k + 2]));
        }
      };
      if (whole && !p.out_f32) {
        store([&](int64_t at, float2 two) {
          *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.out) + at) =
              Pack<__nv_bfloat16>::two(two.x, two.y);
        });
      } else {
        float* const to = whole ? static_cast<float*>(p.out) : p.partial_out;
        store([&](int64_t at, float2 two) { *reinterpret_cast<float2*>(to + at) = two; });
      }
      if (!whole && last) publish<Order>(p, s.splits, it, part_of(it));
    });
  }

  // ---- merge
  merge_split_tiles<Order, n>(p, s.splits, s.split, blockIdx.x, s.ring[0], merge_bytes, part_of);
}

}  // namespace mla::cuda::latent
