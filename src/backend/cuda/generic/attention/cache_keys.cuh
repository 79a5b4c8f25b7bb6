// Keys that are cached rows: positions of a request through its block table, or slots of a row's list. Rows whose
// bytes lie at multiples of 4 are copied as they are to a stage, a block ahead, and dequantised from there; the others
// are read when needed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/core/cache_row.cuh"
#include "backend/cuda/generic/attention/block.cuh"

namespace mla::cuda::generic {

struct CacheSource {
  CacheMemory memory;
  const int32_t* table = nullptr;  // block table [requests][pages], or slots [rows][topk]
  int64_t table_stride = 0;
  const int32_t* lengths = nullptr;  // of slot lists; null: all count
  int64_t slots = 0;                 // the cache has
  int32_t first = 0, topk = 0;       // the list's keys that are this source's
  int32_t row_bytes = 0;
  int32_t unit = 0;   // bytes of a staged copy: 4, 8, 16
  bool wide = false;  // eight elements may be read at once (in the stage, where there is one)
};

template <class Core>
class CacheKeys {
 public:
  static constexpr int N = Core::N, kKeyBytes = 20;
  using T = typename Core::T;

  /// Keys [begin, end) of row `row` of the sources' tables.
  __device__ CacheKeys(const CacheSource* sources, int count, bool lists, bool staged, const Layout& l,
                       std::byte* shared, int64_t row, int64_t begin, int64_t end)
      : sources_(sources),
        layout_(l),
        shared_(shared),
        row_(row),
        begin_(begin),
        end_(end),
        count_(count),
        lists_(lists),
        staged_(staged) {
    if (threadIdx.x < N) pending_ = look_up(begin + static_cast<int>(threadIdx.x));
  }

  __device__ bool locate(int block) {
    if (threadIdx.x >= N) return false;
    const int64_t key = begin_ + static_cast<int64_t>(block) * N + static_cast<int>(threadIdx.x);
    const Place at = pending_;
    pending_ = look_up(key + N);
    const int n = block % 2 * N + static_cast<int>(threadIdx.x);
    if (at.source < 0) {
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

  __device__ bool exists(int block, int n) const { return sources()[block % 2 * N + n] >= 0; }

  __device__ void fetch(int block) {
    if (!staged_) return;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    for (int n = warp; n < N; n += kWarps) {
      const int at = block % 2 * N + n, source = sources()[at];
      if (source < 0) continue;
      const CacheSource& s = sources_[source];
      const std::byte* const from = rows()[at];
      const uint32_t to = shared_address(shared_ + layout_.stage + n * layout_.stage_row);
      switch (s.unit) {
        case 16: copy_row<16>(to, from, s.row_bytes, lane); break;
        case 8: copy_row<8>(to, from, s.row_bytes, lane); break;
        default: copy_row<4>(to, from, s.row_bytes, lane);
      }
      if (s.memory.format == CacheFormat::fp8_ds_v4 && lane < 2)
        copy_async<4>(to + cache::fp8_ds_v4::kRow + lane * 4, scales()[at] + lane * 4);
    }
  }

  __device__ void land(int block) {
    for (int i = 0; i < count_; ++i) {
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
      const int32_t slot = s.table[row_ * s.table_stride + k];
      return {slot >= 0 && slot < s.slots ? i : -1, slot};
    }
    return {};
  }

  template <int unit>
  __device__ static void copy_row(uint32_t to, const std::byte* from, int bytes, int lane) {
    for (int i = lane * unit; i < bytes; i += 32 * unit) copy_async<unit>(to + i, from + i);
  }

  template <CacheFormat f>
  __device__ void land_as(int block, int source) {
    if (sources_[source].wide) land_rows<f, true>(block, source);
    else land_rows<f, false>(block, source);
  }

  template <CacheFormat f, bool wide>
  __device__ void land_rows(int block, int source) {
    // bf16 rows go as they are where that is what products take.
    using Read = std::conditional_t<f == CacheFormat::bf16 && std::is_same_v<T, bf16>, bf16, float>;
    constexpr int kPieces = 3;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int entry = sources_[source].memory.latent + sources_[source].memory.rope, depth = layout_.depth;
    T* const keys = reinterpret_cast<T*>(shared_ + layout_.k);
    for (int n = warp; n < N; n += kWarps) {
      const int at = block % 2 * N + n, whose = sources()[at];
      if (whose != source && (whose >= 0 || source > 0)) continue;
      std::byte *data = rows()[at], *scale = scales()[at];
      if (staged_) data = shared_ + layout_.stage + n * layout_.stage_row, scale = data + cache::fp8_ds_v4::kRow;
      const CacheRow<f> row(sources_[source].memory.k_scale, data, scale);
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
  bool lists_, staged_;
  Place pending_;
};

}  // namespace mla::cuda::generic
