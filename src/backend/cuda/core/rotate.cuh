// The one place where rotations are computed, so that rope and rope_append give equal bits.
#pragma once

#include <algorithm>

#include "backend/cuda/core/convert.cuh"
#include "mla/rotary.hpp"

namespace mla::cuda {

/// A table as kernels take it. No pairs: nothing rotates.
struct Rotation {
  const float* table = nullptr;  ///< row p: `pairs` cosines, then `pairs` sines
  int32_t pairs = 0;
  bool interleaved = true;

  Rotation() = default;
  explicit Rotation(const RotaryTable& t)
      : table(t.rotates() ? t.data() : nullptr),
        pairs(t.rotates() ? static_cast<int32_t>(t.pairs()) : 0),
        interleaved(t.interleaved()) {}
  __device__ const float* at(int32_t position) const { return table + 2 * static_cast<int64_t>(position) * pairs; }
};

struct Pair {
  float a, b;
};
__device__ inline Pair rotated(float a, float b, float cos, float sin) {
  return {__fmaf_rn(a, cos, -__fmul_rn(b, sin)), __fmaf_rn(b, cos, __fmul_rn(a, sin))};
}

/// Pairs [m * unit, m * unit + m) of `count` rows of one position: the first at `from`, the next `step` elements on, to
/// `to`, which may be the same, and on by `to_step`. All are under way before cos_sin(), which may wait for the
/// position, says where the table's row lies. wide: m divides pairs, and the rows and the table's are aligned to 16
/// bytes.
template <bool wide, int m, int most, class T, class CosSin>
__device__ void rotate_pairs(const T* from, int64_t step, T* to, int64_t to_step, int count, const Rotation& r,
                             CosSin&& cos_sin, int unit) {
  const int first = m * unit;
  float cos[m], sin[m];
  const auto load_table = [&] {
    const float* const at = cos_sin();
    load<wide>(at + first, cos);
    load<wide>(at + r.pairs + first, sin);
  };
  if (r.interleaved) {
    T x[most][2 * m];
#pragma unroll
    for (int k = 0; k < most; ++k)
      if (k < count) load<wide>(from + k * step + 2 * first, x[k]);
    load_table();
#pragma unroll
    for (int k = 0; k < most; ++k) {
      if (k >= count) break;
      float y[2 * m];
      widen_all(x[k], y);
#pragma unroll
      for (int i = 0; i < m; ++i) {
        const Pair p = rotated(y[2 * i], y[2 * i + 1], cos[i], sin[i]);
        y[2 * i] = p.a;
        y[2 * i + 1] = p.b;
      }
      narrow_all(y, x[k]);
      store<wide>(x[k], to + k * to_step + 2 * first);
    }
  } else {
    T xa[most][m], xb[most][m];
#pragma unroll
    for (int k = 0; k < most; ++k)
      if (k < count) {
        load<wide>(from + k * step + first, xa[k]);
        load<wide>(from + k * step + r.pairs + first, xb[k]);
      }
    load_table();
#pragma unroll
    for (int k = 0; k < most; ++k) {
      if (k >= count) break;
      float a[m], b[m];
      widen_all(xa[k], a);
      widen_all(xb[k], b);
#pragma unroll
      for (int i = 0; i < m; ++i) {
        const Pair p = rotated(a[i], b[i], cos[i], sin[i]);
        a[i] = p.a;
        b[i] = p.b;
      }
      narrow_all(a, xa[k]);
      narrow_all(b, xb[k]);
      store<wide>(xa[k], to + k * to_step + first);
      store<wide>(xb[k], to + k * to_step + r.pairs + first);
    }
  }
}

/// Elements [first, first + n) of rows of one position as they are once rotated; n is 4 where wide, otherwise 1. The
/// rows' 2 * pairs first rotate. wide: 4 divides pairs, and the rows and the table's are aligned to 16 bytes.
template <bool wide, int n>
class RotatedPart {
 public:
  __device__ RotatedPart(const Rotation& r, const float* cos_sin, int first)
      : first_(first), pairs_(r.pairs), rotates_(first < 2 * r.pairs), interleaved_(r.interleaved) {
    if (!rotates_) return;
    if (!interleaved_) {
      const int pair = first < pairs_ ? first : first - pairs_;
      mla::cuda::load<wide>(cos_sin + pair, cos_);
      mla::cuda::load<wide>(cos_sin + pairs_ + pair, sin_);
    } else {
#pragma unroll
      for (int e = 0; e < n; e += 2) cos_[e] = cos_sin[(first + e) / 2], sin_[e] = cos_sin[pairs_ + (first + e) / 2];
    }
  }
  __device__ void load(const float* row, float (&x)[n]) const {
    mla::cuda::load<wide>(row + first_, x);
    if (!rotates_) return;
    if (!interleaved_) {
      const bool second = first_ >= pairs_;
      float other[n];
      mla::cuda::load<wide>(row + (second ? first_ - pairs_ : first_ + pairs_), other);
#pragma unroll
      for (int e = 0; e < n; ++e) {
        const Pair p = rotated(second ? other[e] : x[e], second ? x[e] : other[e], cos_[e], sin_[e]);
        x[e] = second ? p.b : p.a;
      }
    } else if constexpr (wide) {
#pragma unroll
      for (int e = 0; e < n; e += 2) {
        const Pair p = rotated(x[e], x[e + 1], cos_[e], sin_[e]);
        x[e] = p.a, x[e + 1] = p.b;
      }
    } else {
      const bool second = first_ % 2 == 1;
      const float other = row[first_ ^ 1];
      const Pair p = rotated(second ? other : x[0], second ? x[0] : other, cos_[0], sin_[0]);
      x[0] = second ? p.b : p.a;
    }
  }
  /// Rotates them where lane l of a warp has elements [n * l, n * l + n) of a row; by all lanes.
  __device__ void turn(float (&x)[n]) const {
    static_assert(wide);
    if (interleaved_) {
#pragma unroll
      for (int e = 0; e < n; e += 2) {
        const Pair p = rotated(x[e], x[e + 1], cos_[e], sin_[e]);
        if (rotates_) x[e] = p.a, x[e + 1] = p.b;
      }
      return;
    }
    const bool second = first_ >= pairs_;
    const int partner = (second ? first_ - pairs_ : first_ + pairs_) / n;
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const float other = __shfl_sync(0xffffffffu, x[e], partner);
      const float y =
          rotated(x[e], other, cos_[e], second ? -sin_[e] : sin_[e]).a;  // b's is a's with -sin, bit for bit
      if (rotates_) x[e] = y;
    }
  }

