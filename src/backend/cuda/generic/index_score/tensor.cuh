// index_score on matrix units. A block keeps its tokens' queries in shared memory; each warp walks keys, 16 at a time,
// from global memory straight into the registers of a product's A operand (rows are keys), B is a token's heads, and a
// score is the weighted sum along its row of D after relu: shared memory holds no keys and carries none.
//
// A's columns may come in any order that B's share: so a lane takes 16-byte pieces of its two rows, four lanes a
// contiguous 64 bytes, and the queries are laid out to match (dim_at). The next keys' loads are in flight while a tile
// is multiplied, and the page after those is looked up.
#pragma once

#include <algorithm>
#include <type_traits>

#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/mbarrier.cuh"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/generic/index_score/relu.cuh"
#include "backend/cuda/generic/index_score/score.hpp"

namespace mla::cuda::generic {

constexpr int kScoreThreads = 256, kScoreWarps = kScoreThreads / 32;
constexpr int kTile = 16 * kScoreWarps;  // keys of a block at a time
constexpr int kSteps = kIndexDim / 16;   // of a product's inner dimension
/// Shared memory for queries, beside which two blocks fit a multiprocessor of every GPU served.
constexpr int kQueryBytes = 64 << 10;

/// relu for sums of fp8 products, which are never infinite: x + |x|, twice it, in the pipe that has room; weights are
/// halved.
template <class T>
constexpr bool kTwice = std::is_same_v<T, f16>;
template <class T>
__device__ __forceinline__ float positive(float x) {
  if constexpr (kTwice<T>) return x + fabsf(x);
  else return relu(x);
}

// Inline for its order: what is written before a load stays before it, so that registers are free for the load.
__device__ __forceinline__ uint4 load_once(const void* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}
__device__ __forceinline__ uint32_t widen_pair(uint16_t codes) {
#if __CUDA_ARCH__ >= 890
  uint32_t pair;
  asm volatile("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
  return pair;
#else
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3);
  return pair.x | static_cast<uint32_t>(pair.y) << 16;
#endif
}

// Four codes as two pairs of T.
template <class T>
__device__ __forceinline__ void widen_codes(uint32_t codes, uint32_t& low, uint32_t& high) {
  low = widen_pair(static_cast<uint16_t>(codes));
  high = widen_pair(static_cast<uint16_t>(codes >> 16));
  if constexpr (std::is_same_v<T, bf16>)
    for (uint32_t* p : {&low, &high}) {
      const float2 f = __half22float2(
          __half2(__ushort_as_half(static_cast<uint16_t>(*p)), __ushort_as_half(static_cast<uint16_t>(*p >> 16))));
      *p = static_cast<uint32_t>(narrow<bf16>(f.x).bits) | static_cast<uint32_t>(narrow<bf16>(f.y).bits) << 16;
    }
}

/// A lane's part of 16 keys: pieces of 16 bytes of rows lane / 4 and + 8.
template <class Key>
struct KeyTile {
  static constexpr int kPieces = 2 * static_cast<int>(sizeof(Key)),
                       kRowBytes = kIndexDim * static_cast<int>(sizeof(Key));
  uint4 piece[2][kPieces];
  float scale[2];

  /// row: of this lane's, at its first piece.
  __device__ void load(int r, const std::byte* row, const float* at_scale) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) piece[r][p] = load_once(row + 64 * p);
    scale[r] = 1;
    if constexpr (sizeof(Key) == 1) scale[r] = __ldg(at_scale);
  }
  /// As A operands.
  template <class T>
  __device__ void widen(uint32_t (&to)[kSteps][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const uint32_t words[4] = {piece[r][p].x, piece[r][p].y, piece[r][p].z, piece[r][p].w};
#pragma unroll
        for (int w = 0; w < 4; ++w)
          if constexpr (sizeof(Key) == 1) widen_codes<T>(words[w], to[4 * p + w][r], to[4 * p + w][2 + r]);
          else to[2 * p + w / 2][w % 2 * 2 + r] = words[w];
      }
  }
};

