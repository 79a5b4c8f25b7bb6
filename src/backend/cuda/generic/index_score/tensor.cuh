// index_score on matrix units. A block keeps its tokens' queries in shared memory; each warp walks keys, 16 at a time,
// from global memory straight into the registers of a product's A operand (rows are keys), B is a token's heads, and a
// score is the weighted sum along its row of D after relu: shared memory holds no keys and carries none.
//
// A's columns may come in any order that B's share: so a lane takes 16-byte pieces of its two rows, four lanes a
// contiguous 64 bytes, and the queries are laid out to match (dim_at). The next keys' loads are in flight while a tile
// is multiplied, and the page after those is looked up.
#pragma once

#include <algorithm>

#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/mbarrier.cuh"
#include "backend/cuda/generic/index_score/score.hpp"

namespace mla::cuda::generic {

constexpr int kScoreThreads = 256, kScoreWarps = kScoreThreads / 32;
constexpr int kSteps = kIndexDim / 16;  // of a product's inner dimension
/// Shared memory for queries, beside which two blocks fit a multiprocessor of every GPU served.
constexpr int kQueryBytes = 64 << 10;

/// The max that keeps a NaN.
__device__ __forceinline__ float relu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// Four codes as two pairs of T.
template <class T>
__device__ __forceinline__ void widen_codes(uint32_t codes, uint32_t& low, uint32_t& high);
template <>
__device__ __forceinline__ void widen_codes<f16>(uint32_t codes, uint32_t& low, uint32_t& high) {
  const __half2_raw l = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3),
                    h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes >> 16), __NV_E4M3);
  low = l.x | static_cast<uint32_t>(l.y) << 16;
  high = h.x | static_cast<uint32_t>(h.y) << 16;
}
template <>
__device__ __forceinline__ void widen_codes<bf16>(uint32_t codes, uint32_t& low, uint32_t& high) {
  uint32_t pairs[2];
  widen_codes<f16>(codes, pairs[0], pairs[1]);
#pragma unroll
  for (uint32_t& p : pairs) {
    const float2 f = __half22float2(
        __half2(__ushort_as_half(static_cast<uint16_t>(p)), __ushort_as_half(static_cast<uint16_t>(p >> 16))));
    p = static_cast<uint32_t>(narrow<bf16>(f.x).bits) | static_cast<uint32_t>(narrow<bf16>(f.y).bits) << 16;
  }
  low = pairs[0];
  high = pairs[1];
}

/// Which number of a key is element e of pair t in half `half` of a product's step s.
template <class Key>
__device__ constexpr int dim_at(int s, int half, int t, int e) {
  return sizeof(Key) == 1 ? 64 * (s / 4) + 16 * t + 4 * (s % 4) + 2 * half + e
                          : 32 * (s / 2) + 8 * t + 4 * (s % 2) + 2 * half + e;
}

/// A lane's part of a tile's keys: of rows lane / 4 and + 8.
template <class Key>
struct KeyTile {
  static constexpr int kPieces = 2 * static_cast<int>(sizeof(Key));  // of 64 bytes a row
  uint4 piece[2][kPieces];
  float scale[2];

