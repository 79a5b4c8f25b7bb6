// Attention by products of e4m3 codes: queries and a cache of e4m3 with one scale each, tiles of 64 rows a CTA.
//
// Scores are products of codes as they lie. For the values the tensor cores want positions side by side, so two warps
// turn each block's codes over in shared memory, once for all rows. Probabilities become e4m3, too, 2^7 at a row's
// reference; their sum is of the unrounded ones. Tensor cores keep some 14 bits of a sum: a block's products are summed
// there, blocks in f32.
#pragma once

#include "backend/cuda/core/cluster.cuh"
#include "backend/cuda/core/wgmma_fp8.cuh"
#include "backend/cuda/sm90/attention/load.cuh"
#include "backend/cuda/sm90/attention/wide_outputs.cuh"

namespace mla::cuda::latent {

/// What the kernel is launched with, beside Params: queries [rows, 576] and the cache [pages, page size, 576], in boxes
/// of 128 codes, and of the 64 that are left.
struct CodeMaps {
  CUtensorMap q, q_rope, cache, cache_rope;
};

constexpr int code_threads = 512;  // warpgroups 0, 1: outputs; 2: scores; 3: a warp copies, two turn over, one walks
constexpr int code_boxes = 4, code_rope_bytes = block_tokens * 64, code_block_bytes = block_tokens * entry;

struct CodesShared {
  static constexpr int buffers = 3;
  alignas(1024) char kv[buffers][code_block_bytes];  // four boxes of 128 codes, one of 64; later the merge's
  alignas(1024) char v[2][width * block_tokens];     // latents x positions: rows of 64 bytes, 64-byte swizzle
  alignas(1024) char q[code_block_bytes];
  uint4 p[2][2][128];  // probabilities as the products take them: 32 positions of each thread's two rows
  float inverse[64];   // of a piece's sums
  uint8_t exponent[2][64];
  float growth[2][64];  // what outputs held before this block's are to be multiplied by
  bool changed[2][4];   // is any growth of the warp's rows not 1?
  alignas(16) Item item[2];
  Splits splits;
  Split split;
  alignas(8) uint64_t full[buffers], empty[buffers], v_full[2], v_empty[2], made[2], p_empty[2];
  uint64_t item_full[2], item_empty[2], q_full, q_empty, piece_read;
};

/// Four numbers as e4m3, the first in the lowest byte.
__device__ __forceinline__ uint32_t e4m3_of(float a, float b, float c, float d) {
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return low | static_cast<uint32_t>(high) << 16;
}

/// A block's values, turned over: 16 latents of 32 positions at a time. Of 16 positions a row of latents has them in
/// the order 0 1 8 9, 2 3 10 11, .., in which a thread of the scores has its probabilities.
class TurnedValues {
 public:
  struct Words {
    uint32_t w[4];
  };
  /// from: a block as it was copied, on a boundary of 1024 bytes; to: [512][64].
  __device__ TurnedValues(uint32_t from, uint32_t to) {
    const int lane = thread_index() % 32, row = lane % 8, matrix = lane / 8;
    from_ = from + lane * 128 + row * 16;
    // Of each eight matrix rows the first four are of even latents in one matrix, of odd ones in the next: all banks.
    const int odd = (matrix + row / 4) & 1, swizzle = row % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      to_[half] = to + (2 * row + odd) * 64 + ((matrix / 2 + 2 * half) ^ swizzle) * 16;
    first_ = lane < 16 ? 0x6420 : 0x7531;
  }
  /// Latents 16 i and on, of positions 32 * half and on.
  __device__ Words read(int i, int half) const {
    Words m;
    load_matrix_x4_transposed((from_ ^ i % 8 * 16) + i / 8 * box_bytes + half * 4096, m.w[0], m.w[1], m.w[2], m.w[3]);
    return m;
  }
  /// numbers: NaN become 0.
  template <bool numbers>
  __device__ void write(int i, int half, const Words& m) const {
    const uint32_t second = first_ ^ 0x1111;
    uint32_t w[4] = {__byte_perm(m.w[0], m.w[1], first_), __byte_perm(m.w[0], m.w[1], second),
                     __byte_perm(m.w[2], m.w[3], first_), __byte_perm(m.w[2], m.w[3], second)};
    if constexpr (numbers)
#pragma unroll
      for (uint32_t& x : w) x = numbers_of_e4m3(x);
    store_matrix_x4(to_[half] + i * 1024, w[0], w[1], w[2], w[3]);
  }