// Queries of a chunk of N heads: two panels of 64 numbers of N rows of 128 bytes, their 16-byte chunks swizzled as the
// matrix units want them. The numbers that a lane's piece of a key meets, 16 / sizeof(Key) in a row, are pairs of its
// two halves of the products' steps in turn.
template <class Key, class T, class Q, int N>
__device__ void stage_queries(const IndexScore& a, int64_t token, int tokens, int chunks, std::byte* to,
                              float* weights) {
  constexpr int kNumbers = 16 / static_cast<int>(sizeof(Key)), kPieces = kIndexDim / kNumbers;
  constexpr int kBytes = kNumbers * static_cast<int>(sizeof(Q));
  const int rows = tokens * chunks * N;
  const bool wide = reinterpret_cast<uintptr_t>(a.q) % kBytes == 0 && a.q_token * sizeof(Q) % kBytes == 0 &&
                    a.q_head * sizeof(Q) % kBytes == 0;
  for (int i = threadIdx.x; i < rows * kPieces; i += kScoreThreads) {
    const int t = i / kPieces / (chunks * N), head = i / kPieces % (chunks * N), d = i % kPieces * kNumbers;
    Q q[kNumbers] = {};
    if (head < a.heads) {
      const Q* from = static_cast<const Q*>(a.q) + (token + t) * a.q_token + head * a.q_head + d;
      struct alignas(kBytes) Pack {
        Q at[kNumbers];
      };
      if (wide) *reinterpret_cast<Pack*>(q) = *reinterpret_cast<const Pack*>(from);
      else
        for (int e = 0; e < kNumbers; ++e) q[e] = from[e];
    }
    const int row = head % N, chunk = t * chunks + head / N, lane = i % 4;
#pragma unroll
    for (int j = 0; j < kNumbers / 2; ++j) {
      const int step = i % kPieces / 4 * (kNumbers / 4) + j / 2;
      std::byte* at = to + (chunk * 2 + step / 4) * (N * 128) + row * 128 + ((step % 4 * 2 + j % 2) ^ row % 8) * 16;
      reinterpret_cast<uint32_t*>(at)[lane] =
          narrow<T>(widen(q[2 * j])).bits | static_cast<uint32_t>(narrow<T>(widen(q[2 * j + 1])).bits) << 16;
    }
  }
  for (int i = threadIdx.x; i < rows; i += kScoreThreads) {
    const int t = i / (chunks * N), head = i % (chunks * N);
    const float w = head < a.heads ? a.weights[(token + t) * a.weights_token + head * a.weights_head] * a.scale : 0.0f;
    weights[i] = kTwice<T> ? 0.5f * w : w;
  }
}

