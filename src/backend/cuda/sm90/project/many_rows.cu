// Memory-bound up to some 100 rows: a code is read and widened once for all rows of a tile of 32, 64 or 128. Weights
// are the products' (wgmma's) operand in registers, 64 outputs a warpgroup; rows are the other one, in shared memory.
// One thread fills a ring with both by the copy engine, codes as they are, a step of 128 inputs at a time: loads into
// registers would not do, for the compiler waits for all of them at once. Sums of 128 inputs then meet their scale;
// e2m1 codes have met theirs, a power of two, before. CTAs of a cluster share out the inputs.
#include <cuda_bf16.h>

#include <algorithm>

#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/mbarrier.cuh"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/core/static_for.cuh"
#include "backend/cuda/core/tensor_map.hpp"
#include "backend/cuda/core/tma.cuh"
#include "backend/cuda/core/warpgroup.cuh"
#include "backend/cuda/core/wgmma.cuh"
#include "backend/cuda/sm90/project/quantised.hpp"
#include "backend/cuda/sm90/project/sums.cuh"
#include "backend/cuda/sm90/project/widen.cuh"

namespace mla::cuda::sm90 {
namespace {

constexpr int kPair = 256;  // threads of two warpgroups that multiply
constexpr int kFill = 128;  // of one that fills the ring, by one thread, and gives the others its registers
constexpr int kMathBarrier = 1;
constexpr int kStep = 128, kWindow = 64;  // inputs; a row of 128 bytes, swizzled, holds a window
constexpr int kOuts = 128;                // of a tile
constexpr int kPitch = kOuts + 4;         // of a tile's sums: a warp's stores touch all banks

template <bool e4m3, int kRows>
struct Ring {
  // Pairs of warpgroups take turns at the steps: while one waits for its products the other one widens.
  static constexpr int kPairs = kRows == 128 ? 1 : 2, kMath = kPairs * kPair, kThreads = kMath + kFill;
  // The compiler gives each thread 65536 registers / kThreads, in fours of warps: 168, or 96.
  static constexpr int kFillRegisters = kPairs == 1 ? 56 : kRows == 64 ? 32 : 40;
  static constexpr int kMathRegisters = kPairs == 1 ? 224 : kRows == 64 ? 112 : 104;
  static constexpr int kStages = kRows == 128 ? 3 : 6;
  static_assert(kStages % kPairs == 0);               // a stage is one pair's: no other waits for its barrier's phases
  static constexpr int kPanel = kRows * 2 * kWindow;  // rows of a window
  static constexpr int kCodeRow = e4m3 ? kStep : kStep / 2;  // bytes of an output
  static constexpr int kCodesAt = kPanel * (kStep / kWindow), kScalesAt = kCodesAt + kOuts * kCodeRow;
  static constexpr int kFilled = kScalesAt + (e4m3 ? 0 : kOuts * 16);
  static constexpr int kStage = (kFilled + 1023) / 1024 * 1024;
  static constexpr int kBytes = 1024 + kStages * kStage + kRows * kPitch * 4;  // the begin is rounded up; and sums
  static_assert(kBytes + 2 * kStages * 8 <= 227 * 1024);
  // Where the copy engine's swizzle, as wide as a row of codes, puts 16 bytes of an output: lanes that read together
  // touch all banks.
  __device__ static int place(int out, int chunk) { return chunk ^ (e4m3 ? out & 7 : out >> 1 & 3); }
};
struct Maps {
  CUtensorMap rows, codes, scales;  // [rows, heads, in]; [heads out, bytes of codes]; of e2m1: [heads out, in / 32]
};

// A CTA's tiles of rows and outputs, and of each its steps.
struct Work {
  int64_t out_tiles, row_tiles, tiles;
  int cluster, rank, count;  // count: of a tile's steps, this CTA's
  int64_t tile, stride;      // the first one, and from one to the next

