// attend_latent for tiles of 64 rows a CTA, whose 64 x 512 f32 outputs two math warpgroups share by columns. A cluster
// of two CTAs takes 128 rows: each loads half of every cache block, for both.
#pragma once

#include "backend/cuda/core/cluster.cuh"
#include "backend/cuda/sm90/attend_latent/load.cuh"
#include "backend/cuda/sm90/attend_latent/math.cuh"

namespace mla::cuda::latent {

// Tile: a struct of constants, one a kernel.
struct Wide64 {
  static constexpr int ctas = 1;  // of a cluster, 64 rows each
};
struct Wide128 {
  static constexpr int ctas = 2;
};

/// Block i of an item goes through buffer i % 2 and belongs to math warpgroup i % 2, which makes its probabilities.
/// Column boxes 0-3 are values of warpgroup 0, 4-7 of warpgroup 1, 8 is the rope; once scores are made, the rope box
/// holds the block's probabilities for the other warpgroup.
struct WideShared {
  alignas(1024) char q[9][box_bytes];
  alignas(1024) char kv[2][9][box_bytes];
  float top[2][64];  // maxima after a block of warpgroup 0, 1
  float sum[2][64];
  alignas(16) Item item[2];
  Item split_item[2];  // a worker's pieces of split tiles, unless batch-invariant
  alignas(16) MergeSpace merge;
  Split split;
  // full: column boxes in pairs, then the rope box; empty: halves of the boxes, the rope box in the half loaded last.
  alignas(8) uint64_t full[2][5], empty[2][2], q_full, q_empty;
};

template <class Tile, class T>
__global__ void __launch_bounds__(threads, 1)
    wide_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map,
                const __grid_constant__ CUtensorMap cache_map) {
  constexpr int tile_rows = 64 * Tile::ctas;
  extern __shared__ __align__(1024) char shared_bytes[];
  WideShared& s = *reinterpret_cast<WideShared*>(shared_bytes);
  const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int rank = Tile::ctas > 1 ? static_cast<int>(cluster_rank()) : 0, worker = blockIdx.x / Tile::ctas;
  const bool boxes_fit = p.box_shift >= 0;

  if (threadIdx.x == 0) {
    for (int b = 0; b < 2; ++b) {
      for (int i = 0; i < 5; ++i) mbarrier_init(smem_address(&s.full[b][i]), boxes_fit ? 1 : 128);
      for (int i = 0; i < 2; ++i) mbarrier_init(smem_address(&s.empty[b][i]), 4 * Tile::ctas);
    }
    mbarrier_init(smem_address(&s.q_full), 1);
    mbarrier_init(smem_address(&s.q_empty), 8);
    mbarrier_init_fence();
    tma_prefetch_map(q_map);
    if (boxes_fit) tma_prefetch_map(cache_map);
  }
  wait_for_previous_grids();
  if (warp == 8) {  // beside the barriers' birth
    const Split split = make_split<tile_rows>(p, worker);
    if (lane == 0) s.split = split;
  }
  __syncthreads();
  allow_next_grid();
  if constexpr (Tile::ctas > 1) cluster_sync();  // the peer's barriers exist

  if (warpgroup == 2) {  // ---- load
    give_registers<64>();
    Walk<tile_rows> walk(p, s.split, worker);
    Item it{};
    int count = 0;
    const auto start = [&] {  // the item's queries; by one warp
      mbarrier_wait(smem_address(&s.q_empty), (count & 1) ^ 1);
      if (lane == 0) {
        s.item[count & 1] = it;
        mbarrier_arrive_expect(smem_address(&s.q_full), 9 * box_bytes);
      }
      __syncwarp();
      if (lane < 9) tma_load(smem_address(s.q[lane]), q_map, smem_address(&s.q_full), lane * 64, it.row0 + rank * 64);
      __syncwarp();
    };
    const auto stop = [&] {
      mbarrier_wait(smem_address(&s.q_empty), (count & 1) ^ 1);
      if (lane == 0) {
        s.item[count & 1].blocks = -1;
        mbarrier_arrive(smem_address(&s.q_full));
      }
    };
    if (boxes_fit) {
      // A warp for each half of each buffer, so that none waits for another's release.
      const int buffer = (warp - 8) / 2, half = warp % 2;
      const bool queries = buffer == 1 && half == 0, with_rope = half != buffer;
      // Lanes below `columns` copy one column box each of this half, the next one the rope box.
      constexpr int columns = 4 / Tile::ctas;
      const bool rope = with_rope && lane == columns && (Tile::ctas == 1 || rank == buffer);
      const bool copies = lane < columns || rope;
      const int column = rope ? 8 : half * 4 + lane % columns * Tile::ctas + rank;
      const uint32_t full = smem_address(&s.full[buffer][column / 2]), to = smem_address(s.kv[buffer][column]);
      const uint32_t expected = smem_address(&s.full[buffer][lane == 2 ? 4 : half * 2 + lane % 2]);
      const uint32_t empty = smem_address(&s.empty[buffer][half]);
      int parity = 1;
      while (walk.next(it)) {
        BoxRows rows(p, it);
        // The next item's queries wait for the last scores of this one; its first block goes ahead of them.
        bool waiting = queries;
        if (waiting && (count == 0 || it.blocks < 2)) start(), waiting = false;
#pragma unroll 1
        for (int i = buffer; i < it.blocks; i += 2) {
          rows.seek(p, it.block + i);
          const int boxes = rows.boxes(), bytes = boxes << p.box_shift << 7;
          int row = rows.row(0);
          mbarrier_wait(empty, parity);
          parity ^= 1;
          if (lane < 2 + with_rope) mbarrier_arrive_expect(expected, lane == 2 ? bytes : 2 * bytes);
#pragma unroll 1
          for (int k = 0;;) {
            if (copies) {
              if constexpr (Tile::ctas > 1)
                tma_load_multicast(to + (k << p.box_shift << 7), cache_map, full, 3, column * 64, row);
              else tma_load(to + (k << p.box_shift << 7), cache_map, full, column * 64, row);
            }
            __syncwarp();
            if (++k == boxes) break;
            row = rows.row(k);
          }
          if (waiting) start(), waiting = false;
        }
        ++count;
      }
      if (queries) stop();
    } else {
      int parity = 3;  // a bit a buffer
      while (walk.next(it)) {
        if (warp == 8) start();
        ++count;
        RowCopies rows(p, it);
        for (int i = 0; i < it.blocks; ++i) {
          const int buffer = i & 1;
          for (int half = 0; half < 2; ++half)
            mbarrier_wait(smem_address(&s.empty[buffer][half]), parity >> buffer & 1);
          parity ^= 1 << buffer;
          rows.copy(it.block + i, [&](int column) { return smem_address(s.kv[buffer][column]); });
          for (int k = 0; k < 5; ++k) mbarrier_arrive_after_cp_async(smem_address(&s.full[buffer][k]));
        }
      }
      if (warp == 8) stop();
    }
  } else {  // ---- math
    take_registers<216>();
    const int h = warpgroup, g = lane / 4, pair = lane % 4 * 2;
    const int row = warp % 4 * 16 + g;  // and row + 8, of the CTA's 64
    // Barriers. made + h: h's probabilities are there; own + h: h alone; turn: warpgroup 0 has made its scores.
    enum : int { made = 2, own = 4, turn = 6 };
    float o[128];
    int parity = 0;  // of our buffer's full barriers
    int partials = 0;

    const auto release = [&](int buffer) {  // this warpgroup's half
      __syncwarp();
      if (lane == 0) {
        const uint32_t bar = smem_address(&s.empty[buffer][h]);
        if constexpr (Tile::ctas > 1) {
          mbarrier_arrive_remote(bar, 0);
          mbarrier_arrive_remote(bar, 1);
        } else {
          mbarrier_arrive(bar);
        }
      }
    };
    const auto scale_outputs = [&](float a, float b) {
#pragma unroll
      for (int i = 0; i < 128; i += 4) o[i] *= a, o[i + 1] *= a, o[i + 2] *= b, o[i + 3] *= b;
    };

    for (int count = 0;; ++count) {
      mbarrier_wait(smem_address(&s.q_full), count & 1);
      const Item& it = s.item[count & 1];
      const int blocks = it.blocks, block0 = it.block, positions = it.positions;
      if (blocks < 0) break;
      const int tile_row = rank * 64 + row;
      const int limit0 = min(it.context + p.by_heads.divide(it.first_row + tile_row) + 1, positions);
      const int limit1 = min(it.context + p.by_heads.divide(it.first_row + tile_row + 8) + 1, positions);
      const int limit_all = min(it.context + p.by_heads.divide(it.first_row + rank * 64) + 1, positions);
      convert_queries<T>(&s.q[0][0], 9 * box_bytes);
#pragma unroll
      for (int i = 0; i < 128; ++i) o[i] = 0;
      float top0 = -INFINITY, top1 = -INFINITY, sum0 = 0, sum1 = 0;
      float d[32];
      uint32_t a[16];

      const auto scores = [&](int i) {  // issues S of block i into d
        const int buffer = i & 1;
#pragma unroll
        for (int order = 0; order < 5; ++order) {
          const int group = order == 4 ? 4 : order ^ (2 * h);
          mbarrier_wait(smem_address(&s.full[buffer][group]), parity);
          if (!boxes_fit) fence_async_proxy();
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            if (group == 4 && k >= 4) break;
            const int column = group * 2 + k / 4;
            Wgmma<64, T>::ss(d, operand_advance(operand_128b(smem_address(s.q[column])), k % 4 * 32),
                             operand_advance(operand_128b(smem_address(s.kv[buffer][column])), k % 4 * 32),
                             order + k > 0);
          }
        }
        wgmma_commit();
      };
      const auto softmax = [&](int i) {  // d to a, the rope box and tops; returns through factor what outputs need
        const int base = (block0 + i) * block_tokens + pair;
        if ((block0 + i + 1) * block_tokens > limit_all) {
#pragma unroll
          for (int k = 0; k < 32; ++k) {
            const int position = base + k / 4 * 8 + k % 2;
            if (position >= (k % 4 < 2 ? limit0 : limit1)) d[k] = -INFINITY;
          }
        }
        float best0 = -INFINITY, best1 = -INFINITY;
#pragma unroll
        for (int k = 0; k < 32; k += 4) {
          best0 = fmaxf(best0, fmaxf(d[k], d[k + 1]));
          best1 = fmaxf(best1, fmaxf(d[k + 2], d[k + 3]));
        }
#pragma unroll
        for (int k = 1; k < 4; k *= 2) {
          best0 = fmaxf(best0, __shfl_xor_sync(0xffffffffu, best0, k));
          best1 = fmaxf(best1, __shfl_xor_sync(0xffffffffu, best1, k));
        }
        best0 *= p.scale_log2, best1 *= p.scale_log2;
        const float old0 = top0, old1 = top1;
        if (best0 - top0 > lazy_growth) top0 = best0;
        if (best1 - top1 > lazy_growth) top1 = best1;
        const float shift0 = top0 == -INFINITY ? 0.0f : top0, shift1 = top1 == -INFINITY ? 0.0f : top1;
        sum0 *= exp2_approx(old0 - shift0), sum1 *= exp2_approx(old1 - shift1);
#pragma unroll
        for (int k = 0; k < 32; k += 4) {
          d[k] = exp2_approx(fmaf(d[k], p.scale_log2, -shift0));
          d[k + 1] = exp2_approx(fmaf(d[k + 1], p.scale_log2, -shift0));
          d[k + 2] = exp2_approx(fmaf(d[k + 2], p.scale_log2, -shift1));
          d[k + 3] = exp2_approx(fmaf(d[k + 3], p.scale_log2, -shift1));
          sum0 += d[k] + d[k + 1];
          sum1 += d[k + 2] + d[k + 3];
          a[k / 2] = Pack<T>::two(d[k], d[k + 1]);
          a[k / 2 + 1] = Pack<T>::two(d[k + 2], d[k + 3]);
        }
        // 16 rows a warp; lane l gives the address of row l % 8 of matrix l / 8: rows 0-7, 8-15, then 8 columns on
        char* to = s.kv[i & 1][8] + (warp % 4 * 16 + lane % 16) * 128;
#pragma unroll
        for (int k = 0; k < 4; ++k)
          store_matrix_x4(smem_address(to + ((2 * k + lane / 16) ^ (lane % 8)) * 16), a[4 * k], a[4 * k + 1],
                          a[4 * k + 2], a[4 * k + 3]);
        if (lane % 4 == 0) s.top[h][row] = top0, s.top[h][row + 8] = top1;
        fence_async_proxy();
        barrier_arrive(made + h, math_threads);
      };
      // Outputs held relative to (was0, was1) are brought to (top0, top1).
      const auto rescale = [&](float was0, float was1) {
        if (__any_sync(0xffffffffu, was0 != top0 || was1 != top1))
          scale_outputs(top0 == was0 ? 1.0f : exp2_approx(was0 - top0), top1 == was1 ? 1.0f : exp2_approx(was1 - top1));
      };
      const auto clear_tail = [&](int i) {  // what lies past the sequence must not be multiplied, not even by 0
        const int valid = positions - (block0 + i) * block_tokens;
        if (valid >= block_tokens) return;
        for (int box = 4 * h; box < 4 * h + 4; ++box)
#pragma unroll 1
          for (int at = valid * 8 + threadIdx.x % 128; at < block_tokens * 8; at += 128)
            *reinterpret_cast<uint4*>(s.kv[i & 1][box] + at * 16) = {0, 0, 0, 0};
        fence_async_proxy();
        barrier_sync(own + h, 128);
      };
      const auto values_mine = [&](int i) {  // issues O += P V, P in registers
        const uint64_t values = operand_128b(smem_address(s.kv[i & 1][4 * h]), 1024, box_bytes);
        wgmma_pin(o);
        wgmma_pin(a);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          Wgmma<256, T>::template rs<Major::mn>(o, a + 4 * k, operand_advance(values, k * 2048), 1);
        wgmma_commit();
      };
      const auto values_other = [&](int i) {  // the same, P from the other warpgroup
        const uint64_t values = operand_128b(smem_address(s.kv[i & 1][4 * h]), 1024, box_bytes);
        const uint64_t probabilities = operand_128b(smem_address(s.kv[i & 1][8]));
        wgmma_pin(o);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          Wgmma<256, T>::template ss<Major::k, Major::mn>(o, operand_advance(probabilities, k * 32),
                                                          operand_advance(values, k * 2048), 1);
        wgmma_commit();
      };
      const auto take_tops = [&] {  // the other warpgroup's maxima; its block comes before our next
        const float was0 = top0, was1 = top1;
        top0 = s.top[h ^ 1][row], top1 = s.top[h ^ 1][row + 8];
        const float shift0 = top0 == -INFINITY ? 0.0f : top0, shift1 = top1 == -INFINITY ? 0.0f : top1;
        sum0 *= exp2_approx(was0 - shift0), sum1 *= exp2_approx(was1 - shift1);
        rescale(was0, was1);
      };
      const auto release_queries = [&](bool last) {
        if (!last) return;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_address(&s.q_empty));
      };

      if (h == 0) {
        for (int i = 0; i < blocks; i += 2) {
          const bool both = i + 1 < blocks;
          scores(i);
          wgmma_wait<0>();
          wgmma_pin(d);
          if (both) barrier_arrive(turn, math_threads);
          parity ^= 1;
          release_queries(i + 2 >= blocks);
          const float was0 = top0, was1 = top1;
          softmax(i);
          rescale(was0, was1);
          clear_tail(i);
          values_mine(i);
          wgmma_wait<0>();
          wgmma_pin(o);
          release(0);
          if (both) {
            barrier_sync(made + 1, math_threads);
            take_tops();
            clear_tail(i + 1);
            values_other(i + 1);
            wgmma_wait<0>();
            wgmma_pin(o);
            release(1);
          }
        }
      } else {
        int i = 0;
        for (; i + 1 < blocks; i += 2) {
          barrier_sync(turn, math_threads);  // not beside its scores, or both would then wait for softmax together
          scores(i + 1);
          barrier_sync(made + 0, math_threads);
          wgmma_wait<0>();  // outputs may be scaled only while no product is under way
          wgmma_pin(d);
          parity ^= 1;
          release_queries(i + 3 >= blocks);
          take_tops();
          clear_tail(i);
          values_other(i);
          const float was0 = top0, was1 = top1;
          softmax(i + 1);
          wgmma_wait<0>();
          wgmma_pin(o);
          release(0);
          rescale(was0, was1);
          clear_tail(i + 1);
          values_mine(i + 1);
          wgmma_wait<0>();
          wgmma_pin(o);
          release(1);
        }
        if (i < blocks) {
          barrier_sync(made + 0, math_threads);
          take_tops();
          clear_tail(i);
          values_other(i);
          wgmma_wait<0>();
          wgmma_pin(o);
          release(0);
        }
        if (blocks == 1) release_queries(true);
      }
      if (blocks == 0) release_queries(true);

        // ---- epilogue
#pragma unroll
      for (int k = 1; k < 4; k *= 2) {
        sum0 += __shfl_xor_sync(0xffffffffu, sum0, k);
        sum1 += __shfl_xor_sync(0xffffffffu, sum1, k);
      }
      if (lane % 4 == 0) s.sum[h][row] = sum0, s.sum[h][row + 8] = sum1;
      barrier_sync(math_barrier, math_threads);
      sum0 = s.sum[0][row] + s.sum[1][row];
      sum1 = s.sum[0][row + 8] + s.sum[1][row + 8];
      const bool whole = it.pieces == 1;
      const int rows = it.rows - rank * 64;  // of this CTA; may be none
      const int64_t slot_row = (static_cast<int64_t>(it.slot) * Tile::ctas + rank) * 64, out_row = it.row0 + rank * 64;
      if (h == 0 && lane % 4 == 0) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int r = row + 8 * k;
          const float sum = k ? sum1 : sum0, lse2 = sum > 0 ? (k ? top1 : top0) + __log2f(sum) : -INFINITY;
          if (r < rows) {
            if (whole) store_lse(p, static_cast<int>(out_row) + r, lse2);
            else p.partial_lse[slot_row + r] = lse2;
          }
        }
      }
      scale_outputs(sum0 > 0 ? 1.0f / sum0 : 0.0f, sum1 > 0 ? 1.0f / sum1 : 0.0f);
      // Neighbouring lanes trade column pairs of blocks 2 k and 2 k + 1: each then has four columns in a row.
      const bool odd = lane & 1, in0 = row < rows, in1 = row + 8 < rows;
      const int at = row * width + h * 256 + odd * 8 + (pair & 4);
      const auto store = [&](auto put) {  // put(offset, four values)
#pragma unroll
        for (int k = 0; k < 128; k += 8)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float* low = o + k + 2 * r;  // of block 2 k, then of the next
            const float send0 = odd ? low[0] : low[4], send1 = odd ? low[1] : low[5];
            const float get0 = __shfl_xor_sync(0xffffffffu, send0, 1), get1 = __shfl_xor_sync(0xffffffffu, send1, 1);
            if (r ? in1 : in0)
              put(k * 2 + r * 8 * width,
                  make_float4(odd ? get0 : low[0], odd ? get1 : low[1], odd ? low[4] : get0, odd ? low[5] : get1));
          }
      };
      if (whole && !p.out_f32) {
        __nv_bfloat16* to = static_cast<__nv_bfloat16*>(p.out) + out_row * width + at;
        store([&](int offset, float4 v) {
          *reinterpret_cast<uint2*>(to + offset) = {Pack<__nv_bfloat16>::two(v.x, v.y),
                                                    Pack<__nv_bfloat16>::two(v.z, v.w)};
        });
      } else {
        float* to = (whole ? static_cast<float*>(p.out) + out_row * width : p.partial_out + slot_row * width) + at;
        store([&](int offset, float4 v) { *reinterpret_cast<float4*>(to + offset) = v; });
      }
      if (!whole) {
        if (threadIdx.x == 0 && !p.split_blocks) s.split_item[partials] = it;
        ++partials;
        publish(p, it.counter * Tile::ctas + rank);
      } else {
        barrier_sync(math_barrier, math_threads);  // s.sum is written again
      }
    }

    // ---- merge
    const auto merge = [&](const Item& it) {
      merge_share<64>(p, it, min(max(it.rows - rank * 64, 0), 64), it.row0 + rank * 64, Tile::ctas, rank, s.merge);
    };
    if (p.split_blocks) {
      Walk<tile_rows> walk(p, s.split, worker);
      Item it{};
      while (partials && walk.next(it))
        if (it.pieces > 1) merge(it);
    } else {
      for (int i = 0; i < partials; ++i) {
        const Item it = s.split_item[i];
        merge(it);
      }
    }
  }
  if constexpr (Tile::ctas > 1) cluster_sync();  // no copy or arrival may be on its way to a CTA that left
}

}  // namespace mla::cuda::latent
