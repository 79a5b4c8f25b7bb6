// Tiles of attend_expanded's kernels: which there are, in which order blocks take them, and how they are announced.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "backend/cuda/core/check.hpp"
#include "backend/cuda/core/cluster.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/mbarrier.cuh"
#include "backend/cuda/core/tma.cuh"
#include "backend/cuda/core/warp_scan.cuh"
#include "backend/cuda/sm90/attend_expanded/attend_expanded.hpp"
#include "mla/error.hpp"
#include "mla/work.hpp"

namespace mla::cuda::sm90 {

constexpr int tile_ring = 4;                                             // tiles announced ahead of the math warpgroups
constexpr int section_heads(int heads) { return heads >= 64 ? 8 : 16; }  // heads whose tiles run side by side
constexpr int run_keys = 2048;                                           // a run's tiles times its request's keys

/// Where tiles come from: part of a kernel's parameters.
struct TileSource {
  const ExpandedItem* items;
  int32_t items_count, heads;
  int32_t run_keys;   // keys a run of tiles may walk, about; 0: every run is one tile
  int32_t* counters;  // [0] runs handed out beyond the first of each block, [1] blocks that are done, [2] whether some
                      // value of a masked item is no number
};

/// What a math warpgroup needs to know of a tile: neighbouring query rows of one head of one item.
struct alignas(16) TileWork {
  int32_t blocks;     // of keys, walked from the last to the first; 0: no more tiles
  int32_t row, rows;  // first query row in q, rows of this item
  int32_t key, keys;  // first key row, keys of this item
  int32_t diagonal;   // tile row r sees min(keys, diagonal + r) keys
  int32_t head;
  int32_t item;  // its number; of the rows' last part, its complement
  int32_t mask;  // column of the first key in the rows' masks; below 0: they have none
  __device__ bool last() const { return item < 0; }
  __device__ int32_t number() const { return item < 0 ? ~item : item; }
};

/// A tile to another block of the cluster, whose barrier counts sizeof(TileWork) bytes.
__device__ __forceinline__ void send_tile(uint32_t to, const TileWork& work, uint32_t bar) {
  store_remote_async(to, work.blocks, work.row, work.rows, work.key, bar);
  store_remote_async(to + 16, work.keys, work.diagonal, work.head, work.item, bar);
  store_remote_async(to + 32, work.mask, 0, 0, 0, bar);
}

/// Item number `count` of a ring of `depth` slots: its slot, and the parity of the slot's round. The slot's `full`
/// barrier is waited for with this parity, its `empty` barrier with the other.
template <uint32_t depth>
struct Slot {
  uint32_t index, parity;
  __device__ explicit Slot(uint32_t count) : index(count % depth), parity(count / depth & 1) {}
};

/// Turns ascending numbers into runs of tiles, a warp at a time. A run is one tile of a long item, or several
/// neighbouring tiles of one head of a short one: taken by one block, they read the keys and values after the first
/// time from the half of L2 that is near it, where several blocks would draw them across to both halves. Items in
/// their order; within one, sections of heads; within a section, the longest runs first and the heads side by side. A
/// section is narrow enough for several blocks to walk the same head's keys a few blocks apart, so that memory serves
/// only one of them, and wide enough for the last one to end with many short tiles.
template <int tile_rows, int tile_keys>
struct TileOrder {
  int32_t group = 0;   // first of the 32 items held by the lanes
  int32_t before = 0;  // runs of the items before the group
  int32_t until = 0;   // runs of the group's items up to this lane's

  struct Item {
    int32_t row, queries, key, keys, visible;
    int32_t height, run;  // tiles of a head, and of a run
    bool last;
    int32_t mask;
  };
  static __device__ Item item(const TileSource& p, int number) {
    const ExpandedItem& from = p.items[number];
    Item i;
    i.row = from.q_begin;
    i.queries = max(from.q_count, 0);
    i.key = from.k_begin;
    i.keys = max(from.k_count, 0);
    i.visible = min(max(from.visible, -i.queries), i.keys);  // what lies beyond says the same, and may overflow
    i.height = (i.queries + tile_rows - 1) / tile_rows;
    i.run = max(p.run_keys / max(i.keys, 1), 1);
    i.last = from.last;
    i.mask = from.masked ? from.mask_begin : -1;
    return i;
  }

  __device__ void load(const TileSource& p, int lane) {
    until = 0;
    if (group + lane < p.items_count) {
      const Item i = item(p, group + lane);
      until = (i.height + i.run - 1) / i.run * p.heads;
    }
    until = sum_upto(until, lane);
  }