  __device__ Work(const QuantisedProduct& a, int rows, int of)
      : out_tiles((a.out + kOuts - 1) / kOuts),
        row_tiles((a.rows + rows - 1) / rows),
        tiles(out_tiles * row_tiles * a.heads),
        cluster(of),
        rank(static_cast<int>(blockIdx.x) % of),
        count((static_cast<int>(a.in / kStep) - 1 - rank) / of + 1),
        tile(blockIdx.x / static_cast<unsigned>(of)),
        stride(gridDim.x / static_cast<unsigned>(of)) {}
};
struct Tile {
  int64_t head, first_out, first_row;
  int begin;  // tiles of outputs begin at different steps: all at one would ask for the same rows
  __device__ Tile(const QuantisedProduct& a, const Work& w, int rows, int64_t tile)
      : head(tile / w.out_tiles % a.heads),
        first_out(tile % w.out_tiles * kOuts),
        first_row(tile / w.out_tiles / a.heads * rows),
        begin(static_cast<int>(tile % w.count)) {}
};
// The t-th of a tile's steps that this CTA takes.
__device__ __forceinline__ int step_of(const Work& w, const Tile& tile, int t) {
  const int turned = tile.begin + t;
  return w.rank + (turned < w.count ? turned : turned - w.count) * w.cluster;
}

template <bool e4m3, int kRows>
__device__ void fill(const QuantisedProduct& a, const Maps& maps, const Work& w, uint32_t ring, uint32_t full,
                     uint32_t empty) {
  using R = Ring<e4m3, kRows>;
  int n = 0;
  for (int64_t at = w.tile; at < w.tiles; at += w.stride) {
    const Tile tile(a, w, kRows, at);
    const int out = static_cast<int>(tile.head * a.out + tile.first_out);
    for (int t = 0; t < w.count; ++t, ++n) {
      const int slot = n % R::kStages, step = step_of(w, tile, t);
      const uint32_t stage = ring + static_cast<uint32_t>(slot * R::kStage),
                     bar = full + 8 * static_cast<uint32_t>(slot);
      mbarrier_wait(empty + 8 * static_cast<uint32_t>(slot), n / R::kStages % 2 ^ 1);
      mbarrier_arrive_expect(bar, R::kFilled);
      tma_load(stage + R::kCodesAt, maps.codes, bar, step * R::kCodeRow, out);
      if (!e4m3) tma_load(stage + R::kScalesAt, maps.scales, bar, step * (kStep / 32), out);
      if (n == 0) wait_for_previous_grids(), allow_next_grid();  // weights are nobody's to write
#pragma unroll
      for (int window = 0; window < kStep / kWindow; ++window)
        tma_load(stage + static_cast<uint32_t>(window * R::kPanel), maps.rows, bar, step * kStep + window * kWindow,
                 static_cast<int>(tile.head), static_cast<int>(tile.first_row));
    }
  }
}

// A window's four operands, of 16 inputs each: of a lane's outputs, `out` and 8 behind it, inputs 2 q, 8 + 2 q and
// their neighbours.
template <class R, bool e4m3>
__device__ __forceinline__ void widen(const uint8_t* stage, int out, int q, int window, uint32_t (&w)[16]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int o = out + 8 * r;
    const uint8_t* const row = stage + R::kCodesAt + o * R::kCodeRow;
    if constexpr (e4m3) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto* const at = reinterpret_cast<const uint32_t*>(row + R::place(o, 4 * window + i) * 16) + q / 2;
        w[4 * i + r] = widen_two_e4m3(at[0], q % 2), w[4 * i + 2 + r] = widen_two_e4m3(at[2], q % 2);
      }
    } else {
      const uint32_t both = static_cast<uint32_t>(q | (4 + q) << 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2 at = *reinterpret_cast<const uint2*>(row + R::place(o, 2 * window + i / 2) * 16 + i % 2 * 8);
        const uint32_t bits =
            __float_as_uint(reinterpret_cast<const float*>(stage + R::kScalesAt)[4 * o + 2 * window + i / 2]) >> 16;
        widen_e2m1(__byte_perm(at.x, at.y, both) & 0xffff, bits << 16 | bits, w[4 * i + r], w[4 * i + 2 + r]);
      }
    }
  }
}

