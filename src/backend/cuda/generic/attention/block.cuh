// The core that the attention ops share: up to M rows of queries against blocks of N keys, all warps in step.
//
//   land      the block's keys, dequantised, in shared memory; the next block's copies set out
//   scores    S = Q K^T, to shared memory
//   softmax   neighbouring threads of a row: running maximum and sum, weights to shared memory
//   values    O = O * (old maximum's share) + P V; the warps split the columns, O stays in registers
//
// Where keys come from is a class of its own (cache_keys.cuh, flat_keys.cuh); where rows come from and go to is a Tile.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/mma.cuh"
#include "mla/dtype.hpp"

namespace mla::cuda::generic {

constexpr int up(int x, int to) { return (x + to - 1) / to * to; }

/// Queries, Entry dense.
struct Queries {
  const void* data = nullptr;
  int64_t row = 0, head = 0;  // strides
  Dtype dtype = Dtype::f32;
  int32_t depth = 0;
  bool wide = false;  // eight elements may be read at once
};

/// Where rows go. out: f32, bf16 or f16; max may be null.
struct Destination {
  void* out = nullptr;
  int64_t out_row = 0, out_head = 0;
  float* lse = nullptr;
  int64_t lse_row = 0, lse_head = 0;
  float* max = nullptr;
  int64_t max_row = 0, max_head = 0;
  Dtype dtype = Dtype::f32;
  bool wide = false;  // two neighbouring elements at even columns may be accessed at once
};

/// Shared memory of a call, in bytes from its start; the same for all its CTAs.
struct Layout {
  int32_t q = 0, k = 0, v = 0, stage = 0, s = 0, p = 0, rows = 0, keys = 0, total = 0;
  int32_t ld_q = 0, ld_v = 0;  // elements of a row of queries and keys, of values
  int32_t depth = 0;           // of a product: the entry rounded up
  int32_t stage_row = 0;       // bytes
};

/// What a tile's rows are. The arrays lie in shared memory.
template <int M>
struct Tile {
  int32_t from[M], to[M], head[M];  // query row, row of the destination
  int32_t limit[M];                 // keys of the tile's range that the row sees; 0 for a row that is none
  float alpha[M], keep[M];          // softmax to values; at the end the factors of O and of what `out` holds
  int32_t unusable[M];              // does the row's query hold NaN or +inf?
  uint32_t bad[2];                  // keys of the block whose values were not all numbers
};

// Operands of 16 bits, f32 sums, by mma.sync. Warps of `scores`: kWarpsM x kWarpsN over the tile, kParts over the
// depth.
template <int kM, int kN, int kColumnTiles, int warps, class Element = bf16>
struct MmaCore {
  using T = Element;
  static constexpr int kWarps = warps, kThreads = 32 * kWarps;
  static constexpr int M = kM, N = kN, kPairs = kColumnTiles / 2, kColumns = kWarps * kColumnTiles * 8;
  static constexpr int kWarpsM = M < 32 ? 1 : kWarps / 4, kWarpsN = M < 32 ? N / 16 : 2,
                       kParts = kWarps / (kWarpsM * kWarpsN);
  static constexpr int kTilesM = M / kWarpsM / 16, kPairsN = N / kWarpsN / 16;
  static constexpr int kScoreRow = N + 8, kWeightRow = N + 8;
  static_assert(kWarpsM * kWarpsN * kParts == kWarps && kPairsN >= 1);

  static constexpr int depth(int entry) { return up(entry, 16); }
  /// Rows an odd number of 16 bytes apart: eight of them meet all banks.
  static constexpr int row(int depth) { return depth + 8; }
  static constexpr int weight_at(int row, int key) { return row * kWeightRow + key; }
  static constexpr int kWeights = M * kWeightRow;

  float o[M / 16][kColumnTiles][4];

