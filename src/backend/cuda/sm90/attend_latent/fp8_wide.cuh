// attend_latent over caches of e4m3 for tiles of 64 rows, operands swapped and converted in registers as in the narrow
// kernel. One warpgroup makes scores and probabilities, a block ahead of two that sum values, 256 latents each.
#pragma once

#include "backend/cuda/sm90/attend_latent/fp8_rows.cuh"

namespace mla::cuda::latent {

constexpr int wide_fp8_threads = 512;

/// Units go through a ring of their own places, so that a block's first units may come before a whole block fits.
template <class Rows>
struct Fp8WideShared {
  static constexpr int rows = 64, buffers = Rows::scaled ? 1 : 2;  // of P
  static constexpr int fixed = 9 * rows * 128 + buffers * Rows::groups * rows * 128 + 6400;
  static constexpr int places = (232448 - fixed) / Rows::unit_bytes;
  alignas(1024) char q[9][rows * 128];
  union {
    alignas(1024) char p[buffers][Rows::groups][rows * 128];  // rows x 64 positions, swizzled
    float group_peak[4][Rows::groups][rows];                  // of a block, by warp; before P is written
    MergeSpace merge;
  };
  alignas(128) char ring[places][Rows::unit_bytes];
  float2 factor_shift[rows];  // of scores, to log2 units; what these are taken relative to
  int limit[rows];            // a row sees positions below
  float peak[4][rows], sum[4][rows];
  float growth[rows];
  float room[Rows::groups][rows];  // powers of two that bring probabilities times scales into f16's range
  float rescale[buffers][Rows::groups][rows], last[Rows::groups][rows];  // of outputs, before a block and in the end
  int changed[buffers];                                                  // is any of rescale not 1?
  alignas(16) Item item[4];
  Item split_item[2];  // a worker's pieces of split tiles, unless batch-invariant
  Split split;
  alignas(8) uint64_t full[places], empty[places], item_full[4], q_full, q_empty;
  uint64_t p_full[buffers], p_empty[buffers], last_full, last_empty;
};

template <class Rows>
__global__ void __launch_bounds__(wide_fp8_threads, 1)
    fp8_wide_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map) {
  using Shared = Fp8WideShared<Rows>;
  constexpr int n = Shared::rows, places = Shared::places, groups = Rows::groups;
  extern __shared__ __align__(1024) char shared_bytes[];
  Shared& s = *reinterpret_cast<Shared*>(shared_bytes);
  const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int w = warp % 4, g = lane / 4, c = lane % 4;
  enum : int { own = 2, first_queries = 3 };  // barriers: of the scoring warpgroup; of all three that compute

  if (threadIdx.x == 0) {
    for (int i = 0; i < places; ++i) {
      mbarrier_init(smem_address(&s.full[i]), 1);
      mbarrier_init(smem_address(&s.empty[i]), 12);
    }
    for (int i = 0; i < 4; ++i) mbarrier_init(smem_address(&s.item_full[i]), 1);
    mbarrier_init(smem_address(&s.q_full), 1);
    mbarrier_init(smem_address(&s.q_empty), 4);
    for (int i = 0; i < Shared::buffers; ++i) {
      mbarrier_init(smem_address(&s.p_full[i]), 1);
      mbarrier_init(smem_address(&s.p_empty[i]), 8);
    }
    mbarrier_init(smem_address(&s.last_full), 1);
    mbarrier_init(smem_address(&s.last_empty), 8);
    mbarrier_init_fence();
    tma_prefetch_map(q_map);
  }
  wait_for_previous_grids();
  if (warp == 12) {  // beside the barriers' birth
    const Split split = make_split<n>(p, blockIdx.x);
    if (lane == 0) s.split = split;
  }
  __syncthreads();
  allow_next_grid();

  // Queries of an item, by warps first, first + step, ..
  const auto convert_queries = [&](const Item& it, int first, int step) {
#pragma unroll 1
    for (int row = first; row < n; row += step) {
      const float back = convert_query_row<Rows, n>(s.q, row);
      if (lane == 0) {
        s.factor_shift[row] = make_float2(p.scale_log2 * back, -3e38f);
        s.limit[row] = min(it.context + p.by_heads.divide(it.first_row + row) + 1, it.positions);
      }
    }
    fence_async_proxy();
  };
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

  if (warpgroup == 3) {  // ---- load: a warp for each unit; the first also brings queries
    give_registers<40>();
    const int unit = warp - 12;
    Walk<n> walk(p, s.split, blockIdx.x);
    Item it;
    int block = 0, count = 0;
    bool more = walk.next(it);
    UnitRows<Rows> rows;
    if (more) rows = UnitRows<Rows>(p, it, unit);
    while (more) {
      Item following;
      UnitRows<Rows> following_rows;
      bool another = false, looked = false;
      const auto look_ahead = [&] {  // its lengths and page numbers are asked for while this item is copied
        looked = true;
        another = walk.next(following);
        if (!another) return;
        following_rows = UnitRows<Rows>(p, following, unit);
        if (unit == 0 && lane < 9) tma_prefetch_box(q_map, lane * 64, following.row0);
      };
      const auto start = [&] {  // the item and its queries
        mbarrier_wait(smem_address(&s.q_empty), (count & 1) ^ 1);
        if (lane == 0) {
          s.item[count & 3] = it;
          mbarrier_arrive(smem_address(&s.item_full[count & 3]));
          mbarrier_arrive_expect(smem_address(&s.q_full), 9 * n * 128);
        }
        __syncwarp();
        if (lane < 9) tma_load(smem_address(s.q[lane]), q_map, smem_address(&s.q_full), lane * 64, it.row0);
        __syncwarp();
      };
      // Queries wait for the last scores of the item before; some blocks of the cache go ahead of them.
      const int queries_at = unit ? -1 : min(it.blocks, count == 0 ? 0 : 1);
#pragma unroll 1
      for (int i = 0; i < it.blocks; ++i, ++block) {
        if (i == queries_at) start();
        const int place = place_of(block, unit);
        mbarrier_wait(smem_address(&s.empty[place]), lap_of(block, unit) ^ 1);
        load_unit(p, it, rows, i, unit, s.ring[place], smem_address(&s.full[place]));
        if (!looked && i > 0) look_ahead();
      }
      if (queries_at == it.blocks) start();
      if (!looked) look_ahead();
      ++count;
      it = following, rows = following_rows, more = another;
    }
    if (unit == 0) {
      mbarrier_wait(smem_address(&s.q_empty), (count & 1) ^ 1);
      if (lane == 0) {
        s.item[count & 3].blocks = -1;
        mbarrier_arrive(smem_address(&s.item_full[count & 3]));
      }
    }
    return;
  }

  if (warpgroup == 2) {  // ---- scores and probabilities
    give_registers<120>();
    constexpr int mine = n / 4;  // rows a thread has positions of
    const int thread = threadIdx.x % 128;
    // The thread's two positions in a block, p0 even and p0 + 1: rows g and g + 8 of the warp's 16 of S^T.
    const int unit = Rows::unit(g), chunk = 2 * w + Rows::odd_pair(g), p0 = unit_rows * unit + 2 * chunk;
    const bool swapped = Rows::swapped(g);
    const int first_at = (2 * chunk + swapped) * Rows::bytes + c * 16,
              second_at = (2 * chunk + 1 - swapped) * Rows::bytes + c * 16;
    // Probabilities: a thread's two positions are a word, 4 units a 16-byte chunk.
    int p_at[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) p_at[i] = (2 * c + i) * 128 + (chunk ^ (2 * c + i)) * 16 + unit * 4;
    int block = 0;  // of the CTA, counted

    for (int count = 0;; ++count) {
      mbarrier_wait(smem_address(&s.item_full[count & 3]), count >> 2 & 1);
      const Item& it = s.item[count & 3];
      const int blocks = it.blocks, block0 = it.block;
      if (blocks < 0) break;
      mbarrier_wait(smem_address(&s.q_full), count & 1);
      if constexpr (Rows::scaled)
        for (int at = thread; at < groups * n; at += 128) (&s.room[0][0])[at] = 0x1p126f;
      if (count == 0) {
        convert_queries(it, warp, 12);
        barrier_sync(first_queries, 384);
      } else {
        convert_queries(it, w, 4);
        barrier_sync(own, 128);
      }
      const int limit_all = s.limit[0];
      float sum[mine];  // of this thread's positions, of rows k / 2 * 8 + 2 c + k % 2
#pragma unroll
      for (int k = 0; k < mine; ++k) sum[k] = 0;
      if (blocks == 0) {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_address(&s.q_empty));
      }

#pragma unroll 1
      for (int j = 0; j < blocks; ++j, ++block) {
        const int buffer = block % Shared::buffers;
        wait_for_block(block);

        // S^T, two steps of 16 elements a batch: while one or two are multiplied the next is converted
        float d[n / 2];
        uint32_t a[3][8];
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
        float4 scale[2] = {};  // of the thread's positions
        if constexpr (!Rows::scaled) {
          load(0);
          convert(0, a[0]);
#pragma unroll
          for (int i = 0; i < 18; ++i) {
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 2; ++k)
              Wgmma<n, __half>::rs(d, a[i % 3] + 4 * k, queries(i / 2, i % 2 * 2 + k), i + k > 0);
            wgmma_commit();
            if (i < 17) convert(i + 1, a[(i + 1) % 3]);
            if (i % 2 == 0 && i < 16) load((i / 2 + 1) * 64);
            wgmma_wait<1>();
            if (i > 0) wgmma_pin(a[(i + 2) % 3]);
          }
          wgmma_wait<0>();
          wgmma_pin(d);
        } else {
          float e[n / 2];  // of a group
          const auto fold = [&](int group) {
            wgmma_wait<0>();
            wgmma_pin(e);
            const float f[2] = {reinterpret_cast<const float*>(&scale[0])[group],
                                reinterpret_cast<const float*>(&scale[1])[group]};
#pragma unroll
            for (int k = 0; k < n / 2; ++k) d[k] = fmaf(f[k % 4 / 2], e[k], d[k]);
          };
          scale[0] = *reinterpret_cast<const float4*>(from + first_at + Rows::scales_at - c * 16);
          scale[1] = *reinterpret_cast<const float4*>(from + second_at + Rows::scales_at - c * 16);
#pragma unroll
          for (int i = 0; i < 2; ++i) {  // the rope
            load(Rows::rope_at + i * 64);
            const uint32_t words[2][4] = {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
#pragma unroll
            for (int k = 0; k < 8; ++k) a[1 + i][k] = words[k % 2][k / 4 * 2 + k % 4 / 2];
            if (i == 1) load(0);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 2; ++k)
              Wgmma<n, __nv_bfloat16>::rs(d, a[1 + i] + 4 * k, queries(8, i * 2 + k), i + k > 0);
            wgmma_commit();
          }
          convert(0, a[0]);
          wgmma_wait<0>();
          wgmma_pin(d);
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            if (i % 4 == 0 && i > 0) fold(i / 4 - 1);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 2; ++k)
              Wgmma<n, __half>::rs(e, a[i % 3] + 4 * k, queries(i / 2, i % 2 * 2 + k), i % 4 + k > 0);
            wgmma_commit();
            if (i < 15) convert(i + 1, a[(i + 1) % 3]);
            if (i % 2 == 0 && i < 14) load((i / 2 + 1) * 64);
            wgmma_wait<1>();
            if (i > 0) wgmma_pin(a[(i + 2) % 3]);
          }
          fold(3);
        }
        release_block(block);
        if (j + 1 == blocks && lane == 0) mbarrier_arrive(smem_address(&s.q_empty));

        // Softmax. Element k of d: row k / 4 * 8 + 2 c + k % 2, the thread's position k % 4 / 2.
        const int base = (block0 + j) * block_tokens + p0;
        const bool masked = (block0 + j + 1) * block_tokens > limit_all;
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
        const auto store = [&] {  // to shared memory
#pragma unroll
          for (int k = 0; k < n / 2; k += k % 2 ? 3 : 1) {
            char* const to = s.p[buffer][0] + k / 4 * 1024 + p_at[k % 2];
            if constexpr (!Rows::scaled) {
              *reinterpret_cast<uint32_t*>(to) =
                  swapped ? Pack<__half>::two(v[k + 2], v[k]) : Pack<__half>::two(v[k], v[k + 2]);
            } else {
              const int row = k / 4 * 8 + 2 * c + k % 2;
              const float s0[4] = {scale[0].x, scale[0].y, scale[0].z, scale[0].w},
                          s1[4] = {scale[1].x, scale[1].y, scale[1].z, scale[1].w};
#pragma unroll
              for (int q = 0; q < 4; ++q) {
                const float w0 = v[k] * s0[q] * s.room[q][row], w1 = v[k + 2] * s1[q] * s.room[q][row];
                *reinterpret_cast<uint32_t*>(to + q * n * 128) = Pack<__half>::two(w0, w1);
                top = fmaxf(top, fmaxf(fabsf(w0), fabsf(w1)));
              }
            }
          }
          fence_async_proxy();
        };
        constexpr float most = 0x1p15f;  // of f16's range; maxima are brought to 2^7 when one is beyond
        mbarrier_wait(smem_address(&s.p_empty[buffer]), block / Shared::buffers & 1 ^ 1);
        store();
        const bool changed = barrier_any(own, 128, top > most);
        if (changed) {
#pragma unroll
          for (int k = 0; k < mine; ++k) {
            float best = fmaxf(d[k / 2 * 4 + k % 2], d[k / 2 * 4 + 2 + k % 2]);
#pragma unroll
            for (int m = 4; m < 32; m *= 2) best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, m));
            if (g == 0) s.peak[w][k / 2 * 8 + 2 * c + k % 2] = best;
          }
          barrier_sync(own, 128);
          if (thread < n) {
            const float best =
                fmaxf(fmaxf(s.peak[0][thread], s.peak[1][thread]), fmaxf(s.peak[2][thread], s.peak[3][thread]));
            const float old = s.factor_shift[thread].y, shift = best - old > 15 ? best - 7 : old;
            const float growth = exp2_approx(old - shift);
            s.factor_shift[thread].y = shift;
            s.growth[thread] = growth;
            if constexpr (!Rows::scaled) s.rescale[buffer][0][thread] = growth;
          }
          barrier_sync(own, 128);
