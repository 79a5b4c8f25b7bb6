// Attention over caches of e4m3 for tiles of 16 or 32 rows: the narrow kernel's swapped operands, S^T = K Q^T and
// O^T = V^T P^T, with K and V converted to f16 in registers on their way to the matrix units; no 16-bit copy of the
// cache is made. Two math warpgroups take blocks in turn and know of each other only at an item's ends.
#pragma once

#include "backend/cuda/sm90/attention/fp8_rows.cuh"

namespace mla::cuda::latent {

// Tile: a struct of constants, one a kernel.
struct Fp8Tile16 {
  static constexpr int rows = 16;  // wgmma's N
  // Steps of 16 elements that are multiplied as a batch, and batches that have registers.
  static constexpr int steps = 2, buffers = 4;
};
struct Fp8Tile32 {
  static constexpr int rows = 32, steps = 4, buffers = 2;
};

template <class Rows, class Tile>
struct Fp8NarrowLayout {
  static constexpr int slot_bytes = units * Rows::unit_bytes, pitch = 132;  // of staged outputs
  static constexpr int q_bytes = 9 * Tile::rows * 128, rest_bytes = Rows::scaled ? 5120 : 3072;
  static constexpr int p_bytes = 2 * Rows::groups * Tile::rows * 128, staged_bytes = 2 * Tile::rows * pitch * 4;
  static constexpr int fit =
      (232448 - rest_bytes - q_bytes - (p_bytes > staged_bytes ? p_bytes : staged_bytes)) / slot_bytes;
  static constexpr int slots = fit > 5 ? 5 : fit;
};

template <class Rows, class Tile, bool listed = false>
struct Fp8NarrowShared {
  using Layout = Fp8NarrowLayout<Rows, Tile>;
  static constexpr int rows = Tile::rows;
  alignas(1024) char q[9][rows * 128];
  union {
    alignas(1024) char p[2][Rows::groups][rows * 128];  // P of each warpgroup: rows x 64 positions, swizzled
    float staged[2][rows * Layout::pitch];
  };
  alignas(128) char ring[Layout::slots][Layout::slot_bytes];
  float factor[rows];  // of a row's scores, to log2 units
  int limit[rows];     // a row sees positions below
  union {
    float peak[2][4][rows];  // of a block's scores, by warpgroup and warp
    float sum[2][4][rows];   // in the end, likewise
  };
  float shift[2][rows];
  // By warpgroup, row and group: powers of two that bring probabilities times scales into f16's range, and what a
  // change of them makes of outputs.
  float room[Rows::scaled ? 2 : 1][Rows::scaled ? rows : 1][4], ratio[Rows::scaled ? 2 : 1][Rows::scaled ? rows : 1][4];
  float growth[2][rows];
  int beyond[2][2];                                   // by warpgroup: of barrier_any
  uint32_t there[listed ? Layout::slots : 1][units];  // bit r: has the list a row r of the unit?
  bool any;                                           // has the item any?
  alignas(16) Item item[2];
  Splits splits;
  Split split;
  // full: of a slot's first block and of its second in turn, which different warpgroups may wait for. By parity alone
  // the second would seem to be there as long as the first is not.
  alignas(8) uint64_t full[2 * Layout::slots], empty[Layout::slots], q_full, q_empty;
};

template <class Rows, class Tile, bool invariant, bool listed = false>
__global__ void __launch_bounds__(threads, 1)
    fp8_narrow_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map) {
  using Shared = Fp8NarrowShared<Rows, Tile, listed>;
  using Layout = typename Shared::Layout;
  constexpr int n = Tile::rows, slots = Layout::slots, unit_bytes = Rows::unit_bytes;
  constexpr bool many_registers = n > 16 || Rows::scaled;
  constexpr int load_registers = Rows::scaled ? 88 : 40, math_registers = Rows::scaled ? 208 : 232;
  extern __shared__ __align__(1024) char shared_bytes[];
  Shared& s = *reinterpret_cast<Shared*>(shared_bytes);
  const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  using Order = RowOrder<n, invariant>;
  constexpr int merge_bytes = sizeof Shared::ring;
  const auto part_of = [](const Item& it) { return Part{it.rows, it.row0}; };

  if (threadIdx.x == 0) {
    for (uint64_t& full : s.full) mbarrier_init(smem_address(&full), units);
    for (uint64_t& empty : s.empty) mbarrier_init(smem_address(&empty), 4);
    for (int i = 0; i < 2; ++i) s.beyond[i][0] = s.beyond[i][1] = 0;
    mbarrier_init(smem_address(&s.q_full), 1);
    mbarrier_init(smem_address(&s.q_empty), 8);
    mbarrier_init_fence();
    s.splits.count = s.splits.merges[0] = s.splits.merges[1] = 0;
    tma_prefetch_map(q_map);
  }
  UnitLoader<Order, Rows, listed> loader;
  if (warpgroup == 2) {
    loader = {p, q_map, s};
  } else if (!listed && warp == 1 && !p.starts) {
    prefetch_table(p);
  }
  __syncthreads();

  if (warpgroup == 2) {  // ---- load: a warp for each unit; the first also brings queries
    if constexpr (many_registers) give_registers<load_registers>();
    int slot = 0, parity = 1;
    loader.run(p, q_map, s, 2, merge_bytes, part_of, [&](const Item& it, auto& rows, int i, int unit) {
      mbarrier_wait(smem_address(&s.empty[slot]), parity);
      char* const to = s.ring[slot] + unit * unit_bytes;
      const uint32_t full = smem_address(&s.full[parity ? slot : slots + slot]);
      if constexpr (listed) load_listed_unit(p, rows, i, to, s.there[slot][unit], full);
      else load_unit(p, it, rows, i, unit, to, full);
      if (++slot == slots) slot = 0, parity ^= 1;
    });
    return;
  }

  // ---- math
  take_turn();
  if (warp == 0) load_first_queries<n>(s, q_map);
  if constexpr (many_registers) take_registers<math_registers>();
  constexpr int tiles = width / 64, mine = n / 4;  // output tiles of 64 latents; rows of S a thread has positions of
  constexpr int own = 2;                           // barriers own + h: of warpgroup h alone
  const int h = warpgroup, w = warp % 4, g = lane / 4, c = lane % 4;
  // The thread's two positions in a block, p0 even and p0 + 1: rows g and g + 8 of the warp's 16 of S^T.
  const int chunk = 2 * w + Rows::odd_pair(g), p0 = unit_rows * Rows::unit(g) + 2 * chunk;
  const bool swapped = Rows::swapped(g);
  const auto row_at = [](int position) {
    return position / unit_rows * unit_bytes + position % unit_rows * Rows::bytes;
  };
  const int first_at = row_at(p0 + swapped) + c * 16, second_at = row_at(p0 + 1 - swapped) + c * 16;
  // Matrix m of four has positions 16 u + 2 m + {0, 1} of all units u, and 16 latents.
  const int matrix_at = lane % 8 / 2 * unit_bytes + (lane / 8 * 2 + lane % 2) * Rows::bytes + w * 16;
  // Probabilities: a thread's two positions are a word, 4 units a 16-byte chunk.
  int p_at[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) p_at[i] = (2 * c + i) * 128 + (chunk ^ (2 * c + i)) * 16 + Rows::unit(g) * 4;
  const uint32_t ring = smem_address(s.ring);
  float o[tiles][n / 2];
  int blocks_before = 0;

  for (int count = 0;; ++count) {
    mbarrier_wait(smem_address(&s.q_full), count & 1);
    const Item& it = s.item[count & 1];
    const int item_blocks = it.blocks, positions = it.positions;
    if (item_blocks < 0) break;

#pragma unroll 1
    for (int row = warp; row < n; row += 8) {
      const float back = convert_query_row<Rows, n>(s.q, row);
      if (lane == 0) {
        s.factor[row] = p.scale_log2 * given(p.q_scale) * given(p.k_scale) * back;
        s.limit[row] = min(it.context + p.by_heads.divide(it.first_row + row) + 1, positions);
      }
    }
    const auto begin_piece = [&] {
      if constexpr (Rows::scaled)
        for (int at = threadIdx.x; at < 2 * n * 4; at += math_threads) (&s.room[0][0][0])[at] = 0x1p126f;
      if (listed && threadIdx.x == 0) s.any = false;
    };
    begin_piece();
    fence_async_proxy();
    barrier_sync(math_barrier, math_threads);

    const int limit_all = s.limit[0];
    for_pieces<invariant>(p, it, item_blocks, [&](int piece, int begin, int end) {
      const int blocks = end - begin, block0 = it.block + begin;
      const bool last = end == item_blocks;
      if (invariant && begin) {
        begin_piece();
        barrier_sync(math_barrier, math_threads);
      }
#pragma unroll
      for (int i = 0; i < tiles; ++i)
#pragma unroll
        for (int k = 0; k < n / 2; ++k) o[i][k] = 0;
      // Of rows k / 2 * 8 + 2 c + k % 2: what their log2 scores are taken relative to, and sums of this thread's
      // positions.
      float shift[mine], sum[mine];
#pragma unroll
      for (int k = 0; k < mine; ++k) shift[k] = -3e38f, sum[k] = 0;

      int j = h, changes = 0;  // changes of maxima
      if (last && j >= blocks) {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_address(&s.q_empty));
      }
#pragma unroll 1
      for (; j < blocks; j += 2) {
        const int turn = (blocks_before + j) % (2 * slots), slot = turn % slots;
        const char* block = s.ring[slot];
        mbarrier_wait(smem_address(&s.full[turn]), (blocks_before + j) / (2 * slots) & 1);

        // ---- S^T. Batches of `steps`; while one or two are multiplied the next is converted.
        constexpr int steps = Tile::steps, buffers = Tile::buffers, of_box = 4 / steps;
        float d[n / 2];
        uint32_t a[buffers][4 * steps];
        const char *first = block + first_at, *second = block + second_at;
        uint4 x, y;  // 16 bytes of each of the thread's rows: a box of e4m3
        const auto load = [&](int at) {
          x = *reinterpret_cast<const uint4*>(first + at);
          y = *reinterpret_cast<const uint4*>(second + at);
        };
        const auto convert = [&](int i) {
          const uint32_t from[2][4] = {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
#pragma unroll
          for (int k = 0; k < 4 * steps; ++k) {
            const uint32_t four = from[k % 2][i % of_box * steps + k / 4];
            a[i % buffers][k] = k % 4 < 2 ? e4m3_low(four) : e4m3_high(four);
          }
        };
        const auto queries = [&](int box, int at) {
          return operand_advance(operand_128b(smem_address(s.q[box])), at * 32);
        };
        // After batch i was issued: makes batch i + 1, the last of `count`, ready.
        const auto prepare = [&](int i, int count) {
          if (buffers == 2) wgmma_wait<1>(), wgmma_pin(a[(i + 1) % buffers]);
          if (i + 1 < count) convert(i + 1);
          if ((i + 2) % of_box == 0 && i + 2 < count) load((i + 2) / of_box * 64);
          if (buffers > 2) wgmma_wait<1>(), wgmma_pin(a[(i + buffers - 1) % buffers]);
        };
        float4 scale[2] = {};  // of the thread's positions
        if constexpr (!Rows::scaled) {
          load(0);
          convert(0);
          if (of_box == 1) load(64);
#pragma unroll
          for (int i = 0; i < 9 * of_box; ++i) {
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < steps; ++k)
              Wgmma<n, __half>::rs(d, a[i % buffers] + 4 * k, queries(i / of_box, i % of_box * steps + k), i + k > 0);
            wgmma_commit();
            prepare(i, 9 * of_box);
          }
          wgmma_wait<0>();
          wgmma_pin(d);
        } else {
          static_assert(steps == 2 && buffers == 4);
          float e[2][n / 2];  // of a group, in turn
          const auto fold = [&](int group) {
            const float f[2] = {reinterpret_cast<const float*>(&scale[0])[group],
                                reinterpret_cast<const float*>(&scale[1])[group]};
            wgmma_pin(e[group % 2]);
#pragma unroll
            for (int k = 0; k < n / 2; ++k) d[k] = fmaf(f[k % 4 / 2], e[group % 2][k], d[k]);
          };
          scale[0] = *reinterpret_cast<const float4*>(first + Rows::scales_at - c * 16);
          scale[1] = *reinterpret_cast<const float4*>(second + Rows::scales_at - c * 16);
          // The rope's two batches, then four of each group.
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            load(Rows::rope_at + i * 64);
            const uint32_t from[2][4] = {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
#pragma unroll
            for (int k = 0; k < 8; ++k) a[2 + i][k] = from[k % 2][k / 4 * 2 + k % 4 / 2];
            if (i == 1) load(0);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 2; ++k)
              Wgmma<n, __nv_bfloat16>::rs(d, a[2 + i] + 4 * k, queries(8, i * 2 + k), i + k > 0);
            wgmma_commit();
          }
          convert(0);
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 2; ++k)
              Wgmma<n, __half>::rs(e[i / 4 % 2], a[i % 4] + 4 * k, queries(i / 2, i % 2 * 2 + k), i % 4 + k > 0);
            wgmma_commit();
            prepare(i, 16);
            if (i == 1) wgmma_pin(d);
            if (i > 4 && i % 4 == 1) fold(i / 4 - 1);
          }
          wgmma_wait<0>();
          fold(3);
        }
        if (last && j + 2 >= blocks) {
          __syncwarp();
          if (lane == 0) mbarrier_arrive(smem_address(&s.q_empty));
        }

        // ---- softmax. Element k of d: row k / 4 * 8 + 2 c + k % 2, the thread's position k % 4 / 2.
        const int base = (block0 + j) * block_tokens + p0;
        const bool masked = (block0 + j + 1) * block_tokens > limit_all;
#pragma unroll
        for (int k = 0; k < n / 2; ++k) {
          const int row = k / 4 * 8 + 2 * c + k % 2;
          d[k] *= s.factor[row];
          if (!listed && masked && base + (k % 4 / 2 ^ swapped) >= s.limit[row]) d[k] = -INFINITY;
        }
        if constexpr (listed) {         // the thread's two
          static_assert(Rows::scaled);  // whose positions are not swapped
          const uint32_t two = s.there[slot][Rows::unit(g)] >> 2 * chunk & 3u;
          if (two) s.any = true;
#pragma unroll
          for (int k = 0; k < n / 2; ++k)
            if (!(two >> k % 4 / 2 & 1)) d[k] = -INFINITY;
        }
        float v[n / 2];
        const auto probabilities = [&] {
          float top = 0;
#pragma unroll
          for (int k = 0; k < n / 2; ++k) {
            v[k] = exp2_approx(d[k] - shift[k / 4 * 2 + k % 2]);
            top = fmaxf(top, v[k]);
          }
          return top;
        };
        const auto store = [&] {  // to shared memory; returns the largest that is scaled
          float top = 0;
#pragma unroll
          for (int k = 0; k < n / 2; k += k % 2 ? 3 : 1) {
            if constexpr (!Rows::scaled) {
              *reinterpret_cast<uint32_t*>(s.p[h][0] + k / 4 * 1024 + p_at[k % 2]) =
                  swapped ? Pack<__half>::two(v[k + 2], v[k]) : Pack<__half>::two(v[k], v[k + 2]);
            } else {
              const int row = k / 4 * 8 + 2 * c + k % 2;
              const float4 room4 = *reinterpret_cast<const float4*>(s.room[h][row]);
              const float room[4] = {room4.x, room4.y, room4.z, room4.w};
              const float s0[4] = {scale[0].x, scale[0].y, scale[0].z, scale[0].w},
                          s1[4] = {scale[1].x, scale[1].y, scale[1].z, scale[1].w};
#pragma unroll
              for (int q = 0; q < 4; ++q) {
                const float w0 = v[k] * s0[q] * room[q], w1 = v[k + 2] * s1[q] * room[q];
                *reinterpret_cast<uint32_t*>(s.p[h][q] + k / 4 * 1024 + p_at[k % 2]) = Pack<__half>::two(w0, w1);
                top = fmaxf(top, fmaxf(fabsf(w0), fabsf(w1)));
              }
            }
          }
          return top;
        };
        constexpr float most = 0x1p15f;  // of f16's range; maxima are brought to 2^7 when one is beyond
        if (!listed && masked) {
          const int at = (block0 + j) * block_tokens + p0;
          if (limit_all < positions) {  // the bytes that this thread has multiplied
            if (at + swapped >= limit_all) zero_nan_codes(s.ring[slot] + first_at);
            if (at + 1 - swapped >= limit_all) zero_nan_codes(s.ring[slot] + second_at);
          }
          if constexpr (Rows::scaled)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (at + i >= limit_all)
                scale[i] = make_float4(number_of(scale[i].x), number_of(scale[i].y), number_of(scale[i].z),
                                       number_of(scale[i].w));
        }
        float top = probabilities();
        barrier_sync(own + h, 128);  // P of the block before has been used
        top = fmaxf(top, store());
        fence_async_proxy();
        if (barrier_any(own + h, 128, top > most, s.beyond[h], blocks_before + j + 1)) {
          ++changes;
          float factor[mine];
#pragma unroll
          for (int k = 0; k < mine; ++k) {
            float best = fmaxf(d[k / 2 * 4 + k % 2], d[k / 2 * 4 + 2 + k % 2]);
#pragma unroll
            for (int m = 4; m < 32; m *= 2) best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, m));
            if (g == 0) s.peak[h][w][k / 2 * 8 + 2 * c + k % 2] = best;
          }
          barrier_sync(own + h, 128);