  static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, f16>) multiply_add_f16(c, a, b0, b1);
    else multiply_add(c, a, b0, b1);
  }

  __device__ void clear() {
#pragma unroll
    for (auto& row : o)
#pragma unroll
      for (auto& tile : row)
#pragma unroll
        for (float& x : tile) x = 0.0f;
  }

  /// Ends with the scores of all warps in s, without a barrier after the last write.
  __device__ void scores(const T* q, const T* k, int ld, int depth, float* s) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int part = warp / (kWarpsM * kWarpsN), m0 = warp % kWarpsM * kTilesM * 16,
              n0 = warp / kWarpsM % kWarpsN * kPairsN * 16;
    const int steps = depth / 16, begin = steps * part / kParts, end = steps * (part + 1) / kParts;
    float c[kTilesM][kPairsN * 2][4] = {};
    const uint32_t a_at = shared_address(q + (m0 + lane % 16) * ld + lane / 16 * 8),
                   b_at = shared_address(k + (n0 + lane % 8 + lane / 16 * 8) * ld + lane / 8 % 2 * 8);
    // Operands of a step are asked for while the step before multiplies.
    uint32_t a[2][kTilesM][4], b[2][kPairsN][4];
    const auto load_step = [&](int step, int to) {
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) load_matrices(a[to][m], a_at + (m * 16 * ld + step * 16) * 2);
#pragma unroll
      for (int n = 0; n < kPairsN; ++n) load_matrices(b[to][n], b_at + (n * 16 * ld + step * 16) * 2);
    };
    const auto multiply_step = [&](int from) {
#pragma unroll
      for (int m = 0; m < kTilesM; ++m)
#pragma unroll
        for (int n = 0; n < kPairsN; ++n) {
          multiply(c[m][2 * n], a[from][m], b[from][n][0], b[from][n][1]);
          multiply(c[m][2 * n + 1], a[from][m], b[from][n][2], b[from][n][3]);
        }
    };
    if constexpr (kWarps > 8) {  // other warps multiply meanwhile
#pragma unroll 1
      for (int step = begin; step < end; ++step) load_step(step, 0), multiply_step(0);
    } else {
      if (begin < end) load_step(begin, 0);
      for (int step = begin; step < end; step += 2) {
        if (step + 1 < end) load_step(step + 1, 1);
        multiply_step(0);
        if (step + 2 < end) load_step(step + 2, 0);
        if (step + 1 < end) multiply_step(1);
      }
    }
#pragma unroll
    for (int turn = kParts - 1; turn >= 0; --turn) {
      if (part == turn) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m)
#pragma unroll
          for (int n = 0; n < kPairsN * 2; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              auto* at = reinterpret_cast<float2*>(s + (m0 + m * 16 + half * 8 + lane / 4) * kScoreRow + n0 + n * 8 +
                                                   lane % 4 * 2);
              float2 x = make_float2(c[m][n][2 * half], c[m][n][2 * half + 1]);
              if (turn < kParts - 1) {
                const float2 y = *at;
                x.x += y.x, x.y += y.y;
              }
              *at = x;
            }
      }
      if (turn > 0) __syncthreads();
    }
  }

  __device__ void values(const T* p, const T* v, int ld, int width, const float* alpha) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int m = 0; m < M / 16; ++m) {
      const float low = alpha[m * 16 + lane / 4], high = alpha[m * 16 + 8 + lane / 4];
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
        o[m][n][0] *= low, o[m][n][1] *= low, o[m][n][2] *= high, o[m][n][3] *= high;
    }
    const uint32_t p_at = shared_address(p + lane % 16 * kWeightRow + lane / 16 * 8),
                   v_at = shared_address(v + lane % 16 * ld + warp * 16 + lane / 16 * 8);
