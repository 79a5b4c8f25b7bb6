// Rows of e4m3 on their way into the wide kernel's ring: loading warps read them, make bf16 of them and write them to
// shared memory as the copy engine would; a cluster's CTAs make half of a block each and copy it to one another.
#pragma once

#include "backend/cuda/core/cluster.cuh"
#include "backend/cuda/sm90/attend_latent/fp8_rows.cuh"

namespace mla::cuda::latent {

/// Where one warp's eight rows of each block lie in the cache: lanes look up four blocks' at a time, one such window
/// ahead.
template <class Format>
class PartRows {
 public:
  static constexpr int part_rows = 8, look_ups = 1, parts = block_tokens / part_rows, window_blocks = 32 / part_rows;

  PartRows() = default;
  __device__ PartRows(const Params& p, const Item& it, int part) : PartRows(it, table_of(p, it), part) {
    at_ = place_of(p, 0, look_up(p, 0)), next_ = look_up(p, 1);
  }
  __device__ PartRows(const Params& p, const Begin<PartRows>& begin, int part)
      : PartRows(begin.item, table_of(p, begin.item), part) {
    at_ = place_of(p, 0, begin.pages[0]), next_ = look_up(p, 1);
  }
  /// first: position of the part's first row in the first block.
  __device__ static int position(const Params&, int first, int window) {
    const int lane = threadIdx.x % 32;
    return first + (window * window_blocks + lane / part_rows) * block_tokens + lane % part_rows;
  }

  /// Moves to the item's block i, not before the last one; all lanes of the warp.
  __device__ void seek(const Params& p, int i) {
    offset_ = i % window_blocks * part_rows;
    if (i / window_blocks == window_) return;
    window_ = i / window_blocks;
    at_ = place_of(p, window_, next_), next_ = look_up(p, window_ + 1);  // not touched before it is needed
  }
  /// Units of 16 bytes from the cache's start to the block's row i of the part, which is not past the item's end; by
  /// all lanes.
  __device__ uint32_t row(int i) const { return __shfl_sync(0xffffffffu, at_, offset_ + i); }

 private:
  __device__ PartRows(const Item& it, const int* table, int part)
      : table_(table), positions_(it.positions), first_(it.block * block_tokens + part * part_rows) {}
  __device__ int look_up(const Params& p, int window) const {
    return page_of(p, table_, positions_, position(p, first_, window));
  }
  __device__ uint32_t place_of(const Params& p, int window, int page) const {
    const int at = position(p, first_, window), row = at - p.by_page.divide(at) * p.page_size;
    return static_cast<uint32_t>(page) * static_cast<uint32_t>(p.page_stride / 16) +
           static_cast<uint32_t>(row * (Format::bytes / 16));
  }

  const int* table_ = nullptr;
  int positions_ = 0, first_ = 0, window_ = 0, offset_ = 0, next_ = -1;
  uint32_t at_ = 0;
};

/// Eight rows, an eight-row group of every column box, in one warp's registers. A lane has 16 codes of each row.
template <class Format>
class EightRows {
 public:
  /// Asks for the block's rows, of which `valid` are within the sequence. The others are zeros.
  template <class Rows>
  __device__ void load(const char* cache, const Rows& rows, int valid) {
    const int lane = threadIdx.x % 32;
    const auto address = [&](uint32_t row, int byte) { return cache + row * int64_t{16} + byte; };
    const uint32_t quarter = rows.row(lane / 4);  // lanes of a row: four
    if constexpr (Format::scaled) {
      scale_ = 0;
      if (lane / 4 < valid) scale_ = __uint_as_float(load_4(address(quarter, Format::scales_at + lane % 4 * 4)));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = i * 4 + lane / 8;
        const uint32_t eighth = rows.row(k);
        rope_[i] = load_16(address(eighth, Format::rope_at + lane % 8 * 16), k < valid);
      }
    } else {
      rope_[0] = load_16(address(quarter, width + lane % 4 * 16), lane / 4 < valid);
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t row = rows.row(k);
      codes_[k] = load_16(address(row, lane * 16), k < valid);
    }
  }

  /// rope: the group's rows in the rope's box.
  __device__ void put_rope(char* rope) const {
    const int lane = threadIdx.x % 32;
    if constexpr (Format::scaled) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = i * 4 + lane / 8;
        *reinterpret_cast<uint4*>(rope + k * 128 + (lane % 8 ^ k) * 16) = rope_[i];
      }
    } else {
      const int k = lane / 4;
      uint4 chunk[2];
      convert(rope_[0], 1.0f, chunk);
#pragma unroll
      for (int i = 0; i < 2; ++i) *reinterpret_cast<uint4*>(rope + k * 128 + ((lane % 4 * 2 + i) ^ k) * 16) = chunk[i];
    }
  }
  /// values: the group's rows in the first of eight boxes. A quarter of a warp writes to two boxes at a time: even
  /// chunks of the one and odd chunks of the other lie in different banks.
  __device__ void put_row(char* values, int k) const {
    const int lane = threadIdx.x % 32;
    const bool odd = lane / 4 % 2;
    uint4 chunk[2];
    convert(codes_[k], Format::scaled ? __shfl_sync(0xffffffffu, scale_, k * 4 + lane / 8) : 1.0f, chunk);
    char* const row = values + lane / 4 * (block_tokens * 128) + k * 128;
    const int first = (lane % 4 * 2 + odd) ^ k;
    *reinterpret_cast<uint4*>(row + first * 16) = odd ? chunk[1] : chunk[0];
    *reinterpret_cast<uint4*>(row + (first ^ 1) * 16) = odd ? chunk[0] : chunk[1];
  }

 private:
  /// Asked for here and now, and not kept by the first level cache.
  __device__ static uint4 load_16(const char* from, bool there) {
    uint4 v;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
        "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
        "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(from), "r"(static_cast<uint32_t>(there)));
    return v;
  }
  __device__ static uint32_t load_4(const char* from) {
    uint32_t v;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(from));
    return v;
  }
  /// 16 codes to two chunks of eight bf16.
  __device__ static void convert(const uint4& codes, float scale, uint4 (&chunk)[2]) {
    const uint32_t from[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t to[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t half = i % 2 ? e4m3_high(from[i / 2]) : e4m3_low(from[i / 2]);
      const float2 two = __half22float2(reinterpret_cast<const __half2&>(half));
      to[i] = Format::scaled ? Pack<__nv_bfloat16>::two(two.x * scale, two.y * scale)
                             : Pack<__nv_bfloat16>::two(two.x, two.y);
    }
    chunk[0] = {to[0], to[1], to[2], to[3]}, chunk[1] = {to[4], to[5], to[6], to[7]};
  }

  uint4 codes_[8], rope_[Format::scaled ? 2 : 1];
  float scale_ = 0;  // of row lane / 4, group lane % 4
};

}  // namespace mla::cuda::latent
