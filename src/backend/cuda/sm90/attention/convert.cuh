// Rows of e4m3 on their way into the wide kernel's ring: loading warps read them, make bf16 of them and write them to
// shared memory as the copy engine would; a cluster's CTAs make half of a block each and copy it to one another.
#pragma once

#include "backend/cuda/core/cluster.cuh"
#include "backend/cuda/sm90/attention/fp8_rows.cuh"

namespace mla::cuda::latent {

/// Rows of fp8_ds_v4: 448 codes and 64 rope numbers in bf16, all of them values; the scales of 64 codes each lie behind
/// a page's rows.
struct Fp8DsV4Rows {
  static constexpr int bytes = 576, scale_bytes = 8, rope_at = 448;
  static constexpr bool scaled = true, scales_apart = true, has_rope = false;
};

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

/// The same of a list of slots: each lane looks up one of its warp's slots, of whichever source it is.
template <class Format, int groups>
class ListedRows {
 public:
  static constexpr int part_rows = 8, window_groups = 4;
  static constexpr uint32_t none = 0xffffffffu;  ///< a place: there is no such row
  static constexpr uint32_t second = 1u << 31;   ///< it is the second source's

  ListedRows() = default;
  __device__ ListedRows(const Params& p, const Item& it, int part) {
    if (keeps_first && p.lists.sources > 1) first_ = ListedRow::first_keys(p.lists, it.request);
    look_up(p, it, part, 0), arrive(p, it, part, 0);
  }

  __device__ void seek(const Params& p, const Item& it, int part, int i) {
    if (i && i % window_groups == 0) arrive(p, it, part, i / window_groups);
  }
  __device__ void look_ahead(const Params& p, const Item& it, int part, int i) {
    if (i % window_groups == 0) look_up(p, it, part, i / window_groups + 1);
  }
  /// Of row lane % 8 of group i: units of 16 bytes from its cache's start.
  __device__ uint32_t place(int i) const { return of_group(at_, i); }
  /// Units of 8 bytes from there to its scales.
  __device__ int to_scales(int i) const { return static_cast<int>(of_group(to_scales_, i)); }
  /// Bit r: is there a row r of group i?
  __device__ uint32_t there(int i) const {
    return __ballot_sync(0xffffffffu, at_ != none) >> i % window_groups * part_rows & 0xffu;
  }

 private:
  __device__ static uint32_t of_group(uint32_t of_lane, int i) {
    return __shfl_sync(0xffffffffu, of_lane, i % window_groups * part_rows + thread_index() % part_rows);
  }
  __device__ static int position(const Item& it, int part, int window) {
    const int lane = thread_index() % 32;
    return it.block * block_tokens + part * part_rows + lane % part_rows +
           (window * window_groups + lane / part_rows) * (block_tokens / groups);
  }
  /// Keys of the first source: kept, where a lane's part of eight rows leaves registers for it.
  static constexpr bool keeps_first = Format::scales_apart;
  __device__ int first_keys(const Params& p, const Item& it) const {
    return keeps_first ? first_ : p.lists.sources > 1 ? ListedRow::first_keys(p.lists, it.request) : 0x7fffffff;
  }
  __device__ void look_up(const Params& p, const Item& it, int part, int window) {
    const int at = position(it, part, window), first = first_keys(p, it);
    slot_ = -1;
    if (at >= min(it.positions, (it.block + it.blocks) * block_tokens)) return;
    const SlotSource& from = p.lists.source[at >= first];
    slot_ = __ldg(from.slots + it.request * from.slot_stride + (at >= first ? at - first : at));
  }
  __device__ void arrive(const Params& p, const Item& it, int part, int window) {
    const bool is_second = position(it, part, window) >= first_keys(p, it);
    const SlotSource& from = p.lists.source[is_second];
    at_ = none;
    if (slot_ < 0 || slot_ >= from.held) return;
    at_ = unit_of(from, p.by_slot_page[is_second], slot_) | (is_second ? second : 0);
    if constexpr (Format::scales_apart) {
      const int row = slot_ - p.by_slot_page[is_second].divide(slot_) * from.page_size;
      to_scales_ =
          static_cast<uint32_t>((from.page_size * Format::bytes + row * (Format::scale_bytes - Format::bytes)) / 8);
    }
  }

