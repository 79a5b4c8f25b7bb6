// Memory-bound: of 8 rows a code of 8 bits takes part in 8 multiply-adds, where an H200 does 100 while it reads a byte.
// A warp takes 32 outputs by 128 inputs at a time, straight from memory to registers; codes become bf16, exactly, by
// integer operations, and meet the rows in products of a warp (mma) whose inputs stand in an order of their own: a
// lane's 16 neighbouring codes. Rows may be codes, too, with a scale for each 128 inputs. The warps of a CTA and the
// CTAs of a cluster share out outputs and inputs; sums of different inputs are added in the inputs' order.
#include <type_traits>

#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/mma.cuh"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/sm90/project/quantised.hpp"
#include "backend/cuda/sm90/project/sums.cuh"
#include "backend/cuda/sm90/project/widen.cuh"

namespace mla::cuda::sm90 {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kStep = 128;  // inputs of a warp at a time: two chunks of 64
constexpr int kTiles = 2;   // of 16 outputs, a warp's

// Codes of a lane: its two rows of each tile, both chunks of 64 inputs.
template <bool e4m3>
struct Codes {
  static constexpr int kWords = e4m3 ? 4 : 2;  // of 16 codes
  uint32_t at[kTiles][2][2][kWords];
};

// kAcross warps stand side by side on a CTA's outputs. Rows are bf16, or e4m3 codes.
template <bool e4m3, int n_tiles, int kAcross, bool row_codes>
__global__ void __launch_bounds__(kThreads, n_tiles == 1 || (n_tiles == 2 && e4m3) ? 2 : 1)
    few_rows_kernel(QuantisedProduct a, int cluster) {
  using X = std::conditional_t<row_codes, uint8_t, bf16>;
  constexpr int kAlong = kWarps / kAcross, kOuts = 32 * kAcross, kRows = 8 * n_tiles, kPitch = kOuts + 2;
  __shared__ float sums[kAlong][kRows][kPitch];
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  const int warp = static_cast<int>(threadIdx.x / 32), across = warp % kAcross, along = warp / kAcross;
  const int rank = static_cast<int>(blockIdx.x) % cluster;
  const int64_t head = blockIdx.y, first_out = int64_t{blockIdx.x / static_cast<unsigned>(cluster)} * kOuts,
                first_row = int64_t{blockIdx.z} * kRows;
  const int64_t mine = first_out + 32 * across;
  const int steps = static_cast<int>(a.in / kStep), stride = cluster * kAlong;

  const uint8_t* row[kTiles][2];
  const float* group_scales[kTiles][2];  // e2m1
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t o = head * a.out + min(mine + 16 * m + 8 * r + g, a.out - 1);
      row[m][r] = a.codes + (o * a.in + 16 * t) / (e4m3 ? 1 : 2);
      group_scales[m][r] = a.scales + o * a.scale_stride + t / 2;
    }
  Codes<e4m3> next;
  const auto load_codes = [&](int step) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const uint8_t* const from = row[m][r] + (static_cast<int64_t>(step) * kStep + 64 * c) / (e4m3 ? 1 : 2);
          uint32_t(&to)[Codes<e4m3>::kWords] = next.at[m][r][c];
          if constexpr (e4m3)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                         : "l"(from));
          else
            asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
        }
  };
  int step = rank * kAlong + along;
  if (step < steps) load_codes(step);
  wait_for_previous_grids();  // weights are nobody's to write
  allow_next_grid();

  const X* x[n_tiles];
#pragma unroll
  for (int n = 0; n < n_tiles; ++n) {
    const int64_t at = min(first_row + 8 * n + g, a.rows - 1);
    x[n] = static_cast<const X*>(a.x) + (a.x_rows ? a.x_rows[at] : at) * a.x_row + head * a.x_head + 16 * t;
  }
  const float* const row_scales = a.x_scales + head * steps * a.x_scale_row;
  int64_t column[n_tiles][2];  // of codes' scales
#pragma unroll
  for (int n = 0; n < n_tiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) column[n][e] = min(first_row + 8 * n + 2 * t + e, a.rows - 1);
  const int64_t scale_row =
      a.scale_rows > 0 ? (head * a.row_blocks + min(mine, a.out - 1) / a.scale_rows) * a.scale_stride : 0;
  float acc[kTiles][n_tiles][4] = {};
  for (; step < steps; step += stride) {
    const Codes<e4m3> codes = next;
    if (step + stride < steps) load_codes(step + stride);
    float part[kTiles][n_tiles][4] = {};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint32_t rows[n_tiles][8];
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
        const uint4* const from = reinterpret_cast<const uint4*>(x[n] + step * kStep + 64 * c);
        const uint4 v = *from;
        if constexpr (row_codes) {
          widen_e4m3(v.x, rows[n][0], rows[n][1]), widen_e4m3(v.y, rows[n][2], rows[n][3]);
          widen_e4m3(v.z, rows[n][4], rows[n][5]), widen_e4m3(v.w, rows[n][6], rows[n][7]);
        } else {
          const uint4 u = from[1];
          rows[n][0] = v.x, rows[n][1] = v.y, rows[n][2] = v.z, rows[n][3] = v.w;
          rows[n][4] = u.x, rows[n][5] = u.y, rows[n][6] = u.z, rows[n][7] = u.w;
        }
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        uint32_t scale[2] = {};
        if constexpr (!e4m3) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const uint32_t s = __float_as_uint(__ldg(group_scales[m][r] + step * (kStep / 32) + 2 * c)) >> 16;
            scale[r] = s << 16 | s;
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t w[4];
          if constexpr (e4m3) {
            widen_e4m3(codes.at[m][0][c][i], w[0], w[2]);
            widen_e4m3(codes.at[m][1][c][i], w[1], w[3]);
          } else {
            widen_e2m1(codes.at[m][0][c][i / 2] >> (i % 2 * 16) & 0xffff, scale[0], w[0], w[2]);
            widen_e2m1(codes.at[m][1][c][i / 2] >> (i % 2 * 16) & 0xffff, scale[1], w[1], w[3]);
          }
#pragma unroll
          for (int n = 0; n < n_tiles; ++n) multiply_add(part[m][n], w, rows[n][2 * i], rows[n][2 * i + 1]);
        }
      }
    }
    const float scale =
        e4m3 ? __ldg(a.scales + scale_row + (a.scale_rows > 0 ? step * kStep / a.scale_cols : 0)) : 1.0f;
    float scales[n_tiles][2];  // of the lane's columns
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        scales[n][e] = row_codes ? scale * row_scales[step * a.x_scale_row + column[n][e]] : scale;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[m][n][e] = fmaf(part[m][n][e], scales[n][e % 2], acc[m][n][e]);
  }

