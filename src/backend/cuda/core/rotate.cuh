// The one place where rotations are computed, so that rope and rope_append give equal bits.
#pragma once

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

/// Pairs [m * unit, m * unit + m) of a row, in place. wide: m divides pairs, and the row and the table's are aligned to
/// 16 bytes.
template <bool wide, int m, class T>
__device__ void rotate_pairs(T* row, const Rotation& r, const float* cos_sin, int unit) {
  const int first = m * unit;
  float cos[m], sin[m];
  if (r.interleaved) {
    T x[2 * m];
    float y[2 * m];
    load<wide>(row + 2 * first, x);
    load<wide>(cos_sin + first, cos);
    load<wide>(cos_sin + r.pairs + first, sin);
    widen_all(x, y);
#pragma unroll
    for (int i = 0; i < m; ++i) {
      const Pair p = rotated(y[2 * i], y[2 * i + 1], cos[i], sin[i]);
      y[2 * i] = p.a;
      y[2 * i + 1] = p.b;
    }
    narrow_all(y, x);
    store<wide>(x, row + 2 * first);
  } else {
    T xa[m], xb[m];
    float a[m], b[m];
    load<wide>(row + first, xa);
    load<wide>(row + r.pairs + first, xb);
    load<wide>(cos_sin + first, cos);
    load<wide>(cos_sin + r.pairs + first, sin);
    widen_all(xa, a);
    widen_all(xb, b);
#pragma unroll
    for (int i = 0; i < m; ++i) {
      const Pair p = rotated(a[i], b[i], cos[i], sin[i]);
      a[i] = p.a;
      b[i] = p.b;
    }
    narrow_all(a, xa);
    narrow_all(b, xb);
    store<wide>(xa, row + first);
    store<wide>(xb, row + r.pairs + first);
  }
}

/// Rows of heads of tokens: head h of token t at data + t * token + h * head, R elements.
template <class T>
struct HeadRows {
  T* data = nullptr;
  int64_t token = 0, head = 0;
  int32_t heads = 0;
};

/// Blocks of (units of a row) x (heads), `chunks` blocks a token.
struct RotateShape {
  int32_t units = 1, chunks = 1;
  dim3 block;

  RotateShape(int32_t pairs, int m, int64_t heads) {
    constexpr int kThreads = 256;
    units = pairs / m;
    block.x = static_cast<unsigned>(units < 1 ? 1 : units < kThreads ? units : kThreads);
    const int64_t most = kThreads / block.x;
    chunks = static_cast<int32_t>((heads + most - 1) / most);
    if (chunks > 0) block.y = static_cast<unsigned>((heads + chunks - 1) / chunks);
    // At least a warp, for what else a block may do.
    if (block.x * block.y < 32) block.y = (32 + block.x - 1) / block.x;
  }
};

/// One row, by the threads along x.
template <bool wide, int m, class T>
__device__ void rotate_row(T* row, const Rotation& r, int32_t position) {
  const float* const cos_sin = r.at(position);
  for (int unit = static_cast<int>(threadIdx.x); unit < r.pairs / m; unit += static_cast<int>(blockDim.x))
    rotate_pairs<wide, m>(row, r, cos_sin, unit);
}

/// Do rows of T at these strides lie at multiples of 16 bytes?
template <class T, class... Strides>
bool rows_aligned(const void* data, Strides... strides) {
  constexpr int64_t n = 16 / static_cast<int64_t>(sizeof(T));
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && ((strides % n == 0) && ...);
}

}  // namespace mla::cuda