#pragma unroll
    for (int step = 0; step < N / 16; ++step) {
      uint32_t a[M / 16][4];
#pragma unroll
      for (int m = 0; m < M / 16; ++m) load_matrices(a[m], p_at + (m * 16 * kWeightRow + step * 16) * 2);
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        if ((n * kWarps + warp) * 16 >= width) break;
        uint32_t b[4];
        load_matrices_transposed(b, v_at + (step * 16 * ld + n * kWarps * 16) * 2);
#pragma unroll
        for (int m = 0; m < M / 16; ++m) {
          multiply(o[m][2 * n], a[m], b[0], b[1]);
          multiply(o[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  /// f(row, even column, its value, the next column's).
  template <class F>
  __device__ void for_each(F&& f) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int m = 0; m < M / 16; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
          f(m * 16 + half * 8 + lane / 4, (n / 2 * kWarps + warp) * 16 + n % 2 * 8 + lane % 4 * 2, o[m][n][2 * half],
            o[m][n][2 * half + 1]);
  }
};

// f32 throughout, by fused multiply-adds. Scores: a warp has 4 rows x 16 keys; lane l sums every eighth piece of 4
// elements, from l % 8 on, over 4 rows x 4 keys.
template <int kPairs>
struct FmaCore {
  using T = float;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int M = 16, N = 32, kColumns = kThreads * 2 * kPairs;
  static constexpr int kScoreRow = N + 8;

  static constexpr int depth(int entry) { return up(entry, 32); }
  static constexpr int row(int depth) { return depth; }
  static constexpr int weight_at(int row, int key) { return key * M + row; }
  static constexpr int kWeights = M * N;

  float o[M][2 * kPairs];

  __device__ void clear() {
#pragma unroll
    for (auto& row : o)
#pragma unroll
      for (float& x : row) x = 0.0f;
  }

  __device__ void scores(const T* q, const T* k, int ld, int depth, float* s) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int row = warp / 2 * 4, key = warp % 2 * 16 + lane / 8, piece = lane % 8;
    float c[4][4] = {};
    for (int d = piece * 4; d < depth; d += 32) {
      float4 a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = *reinterpret_cast<const float4*>(q + (row + i) * ld + d);
        b[i] = *reinterpret_cast<const float4*>(k + (key + 4 * i) * ld + d);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          c[i][j] = fmaf(a[i].x, b[j].x, c[i][j]);
          c[i][j] = fmaf(a[i].y, b[j].y, c[i][j]);
          c[i][j] = fmaf(a[i].z, b[j].z, c[i][j]);
          c[i][j] = fmaf(a[i].w, b[j].w, c[i][j]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float x = c[i][j];
#pragma unroll
        for (int d = 1; d < 8; d *= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
        if (piece == (i * 4 + j) / 2) s[(row + i) * kScoreRow + key + 4 * j] = x;
      }
  }

  __device__ void values(const T* p, const T* v, int ld, int width, const float* alpha) {
    const int column = static_cast<int>(threadIdx.x) * 2;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (float& x : o[m]) x *= alpha[m];
    if (column >= width) return;
#pragma unroll 2
    for (int key = 0; key < N; ++key) {
      float4 w[M / 4];
#pragma unroll
      for (int m = 0; m < M / 4; ++m) w[m] = *reinterpret_cast<const float4*>(p + key * M + m * 4);
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const int at = column + n * kThreads * 2;
        if (at >= width) break;
        const float2 x = *reinterpret_cast<const float2*>(v + key * ld + at);
#pragma unroll
        for (int m = 0; m < M / 4; ++m) {
          const float weights[4] = {w[m].x, w[m].y, w[m].z, w[m].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            o[m * 4 + i][2 * n] = fmaf(weights[i], x.x, o[m * 4 + i][2 * n]);
            o[m * 4 + i][2 * n + 1] = fmaf(weights[i], x.y, o[m * 4 + i][2 * n + 1]);
          }
        }
      }
    }
  }

  template <class F>
  __device__ void for_each(F&& f) const {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < kPairs; ++n)
        f(m, (n * kThreads + static_cast<int>(threadIdx.x)) * 2, o[m][2 * n], o[m][2 * n + 1]);
  }
};

/// Shared memory of a call: values apart from keys when value_width > 0. 0 bytes a staged row: copies are not staged.
template <class Core>
Layout layout(int entry, int value_width, int staged_row, int key_bytes, int buffers = 1) {
  using T = typename Core::T;
  Layout l;
  l.depth = Core::depth(entry);
  l.ld_q = Core::row(l.depth);
  int at = 0;
  const auto take = [&at](int64_t bytes) {
    const int64_t from = at;
    // Far beyond any shared memory, so that the caller finds it too large.
    at = static_cast<int>(from + bytes < (1 << 29) ? (from + bytes + 127) / 128 * 128 : 1 << 29);
    return static_cast<int>(from);
  };
  l.q = take(int64_t{Core::M} * l.ld_q * static_cast<int>(sizeof(T)));
  l.k = take(int64_t{buffers} * Core::N * l.ld_q * static_cast<int>(sizeof(T)));
  l.v = l.k, l.ld_v = l.ld_q;
  if (value_width > 0) {
    l.ld_v = Core::row(Core::depth(value_width));
    l.v = take(int64_t{Core::N} * l.ld_v * static_cast<int>(sizeof(T)));
  }
  l.stage_row = up(staged_row, 16);
  l.stage = take(int64_t{Core::N} * l.stage_row);
  l.s = take(Core::M * Core::kScoreRow * 4);
  l.p = take(Core::kWeights * static_cast<int>(sizeof(T)));
  l.rows = take(sizeof(Tile<Core::M>));
  l.keys = take(2 * Core::N * key_bytes);
  l.total = at;
  return l;
}

__device__ inline void pack8(const float (&x)[8], bf16* to) {
  Pack<bf16, 8> y;
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[e], x[e + 1]);
    y.at[e].bits = __bfloat16_as_ushort(pair.x);
    y.at[e + 1].bits = __bfloat16_as_ushort(pair.y);
  }
  *reinterpret_cast<Pack<bf16, 8>*>(to) = y;
}
__device__ inline void pack8(const float (&x)[8], f16* to) {
  Pack<f16, 8> y;
#pragma unroll
  for (int e = 0; e < 8; ++e) y.at[e] = narrow<f16>(x[e]);
  *reinterpret_cast<Pack<f16, 8>*>(to) = y;
}
__device__ inline void pack8(const float (&x)[8], float* to) {
  reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

template <class T, class S, int kWarps>
__device__ void load_query_rows(const Queries& queries, const int32_t* from, const int32_t* head, const int32_t* limit,
                                int32_t* unusable, int rows, int depth, int ld, T* q) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int r = warp; r < rows; r += kWarps) {
    bool strange = false;
    const S* const x = static_cast<const S*>(queries.data) + from[r] * queries.row + head[r] * queries.head;
    for (int i = lane * 8; i < depth; i += 256) {
      float y[8] = {};
      if (limit[r] > 0) {  // the others' rows may be anything
        if (queries.wide && i + 8 <= queries.depth) {
          S stored[8];
          load<true>(x + i, stored);
          widen_all(stored, y);
        } else {
#pragma unroll
          for (int e = 0; e < 8; ++e)
            if (i + e < queries.depth) y[e] = widen(x[i + e]);
        }
      }
#pragma unroll
      for (float e : y) strange |= !(e < INFINITY);
      pack8(y, q + r * ld + i);
    }
    strange = __any_sync(0xffffffffu, strange);
    if (lane == 0) unusable[r] = strange;
  }
}