#pragma unroll
          for (int k = 0; k < mine; ++k) {
            const int row = k / 2 * 8 + 2 * c + k % 2;
            const float best =
                fmaxf(fmaxf(s.peak[h][0][row], s.peak[h][1][row]), fmaxf(s.peak[h][2][row], s.peak[h][3][row]));
            const float old = shift[k];
            if (best - old > 15) shift[k] = best - 7;
            factor[k] = exp2_approx(old - shift[k]);
            sum[k] *= factor[k];
          }
          probabilities();
          if constexpr (!Rows::scaled) {
#pragma unroll
            for (int i = 0; i < tiles; ++i)
#pragma unroll
              for (int k = 0; k < n / 2; ++k) o[i][k] *= factor[k / 4 * 2 + k % 2];
          } else {
            // The same for each group's probabilities times scales, in powers of two.
            if (g == 0 && w == 0)
#pragma unroll
              for (int k = 0; k < mine; ++k) s.growth[h][k / 2 * 8 + 2 * c + k % 2] = factor[k];
            static_assert(sizeof(ScaledPeaks<n>) <= sizeof(s.p[h]));
            scaled_peaks(*reinterpret_cast<ScaledPeaks<n>*>(s.p[h]), v, scale, p0, own + h,
                         [&](int row, int q, float peak) {
                           const float old = s.room[h][row][q], growth = s.growth[h][row],
                                       room = new_room(old, growth, peak, most);
                           s.room[h][row][q] = room;
                           s.ratio[h][row][q] = growth * room / old;
                         });
            barrier_sync(own + h, 128);
#pragma unroll
            for (int k = 0; k < mine; ++k)
#pragma unroll
              for (int i = 0; i < tiles; ++i) {
                const float ratio = s.ratio[h][k / 2 * 8 + 2 * c + k % 2][i / 2];
                o[i][k / 2 * 4 + k % 2] *= ratio, o[i][k / 2 * 4 + k % 2 + 2] *= ratio;
              }
          }
          store();
          fence_async_proxy();
          barrier_sync(own + h, 128);
        }