template <bool e4m3, int kRows>
__device__ void multiply_rows(const QuantisedProduct& a, const Work& w, const uint8_t* ring, float* sums, uint32_t full,
                              uint32_t empty) {
  using R = Ring<e4m3, kRows>;
  using Product = Wgmma<kRows, __nv_bfloat16>;
  const int thread = static_cast<int>(threadIdx.x) % kPair, warp = thread / 32, g = thread % 32 / 4, q = thread % 4;
  const int pair = static_cast<int>(threadIdx.x) / kPair, out = 16 * warp + g;
  float acc[kRows / 2] = {}, part[kRows / 2];
  const int steps_a_scale = static_cast<int>((a.scale_rows > 0 ? a.scale_cols : a.in) / kStep);
  int n = 0;  // steps so far, both pairs'
  for (int64_t at = w.tile; at < w.tiles; at += w.stride) {
    const Tile tile(a, w, kRows, at);
    const float* scales = a.scales;  // of the warp's outputs
    if (a.scale_rows > 0)
      scales += (tile.head * a.row_blocks + min(tile.first_out + 16 * warp, a.out - 1) / a.scale_rows) * a.scale_stride;
    const int begin = n, end = n + w.count;
    for (n += (n + pair) % R::kPairs; n < end; n += R::kPairs) {
      const int slot = n % R::kStages;
      const uint8_t* const stage = ring + slot * R::kStage;
      const uint32_t bar = 8 * static_cast<uint32_t>(slot);
      uint32_t operands[2][16];
      mbarrier_wait(full + bar, n / R::kStages % 2);
      const uint64_t rows = warp_operand_128b(shared_address(stage));
      const int step = step_of(w, tile, n - begin);
      const float scale = e4m3 ? __ldg(scales + (steps_a_scale == 1 ? step : step / steps_a_scale)) : 1.0f;
      static_for<2>([&](auto window) {
        widen<R, e4m3>(stage, out, q, window, operands[window]);
        wgmma_pin(operands[window]);
        wgmma_pin(part);
        wgmma_fence();
        static_for<4>([&](auto i) {
          Product::template rs_at<window * R::kPanel + i * 32>(part, operands[window] + 4 * i, rows, window + i > 0);
        });
        wgmma_commit();
      });
      wgmma_wait<0>();
      wgmma_pin(part);
      wgmma_pin(operands[0]);
      wgmma_pin(operands[1]);
      __syncwarp();
      if (thread % 32 == 0) mbarrier_arrive(empty + bar);
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) acc[i] = fmaf(part[i], scale, acc[i]);
    }
    n = end;
    wait_for_previous_grids();             // long complete
    barrier_sync(kMathBarrier, R::kMath);  // the tile before is stored
#pragma unroll
    for (int p = 0; p < R::kPairs; ++p) {  // each pair's sums of every other step, one added to the other
      if (pair == p)
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) {
          float& sum = sums[(i / 4 * 8 + q * 2 + i % 2) * kPitch + out + i / 2 % 2 * 8];
          sum = p == 0 ? acc[i] : sum + acc[i];
          acc[i] = 0;
        }
      if (p + 1 < R::kPairs || w.cluster == 1) barrier_sync(kMathBarrier, R::kMath);
    }
    if (w.cluster > 1) cluster_sync();  // of one tile
    store_sums<kRows, kOuts, kPitch, R::kMath>(a, sums, w.rank, w.cluster, tile.head, tile.first_row, tile.first_out);
  }
}