 private:
  float cos_[n], sin_[n];
  int first_, pairs_;
  bool rotates_, interleaved_;
};

/// Rows of heads of tokens: head h of token t at data + t * token + h * head, R elements.
template <class T>
struct HeadRows {
  T* data = nullptr;
  int64_t token = 0, head = 0;
  int32_t heads = 0;
  // Where rotated rows go, row r those of token tokens[r], or r; null: they stay in their place.
  T* to = nullptr;
  int64_t to_row = 0, to_head = 0;
  const int32_t* tokens = nullptr;
};

/// Rows that a thread turns together, at most: enough bytes under way to wait for memory.
template <bool wide>
constexpr int kRotateRows = wide ? 4 : 1;

/// Blocks of (units of a row) x (heads) x (tokens). A thread takes `rows` heads, block.y apart, once that leaves blocks
/// for all of a GPU.
struct RotateShape {
  int32_t units = 1, rows = 1, chunks = 1;  ///< chunks: blocks of a token
  dim3 block;

  RotateShape(int32_t pairs, int m, int64_t heads, int64_t tokens, int most_rows, int multiprocessors) {
    constexpr int64_t kThreads = 256;
    units = pairs / m;
    block.x = static_cast<unsigned>(std::clamp<int64_t>(units, 1, kThreads));
    while (rows < most_rows && tokens * heads * units > int64_t{multiprocessors} * 2048 * 2 * rows) rows *= 2;
    const int64_t wanted = (heads + rows - 1) / rows, most = kThreads / block.x;
    chunks = static_cast<int32_t>((wanted + most - 1) / most);
    if (chunks > 0) block.y = static_cast<unsigned>((wanted + chunks - 1) / chunks);
    if (chunks <= 1) block.z = static_cast<unsigned>(std::clamp<int64_t>(kThreads / (block.x * block.y), 1, 64));
    // At least a warp, for what else a block may do.
    if (block.x * block.y * block.z < 32) block.y = (32 + block.x - 1) / block.x;
  }
  int64_t blocks(int64_t tokens) const { return (tokens + block.z - 1) / block.z * chunks; }
};

/// The part of thread (x, y, z) of a block of that shape, of `count` rows.
template <bool wide, class T>
__device__ void rotate_heads(const HeadRows<T>& q, const Rotation& r, const int32_t* positions, int64_t count,
                             unsigned block, int rows, int chunks) {
  constexpr int m = wide ? 4 : 1;
  const int y = static_cast<int>(blockDim.y);
  const int64_t row = static_cast<int64_t>(block / static_cast<unsigned>(chunks)) * blockDim.z + threadIdx.z;
  const int head = static_cast<int>(block % static_cast<unsigned>(chunks)) * rows * y + static_cast<int>(threadIdx.y),
            heads = min(rows, (q.heads - head + y - 1) / y);
  if (row >= count || head >= q.heads) return;
  const int64_t token = q.tokens ? q.tokens[row] : row;
  T* const from = q.data + token * q.token + head * q.head;
  T* const to = q.to ? q.to + row * q.to_row + head * q.to_head : from;
  for (int unit = static_cast<int>(threadIdx.x); unit < r.pairs / m; unit += static_cast<int>(blockDim.x))
    rotate_pairs<wide, m, kRotateRows<wide>>(
        from, y * q.head, to, y * (q.to ? q.to_head : q.head), heads, r, [&] { return r.at(positions[token]); }, unit);
}

/// Do rows of T at these strides lie at multiples of 16 bytes?
template <class T, class... Strides>
bool rows_aligned(const void* data, Strides... strides) {
  constexpr int64_t n = 16 / static_cast<int64_t>(sizeof(T));
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && ((strides % n == 0) && ...);
}

}  // namespace mla::cuda