#pragma unroll
        for (int k = 0; k < n / 2; ++k) sum[k / 4 * 2 + k % 2] += v[k];

          // ---- O^T
#pragma unroll
        for (int i = 0; i < tiles; ++i) wgmma_pin(o[i]);
        const uint32_t matrices = ring + slot * Layout::slot_bytes + matrix_at;
        constexpr int of_tile = 4 / steps;
        uint32_t m[2 * steps];
        const auto load_values = [&](int i) {  // positions of `steps` steps, 16 latents
          const uint32_t at = matrices + i / of_tile * 64;
          if (steps == 2 && i % 2) load_matrix_x4_transposed(at + unit_rows / 2 * Rows::bytes, m[0], m[1], m[2], m[3]);
          else load_matrix_x4_transposed(at, m[0], m[1], m[2], m[3]);
          if constexpr (steps == 4) load_matrix_x4_transposed(at + unit_rows / 2 * Rows::bytes, m[4], m[5], m[6], m[7]);
        };
        const auto convert_values = [&](int i) {
#pragma unroll
          for (int k = 0; k < 2 * steps; ++k) {
            const uint32_t pairs = __byte_perm(m[k], 0, 0x3120);  // both positions of a latent together
            a[i % buffers][2 * k] = e4m3_low(pairs), a[i % buffers][2 * k + 1] = e4m3_high(pairs);
          }
        };
        load_values(0);
        convert_values(0);
        load_values(1);