template <bool e4m3, int kRows>
__global__ void __launch_bounds__(Ring<e4m3, kRows>::kThreads, 1)
    many_rows_kernel(QuantisedProduct a, const __grid_constant__ Maps maps, int cluster) {
  using R = Ring<e4m3, kRows>;
  extern __shared__ uint8_t memory[];
  __shared__ uint64_t barriers[2 * R::kStages];
  uint8_t* const ring = memory + (-shared_address(memory) & 1023);
  float* const sums = reinterpret_cast<float*>(ring + R::kStages * R::kStage);
  const uint32_t full = shared_address(barriers), empty = shared_address(barriers + R::kStages);
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < R::kStages; ++i) mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, kPair / 32);
    mbarrier_init_fence();
  }
  __syncthreads();
  const Work w(a, kRows, cluster);
  if (threadIdx.x >= R::kMath) {
    give_registers<R::kFillRegisters>();
    if (threadIdx.x == R::kMath) fill<e4m3, kRows>(a, maps, w, shared_address(ring), full, empty);
    __syncwarp();
    if (cluster > 1) cluster_sync();
  } else {
    take_registers<R::kMathRegisters>();
    multiply_rows<e4m3, kRows>(a, w, ring, sums, full, empty);
  }
  if (cluster > 1) cluster_sync();  // nobody leaves while others read its sums
}

template <bool e4m3, int kRows>
Maps maps_of(const QuantisedProduct& a) {
  using R = Ring<e4m3, kRows>;
  const auto u = [](int64_t n) { return static_cast<uint64_t>(n); };
  const uint64_t outs = u(a.heads * a.out), code_row = u(a.in) / (e4m3 ? 1 : 2), scale_row = u(a.scale_stride) * 4;
  const uint64_t rows[] = {u(a.in), u(a.heads), u(a.rows)},
                 row_strides[] = {u(a.heads > 1 ? a.x_head : a.in) * 2, u(a.rows > 1 ? a.x_row : a.in) * 2},
                 codes[] = {code_row, outs}, scales[] = {u(a.in) / 32, outs};
  const uint32_t row_box[] = {kWindow, 1, kRows}, code_box[] = {R::kCodeRow, kOuts}, scale_box[] = {kStep / 32, kOuts};
  Maps m{.rows = tensor_map("project", "x", MapType::bf16, a.x, rows, row_strides, row_box, Swizzle::b128),
         .codes = tensor_map("project", "codes", MapType::u8, a.codes, codes, {&code_row, 1}, code_box,
                             e4m3 ? Swizzle::b128 : Swizzle::b64),
         .scales = {}};
  if (!e4m3)
    m.scales =
        tensor_map("project", "scales", MapType::f32, a.scales, scales, {&scale_row, 1}, scale_box, Swizzle::none);
  return m;
}

// A CTA a multiprocessor. Few tiles: clusters that share out a tile's inputs; many: a CTA takes several.
template <bool e4m3, int kRows>
void run(const QuantisedProduct& a, int multiprocessors, cudaStream_t stream) {
  using R = Ring<e4m3, kRows>;
  const int64_t tiles = (a.out + kOuts - 1) / kOuts * ((a.rows + kRows - 1) / kRows) * a.heads;
  const int cluster = static_cast<int>(std::clamp<int64_t>(std::min(multiprocessors / tiles, a.in / kStep / 2), 1, 8));
  launch(
      many_rows_kernel<e4m3, kRows>,
      {.grid = dim3(static_cast<unsigned>(cluster > 1 ? tiles * cluster : std::min<int64_t>(tiles, multiprocessors))),
       .block = dim3(R::kThreads),
       .shared_bytes = R::kBytes,
       .cluster = cluster,
       .overlap = true},
      stream, "project", "many_rows", shape_of(a), a, maps_of<e4m3, kRows>(a), cluster);
}

template <bool e4m3>
void multiply(const QuantisedProduct& a, int multiprocessors, cudaStream_t stream) {
  if (a.rows <= 32) return run<e4m3, 32>(a, multiprocessors, stream);
  if (a.rows <= 64) return run<e4m3, 64>(a, multiprocessors, stream);
  run<e4m3, 128>(a, multiprocessors, stream);
}

}  // namespace

void multiply_many_rows(const QuantisedProduct& a, int multiprocessors, cudaStream_t stream) {
  if (a.e4m3) multiply<true>(a, multiprocessors, stream);
  else multiply<false>(a, multiprocessors, stream);
}

}  // namespace mla::cuda::sm90
