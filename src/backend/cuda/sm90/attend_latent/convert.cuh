// Rows of e4m3 on their way into the wide kernel's ring: loading warps read them, make bf16 of them and write them to
// shared memory as the copy engine would; a cluster's CTAs make half of a block each and copy it to one another.
#pragma once

#include "backend/cuda/core/cluster.cuh"
#include "backend/cuda/sm90/attend_latent/fp8_rows.cuh"

namespace mla::cuda::latent {

/// Where one warp's rows of each block lie in the cache, `groups` times eight of them, block_tokens / groups apart:
/// lanes look up four groups at a time, one such window ahead. What an item knows is asked of it again: registers are
/// short, and what is spilled comes back from L2 where rows of the cache stream through L1.
template <class Format, int groups>
class PartRows {
 public:
  static constexpr int part_rows = 8, look_ups = 1, parts = block_tokens / part_rows / groups, window_groups = 4;

  PartRows() = default;
  __device__ PartRows(const Params& p, const Item& it, int part) : PartRows(p, it, part, look_up(p, it, part, 0)) {}
  __device__ PartRows(const Params& p, const Begin<PartRows>& begin, int part)
      : PartRows(p, begin.item, part, begin.pages[0]) {}
  /// first: position of the part's first row in the first block.
  __device__ static int position(const Params&, int first, int window) {
    const int lane = thread_index() % 32;
    return first + (window * window_groups + lane / part_rows) * (block_tokens / groups) + lane % part_rows;
  }

  /// Moves to the item's group i, not before the last one; all lanes of the warp.
  __device__ void seek(const Params& p, const Item& it, int part, int i) {
    if (i && i % window_groups == 0) at_ = place_of(p, it, part, i / window_groups, next_);
  }
  /// Looks further, once the group's rows have been asked for: page numbers are not touched before they are needed.
  __device__ void look_ahead(const Params& p, const Item& it, int part, int i) {
    if (i % window_groups == 0) next_ = look_up(p, it, part, i / window_groups + 1);
  }
  /// Units of 16 bytes from the cache's start to row lane % 8 of group i, if that is not past the item's end.
  __device__ uint32_t place(int i) const {
    return __shfl_sync(0xffffffffu, at_, i % window_groups * part_rows + thread_index() % part_rows);
  }

 private:
  __device__ PartRows(const Params& p, const Item& it, int part, int page) : at_(place_of(p, it, part, 0, page)) {}
  __device__ static int first(const Item& it, int part) { return it.block * block_tokens + part * part_rows; }
  __device__ static int look_up(const Params& p, const Item& it, int part, int window) {
    return page_of(p, table_of(p, it), it.positions, position(p, first(it, part), window));
  }
  __device__ static uint32_t place_of(const Params& p, const Item& it, int part, int window, int page) {
    const int at = position(p, first(it, part), window), row = at - p.by_page.divide(at) * p.page_size;
    return static_cast<uint32_t>(page) * static_cast<uint32_t>(p.page_stride / 16) +
           static_cast<uint32_t>(row * (Format::bytes / 16));
  }

  uint32_t at_ = 0;
  int next_ = -1;
};

/// Eight rows, an eight-row group of every column box, in one warp's registers. Lane l has 16 elements of each 64 of
/// row l % 8, from 16 * (l / 8) on: addresses of all its loads differ by constants, those of its stores, too.
template <class Format>
class EightRows {
 public:
  /// Asks for a group's eight rows, of which `valid` are within the sequence; the others are not read, and zeros.
  template <class Rows>
  __device__ void load(const char* cache, const Rows& rows, int group, int valid) {
    const int lane = thread_index() % 32;
    const char* const row = cache + rows.place(group) * int64_t{16} + lane / 8 * 16;
    if (lane % 8 < valid) {
#pragma unroll
      for (int i = 0; i < 8; ++i) codes_[i] = load_16(row + i * 64);
      if constexpr (Format::scaled) {
        scales_ = load_16(row + Format::scales_at - lane / 8 * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) rope_[i] = load_16(row + Format::rope_at + i * 64);
      } else {
        rope_[0] = load_16(row + width);
      }
    } else {
#pragma unroll
      for (uint4& codes : codes_) codes = {};
      scales_ = rope_[0] = rope_[1] = {};
    }
  }

  /// Makes bf16 of them, at these addresses of the group's rows in the first of eight boxes, and in the rope's. A
  /// quarter of a warp writes eight rows' chunks of 16 bytes to different banks.
  __device__ void put(uint32_t values, uint32_t rope) const {
    const int lane = thread_index() % 32, row = lane % 8, part = lane / 8;
    const auto chunk = [&](int i) { return static_cast<uint32_t>(row * 128 + (i ^ row) * 16); };
    const uint32_t first = values + chunk(2 * part), second = values + chunk(2 * part + 1);
    const uint32_t scales[4] = {scales_.x, scales_.y, scales_.z, scales_.w};
    uint4 two[2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      convert(codes_[i], Format::scaled ? __uint_as_float(scales[i / 2]) : 1.0f, two);
      store_shared_16(first + i * (block_tokens * 128), two[0]);
      store_shared_16(second + i * (block_tokens * 128), two[1]);
    }
    if constexpr (Format::scaled) two[0] = rope_[0], two[1] = rope_[1];
    else convert(rope_[0], 1.0f, two);
#pragma unroll
    for (int i = 0; i < 2; ++i) store_shared_16(rope + chunk(Format::scaled ? 4 * i + part : 2 * part + i), two[i]);
  }

 private:
  /// Asked for here and now. Neighbours of it are asked for next: rows of 656 bytes begin anywhere.
  __device__ static uint4 load_16(const char* from) {
    uint4 v;
    asm volatile("ld.global.L1::evict_first.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
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

  uint4 codes_[8], scales_, rope_[2];
};

}  // namespace mla::cuda::latent