#pragma unroll
          for (int k = 0; k < n / 2; ++k) {
            const int row = k / 4 * 8 + 2 * c + k % 2;
            v[k] = exp2_approx(d[k] - s.factor_shift[row].y);
            if (k % 4 < 2) sum[k / 4 * 2 + k % 2] *= s.growth[row];
          }
          if constexpr (Rows::scaled) {  // the same for each group's probabilities times scales, in powers of two
            const float s0[4] = {scale[0].x, scale[0].y, scale[0].z, scale[0].w},
                        s1[4] = {scale[1].x, scale[1].y, scale[1].z, scale[1].w};
#pragma unroll
            for (int k = 0; k < mine; ++k)
#pragma unroll
              for (int q = 0; q < 4; ++q) {
                const int at = k / 2 * 4 + k % 2;
                float best = fmaxf(fabsf(v[at] * s0[q]), fabsf(v[at + 2] * s1[q]));
#pragma unroll
                for (int m = 4; m < 32; m *= 2) best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, m));
                if (g == 0) s.group_peak[w][q][k / 2 * 8 + 2 * c + k % 2] = best;
              }
            barrier_sync(own, 128);
#pragma unroll
            for (int i = thread; i < groups * n; i += 128) {
              const int q = i / n, row = i % n;
              const float best = fmaxf(fmaxf(s.group_peak[0][q][row], s.group_peak[1][q][row]),
                                       fmaxf(s.group_peak[2][q][row], s.group_peak[3][q][row]));
              const float old = s.room[q][row], growth = s.growth[row];
              float room = old;
              if (best * old > most || growth != 1) {
                const float reach = fmaxf(best, growth * 0x1p7f / old);
                const int exponent = 127 + 7 + 126 - (__float_as_int(reach) >> 23);
                room = __int_as_float(min(max(exponent, 1), 253) << 23);
              }
              s.room[q][row] = room;
              s.rescale[buffer][q][row] = growth * room / old;
            }
            barrier_sync(own, 128);
          }
          store();
          barrier_sync(own, 128);
        }
        if (thread == 0) {
          s.changed[buffer] = changed;
          mbarrier_arrive(smem_address(&s.p_full[buffer]));
        }