  __device__ void load(const IndexScore& a, const int32_t (&page)[2], const uint32_t (&offset)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::byte* at = a.cache + page[r] * a.page_stride;
      scale[r] = 1;
      if constexpr (sizeof(Key) == 1)
        scale[r] = __ldg(reinterpret_cast<const float*>(at + a.page_size * kIndexDim) + offset[r]);
      const uint4* row = reinterpret_cast<const uint4*>(at + static_cast<int64_t>(offset[r]) * kIndexDim * sizeof(Key));
#pragma unroll
      for (int p = 0; p < kPieces; ++p) piece[r][p] = __ldg(row + 4 * p + threadIdx.x % 4);
    }
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

template <class T>
__device__ float query_number(const IndexScore& a, int64_t token, int head, int d) {
  return widen(static_cast<const T*>(a.q)[token * a.q_token + head * a.q_head + d]);
}

// Queries of a chunk of N heads: two panels of 64 numbers of N rows of 128 bytes, their 16-byte chunks swizzled as the
// matrix units want them.
template <class Key, class T, class Q, int N>
__device__ void stage_queries(const IndexScore& a, int64_t token, int tokens, int chunks, std::byte* to,
                              float* weights) {
  const int count = tokens * chunks * N;
  for (int i = threadIdx.x; i < count * 16; i += kScoreThreads) {
    const int t = i / 16 / (chunks * N), head = i / 16 % (chunks * N), s = i % 16 / 2, half = i % 2;
    uint32_t pair[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float x[2] = {0, 0};
      if (head < a.heads)
        for (int e = 0; e < 2; ++e) x[e] = query_number<Q>(a, token + t, head, dim_at<Key>(s, half, k, e));
      pair[k] = narrow<T>(x[0]).bits | static_cast<uint32_t>(narrow<T>(x[1]).bits) << 16;
    }
    const int row = head % N, chunk = t * chunks + head / N;
    std::byte* at = to + (chunk * 2 + s / 4) * (N * 128) + row * 128 + ((s % 4 * 2 + half) ^ row % 8) * 16;
    *reinterpret_cast<uint4*>(at) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
  for (int i = threadIdx.x; i < count; i += kScoreThreads) {
    const int t = i / (chunks * N), head = i % (chunks * N);
    weights[i] = head < a.heads ? a.weights[(token + t) * a.weights_token + head * a.weights_head] * a.scale : 0.0f;
  }
}

/// Product::multiply(acc, keys, queries): acc = keys times the N heads at a shared-memory address, a tile of 16 keys a
/// warp; lane l holds rows l / 4 and + 8, columns 8 j + 2 (l % 4) and + 1.
template <class Key, class T, int N, class Product>
__global__ void __launch_bounds__(kScoreThreads, 2) score_kernel(const IndexScore a) {
  extern __shared__ std::byte shared[];
  const int64_t unit = blockIdx.x;
  const IndexItem item = clipped(a.items[unit / (a.groups * a.ranges)], a.first, a.columns);
  const int group = static_cast<int>(unit / a.ranges % a.groups);
  const int64_t range = unit % a.ranges;
  const int chunks = (a.heads + N - 1) / N, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::byte* queries = shared + (-smem_address(shared) & 1023);
  float* weights = reinterpret_cast<float*>(queries + a.tokens * chunks * (N * 256));
  const int32_t* table = a.table + item.request * a.table_row;

  for (int token = group * a.tokens; token < item.q_count; token += a.groups * a.tokens) {
    const int tokens = min(a.tokens, item.q_count - token);
    if (range * a.range >= item.columns(token + tokens - 1)) continue;
    __syncthreads();  // the last group's queries are read
    if (a.q_dtype == Dtype::fp8_e4m3)
      stage_queries<Key, T, fp8_e4m3, N>(a, item.q_begin + token, tokens, chunks, queries, weights);
    else stage_queries<Key, T, bf16, N>(a, item.q_begin + token, tokens, chunks, queries, weights);
    Product::publish();
    __syncthreads();
    for (int64_t begin = range * a.range; begin < item.columns(token + tokens - 1); begin += a.ranges * a.range) {
      const int end = static_cast<int>(min(begin + a.range, int64_t{item.columns(token + tokens - 1)}));
      constexpr int kStride = 16 * kScoreWarps;
      int32_t page[2];
      uint32_t offset[2];
      // Rows past the end read the last key.
      const auto look_up = [&](int tile) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t at = item.kv_begin + min(tile + 16 * warp + lane / 4 + 8 * r, end - 1);
          const uint32_t p = a.page_shift >= 0 ? at >> a.page_shift : at / a.page_size;
          offset[r] = at - p * a.page_size;
          page[r] = __ldg(table + p);
        }
      };
      KeyTile<Key> keys;
      int tile = static_cast<int>(begin);
      look_up(tile);
      keys.load(a, page, offset);
      look_up(tile + kStride);
      for (; tile < end; tile += kStride) {
        uint32_t rows[kSteps][4];
        keys.template widen<T>(rows);
        const float scale[2] = {keys.scale[0], keys.scale[1]};
        keys.load(a, page, offset);
        look_up(tile + 2 * kStride);
        const int column = tile + 16 * warp + lane / 4;
        for (int t = 0; t < tokens; ++t) {
          const int seen = item.columns(token + t);
          if (tile >= seen) continue;
          float sum[2] = {0, 0};
          for (int c = 0; c < chunks; ++c) {
            float acc[N / 2];
            Product::multiply(acc, rows, smem_address(queries) + (t * chunks + c) * (N * 256));
            const float2* w = reinterpret_cast<const float2*>(weights + (t * chunks + c) * N) + lane % 4;
#pragma unroll
            for (int j = 0; j < N / 8; ++j) {
              const float2 v = w[4 * j];
              sum[0] = fmaf(relu(acc[4 * j + 1]), v.y, fmaf(relu(acc[4 * j]), v.x, sum[0]));
              sum[1] = fmaf(relu(acc[4 * j + 3]), v.y, fmaf(relu(acc[4 * j + 2]), v.x, sum[1]));
            }
          }
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
            if (lane % 4 == 0 && column + 8 * r < min(seen, end))
              a.scores[(item.row + token + t) * a.scores_row + column + 8 * r] = sum[r] * scale[r];
          }
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
void launch_score(cudaStream_t stream, const IndexScore& a, int64_t blocks, const std::string& shape) {
  launch(score_kernel<Key, T, N, Product<T, N>>,
         {.grid = dim3(static_cast<unsigned>(blocks)),
          .block = dim3(kScoreThreads),
          .shared_bytes = static_cast<size_t>(query_bytes<N>(a)) + 1024},
         stream, "index_score", "scores", shape, a);
}

/// By the number of heads that a product takes at a time.
template <class Key, class T, template <class, int> class Product>
void launch_by_heads(cudaStream_t stream, const IndexScore& a, int64_t blocks, const std::string& shape) {
  if (a.heads > 32) launch_score<Key, T, 64, Product>(stream, a, blocks, shape);
  else if (a.heads > 16) launch_score<Key, T, 32, Product>(stream, a, blocks, shape);
  else launch_score<Key, T, 16, Product>(stream, a, blocks, shape);
}

}  // namespace mla::cuda::generic
