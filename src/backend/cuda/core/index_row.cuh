// The index cache's codec on the GPU: as cache/index/codec.hpp, bit for bit.
#pragma once

#include <cfloat>
#include <string>

#include "backend/cuda/core/convert.cuh"
#include "mla/error.hpp"
#include "mla/index_cache.hpp"

namespace mla::cuda {

/// An index cache as kernels take it, by value.
struct IndexMemory {
  std::byte* data = nullptr;
  int64_t page_stride = 0;
  int32_t page_size = 1, dim = 0;
  IndexCacheFormat format = IndexCacheFormat::fp8;
  bool powers_of_two = true, scales_aligned = true;

  IndexMemory() = default;
  /// ShapeError when rows do not lie at multiples of their elements' size.
  IndexMemory(std::string_view op, const IndexCacheView& c)
      : data(c.data),
        page_stride(static_cast<int64_t>(c.page_stride)),
        page_size(static_cast<int32_t>(c.spec.page_size)),
        dim(static_cast<int32_t>(c.spec.dim)),
        format(c.spec.format),
        powers_of_two(c.spec.power_of_two_scales),
        scales_aligned(at_multiples_of(4) && c.spec.page_size * c.spec.dim % 4 == 0) {
    if (at_multiples_of(element())) return;
    throw ShapeError(std::string(op) + ": index cache pages of format " + std::string(to_string(format)) + " lie " +
                     std::to_string(page_stride) + " bytes apart, they and the first must lie at multiples of " +
                     std::to_string(element()));
  }
  int64_t element() const { return format == IndexCacheFormat::f32 ? 4 : format == IndexCacheFormat::bf16 ? 2 : 1; }
  /// May kernels read and write n elements of any row at once?
  bool wide(int n) const {
    const int64_t bytes = std::min<int64_t>(16, n * element());
    return dim % n == 0 && dim * element() % bytes == 0 && at_multiples_of(bytes);
  }

 private:
  bool at_multiples_of(int64_t bytes) const {
    return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0 && page_stride % bytes == 0;
  }
};

/// One token's key. T: float, bf16 or fp8_e4m3, what its format stores.
template <class T>
class IndexRow {
 public:
  __device__ IndexRow(const IndexMemory& c, int32_t page, int32_t offset) : aligned_(c.scales_aligned) {
    std::byte* const at = c.data + page * c.page_stride;
    row_ = reinterpret_cast<T*>(at) + static_cast<int64_t>(offset) * c.dim;
    scale_ = at + static_cast<int64_t>(c.page_size) * c.dim + static_cast<int64_t>(offset) * 4;
  }
  __device__ static IndexRow at(const IndexMemory& c, int32_t slot) {
    const uint32_t page = static_cast<uint32_t>(slot) / static_cast<uint32_t>(c.page_size);
    return IndexRow(c, static_cast<int32_t>(page), slot - static_cast<int32_t>(page) * c.page_size);
  }
  __device__ T* row() const { return row_; }
  /// fp8 only.
  __device__ float scale() const {
    if (aligned_) return *reinterpret_cast<const float*>(scale_);
    uint32_t bits = 0;
    for (int b = 0; b < 4; ++b) bits |= static_cast<uint32_t>(scale_[b]) << (8 * b);
    return __uint_as_float(bits);
  }
  __device__ void set_scale(float s) const {
    if (aligned_) *reinterpret_cast<float*>(scale_) = s;
    else
      for (int b = 0; b < 4; ++b) scale_[b] = static_cast<std::byte>(__float_as_uint(s) >> (8 * b));
  }

 private:
  T* row_;
  std::byte* scale_;
  bool aligned_;
};

__device__ inline float index_scale(float amax, bool powers_of_two) {
  const float scale = fmaxf(fminf(amax, FLT_MAX), 1e-4f) / 448.0f;
  return powers_of_two ? power_of_two(ceil_log2(scale)) : scale;
}

/// A warp's row of e4m3 codes and its scale, which all lanes get. read(i, x): elements [i, i + n) of the row. The first
/// 32 n elements stay in registers, what lies past them is read twice.
template <bool wide, int n, class Read>
__device__ float quantise_row(Read&& read, fp8_e4m3* to, int width, bool powers_of_two, int lane) {
  float first[n] = {};
  if (n * lane < width) read(n * lane, first);
  float most = largest_of(first);
  for (int i = n * (32 + lane); i < width; i += 32 * n) {
    float x[n];
    read(i, x);
    most = fmaxf(most, largest_of(x));
  }
  most = largest_in_lanes<32>(most);
  const float scale = index_scale(most, powers_of_two);
  for (int i = n * lane; i < width; i += 32 * n) {
    float x[n], y[n];
    fp8_e4m3 codes[n];
    if (i < 32 * n) {
#pragma unroll
      for (int e = 0; e < n; ++e) x[e] = first[e];
    } else {
      read(i, x);
    }
    if (powers_of_two) {
      const float inverse = 1.0f / scale;  // exact
#pragma unroll
      for (int e = 0; e < n; ++e) y[e] = x[e] * inverse;
    } else {
      divide_all(x, scale, most, y);
    }
    narrow_all(y, codes);
    store<wide>(codes, to + i);
  }
  return scale;
}

}  // namespace mla::cuda
