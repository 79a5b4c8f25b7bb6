// The formats' codecs on the GPU: rows of every cache format, read and written by the same rules, bit for bit, as
// src/cache/<format>/ does. A kernel takes a CacheMemory by value and the format as a template argument
// (for_format); a lane moves n neighbouring elements of a row at a time.
//
//   launch:  const CacheMemory cache("gather", a.cache);  const bool wide = cache.wide(8);
//   kernel:  CacheRow<format> row(cache, page, offset);  bf16 x[8];  row.read<true>(8 * lane, x);
#pragma once

#include <algorithm>
#include <cfloat>
#include <string>
#include <string_view>
#include <type_traits>

#include "backend/cuda/core/convert.cuh"
#include "cache/fp8_ds_mla/layout.hpp"
#include "cache/fp8_ds_v4/layout.hpp"
#include "mla/cache.hpp"
#include "mla/error.hpp"

namespace mla::cuda {

/// What a row's latent part is stored as, and how many of its elements share a stored scale (0: none is stored).
template <CacheFormat f>
struct CacheTraits {
  using Element = std::conditional_t<
      f == CacheFormat::f32, float,
      std::conditional_t<f == CacheFormat::bf16, bf16, std::conditional_t<f == CacheFormat::f16, f16, fp8_e4m3>>>;
  static constexpr bool kGrouped = f == CacheFormat::fp8_ds_mla || f == CacheFormat::fp8_ds_v4;
  static constexpr int kGroup = f == CacheFormat::fp8_ds_mla  ? cache::fp8_ds_mla::kGroup
                                : f == CacheFormat::fp8_ds_v4 ? cache::fp8_ds_v4::kGroup
                                                              : 0;
};

/// A cache as kernels take it, by value.
struct CacheMemory {
  std::byte* data = nullptr;
  int64_t page_stride = 0;
  int32_t page_size = 1, latent = 0, rope = 0;
  CacheFormat format = CacheFormat::bf16;
  bool powers_of_two = true;
  float k_scale = 1.0f;

  CacheMemory() = default;
  /// ShapeError when rows do not lie at multiples of their elements' size.
  CacheMemory(std::string_view op, const CacheView& c)
      : data(c.data),
        page_stride(static_cast<int64_t>(c.page_stride)),
        page_size(static_cast<int32_t>(c.spec.page_size)),
        latent(static_cast<int32_t>(c.spec.latent)),
        rope(static_cast<int32_t>(c.spec.rope)),
        format(c.spec.format),
        powers_of_two(c.spec.power_of_two_scales),
        k_scale(c.spec.k_scale) {
    const int64_t size = format == CacheFormat::f32 || format == CacheFormat::fp8_ds_mla ? 4
                         : format == CacheFormat::fp8                                    ? 1
                                                                                         : 2;
    if (pages_at(size)) return;
    throw ShapeError(std::string(op) + ": cache pages of format " + std::string(to_string(format)) + " lie " +
                     std::to_string(page_stride) + " bytes apart from an address that is " +
                     std::to_string(address() % static_cast<uintptr_t>(size)) + " past a multiple of " +
                     std::to_string(size) + ", both must be multiples of it");
  }

  /// May kernels read and write n elements of any row at once (wide accesses)? n: 2, 4, 8 or 16.
  bool wide(int n) const {
    if (latent % n != 0 || rope % n != 0) return false;
    auto at = [&](int64_t bytes) { return pages_at(std::min<int64_t>(16, bytes)); };
    switch (format) {
      case CacheFormat::f32: return at(4 * n);
      case CacheFormat::bf16:
      case CacheFormat::f16: return at(2 * n);
      case CacheFormat::fp8: return at(n);
      default: return at(2 * n);  // the rope part's elements; rows of 656 and 576 bytes keep 16
    }
  }

 private:
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(data); }
  bool pages_at(int64_t bytes) const {
    return address() % static_cast<uintptr_t>(bytes) == 0 && page_stride % bytes == 0;
  }
};

