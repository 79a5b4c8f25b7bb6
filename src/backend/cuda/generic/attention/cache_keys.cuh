// Keys that are cached rows: positions of a request through its block table, or slots of a row's list.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/core/cache_row.cuh"
#include "backend/cuda/generic/attention/block.cuh"

namespace mla::cuda::generic {

/// How rows come to shared memory.
enum class Copies : uint8_t {
  none,    ///< read and dequantised when needed: any alignment and dimensions
  staged,  ///< copied as they are a block ahead, dequantised from there
  direct,  ///< rows of the products' own elements to where these read them, a block ahead: two buffers
};

struct CacheSource {
  CacheMemory memory;
  const float* given_scale = nullptr;  // fp8: in place of memory's
  const int32_t* table = nullptr;      // block table [requests][pages], or slots [rows][topk]
  int64_t table_stride = 0;
  const int32_t* lengths = nullptr;  // of slot lists; null: all count
  int64_t slots = 0;                 // the cache has
  int32_t first = 0, topk = 0;       // the list's keys that are this source's
  int32_t row_bytes = 0;
  int32_t unit = 0;   // bytes of a staged copy: 4, 8, 16
  bool wide = false;  // eight elements may be read at once (in the stage, where there is one)
  __device__ float k_scale() const { return given_scale ? *given_scale : memory.k_scale; }
};

template <class Core>
class CacheKeys {
 public:
  static constexpr int N = Core::N, kWarps = Core::kWarps, kThreads = Core::kThreads, kKeyBytes = 20;
  using T = typename Core::T;

  /// Keys [begin, end) of row `row` of the sources' tables.
  __device__ CacheKeys(const CacheSource* sources, int count, bool lists, Copies copies, const Layout& l,
                       std::byte* shared, int64_t row, int64_t begin, int64_t end)
      : sources_(sources),
        layout_(l),
        shared_(shared),
        row_(row),
        begin_(begin),
        end_(end),
        count_(count),
        lists_(lists),
        copies_(copies) {
    if (threadIdx.x < N) pending_ = look_up(begin + static_cast<int>(threadIdx.x));
  }

  __device__ bool locate(int block) {
    if (threadIdx.x >= N) return false;
    const int64_t key = begin_ + static_cast<int64_t>(block) * N + static_cast<int>(threadIdx.x);
    const Place at = pending_;
    pending_ = look_up(key + N);
    const int n = block % 2 * N + static_cast<int>(threadIdx.x);
    if (at.source < 0 || at.entry < 0 || (lists_ && at.entry >= sources_[at.source].slots)) {
      sources()[n] = -1;
      return false;
    }
    const CacheSource& s = sources_[at.source];
    const CacheMemory& m = s.memory;
    const uint32_t size = static_cast<uint32_t>(m.page_size);
    const uint32_t number = lists_ ? static_cast<uint32_t>(at.entry) : static_cast<uint32_t>(key);
    const int32_t offset = static_cast<int32_t>(number % size);
    const int64_t page = lists_ ? number / size : at.entry;
    std::byte* const base = m.data + page * m.page_stride;
    rows()[n] = base + static_cast<int64_t>(offset) * s.row_bytes;
    scales()[n] = base + static_cast<int64_t>(m.page_size) * s.row_bytes + offset * cache::fp8_ds_v4::kScales;
    sources()[n] = at.source;
    return true;
  }

  __device__ bool shows(int, int block, int n) const { return sources()[block % 2 * N + n] >= 0; }

  __device__ int buffer(int block) const { return copies_ == Copies::direct ? block % 2 * N * layout_.ld_q : 0; }

  __device__ void fetch(int block) {
    if (copies_ == Copies::none) return;
    for (int i = 0; i < count_; ++i) {
      switch (sources_[i].unit) {
        case 16: copy_rows<16>(block, i); break;
        case 8: copy_rows<8>(block, i); break;
        default: copy_rows<4>(block, i);
      }
    }
  }

  __device__ void land(int block) {
    if (copies_ == Copies::direct) return;
    for (int i = 0; i < count_; ++i) {
      if constexpr (std::is_same_v<T, f16>) {  // products of f16 are of such rows alone
        land_as<CacheFormat::f16>(block, i);
        continue;
      }
      switch (sources_[i].memory.format) {
        case CacheFormat::f32: land_as<CacheFormat::f32>(block, i); break;
        case CacheFormat::bf16: land_as<CacheFormat::bf16>(block, i); break;
        case CacheFormat::f16: land_as<CacheFormat::f16>(block, i); break;
        case CacheFormat::fp8: land_as<CacheFormat::fp8>(block, i); break;
        case CacheFormat::fp8_ds_mla: land_as<CacheFormat::fp8_ds_mla>(block, i); break;
        case CacheFormat::fp8_ds_v4: land_as<CacheFormat::fp8_ds_v4>(block, i); break;
      }
    }
  }

 private:
  struct Place {
    int32_t source = -1, entry = 0;  // -1: there is no such key; its page, or its slot
  };