/// Product::multiply(acc, keys, queries): acc = keys times the N heads at a shared-memory address, a tile of 16 keys a
/// warp; lane l holds rows l / 4 and + 8, columns 8 j + 2 (l % 4) and + 1.
template <class Key, class T, int N, class Product>
__global__ void __launch_bounds__(kScoreThreads, 2) score_kernel(const IndexScore a) {
  extern __shared__ std::byte shared[];
  take_turn();
  const int64_t unit = blockIdx.x;
  const IndexItem item = clipped(a.items[unit / (a.groups * a.ranges)], a.first, a.columns);
  const int group = static_cast<int>(unit / a.ranges % a.groups);
  const int chunks = (a.heads + N - 1) / N, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::byte* queries = shared + (-smem_address(shared) & 1023);
  float* weights = reinterpret_cast<float*>(queries + a.tokens * chunks * (N * 256));
  const int32_t* table = a.table + item.request * a.table_row;
  // A warp's 16 keys lie in one page. Its unused rows past the last key are read, and what comes of them is dropped.
  const bool whole = a.page_shift >= 4 && item.kv_begin % 16 == 0;

  for (int token = group * a.tokens; token < item.q_count; token += a.groups * a.tokens) {
    const int tokens = min(a.tokens, item.q_count - token), end = item.columns(token + tokens - 1);
    // Blocks take tiles in turn: requests shorter than those that the launch was made for are shared out, too.
    const int stride = kTile * static_cast<int>(a.ranges);
    int tile = kTile * static_cast<int>(unit % a.ranges);
    if (tile >= end) continue;
    // Columns that token t sees: first_seen + t, within [0, end].
    const int first_seen =
        static_cast<int>(max(int64_t{-tokens}, min(int64_t{item.visible} + token + 1 - item.kv_begin, int64_t{end})));
    float* scores = a.scores + (item.row + token) * a.scores_row;
    __syncthreads();  // the last group's queries are read
    if (a.q_dtype == Dtype::fp8_e4m3)
      stage_queries<Key, T, fp8_e4m3, N>(a, item.q_begin + token, tokens, chunks, queries, weights);
    else stage_queries<Key, T, bf16, N>(a, item.q_begin + token, tokens, chunks, queries, weights);
    Product::publish();
    __syncthreads();
    constexpr int kRowBytes = KeyTile<Key>::kRowBytes;
    KeyTile<Key> keys;
    int32_t page[2];
    uint32_t offset[2];
    const auto look_up = [&](int tile) {
      if (whole) {
        const uint32_t at = item.kv_begin + min(tile + 16 * warp, (end - 1) & ~15);
        page[0] = __ldg(table + (at >> a.page_shift));
        offset[0] = (at & (a.page_size - 1)) + lane / 4;
        return;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t at = item.kv_begin + min(tile + 16 * warp + lane / 4 + 8 * r, end - 1);
        const uint32_t p = at / a.page_size;
        offset[r] = at - p * a.page_size;
        page[r] = __ldg(table + p);
      }
    };
    const auto load = [&] {
      const std::byte* at = a.cache + page[0] * a.page_stride;
      const std::byte* row = at + offset[0] * kRowBytes + lane % 4 * 16;
      const float* scale = reinterpret_cast<const float*>(at + a.page_size * kIndexDim) + offset[0];
      keys.load(0, row, scale);
      if (!whole) {
        at = a.cache + page[1] * a.page_stride;
        row = at + offset[1] * kRowBytes + lane % 4 * 16 - 8 * kRowBytes;
        scale = reinterpret_cast<const float*>(at + a.page_size * kIndexDim) + offset[1] - 8;
      }
      keys.load(1, row + 8 * kRowBytes, scale + 8);
    };
    // Behind its last tile a block asks for that once more: past the end all would ask for the same keys.
    const auto within = [&](int next) { return next < end ? next : tile; };
    look_up(tile);
    load();
    look_up(within(tile + stride));
    for (; tile < end; tile += stride) {
      uint32_t rows[kSteps][4];
      keys.template widen<T>(rows);
      const float scale[2] = {keys.scale[0], keys.scale[1]};
      load();
      look_up(within(tile + 2 * stride));
      const int column = tile + 16 * warp + lane / 4;
      float* to = scores + column;
      for (int t = 0; t < tokens; ++t, to += a.scores_row) {
        const int seen = min(first_seen + t, end);
        if (tile >= seen) continue;
        float sum[2] = {0, 0};
        for (int c = 0; c < chunks; ++c) {
          float acc[N / 2];
          Product::multiply(acc, rows, smem_address(queries) + (t * chunks + c) * (N * 256));
          const float2* w = reinterpret_cast<const float2*>(weights + (t * chunks + c) * N) + lane % 4;
#pragma unroll
          for (int j = 0; j < N / 8; ++j) {
            const float2 v = w[4 * j];
            sum[0] = fmaf(positive<T>(acc[4 * j]), v.x, sum[0]);
            sum[1] = fmaf(positive<T>(acc[4 * j + 2]), v.x, sum[1]);
            sum[0] = fmaf(positive<T>(acc[4 * j + 1]), v.y, sum[0]);
            sum[1] = fmaf(positive<T>(acc[4 * j + 3]), v.y, sum[1]);
          }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
          sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
          if (lane % 4 == 0 && column + 8 * r < seen) to[8 * r] = sum[r] * scale[r];
        }
      }
    }
  }
}

template <int N>
int query_bytes(const IndexScore& a) {
  return a.tokens * ((a.heads + N - 1) / N) * (N * 256 + N * 4);
}

template <class Key, class T, int N, template <class, int> class Product>
void launch_score(const Queue& queue, const IndexScore& a, int64_t blocks, const std::string& shape) {
  launch(score_kernel<Key, T, N, Product<T, N>>,
         {.grid = dim3(static_cast<unsigned>(blocks)),
          .block = dim3(kScoreThreads),
          .shared_bytes = static_cast<size_t>(query_bytes<N>(a)) + 1024,
          .overlap = queue.hopper()},
         queue.stream(), "index_score", "scores", shape, a);
}

/// By the number of heads that a product takes at a time.
template <class Key, class T, template <class, int> class Product>
void launch_by_heads(const Queue& queue, const IndexScore& a, int64_t blocks, const std::string& shape) {
  if (a.heads > 32) launch_score<Key, T, 64, Product>(queue, a, blocks, shape);
  else if (a.heads > 16) launch_score<Key, T, 32, Product>(queue, a, blocks, shape);
  else launch_score<Key, T, 16, Product>(queue, a, blocks, shape);
}

}  // namespace mla::cuda::generic