/// One token's row.
template <CacheFormat f>
class CacheRow {
 public:
  using Traits = CacheTraits<f>;
  using Element = typename Traits::Element;
  /// Formats with groups: the rope part's first byte.
  static constexpr int kRopeAt = f == CacheFormat::fp8_ds_mla ? cache::fp8_ds_mla::kRopeAt : cache::fp8_ds_v4::kLatent;

  __device__ CacheRow(const CacheMemory& c, int32_t page, int32_t offset)
      : k_scale_(c.k_scale), powers_of_two_(c.powers_of_two) {
    std::byte* const at = c.data + page * c.page_stride;
    if constexpr (f == CacheFormat::fp8_ds_mla) {
      row_ = at + offset * cache::fp8_ds_mla::kToken;
      scales_ = row_ + cache::fp8_ds_mla::kScalesAt;
    } else if constexpr (f == CacheFormat::fp8_ds_v4) {
      row_ = at + offset * cache::fp8_ds_v4::kRow;
      scales_ = at + c.page_size * cache::fp8_ds_v4::kRow + offset * cache::fp8_ds_v4::kScales;
    } else {
      row_ = at + static_cast<int64_t>(offset) * (c.latent + c.rope) * static_cast<int64_t>(sizeof(Element));
    }
  }
  /// A row whose bytes, and whose scales where they lie apart, were copied elsewhere.
  __device__ CacheRow(float k_scale, std::byte* row, std::byte* scales)
      : k_scale_(k_scale), powers_of_two_(true), row_(row), scales_(scales) {
    if constexpr (f == CacheFormat::fp8_ds_mla) scales_ = row_ + cache::fp8_ds_mla::kScalesAt;
  }
  /// slot >= 0
  __device__ static CacheRow at(const CacheMemory& c, int32_t slot) {
    const uint32_t page = static_cast<uint32_t>(slot) / static_cast<uint32_t>(c.page_size);
    return CacheRow(c, static_cast<int32_t>(page), slot - static_cast<int32_t>(page) * c.page_size);
  }

  /// The row's first byte; where its scales begin, of a format with groups.
  __device__ std::byte* bytes() const { return row_; }
  __device__ std::byte* scales() const { return scales_; }

  /// Elements [i, i + n) of [latent | rope], all of one part, dequantised to T (float, bf16 or f16): in f32, then
  /// rounded. wide: CacheMemory::wide(n) holds and i is a multiple of n. Otherwise they are read one by one; formats
  /// with groups still want i to be a multiple of n, n at most 64.
  template <bool wide, class T, int n>
  __device__ void read(int i, T (&x)[n]) const {
    if constexpr (!Traits::kGrouped) {
      read_as<wide>(reinterpret_cast<const Element*>(row_) + i, k_scale_, x);
    } else {
      const int latent = f == CacheFormat::fp8_ds_mla ? cache::fp8_ds_mla::kLatent : cache::fp8_ds_v4::kLatent;
      if (i < latent) read_as<wide>(reinterpret_cast<const fp8_e4m3*>(row_) + i, scale(i / Traits::kGroup), x);
      else read_as<wide>(rope() + (i - latent), 1.0f, x);
    }
  }
  /// Formats with groups: the scale of group g.
  __device__ float scale(int g) const {
    if constexpr (f == CacheFormat::fp8_ds_mla) return reinterpret_cast<const float*>(scales_)[g];
    else return from_ue8m0(static_cast<uint8_t>(scales_[g]));
  }