#pragma unroll
        for (int i = 0; i < of_tile * tiles; ++i) {
          const uint64_t probability = operand_128b(smem_address(s.p[h][Rows::scaled ? i / of_tile / 2 : 0]));
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < steps; ++k)
            Wgmma<n, __half>::rs(o[i / of_tile], a[i % buffers] + 4 * k,
                                 operand_advance(probability, (i % of_tile * steps + k) * 32), 1);
          wgmma_commit();
          if (buffers == 2) wgmma_wait<1>(), wgmma_pin(a[(i + 1) % buffers]);
          if (i + 1 < of_tile * tiles) convert_values(i + 1);
          if (i + 2 < of_tile * tiles) load_values(i + 2);
          if (buffers > 2) wgmma_wait<1>(), wgmma_pin(a[(i + buffers - 1) % buffers]);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_address(&s.empty[slot]));
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < tiles; ++i) wgmma_pin(o[i]);
      }
      blocks_before += blocks;
      even_barriers(own + h, changes, Rows::scaled ? 5 : 2, h ? blocks % 2 * 2 : 0);

      // ---- epilogue
#pragma unroll
      for (int k = 0; k < mine; ++k) {
#pragma unroll
        for (int m = 4; m < 32; m *= 2) sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], m);
        if (g == 0) {
          s.sum[h][w][k / 2 * 8 + 2 * c + k % 2] = sum[k];
          if (w == 0) s.shift[h][k / 2 * 8 + 2 * c + k % 2] = shift[k];
        }
      }
      barrier_sync(math_barrier, math_threads);
      const bool whole = it.pieces == 1;
      const int rows = it.rows;
      const int64_t slot_row = static_cast<int64_t>(partial_slot(it, piece)) * n, out_row = it.row0;