 private:
  uint32_t from_, to_[2], first_;
};

template <int ctas, bool invariant>
__global__ void __launch_bounds__(code_threads, 1)
    codes_kernel(const __grid_constant__ Params p, const __grid_constant__ CodeMaps maps) {
  using Shared = CodesShared;
  using Order = FragmentOrder<__nv_bfloat16, invariant>;
  using Walk = Walk<64 * ctas, invariant>;
  constexpr int buffers = Shared::buffers, merge_bytes = sizeof Shared::kv;
  constexpr int output_registers = 184, score_registers = 96, load_registers = 48;
  extern __shared__ __align__(1024) char shared_bytes[];
  Shared& s = *reinterpret_cast<Shared*>(shared_bytes);
  const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int rank = ctas > 1 ? static_cast<int>(cluster_rank()) : 0, worker = blockIdx.x / ctas;
  constexpr int copies = 12, turns = 13, walks = 15;  // warps; two of them turn
  const auto part_of = [&](const Item& it) {
    return Part{min(max(it.rows - rank * 64, 0), 64), it.row0 + rank * 64, ctas, rank};
  };

  if (threadIdx.x == 0) {
    for (int b = 0; b < buffers; ++b) {
      mbarrier_init(smem_address(&s.full[b]), 1);
      mbarrier_init(smem_address(&s.empty[b]), 6 * ctas);  // the scores' warps and those that turn
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(smem_address(&s.v_full[i]), 2);
      mbarrier_init(smem_address(&s.v_empty[i]), 8);
      mbarrier_init(smem_address(&s.made[i]), 4);
      mbarrier_init(smem_address(&s.p_empty[i]), 8);
      mbarrier_init(smem_address(&s.item_full[i]), 1);
      mbarrier_init(smem_address(&s.item_empty[i]), 15);  // without the one that walks
    }
    mbarrier_init(smem_address(&s.q_full), 1);
    mbarrier_init(smem_address(&s.q_empty), 4);
    mbarrier_init(smem_address(&s.piece_read), 1);
    mbarrier_init_fence();
    for (const CUtensorMap* map : {&maps.q, &maps.q_rope, &maps.cache, &maps.cache_rope}) tma_prefetch_map(*map);
  }
  __syncwarp();
  if constexpr (ctas > 1) cluster_arrive_relaxed();
  // Beside the barriers' birth and the previous kernel's end.
  BoxRows rows;
  if (warp == copies || warp == walks) {
    Item it;
    const Split split = begin_work<64 * ctas, invariant>(p, worker, 0, it, rows);
    if (warp == walks && lane == 0) {
      s.item[0] = it, s.split = split;
      s.splits.count = s.splits.merges[0] = s.splits.merges[1] = 0;
    }
  } else if (warp == 1 && !p.starts) {
    prefetch_table(p);
  }
  if constexpr (ctas > 1) cluster_wait();  // the barriers exist, the peer's too
  else __syncthreads();

  const auto wait_item = [&](int count) -> const Item& {
    mbarrier_wait(smem_address(&s.item_full[count & 1]), count >> 1 & 1);
    return s.item[count & 1];
  };
  const auto release_item = [&](int count) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem_address(&s.item_empty[count & 1]));
  };
  int buffer = 0, parity = 0;
  const auto advance = [&] {
    if (++buffer == buffers) buffer = 0, parity ^= 1;
  };
  // A block's codes have been read, by one of the warps that do, for the CTAs that they were copied to from here.
  const auto release_block = [&] {
    __syncwarp();
    if (!elect_one()) return;
    const uint32_t bar = smem_address(&s.empty[buffer]);
    if constexpr (ctas > 1) {
      mbarrier_arrive_remote(bar, 0);
      mbarrier_arrive_remote(bar, 1);
    } else {
      mbarrier_arrive(bar);
    }
  };

  // The thread's own: kept, or it would be asked of the processor again for each block, which takes as long as a copy.
  uint32_t mine = smem_address(&s.p[0][0][threadIdx.x % 128]);
  asm volatile("" : "+r"(mine));

  if (warpgroup == 3) {
    give_registers<load_registers>();
    if (warp == walks) {  // ---- items, one ahead of those who work on them, and queries
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem_address(&s.item_full[0]));
      Walk walk(p, s.split, worker);  // again: few registers are left
      for (int count = 0;; ++count) {
        Item it;
        if (!walk.next(p, s.split, it)) it.blocks = -1;
        if (count) mbarrier_wait(smem_address(&s.item_empty[count & 1]), (count >> 1 & 1) ^ 1);
        if (lane == 0) {
          if (count) {
            s.item[count & 1] = it;
            mbarrier_arrive(smem_address(&s.item_full[count & 1]));
          }
          if (it.blocks >= 0) remember_split<Order>(p, s.splits, it, part_of(it), merge_bytes);
        }
        if (it.blocks < 0) break;
        mbarrier_wait(smem_address(&s.q_empty), (count & 1) ^ 1);
        wait_for_previous_grids();
        const int row = warp_uniform(it.row0) + rank * 64;
        const uint32_t bar = smem_address(&s.q_full);
        if (elect_one()) {
          if (it.blocks) {
            mbarrier_arrive_expect(bar, code_block_bytes);
#pragma unroll
            for (int box = 0; box < code_boxes; ++box)
              tma_load(smem_address(s.q + box * box_bytes), maps.q, bar, box * 128, row);
            tma_load(smem_address(s.q + code_boxes * box_bytes), maps.q_rope, bar, width, row);
          } else {
            mbarrier_arrive(bar);
          }
        }
        __syncwarp();
      }
    } else if (warp == copies) {  // ---- blocks; of two CTAs each copies every second column of boxes, for both
      for (int count = 0;; ++count) {
        const Item& it = wait_item(count);
        const int blocks = it.blocks, block = it.block;
        if (blocks < 0) break;
        if (blocks) {
          if (count || !p.settled) wait_for_previous_grids();
          if (count) rows = BoxRows(p, it);
#pragma unroll 1
          for (int i = 0; i < blocks; ++i) {
            rows.seek(p, block + i);
            mbarrier_wait(smem_address(&s.empty[buffer]), parity ^ 1);
            const uint32_t bar = smem_address(&s.full[buffer]), to = smem_address(s.kv[buffer]);
            if (elect_one()) mbarrier_arrive_expect(bar, (rows.boxes() << p.box_shift) * entry);
#pragma unroll 1
            for (int k = 0; k < rows.boxes(); ++k) {
              const int row = rows.row(k);
              if (!elect_one()) continue;
              const int page = p.by_page.divide(row), in_page = row - page * p.page_size;
#pragma unroll 1
              for (int column = (rank ^ i) % ctas; column <= code_boxes; column += ctas) {
                const bool rope = column == code_boxes;
                const uint32_t at = to + column * box_bytes + (k << p.box_shift) * (rope ? 64 : 128);
                const CUtensorMap& map = rope ? maps.cache_rope : maps.cache;
                if constexpr (ctas > 1) tma_load_multicast(at, map, bar, 3, column * 128, in_page, page);
                else tma_load(at, map, bar, column * 128, in_page, page);
              }
            }
            __syncwarp();
            advance();
          }
        }
        release_item(count);
      }
      // The peer's arrivals may not be on their way to a CTA that left.
      for (int i = 0; i < buffers; ++i) mbarrier_wait(smem_address(&s.empty[buffer]), parity ^ 1), advance();
    } else {  // ---- values, turned over: a warp 256 latents
      const int first = (warp - turns) * 16;
      int turn = 0;  // of the buffers of values, then their parity
      for (int count = 0;; ++count) {
        const Item& it = wait_item(count);
        const int blocks = it.blocks;
        if (blocks < 0) break;
        const int hidden = hidden_from(p, it);
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
          const TurnedValues values(smem_address(s.kv[buffer]) + first * (box_bytes / 8),
                                    smem_address(s.v[turn & 1]) + first * 1024);
          const bool masked = (it.block + i + 1) * block_tokens > hidden;
          mbarrier_wait(smem_address(&s.full[buffer]), parity);
          mbarrier_wait(smem_address(&s.v_empty[turn & 1]), (turn >> 1) ^ 1);
          if (masked) {
#pragma unroll 1
            for (int k = 0; k < 32; ++k) values.write<true>(k / 2, k % 2, values.read(k / 2, k % 2));
          } else {  // the next are read while these are written
            TurnedValues::Words m[2][2];
            const auto read = [&](int k) {
#pragma unroll
              for (int j = 0; j < 2; ++j) m[k % 2][j] = values.read(k, j);
            };
            read(0);
            static_for<16>([&](auto k) {
              if constexpr (k < 15) read(k + 1);
#pragma unroll
              for (int j = 0; j < 2; ++j) values.write<false>(k, j, m[k % 2][j]);
            });
          }
          release_block();
          fence_async_proxy();
          __syncwarp();
          if (lane == 0) mbarrier_arrive(smem_address(&s.v_full[turn & 1]));
          turn = (turn + 1) & 3;
          advance();
        }
        release_item(count);
      }
    }
  } else if (warpgroup == 2) {  // ---- scores
    give_registers<score_registers>();
    wait_for_previous_grids();
    // Registers are short: what can be had again is not kept. A thread's rows: my_row() and 8 on, of the CTA's 64.
    const auto my_row = [&] { return thread_index() / 32 % 4 * 16 + thread_index() % 32 / 4; };
    const auto first_of_row = [&] { return thread_index() % 4 == 0; };
    const uint32_t part = __reduce_max_sync(0xffffffffu, thread_index() / 32 % 4);
    int turn = 0;         // of the probabilities, then their parity
    int pieces_read = 0;  // of which not the last of an item, by the outputs
    for (int count = 0;; ++count) {
      const Item& it = wait_item(count);
      const int blocks = it.blocks;
      if (blocks < 0) break;
      mbarrier_wait(smem_address(&s.q_full), count & 1);
      if (blocks) {
        // Positions that a row sees, counted from the item's first block.
        const auto limit = [&](int row) {
          return min(it.context + 1 + p.by_heads.divide(it.first_row + rank * 64 + row), it.positions) -
                 it.block * block_tokens;
        };
        const int seen_by_all = warp_uniform(limit(0) / block_tokens);  // blocks
        // To log2 units, with the scales that the device alone knows.
        const float scale = p.scale_log2 * given(p.q_scale) * given(p.k_scale);
        for_pieces<invariant>(p, it, blocks, [&](int piece, int begin, int end) {
          float top0 = -INFINITY, top1 = -INFINITY, sum0 = 0, sum1 = 0, peak0 = -INFINITY, peak1 = -INFINITY;
          float d[32];
#pragma unroll 1
          for (int i = begin; i < end; ++i) {
            mbarrier_wait(smem_address(&s.full[buffer]), parity);
            const uint64_t keys = operand_128b(smem_address(s.kv[buffer])), queries = operand_128b(smem_address(s.q)),
                           rope_keys = operand_64b(smem_address(s.kv[buffer] + code_boxes * box_bytes)),
                           rope_queries = operand_64b(smem_address(s.q + code_boxes * box_bytes));
            using Product = WgmmaFp8<64>;
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 16; ++k) {
              const uint32_t at = k / 4 * box_bytes + k % 4 * 32;
              Product::ss(d, operand_advance(queries, at), operand_advance(keys, at), k > 0);
            }
#pragma unroll
            for (int k = 0; k < 2; ++k)
              Product::ss(d, operand_advance(rope_queries, k * 32), operand_advance(rope_keys, k * 32), 1);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_pin(d);
            release_block();
            const bool last = i + 1 == end;
            if (i + 1 == blocks && elect_one()) mbarrier_arrive(smem_address(&s.q_empty));

            if (i >= seen_by_all) {
              const int base = i * block_tokens + thread_index() % 4 * 2, row = my_row(), limit0 = limit(row),
                        limit1 = limit(row + 8);
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
            best0 *= scale, best1 *= scale;
            peak0 = fmaxf(peak0, best0), peak1 = fmaxf(peak1, best1);
            // A reference is a largest logit, and grows when one is past it by more than a factor of 2: e4m3 ends below
            // 2^9. A key that outweighs all others is then a power of two, which e4m3 has exactly.
            float growth0 = 1, growth1 = 1;
            const auto grow = [](float best, float& top, float& growth) {
              if (best - top > 1) growth = exp2_approx(top - best), top = best;
            };
            grow(best0, top0, growth0), grow(best1, top1, growth1);
            const bool changed = __any_sync(0xffffffffu, fminf(growth0, growth1) < 1);
            mbarrier_wait(smem_address(&s.p_empty[turn & 1]), (turn >> 1) ^ 1);
            if (changed) {
              sum0 *= growth0, sum1 *= growth1;
              if (first_of_row()) {
                const int row = my_row();
                s.growth[turn & 1][row] = growth0, s.growth[turn & 1][row + 8] = growth1;
              }
            }
            if (elect_one()) s.changed[turn & 1][part] = changed && i > begin;
            const float shift0 = 7 - (top0 == -INFINITY ? 0.0f : top0), shift1 = 7 - (top1 == -INFINITY ? 0.0f : top1);
            uint32_t a[8];
#pragma unroll
            for (int k = 0; k < 32; k += 8) {  // 16 positions of two rows
              float* x = d + k;
#pragma unroll
              for (int m = 0; m < 8; ++m) {
                x[m] = exp2_approx(fmaf(x[m], scale, m % 4 < 2 ? shift0 : shift1));
                (m % 4 < 2 ? sum0 : sum1) += x[m];
              }
              a[k / 4] = e4m3_of(x[0], x[1], x[4], x[5]);
              a[k / 4 + 1] = e4m3_of(x[2], x[3], x[6], x[7]);
            }
#pragma unroll
            for (int k = 0; k < 2; ++k)
              store_shared_16(mine + ((turn & 1) * 2 + k) * sizeof s.p[0][0],
                              make_uint4(a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]));
            if (last) {
#pragma unroll
              for (int k = 1; k < 4; k *= 2) {
                sum0 += __shfl_xor_sync(0xffffffffu, sum0, k);
                sum1 += __shfl_xor_sync(0xffffffffu, sum1, k);
              }
              // The last sums have been read?
              if (begin) mbarrier_wait(smem_address(&s.piece_read), pieces_read++ & 1);
              else if (count) mbarrier_wait(smem_address(&s.item_empty[~count & 1]), (count - 1) >> 1 & 1);
              if (first_of_row()) {
                const int row = my_row();
                s.inverse[row] = finish_row<ctas, true>(p, it, piece, row, sum0, top0 - 7, peak0);
                s.inverse[row + 8] = finish_row<ctas, true>(p, it, piece, row + 8, sum1, top1 - 7, peak1);
              }
            }
            __syncwarp();
            if (elect_one()) mbarrier_arrive(smem_address(&s.made[turn & 1]));
            turn = (turn + 1) & 3;
            advance();
          }
        });
      } else {
        if (first_of_row()) {
          const int row = my_row();
          const volatile float none = -INFINITY;
          finish_row<ctas, true>(p, it, it.piece, row, 0, 0, none);
          finish_row<ctas, true>(p, it, it.piece, row + 8, 0, 0, none);
        }
        if (elect_one()) mbarrier_arrive(smem_address(&s.q_empty));
      }
      release_item(count);
    }
    barrier_arrive(merge_barrier, 128 + math_threads);  // blocks and queries are read
  } else {                                              // ---- outputs
    take_registers<output_registers>();
    take_turn();
    const uint32_t part = __reduce_max_sync(0xffffffffu, thread_index() / 32 % 4),
                   h = __reduce_max_sync(0xffffffffu, thread_index() / 128);
    float o[2][64];  // 128 latents each
    int turn = 0;    // of probabilities and values, then their parity
    for (int count = 0;; ++count) {
      const Item& it = wait_item(count);
      const int blocks = static_cast<int>(__reduce_max_sync(0xffffffffu, it.blocks + 1)) - 1;
      if (blocks < 0) break;
      for_pieces<invariant>(p, it, blocks, [&](int piece, int begin, int end) {
#pragma unroll
        for (int k = 0; k < 64; ++k) o[0][k] = o[1][k] = 0;
#pragma unroll 1
        for (int i = begin; i < end; ++i) {
          mbarrier_wait(smem_address(&s.made[turn & 1]), turn >> 1);
          uint32_t a[8];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            uint4 four;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
                         : "r"(mine + static_cast<uint32_t>(((turn & 1) * 2 + k) * sizeof s.p[0][0]))
                         : "memory");
            a[4 * k] = four.x, a[4 * k + 1] = four.y, a[4 * k + 2] = four.z, a[4 * k + 3] = four.w;
          }
          if (s.changed[turn & 1][part]) {
            const int row = part * 16 + thread_index() % 32 / 4;  // and row + 8, of the CTA's 64
            const float low = s.growth[turn & 1][row], high = s.growth[turn & 1][row + 8];
#pragma unroll
            for (int k = 0; k < 64; ++k) o[0][k] *= k & 2 ? high : low, o[1][k] *= k & 2 ? high : low;
          }
          __syncwarp();
          if (elect_one()) mbarrier_arrive(smem_address(&s.p_empty[turn & 1]));
          mbarrier_wait(smem_address(&s.v_full[turn & 1]), turn >> 1);
          const uint64_t values = operand_64b(smem_address(s.v[turn & 1]) + h * (width / 2 * block_tokens));
#pragma unroll
          for (int n = 0; n < 4; ++n) {  // 64 latents at a time
            float block[32];
            wgmma_pin(a);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 2; ++k)
              WgmmaFp8<64>::rs(block, a + 4 * k, operand_advance(values, n * 64 * block_tokens + k * 32), k > 0);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_pin(block);
#pragma unroll
            for (int k = 0; k < 32; ++k) o[n / 2][n % 2 * 32 + k] += block[k];
          }
          __syncwarp();
          if (elect_one()) mbarrier_arrive(smem_address(&s.v_empty[turn & 1]));
          turn = (turn + 1) & 3;
        }
        finish_outputs<Order, ctas>(p, s, it, piece, end == blocks, part_of(it), o, rank, [&](int h, int i) {
          return reinterpret_cast<uint4*>(s.kv[0] + (2 * i + h) * 32768);
        });
      });
      release_item(count);
    }
    barrier_sync(merge_barrier, 128 + math_threads);  // their room is the merge's now
    merge_split_tiles<Order, 64 * ctas>(p, s.splits, s.split, worker, s.kv[0], merge_bytes, part_of);
  }
}

}  // namespace mla::cuda::latent