  /// Writes elements [i, i + n), all of one part. A format with groups wants a whole warp: lane l holds the elements l
  /// times n past lane 0's, which begin a group, 32 n is a multiple of the group, and lanes with `mine` false hold
  /// nothing.
  template <bool wide, int n>
  __device__ void write(int i, const float (&x)[n], bool mine) const {
    if constexpr (!Traits::kGrouped) {
      if (!mine) return;
      Element y[n];
      if constexpr (f == CacheFormat::fp8) {
        float scaled[n];
        divide_all(x, k_scale_, largest_of(x), scaled);
        narrow_all(scaled, y);
      } else {
        narrow_all(x, y);
      }
      store<wide>(y, reinterpret_cast<Element*>(row_) + i);
    } else {
      constexpr int latent = f == CacheFormat::fp8_ds_mla ? cache::fp8_ds_mla::kLatent : cache::fp8_ds_v4::kLatent;
      constexpr int lanes = Traits::kGroup / n;  // that share a group
      static_assert(lanes <= 32);
      const float most = largest_in_lanes<lanes>(mine && i < latent ? largest_of(x) : 0.0f);
      if (!mine) return;
      if (i >= latent) {
        bf16 y[n];
        narrow_all(x, y);
        store<wide>(y, rope() + (i - latent));
        return;
      }
      const int g = i / Traits::kGroup;
      float scaled[n];
      if (f == CacheFormat::fp8_ds_v4 || powers_of_two_) {
        const int exponent = scale_exponent(fminf(most, FLT_MAX));
        // The inverse of a power of two is exact, so that the product rounds as the quotient does.
        const float inverse = power_of_two(-exponent);
#pragma unroll
        for (int e = 0; e < n; ++e) scaled[e] = x[e] * inverse;
        if (i % Traits::kGroup == 0) {
          if constexpr (f == CacheFormat::fp8_ds_v4) {
            scales_[g] = static_cast<std::byte>(exponent + 127);
            if (g == 0) scales_[cache::fp8_ds_v4::kGroups] = std::byte{0};
          } else {
            reinterpret_cast<float*>(scales_)[g] = power_of_two(exponent);
          }
        }
      } else {
        const float scale = fmaxf(fminf(most, FLT_MAX) / 448.0f, FLT_MIN);
        divide_all(x, scale, most, scaled);
        if (i % Traits::kGroup == 0) reinterpret_cast<float*>(scales_)[g] = scale;
      }
      fp8_e4m3 y[n];
      narrow_all(scaled, y);
      store<wide>(y, reinterpret_cast<fp8_e4m3*>(row_) + i);
    }
  }

 private:
  __device__ bf16* rope() const { return reinterpret_cast<bf16*>(row_ + kRopeAt); }
  template <bool wide, class S, class T, int n>
  __device__ static void read_as(const S* from, float scale, T (&x)[n]) {
    S stored[n];
    load<wide>(from, stored);
    if constexpr (std::is_same_v<S, T>) {
#pragma unroll
      for (int e = 0; e < n; ++e) x[e] = stored[e];
    } else {
      float wide_x[n];
      widen_all(stored, wide_x);
      if constexpr (std::is_same_v<S, fp8_e4m3>) {
#pragma unroll
        for (int e = 0; e < n; ++e) wide_x[e] *= scale;
      }
      narrow_all<false>(wide_x, x);
    }
  }

  float k_scale_;
  bool powers_of_two_;
  std::byte *row_ = nullptr, *scales_ = nullptr;
};

/// f(std::integral_constant<CacheFormat, ...>) of a format.
template <class F>
void for_format(CacheFormat format, F&& f) {
  switch (format) {
    case CacheFormat::f32: return f(std::integral_constant<CacheFormat, CacheFormat::f32>{});
    case CacheFormat::bf16: return f(std::integral_constant<CacheFormat, CacheFormat::bf16>{});
    case CacheFormat::f16: return f(std::integral_constant<CacheFormat, CacheFormat::f16>{});
    case CacheFormat::fp8: return f(std::integral_constant<CacheFormat, CacheFormat::fp8>{});
    case CacheFormat::fp8_ds_mla: return f(std::integral_constant<CacheFormat, CacheFormat::fp8_ds_mla>{});
    case CacheFormat::fp8_ds_v4: return f(std::integral_constant<CacheFormat, CacheFormat::fp8_ds_v4>{});
  }
  throw UnsupportedError("cuda reads no cache format " + std::string(to_string(format)) + " yet");
}

}  // namespace mla::cuda