#pragma unroll
      for (int k = 0; k < mine; ++k) {
        const int row = k / 2 * 8 + 2 * c + k % 2;
        const auto total = [&](int group) {
          return s.sum[group][0][row] + s.sum[group][1][row] + (s.sum[group][2][row] + s.sum[group][3][row]);
        };
        // Both warpgroups' halves of the positions.
        const float shift0 = s.shift[0][row], shift1 = s.shift[1][row], best = fmaxf(shift0, shift1);
        const float weight0 = exp2_approx(shift0 - best), weight1 = exp2_approx(shift1 - best);
        const float weight = h ? weight1 : weight0;
        float all = total(0) * weight0 + total(1) * weight1;
        if (all == 0 && row < rows && (listed ? s.any : s.limit[row] > block0 * block_tokens) &&
            lost_to_query(p, out_row + row))
          all = NAN;
        const float lse2 = all == 0 ? -INFINITY : best + __log2f(all),
                    factor = all == 0 ? 0.0f
                                      : weight * p.value_scale * given(p.k_scale) / all *
                                            (whole ? kept(p, static_cast<int>(out_row) + row, lse2) : 1.0f);
        if (h == 0 && w == 0 && g == 0 && row < rows) {
          if (whole) store_lse(p, static_cast<int>(out_row) + row, lse2);
          else p.partial_lse[partial_row(it.slot0, n, row, it.pieces, piece)] = lse2;
        }
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
          const int at = k / 2 * 4 + k % 2;
          const float f = Rows::scaled ? factor / s.room[Rows::scaled ? h : 0][Rows::scaled ? row : 0][i / 2] : factor;
          o[i][at] *= f, o[i][at + 2] *= f;
        }
      }
      // 128 latents at a time: both warpgroups' shares through shared memory, stored in whole lines.