#pragma unroll
        for (int k = 0; k < n / 2; ++k) sum[k / 4 * 2 + k % 2] += v[k];
      }

#pragma unroll
      for (int k = 0; k < mine; ++k) {
#pragma unroll
        for (int m = 4; m < 32; m *= 2) sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], m);
        if (g == 0) s.sum[w][k / 2 * 8 + 2 * c + k % 2] = sum[k];
      }
      barrier_sync(own, 128);
      mbarrier_wait(smem_address(&s.last_empty), (count & 1) ^ 1);
      if (thread < n) {
        const float all = s.sum[0][thread] + s.sum[1][thread] + (s.sum[2][thread] + s.sum[3][thread]);
        const float factor = all == 0 ? 0.0f : p.value_scale / all;
#pragma unroll
        for (int q = 0; q < groups; ++q) s.last[q][thread] = Rows::scaled ? factor / s.room[q][thread] : factor;
        if (thread < it.rows) {
          const float lse2 = all == 0 ? -INFINITY : s.factor_shift[thread].y + __log2f(all);
          if (it.pieces == 1) store_lse(p, it.row0 + thread, lse2);
          else p.partial_lse[static_cast<int64_t>(it.slot) * n + thread] = lse2;
        }
      }
      barrier_sync(own, 128);
      if (thread == 0) mbarrier_arrive(smem_address(&s.last_full));
    }
    return;
  }

  // ---- values
  take_registers<176>();
  constexpr int tiles = 4;  // of 64 latents
  const int h = warpgroup;
  // Matrix m of four has positions 16 u + 2 m + {0, 1} of all units u, and 16 latents.
  const int matrix_unit = lane % 8 / 2, matrix_at = (lane / 8 * 2 + lane % 2) * Rows::bytes + h * (width / 2) + w * 16;
  float o[tiles][n / 2];
  int block = 0, partials = 0;

  for (int count = 0;; ++count) {
    mbarrier_wait(smem_address(&s.item_full[count & 3]), count >> 2 & 1);
    const Item& it = s.item[count & 3];
    const int blocks = it.blocks;
    if (blocks < 0) break;
    if (count == 0) {
      mbarrier_wait(smem_address(&s.q_full), 0);
      convert_queries(it, warp, 12);
      barrier_arrive(first_queries, 384);
    }
#pragma unroll
    for (int i = 0; i < tiles; ++i)
#pragma unroll
      for (int k = 0; k < n / 2; ++k) o[i][k] = 0;

#pragma unroll 1
    for (int j = 0; j < blocks; ++j, ++block) {
      const int buffer = block % Shared::buffers;
      wait_for_block(block);
      const uint32_t matrices = smem_address(s.ring[place_of(block, matrix_unit)]) + matrix_at;
      uint32_t a[2][8], m[4];
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
      mbarrier_wait(smem_address(&s.p_full[buffer]), block / Shared::buffers & 1);
      if (s.changed[buffer]) {
#pragma unroll
        for (int k = 0; k < n / 2; k += k % 2 ? 3 : 1) {
          const int row = k / 4 * 8 + 2 * c + k % 2;
#pragma unroll
          for (int i = 0; i < tiles; ++i) {
            const float factor = s.rescale[buffer][Rows::scaled ? h * 2 + i / 2 : 0][row];
            o[i][k] *= factor, o[i][k + 2] *= factor;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < tiles; ++i) wgmma_pin(o[i]);
#pragma unroll
      for (int i = 0; i < 2 * tiles; ++i) {
        const uint64_t probability = operand_128b(smem_address(s.p[buffer][Rows::scaled ? h * 2 + i / 4 : 0]));
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
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem_address(&s.p_empty[buffer]));
    }

    mbarrier_wait(smem_address(&s.last_full), count & 1);
#pragma unroll
    for (int k = 0; k < n / 2; k += k % 2 ? 3 : 1) {
      const int row = k / 4 * 8 + 2 * c + k % 2;
#pragma unroll
      for (int i = 0; i < tiles; ++i) {
        const float factor = s.last[Rows::scaled ? h * 2 + i / 2 : 0][row];
        o[i][k] *= factor, o[i][k + 2] *= factor;
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem_address(&s.last_empty));
    const bool whole = it.pieces == 1;
    const int rows = it.rows;
    const int64_t out_row = whole ? it.row0 : static_cast<int64_t>(it.slot) * n;
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
        *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.out) + at) = Pack<__nv_bfloat16>::two(two.x, two.y);
      });
    } else {
      float* const to = whole ? static_cast<float*>(p.out) : p.partial_out;
      store([&](int64_t at, float2 two) { *reinterpret_cast<float2*>(to + at) = two; });
    }
    if (!whole) {
      if (threadIdx.x == 0 && !p.split_blocks) s.split_item[partials] = it;
      ++partials;
      publish(p, it.counter);
    }
  }

  // ---- merge
  barrier_sync(math_barrier, math_threads);  // P is no longer read
  if (p.split_blocks) {
    if (!partials) return;
    Walk<n> walk(p, s.split, blockIdx.x);
    Item it;
    while (walk.next(it))
      if (it.pieces > 1) merge_share<n>(p, it, it.rows, it.row0, 1, 0, s.merge);
  } else {
    for (int i = 0; i < partials; ++i) {
      const Item it = s.split_item[i];
      merge_share<n>(p, it, it.rows, it.row0, 1, 0, s.merge);
    }
  }
}

}  // namespace mla::cuda::latent
