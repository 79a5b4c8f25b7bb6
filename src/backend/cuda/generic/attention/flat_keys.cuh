// Keys and values of one head as flat rows, [nope | rope] and value, of the products' own dtype or e4m3 codes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backend/cuda/generic/attention/block.cuh"

namespace mla::cuda::generic {

/// Scales of rows of codes: row i has x[first + i / rows], `group` apart.
struct RowScales {
  const float* x = nullptr;  // of the head; null: 1
  int64_t group = 0;
  int32_t first = 0, rows = 0;  // rows 0: all have the first
  __device__ float at(int64_t row) const { return x ? __ldg(x + (first + (rows > 0 ? row / rows : 0)) * group) : 1.0f; }
};

template <class Stored>
struct FlatRows {
  const Stored *nope = nullptr, *rope = nullptr, *value = nullptr;  // of the head, at the item's first key
  int64_t nope_row = 0, rope_row = 0, value_row = 0;                // strides
  int32_t nope_width = 0, rope_width = 0, value_width = 0;
  bool wide = false;  // eight elements may be read at once, of every part
  // Of codes.
  int64_t value_step = 1;  // from one element of a value to the next
  RowScales key_scale, value_scale;
  // Of a masked item.
  const uint32_t* mask = nullptr;  // of the tile's first row
  int64_t mask_row = 0;            // stride
  int32_t mask_begin = 0;          // column of the first key
};

template <class Core, class Stored>
class FlatKeys {
 public:
  static constexpr int N = Core::N, kWarps = Core::kWarps, kKeyBytes = 0;
  using T = typename Core::T;

  __device__ FlatKeys(const FlatRows<Stored>& from, const Layout& l, std::byte* shared, int64_t count)
      : from_(from), layout_(l), shared_(shared), count_(count) {}

  __device__ bool locate(int) const { return true; }
  __device__ void fetch(int) const {}
  __device__ int buffer(int) const { return 0; }
  __device__ bool shows(int row, int block, int n) const {  // rows' limits end with the keys
    if (!from_.mask) return true;
    const int64_t column = from_.mask_begin + block * N + n;
    return __ldg(from_.mask + row * from_.mask_row + column / 32) >> column % 32 & 1;
  }

  __device__ void land(int block) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    T* const keys = reinterpret_cast<T*>(shared_ + layout_.k);
    T* const values = reinterpret_cast<T*>(shared_ + layout_.v);
    const int value_depth = Core::depth(from_.value_width), pieces = (layout_.depth + value_depth) / 8;
    // Pieces of eight elements, of keys first; a warp has rows warp, warp + 8, ..
    for (int piece = lane; piece < pieces; piece += 32) {
      const int i = piece * 8, entry = from_.nope_width + from_.rope_width;
      const bool key = i < layout_.depth;
      const int column = key ? i : i - layout_.depth;
      T* to = key ? keys + column : values + column;
      const int step = (key ? layout_.ld_q : layout_.ld_v) * kWarps;
      to += (key ? layout_.ld_q : layout_.ld_v) * warp;
      const Stored* from = nullptr;
      int64_t row = 0;
      if (!key) from = from_.value + column * from_.value_step, row = from_.value_row;
      else if (column < from_.nope_width) from = from_.nope + column, row = from_.nope_row;
      else from = from_.rope + (column - from_.nope_width), row = from_.rope_row;
      const bool inside = column < (key ? entry : from_.value_width);
#pragma unroll 4
      for (int n = warp; n < N; n += kWarps, to += step) {
        const int64_t at = static_cast<int64_t>(block) * N + n;
        T x[8] = {};
        if constexpr (!std::is_same_v<T, Stored>) {
          if (at < count_ && inside) {
            const float scale = key ? from_.key_scale.at(at) : from_.value_scale.at(at);
            const int64_t step = key ? 1 : from_.value_step;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              const int c = column + e;
              const Stored* code = from + at * row + e * step;
              if (!key && c >= from_.value_width) continue;
              if (key && column < from_.nope_width && c >= from_.nope_width)
                code = from_.rope + at * from_.rope_row + c - from_.nope_width;
              if (!key || c < entry) x[e] = narrow<T>(widen(*code) * scale);
            }
          }
        } else if (at < count_ && inside) {
          if (from_.wide) {
            load<true>(from + at * row, x);
          } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              const int c = column + e;
              if (!key) {
                if (c < from_.value_width) x[e] = from_.value[at * from_.value_row + c];
              } else if (c < from_.nope_width) {
                x[e] = from_.nope[at * from_.nope_row + c];
              } else if (c < entry) {
                x[e] = from_.rope[at * from_.rope_row + c - from_.nope_width];
              }
            }
          }
        }
        store<true>(x, to);
      }
    }
  }

 private:
  const FlatRows<Stored> from_;
  const Layout& layout_;
  std::byte* shared_;
  int64_t count_;
};

}  // namespace mla::cuda::generic