#pragma unroll
      for (int i = 0; i < tiles; i += 2) {
#pragma unroll
        for (int k = 0; k < n / 2; k += k % 2 ? 3 : 1)
#pragma unroll
          for (int t = 0; t < 2; ++t)
            *reinterpret_cast<float2*>(
                &s.staged[h][(k / 4 * 8 + 2 * c + k % 2) * Layout::pitch + t * 64 + w * 16 + 2 * g]) =
                make_float2(o[i + t][k], o[i + t][k + 2]);
        barrier_sync(math_barrier, math_threads);
#pragma unroll
        for (int r = threadIdx.x / 32; r < n; r += 8) {
          const float4 x = *reinterpret_cast<const float4*>(&s.staged[0][r * Layout::pitch + lane * 4]);
          const float4 y = *reinterpret_cast<const float4*>(&s.staged[1][r * Layout::pitch + lane * 4]);
          const float4 z = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
          const int64_t column = i * 64 + lane * 4;
          if (r < rows) {
            if (!whole) *reinterpret_cast<float4*>(p.partial_out + (slot_row + r) * width + column) = z;
            else store_four<__nv_bfloat16>(p, (out_row + r) * width + column, z);
          }
        }
        barrier_sync(math_barrier, math_threads);
      }
      if (!whole && last) publish<Order>(p, s.splits, it, part_of(it));
    });
  }

  // ---- merge
  merge_split_tiles<Order, n, listed>(p, s.splits, s.split, blockIdx.x, s.ring[0], merge_bytes, part_of);
}

}  // namespace mla::cuda::latent