/// Rows of a tile as T in shared memory, zero past their depth and where there is no row.
template <class Core>
__device__ void load_queries(const Queries& queries, const Layout& l, Tile<Core::M>& tile, std::byte* shared) {
  using T = typename Core::T;
  T* const q = reinterpret_cast<T*>(shared + l.q);
  switch (queries.dtype) {
    case Dtype::f32:
      return load_query_rows<T, float, Core::kWarps>(queries, tile.from, tile.head, tile.limit, tile.unusable, Core::M,
                                                     l.depth, l.ld_q, q);
    case Dtype::f16:
      return load_query_rows<T, f16, Core::kWarps>(queries, tile.from, tile.head, tile.limit, tile.unusable, Core::M,
                                                   l.depth, l.ld_q, q);
    case Dtype::fp8_e4m3:
      return load_query_rows<T, fp8_e4m3, Core::kWarps>(queries, tile.from, tile.head, tile.limit, tile.unusable,
                                                        Core::M, l.depth, l.ld_q, q);
    default:
      return load_query_rows<T, bf16, Core::kWarps>(queries, tile.from, tile.head, tile.limit, tile.unusable, Core::M,
                                                    l.depth, l.ld_q, q);
  }
}

/// Infinities and NaN among `width` elements of `count` rows become 0, since a weight of 0 must not meet them; bit i %
/// 32 of bad[i / 32] says that row i had some. By all threads, each its share.
template <class T>
__device__ void keep_numbers(T* rows, int ld, int count, int width, int threads, uint32_t* bad) {
  for (int row = 0; row < count; ++row)
    for (int i = static_cast<int>(threadIdx.x); i < width; i += threads) {
      T& x = rows[row * ld + i];
      if (fabsf(widen(x)) < INFINITY) continue;
      x = T{};
      atomicOr(&bad[row / 32], 1u << row % 32);
    }
}