  __device__ Place look_up(int64_t key) const {
    if (key >= end_) return {};
    if (!lists_) return {0, sources_[0].table[row_ * sources_[0].table_stride + key / sources_[0].memory.page_size]};
    for (int i = 0; i < count_; ++i) {
      const CacheSource& s = sources_[i];
      const int64_t k = key - s.first;
      if (k >= s.topk) continue;
      if (s.lengths && k >= s.lengths[row_]) return {};
      return {i, s.table[row_ * s.table_stride + k]};  // whether it exists is asked when it is used
    }
    return {};
  }

  /// A warp has rows warp, warp + kWarps, .. Rows of other sources are left alone; where rows are copied for good, the
  /// first source zeroes those that do not exist.
  template <int unit>
  __device__ void copy_rows(int block, int source) {
    const CacheSource& s = sources_[source];
    const bool direct = copies_ == Copies::direct;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int stride = direct ? layout_.ld_q * static_cast<int>(sizeof(T)) : layout_.stage_row, bytes = s.row_bytes;
    const int base = direct ? layout_.k + buffer(block) * static_cast<int>(sizeof(T)) : layout_.stage;
    const uint32_t to = shared_address(shared_ + base);
#pragma unroll 1
    for (int n = warp; n < N; n += kWarps) {
      const int at = block % 2 * N + n, whose = sources()[at];
      if (whose == source) {
        const std::byte* const from = rows()[at];
        for (int i = lane * unit; i < bytes; i += 32 * unit) copy_async<unit>(to + n * stride + i, from + i);
        if (s.memory.format == CacheFormat::fp8_ds_v4 && lane < 2)
          copy_async<4>(to + n * stride + cache::fp8_ds_v4::kRow + lane * 4, scales()[at] + lane * 4);
      } else if (direct && whose < 0 && source == 0) {
        for (int i = lane * 4; i < bytes; i += 128) *reinterpret_cast<uint32_t*>(shared_ + base + n * stride + i) = 0;
      }
    }
  }

  template <CacheFormat f>
  __device__ void land_as(int block, int source) {
    if constexpr (std::is_same_v<T, bf16> && f != CacheFormat::f32) {
      if (copies_ == Copies::staged) return land_staged<f>(block, source);
    }
    if (sources_[source].wide) land_rows<f, true>(block, source);
    else land_rows<f, false>(block, source);
  }