  uint32_t at_ = none, to_scales_ = 0;
  int slot_ = -1, first_ = 0x7fffffff;
};

/// Eight rows, an eight-row group of every column box, in one warp's registers. Lane l has 16 elements of each 64 of
/// row l % 8, from 16 * (l / 8) on: addresses of all its loads differ by constants, those of its stores, too.
template <class Format>
class EightRows {
 public:
  /// Asks for a group's eight rows, of which `valid` are within the sequence; the others are not read, and zeros.
  template <class Rows>
  __device__ void load(const char* cache, const Rows& rows, int group, int valid) {
    load(cache + rows.place(group) * int64_t{16}, rows, group, static_cast<int>(thread_index() % 8) < valid);
  }
  /// The same of a list's, where any row may be missing.
  template <int groups>
  __device__ void load(const SlotLists& lists, const ListedRows<Format, groups>& rows, int group) {
    using Listed = ListedRows<Format, groups>;
    const uint32_t place = rows.place(group);
    const std::byte* const cache = lists.source[place >= Listed::second].cache;
    load(reinterpret_cast<const char*>(cache) + (place & ~Listed::second) * int64_t{16}, rows, group,
         place != Listed::none);
  }

  /// Makes bf16 of them, at these addresses of the group's rows in the first of eight boxes, and in the rope's. A
  /// quarter of a warp writes eight rows' chunks of 16 bytes to different banks. paced: two boxes after another, not
  /// all at once, which takes more registers.
  template <bool paced>
  __device__ void put(uint32_t values, uint32_t rope) const {
    const int lane = thread_index() % 32, row = lane % 8, part = lane / 8;
    const auto chunk = [&](int i) { return static_cast<uint32_t>(row * 128 + (i ^ row) * 16); };
    const uint32_t first = values + chunk(2 * part), second = values + chunk(2 * part + 1);
    uint4 two[2];
#pragma unroll
    for (int i = 0; i < code_boxes; ++i) {
      convert(codes_[i], scale_of(i), two);
      store_shared_16(first + i * (block_tokens * 128), two[0]);
      store_shared_16(second + i * (block_tokens * 128), two[1]);
      if (paced && i % 2) __syncwarp();
    }
    if constexpr (Format::scaled) two[0] = rope_[0], two[1] = rope_[1];
    else convert(rope_[0], 1.0f, two);
    if constexpr (!Format::has_rope) rope = values + code_boxes * (block_tokens * 128);
#pragma unroll
    for (int i = 0; i < 2; ++i) store_shared_16(rope + chunk(Format::scaled ? 4 * i + part : 2 * part + i), two[i]);
  }

 private:
  static constexpr int code_boxes = Format::has_rope ? 8 : 7;  // the eighth box of a row without is not of codes

  template <class Rows>
  __device__ void load(const char* row, const Rows& rows, int group, bool is) {
    const int lane = thread_index() % 32;
    row += lane / 8 * 16;
    int to_scales = 0;
    if constexpr (Format::scaled && Format::scales_apart) to_scales = rows.to_scales(group);  // by all lanes
    if (is) {
#pragma unroll
      for (int i = 0; i < code_boxes; ++i) codes_[i] = load_16(row + i * 64);
      if constexpr (Format::scaled) {
        if constexpr (Format::scales_apart) {
          const uint2 exponents = load_8(row - lane / 8 * 16 + to_scales * int64_t{8});
          scales_.x = exponents.x, scales_.y = exponents.y;
        } else {
          scales_ = load_16(row + Format::scales_at - lane / 8 * 16);
        }
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
  /// Of box i.
  __device__ float scale_of(int i) const {
    if constexpr (!Format::scaled) {
      return 1.0f;
    } else if constexpr (Format::scales_apart) {  // biased exponents: 0 is 2^-127, 255 NaN
      const uint32_t e = (i < 4 ? scales_.x : scales_.y) >> i % 4 * 8 & 0xffu;
      return __uint_as_float(e == 0 ? 0x00400000u : e == 255 ? 0x7fc00000u : e << 23);
    } else {
      const uint32_t scales[4] = {scales_.x, scales_.y, scales_.z, scales_.w};
      return __uint_as_float(scales[i / 2]);
    }
  }
  /// Asked for here and now. Neighbours of it are asked for next: rows of 656 bytes begin anywhere.
  __device__ static uint4 load_16(const char* from) {
    uint4 v;
    asm volatile("ld.global.L1::evict_first.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
  }
  __device__ static uint2 load_8(const char* from) {
    uint2 v;
    asm volatile("ld.global.L1::evict_first.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
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

  uint4 codes_[code_boxes], scales_, rope_[2];
};

}  // namespace mla::cuda::latent