/// What the rows' softmax ends with.
struct RowEnd {
  float max, sum;
  bool mine;  // this thread speaks for the row
  int row;
};

/// The loop over a tile's keys. The tile's rows are known (and a barrier was passed); `blocks` is the CTA's own. Keys:
///   bool locate(int block)        finds where the block's keys lie; any of this thread's exists
///   void fetch(int block)         sends out their copies
///   void land(int block)          brings them to shared memory; keys that do not exist as zeros
///   bool shows(int row, int block, int n)  key n of the block exists, and is not hidden from the tile's row; `limit`
///                                          is asked besides
///   int buffer(int block)         elements from the first block's keys to this one's
template <class Core, class Keys>
__device__ RowEnd attend(Core& core, const Layout& l, Tile<Core::M>& tile, Keys& keys, int blocks, float scale,
                         int first_column, int columns, std::byte* shared) {
  using T = typename Core::T;
  constexpr int M = Core::M, N = Core::N, kRowThreads = Core::kThreads / M, kPairs = N / kRowThreads / 2;
  static_assert(kPairs >= 1);
  constexpr float kLog2e = 1.4426950408889634f;
  const T* const q = reinterpret_cast<const T*>(shared + l.q);
  const T* const k = reinterpret_cast<const T*>(shared + l.k);
  T* const v = reinterpret_cast<T*>(shared + l.v) + first_column;
  float* const s = reinterpret_cast<float*>(shared + l.s);
  T* const p = reinterpret_cast<T*>(shared + l.p);
  const int row = static_cast<int>(threadIdx.x) / kRowThreads, part = static_cast<int>(threadIdx.x) % kRowThreads;
  const int limit = tile.limit[row];
  float max = -INFINITY, sum = 0.0f;
  bool sees = false;  // any key
  core.clear();
  bool any = __syncthreads_or(blocks > 0 && keys.locate(0));
  if (blocks > 0) keys.fetch(0);
  for (int block = 0; block < blocks; ++block) {
    await_copies();
    __syncthreads();
    if (any) keys.land(block);
    const bool more = block + 1 < blocks, next = __syncthreads_or(more && keys.locate(block + 1));
    if (more) keys.fetch(block + 1);
    if (any) {
      core.scores(q, k + keys.buffer(block), l.ld_q, l.depth, s);
      __syncthreads();
      float x[kPairs][2], most = max;
      // Of values that are part of the keys the scores tell; the others are looked at.
      bool strange = l.v != l.k;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int key = (i * kRowThreads + part) * 2;
        const float2 y = *reinterpret_cast<const float2*>(s + row * Core::kScoreRow + key);
        strange |= !(fabsf(y.x) < INFINITY && fabsf(y.y) < INFINITY);  // of keys that the row does not see, too
        const bool first = block * N + key < limit && keys.shows(row, block, key),
                   second = block * N + key + 1 < limit && keys.shows(row, block, key + 1);
        sees |= first || second;
        x[i][0] = first ? y.x * scale : -INFINITY;
        x[i][1] = second ? y.y * scale : -INFINITY;
        most = fmaxf(most, fmaxf(x[i][0], x[i][1]));
      }
#pragma unroll
      for (int d = 1; d < kRowThreads; d *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
      const float base = most == -INFINITY ? 0.0f : most;
      const float alpha = exp2f((max - base) * kLog2e);
      float added = 0.0f;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int key = (i * kRowThreads + part) * 2;
        const float a = exp2f((x[i][0] - base) * kLog2e), b = exp2f((x[i][1] - base) * kLog2e);
        added += a + b;
        if constexpr (std::is_same_v<T, f16>) {
          *reinterpret_cast<__half2*>(p + Core::weight_at(row, key)) = __floats2half2_rn(a, b);
        } else if constexpr (std::is_same_v<T, bf16>) {
          *reinterpret_cast<__nv_bfloat162*>(p + Core::weight_at(row, key)) = __floats2bfloat162_rn(a, b);
        } else {
          p[Core::weight_at(row, key)] = a;
          p[Core::weight_at(row, key + 1)] = b;
        }
      }
      max = most;
      sum = sum * alpha + added;
      if (part == 0) tile.alpha[row] = alpha;
      T* const values = v + keys.buffer(block);
      if (__syncthreads_or(strange)) {
        if (threadIdx.x < 2) tile.bad[threadIdx.x] = 0;
        __syncthreads();
        keep_numbers(values, l.ld_v, N, columns, Core::kThreads, tile.bad);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
          for (int e = 0; e < 2; ++e) {
            const int key = (i * kRowThreads + part) * 2 + e;
            if (block * N + key < limit && keys.shows(row, block, key) && (tile.bad[key / 32] >> key % 32 & 1)) sum = NAN;
          }
      }
      core.values(p, values, l.ld_v, columns, tile.alpha);
    }
    any = next;
  }