  /// From the stage, in groups of 16 elements: first those that a lane each of a warp has of its rows, which are the
  /// codes where a row has both, then the rest of all rows. Parts of a row are multiples of 16.
  template <CacheFormat f>
  __device__ void land_staged(int block, int source) {
    constexpr int kRows = 2;  // at a time
    static_assert(N / kWarps % kRows == 0);
    constexpr bool kCodes = f == CacheFormat::fp8 || f == CacheFormat::fp8_ds_mla || f == CacheFormat::fp8_ds_v4;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int groups = layout_.depth / 16;
    const int leading = f == CacheFormat::fp8_ds_mla  ? static_cast<int>(cache::fp8_ds_mla::kLatent) / 16
                        : f == CacheFormat::fp8_ds_v4 ? static_cast<int>(cache::fp8_ds_v4::kLatent) / 16
                                                      : groups & ~31;
    const std::byte* const stage = shared_ + layout_.stage;
    T* const keys = reinterpret_cast<T*>(shared_ + layout_.k);
    const int* const whose = sources() + block % 2 * N;
    const auto mine = [&](int n) { return whose[n] == source || (whose[n] < 0 && source == 0); };
    for (int group = lane; group < leading; group += 32) {
#pragma unroll 1
      for (int first = 0; first < N; first += kRows * kWarps) {
        Group<kCodes> x[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int n = first + warp + i * kWarps;
          if (whose[n] == source) read_group<f>(stage + n * layout_.stage_row, group, source, x[i]);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int n = first + warp + i * kWarps;
          if (mine(n)) write_group<f>(x[i], keys + n * layout_.ld_q + group * 16);
        }
      }
    }
    const int rest = groups - leading;
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x); at < N * rest; at += kThreads) {
      const int n = at / rest, group = leading + at % rest;
      if (!mine(n)) continue;
      const std::byte* const row = stage + n * layout_.stage_row;
      if constexpr (f == CacheFormat::fp8_ds_mla || f == CacheFormat::fp8_ds_v4) {
        constexpr int at_rope = f == CacheFormat::fp8_ds_mla ? static_cast<int>(cache::fp8_ds_mla::kRopeAt)
                                                             : static_cast<int>(cache::fp8_ds_v4::kLatent);
        Group<false> x;
        if (whose[n] == source) x.load(row + at_rope + (group - leading) * 32);
        write_group<CacheFormat::bf16>(x, keys + n * layout_.ld_q + group * 16);
      } else {
        Group<kCodes> x;
        if (whose[n] == source) read_group<f>(row, group, source, x);
        write_group<f>(x, keys + n * layout_.ld_q + group * 16);
      }
    }
  }

  /// 16 elements as stored: e4m3 codes and their scale, or 16-bit numbers.
  template <bool codes>
  struct Group {
    uint4 raw[codes ? 1 : 2] = {};
    float scale = 1.0f;
    __device__ void load(const std::byte* from) {
#pragma unroll
      for (size_t i = 0; i < sizeof raw / sizeof *raw; ++i) raw[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  };
  template <CacheFormat f, bool codes>
  __device__ void read_group(const std::byte* row, int group, int source, Group<codes>& x) const {
    x.load(row + group * (codes ? 16 : 32));
    if constexpr (f == CacheFormat::fp8) {
      x.scale = sources_[source].k_scale();
    } else if constexpr (f == CacheFormat::fp8_ds_mla) {
      using namespace cache::fp8_ds_mla;
      x.scale = reinterpret_cast<const float*>(row + kScalesAt)[static_cast<unsigned>(group) / (kGroup / 16)];
    } else if constexpr (f == CacheFormat::fp8_ds_v4) {
      using namespace cache::fp8_ds_v4;
      x.scale = from_ue8m0(static_cast<uint8_t>(row[kRow + static_cast<unsigned>(group) / (kGroup / 16)]));
    }
  }
  /// The halves' order differs among lanes, so that eight neighbours meet all banks.
  template <CacheFormat f, bool codes>
  __device__ static void write_group(const Group<codes>& x, T* to) {
    const bool swap = threadIdx.x / 4 % 2 != 0;
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const bool second = (turn == 1) != swap;
      uint4 y;
      if constexpr (codes) {
        const uint32_t low = second ? x.raw[0].z : x.raw[0].x, high = second ? x.raw[0].w : x.raw[0].y;
        y.x = dequantised(low & 0xffffu, x.scale), y.y = dequantised(low >> 16, x.scale);
        y.z = dequantised(high & 0xffffu, x.scale), y.w = dequantised(high >> 16, x.scale);
      } else {
        y = second ? x.raw[1] : x.raw[0];
        if constexpr (f == CacheFormat::f16) y = {rounded(y.x), rounded(y.y), rounded(y.z), rounded(y.w)};
      }
      *reinterpret_cast<uint4*>(to + (second ? 8 : 0)) = y;
    }
  }
  /// Two e4m3 codes as bf16, times a scale in f32; two f16 numbers as bf16.
  __device__ static uint32_t dequantised(uint32_t codes, float scale) {
    const float2 x =
        __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3)));
    const __nv_bfloat162 y = __floats2bfloat162_rn(x.x * scale, x.y * scale);
    return reinterpret_cast<const uint32_t&>(y);
  }
  __device__ static uint32_t rounded(uint32_t halves) {
    const float2 x = __half22float2(reinterpret_cast<const __half2&>(halves));
    const __nv_bfloat162 y = __floats2bfloat162_rn(x.x, x.y);
    return reinterpret_cast<const uint32_t&>(y);
  }

  template <CacheFormat f, bool wide>
  __device__ void land_rows(int block, int source) {
    // bf16 rows go as they are where that is what products take.
    using Read = std::conditional_t<f == CacheFormat::bf16 && std::is_same_v<T, bf16>, bf16, float>;
    constexpr int kPieces = 1;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int entry = sources_[source].memory.latent + sources_[source].memory.rope, depth = layout_.depth;
    T* const keys = reinterpret_cast<T*>(shared_ + layout_.k);
    for (int n = warp; n < N; n += kWarps) {
      const int at = block % 2 * N + n, whose = sources()[at];
      if (whose != source && (whose >= 0 || source > 0)) continue;
      const CacheRow<f> row(sources_[source].k_scale(), rows()[at], scales()[at]);
      for (int base = lane * 8; base < depth; base += kPieces * 256) {
        Read x[kPieces][8];
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const int i = base + piece * 256;
          if (whose >= 0 && wide && i < entry) {
            row.template read<true>(i, x[piece]);
          } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              Read one[1] = {};
              if (whose >= 0 && i + e < entry) row.template read<false>(i + e, one);
              x[piece][e] = one[0];
            }
          }
        }
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const int i = base + piece * 256;
          if (i >= depth) continue;
          if constexpr (std::is_same_v<Read, bf16>) store<true>(x[piece], keys + n * layout_.ld_q + i);
          else pack8(x[piece], keys + n * layout_.ld_q + i);
        }
      }
    }
  }

  __device__ std::byte** rows() const { return reinterpret_cast<std::byte**>(shared_ + layout_.keys); }
  __device__ std::byte** scales() const { return rows() + 2 * N; }
  __device__ int32_t* sources() const { return reinterpret_cast<int32_t*>(scales() + 2 * N); }

  const CacheSource* sources_;
  const Layout& layout_;
  std::byte* shared_;
  int64_t row_, begin_, end_;
  int count_;
  bool lists_;
  Copies copies_;
  Place pending_;
};

}  // namespace mla::cuda::generic