#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sums[along][8 * n + 2 * t + e % 2][32 * across + 16 * m + g + e / 2 * 8] = acc[m][n][e];
  __syncthreads();
  constexpr int kElements = kRows * kOuts;
  for (int e = static_cast<int>(threadIdx.x); e < kElements; e += kThreads) {
    float& sum = sums[0][e / kOuts][e % kOuts];
#pragma unroll
    for (int w = 1; w < kAlong; ++w) sum += sums[w][e / kOuts][e % kOuts];
  }
  if (cluster > 1) cluster_sync();
  else __syncthreads();
  store_sums<kRows, kOuts, kPitch, kThreads>(a, &sums[0][0][0], rank, cluster, head, first_row, first_out);
  if (cluster > 1) cluster_sync();  // nobody leaves while others read its sums
}

// Few CTAs: inputs are shared out further, to a cluster's.
template <bool e4m3, int n_tiles, int across, bool row_codes>
void run(const QuantisedProduct& a, int multiprocessors, cudaStream_t stream) {
  constexpr int outs = 32 * across, along = kWarps / across, rows = 8 * n_tiles;
  const int64_t tiles = (a.out + outs - 1) / outs, steps = a.in / kStep;
  int cluster = 1;
  while (cluster < 8 && tiles * a.heads * cluster * 2 <= int64_t{multiprocessors} * 4 && steps >= cluster * 2 * along)
    cluster *= 2;
  launch(few_rows_kernel<e4m3, n_tiles, across, row_codes>,
         {.grid = dim3(static_cast<unsigned>(tiles * cluster), static_cast<unsigned>(a.heads),
                       static_cast<unsigned>((a.rows + rows - 1) / rows)),
          .block = dim3(kThreads),
          .cluster = cluster,
          .overlap = true},
         stream, "project", "few_rows", shape_of(a), a, cluster);
}

template <bool e4m3, int n_tiles, bool row_codes>
void spread(const QuantisedProduct& a, int multiprocessors, cudaStream_t stream) {
  // Warps side by side where inputs are few, or rows many and outputs enough for all multiprocessors.
  const bool wide =
      a.in / kStep < 4 || (n_tiles > 2 && a.in / kStep >= 64 && (a.out + 255) / 256 * a.heads * 8 >= multiprocessors);
  if (wide) return run<e4m3, n_tiles, 8, row_codes>(a, multiprocessors, stream);
  if constexpr (n_tiles <= 2)
    if ((a.out + 63) / 64 * a.heads * 8 < multiprocessors)
      return run<e4m3, n_tiles, 1, row_codes>(a, multiprocessors, stream);
  run<e4m3, n_tiles, 2, row_codes>(a, multiprocessors, stream);
}

template <bool e4m3, bool row_codes>
void multiply(const QuantisedProduct& a, int multiprocessors, cudaStream_t stream) {
  if (a.rows <= 8) return spread<e4m3, 1, row_codes>(a, multiprocessors, stream);
  if (a.rows <= 16) return spread<e4m3, 2, row_codes>(a, multiprocessors, stream);
  spread<e4m3, 4, row_codes>(a, multiprocessors, stream);
}

}  // namespace

bool serves_quantised(const Linear& w, Dtype y) {
  const bool scales =
      w.format == WeightFormat::mxfp4 || w.block_rows == 0 || (w.block_rows % 32 == 0 && w.block_cols % kStep == 0);
  return w.format != WeightFormat::plain && w.dtype == Dtype::bf16 && scales && w.in % kStep == 0 && w.heads <= 65535 &&
         (y == Dtype::f32 || y == Dtype::bf16);
}

void multiply_few_rows(const QuantisedProduct& a, int multiprocessors, cudaStream_t stream) {
  if (a.x_scales) multiply<true, true>(a, multiprocessors, stream);
  else if (a.e4m3) multiply<true, false>(a, multiprocessors, stream);
  else multiply<false, false>(a, multiprocessors, stream);
}

}  // namespace mla::cuda::sm90