#pragma unroll
  for (int d = 1; d < kRowThreads; d *= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, d);
    sees |= __shfl_xor_sync(0xffffffffu, static_cast<int>(sees), d) != 0;
  }
  if (sees && tile.unusable[row]) sum = NAN;  // whatever the logits' signs
  __syncthreads();                            // alpha is used
  return {sum == sum ? max : NAN, sum, part == 0, row};
}

/// A row's element a, and with `two` the next, b, rounded; both at once where they may be.
template <class E>
__device__ void store_pair(E* to, float a, float b, float keep, bool two, bool wide) {
  if (keep != 0.0f) {
    a += keep * widen(to[0]);
    if (two) b += keep * widen(to[1]);
  }
  if (wide && two) {
    if constexpr (std::is_same_v<E, f16>) *reinterpret_cast<__half2*>(to) = __floats2half2_rn(a, b);
    else *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
  } else {
    to[0] = narrow<E>(a);
    if (two) to[1] = narrow<E>(b);
  }
}

/// Columns [first, first + columns) of a tile's rows: O * alpha, and with `merge` + keep * what `out` holds.
template <class Core>
__device__ void store_rows(const Core& core, const Tile<Core::M>& tile, int rows, const Destination& d, int first,
                           int columns, bool merge) {
  core.for_each([&](int row, int column, float a, float b) {
    if (row >= rows || column >= columns || tile.to[row] < 0) return;
    const float alpha = tile.alpha[row], keep = merge ? tile.keep[row] : 0.0f;
    a = alpha == 0.0f ? 0.0f : a * alpha, b = alpha == 0.0f ? 0.0f : b * alpha;
    const int64_t at = tile.to[row] * d.out_row + tile.head[row] * d.out_head + first + column;
    const bool two = column + 1 < columns;
    if (d.dtype == Dtype::f32) {
      float* const to = static_cast<float*>(d.out) + at;
      if (d.wide && two) {
        float2 x = make_float2(a, b);
        if (keep != 0.0f) {
          const float2 old = *reinterpret_cast<const float2*>(to);
          x.x += keep * old.x, x.y += keep * old.y;
        }
        *reinterpret_cast<float2*>(to) = x;
      } else {
        to[0] = keep != 0.0f ? a + keep * to[0] : a;
        if (two) to[1] = keep != 0.0f ? b + keep * to[1] : b;
      }
    } else if (d.dtype == Dtype::f16) {
      store_pair(static_cast<f16*>(d.out) + at, a, b, keep, two, d.wide);
    } else {
      store_pair(static_cast<bf16*>(d.out) + at, a, b, keep, two, d.wide);
    }
  });
}

}  // namespace mla::cuda::generic