  /// First tile of a run; `more` tiles follow it.
  __device__ TileWork at(const TileSource& p, int32_t number, int lane, int32_t& more) {
    for (;;) {
      const int32_t total = __shfl_sync(~0u, until, 31);
      if (number < before + total) break;
      before += total;
      group += 32;
      if (group >= p.items_count) return {};
      load(p, lane);
    }
    const int owner = __ffs(__ballot_sync(~0u, number < before + until)) - 1;
    const int32_t skipped = __shfl_sync(~0u, until, max(owner - 1, 0));
    const Item q = item(p, group + owner);
    const int32_t local = number - before - (owner > 0 ? skipped : 0);
    const int32_t sections = (p.heads + section_heads(p.heads) - 1) / section_heads(p.heads),
                  section = (p.heads + sections - 1) / sections;
    const int32_t runs = (q.height + q.run - 1) / q.run * section;
    const int32_t s = local / runs, in_section = local - s * runs, width = min(section, p.heads - s * section);
    const int32_t m = q.height - 1 - in_section / width * q.run;
    more = min(q.run - 1, m);
    TileWork w;
    w.head = s * section + in_section % width;
    w.row = q.row + m * tile_rows;
    w.rows = min(tile_rows, q.queries - m * tile_rows);
    w.key = q.key;
    w.keys = q.keys;
    w.diagonal = m * tile_rows + 1 + q.visible;
    w.item = q.last ? ~(group + owner) : group + owner;
    w.mask = q.mask;
    count_blocks(w);
    return w;
  }
  /// The run's next tile: the rows above.
  static __device__ void step(const TileSource& p, TileWork& w) {
    w.row -= tile_rows;
    w.rows = tile_rows;
    w.diagonal -= tile_rows;
    count_blocks(w);
  }
  static __device__ void count_blocks(TileWork& w) {
    const int32_t seen = min(w.keys, w.diagonal + w.rows - 1);
    w.blocks =
        max((seen + tile_keys - 1) / tile_keys, 1);  // a tile that sees nothing still walks one block, all of it masked
  }
};

/// Every block of a cluster calls it at the same place for its share of the box; all of them receive it.
template <int cluster, class... Coordinates>
__device__ __forceinline__ void load_shared(uint32_t dst, const CUtensorMap& map, uint32_t bar, Coordinates... at) {
  if constexpr (cluster == 1) tma_load(dst, map, bar, at...);
  else tma_load_multicast(dst, map, bar, (1 << cluster) - 1, at...);
}
/// Lets go of something that blocks of a cluster share, or that the first of them hands out.
template <int cluster>
__device__ __forceinline__ void arrive_at(uint64_t& bar, int rank) {
  if constexpr (cluster == 1) mbarrier_arrive(smem_address(&bar));
  else mbarrier_arrive_remote(smem_address(&bar), rank);
}
template <int cluster>
__device__ __forceinline__ int rank_in_cluster() {
  return cluster == 1 ? 0 : static_cast<int>(cluster_rank());
}

// ---- launch --------------------------------------------------------------------------------------------------------

inline void require_hopper(std::string_view op) {
  int device = 0, major = 0, minor = 0;
  check(cudaGetDevice(&device), op, "current device");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), op, "compute capability");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), op, "compute capability");
  if (major == 9 && minor == 0) return;
  throw DeviceError(std::string(op) + ": the device has compute capability " + std::to_string(major) + "." +
                    std::to_string(minor) + ", this kernel needs 9.0");
}

/// What `automatic` stands for: tiles whose bits are the same. Items are taken to be alike, for their lengths are on
/// the device.
inline ExpandedTile suitable_tile(std::string_view op, int64_t item_count, int64_t tokens, int64_t key_rows,
                                  int64_t head_count) {
  const double items = static_cast<double>(item_count), heads = static_cast<double>(head_count),
               queries = static_cast<double>(tokens) / items, keys = static_cast<double>(key_rows) / items;
  if (queries < 512 || keys < 4096) return ExpandedTile::rows_128;
  // Both tiles are 128 rows a multiprocessor. Pairs read half as much, for which some percent of the power goes to
  // arithmetic instead; in exchange they come in larger pieces.
  const int blocks = multiprocessors(op);
  const auto rounds = [&](int rows, int slots) {
    const double n = std::ceil(queries / rows) * items * heads / slots;
    return n < 8 ? std::ceil(n) : n;
  };
  return rounds(256, blocks / 2) <= 1.04 * rounds(128, blocks) ? ExpandedTile::rows_256 : ExpandedTile::rows_128;
}

/// TileSource::run_keys. Runs of several tiles need work enough to still share it out evenly. The lengths are only
/// known on the device, so the extents decide.
inline int32_t run_keys_of(int tile_rows, int multiprocessors, int64_t tokens, int64_t heads) {
  return tokens * heads >= int64_t{multiprocessors} * 16 * tile_rows ? run_keys : 0;
}
/// Clusters to launch: no more than there may be tiles.
inline int64_t clusters_of(int tile_rows, int cluster, int multiprocessors, int64_t tokens, int64_t most_queries,
                           int64_t item_count, int64_t heads) {
  const int64_t most = most_queries > 0 ? most_queries : tokens;
  const int64_t tiles =
      std::min(tokens / tile_rows + item_count, item_count * ((most + tile_rows - 1) / tile_rows)) * heads;
  return std::min<int64_t>(multiprocessors / cluster, tiles);
}

}  // namespace mla::cuda::sm90
