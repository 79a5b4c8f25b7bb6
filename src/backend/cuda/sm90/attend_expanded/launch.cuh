// Launches of the kernel of 16-bit operands, whose arguments were checked.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/tensor_map.hpp"
#include "backend/cuda/sm90/attend_expanded/kernel.cuh"
#include "mla/error.hpp"

namespace mla::cuda::sm90::expanded {

constexpr const char* op = "attend_expanded (sm90)";

/// Map of a tensor [rows, heads, width], in boxes of box_rows x 1 x 64 elements.
inline CUtensorMap rows_map(const char* name, Dtype dtype, const void* base, int64_t width, int64_t heads, int64_t rows,
                            int64_t head_stride, int64_t row_stride, int box_rows) {
  const int64_t size = static_cast<int64_t>(size_of(dtype));
  const auto aligned = [&](int64_t bytes, const char* what) {
    if (bytes <= 0 || bytes % 16 != 0)
      throw ShapeError(std::string(op) + ": " + name + " " + what + " is " + std::to_string(bytes) +
                       " bytes, the copy engine needs a positive multiple of 16");
  };
  aligned(static_cast<int64_t>(reinterpret_cast<uintptr_t>(base)), "address");
  aligned(row_stride * size, "row stride");
  const MapType type = dtype == Dtype::bf16 ? MapType::bf16 : MapType::f16;
  const auto u64 = [](int64_t x) { return static_cast<uint64_t>(x); };
  aligned(head_stride * size, "head stride");
  const std::array<uint64_t, 3> extents{u64(width), u64(heads), u64(rows)};
  const std::array<uint64_t, 2> strides{u64(head_stride * size), u64(row_stride * size)};
  const std::array<uint32_t, 3> box{panel, 1, static_cast<uint32_t>(box_rows)};
  return tensor_map(op, name, type, base, extents, strides, box, Swizzle::b128);
}

/// Writes AttendExpandedArgs::columns for blocks of so many keys, and counters[2]. Words from one query row to the
/// next.
int32_t prepare_masks(cudaStream_t stream, const AttendExpandedArgs& a, int block_keys, int32_t* counters);

template <class Config, class Element, class Out, bool masked>
void run(cudaStream_t stream, const AttendExpandedArgs& a) {
  constexpr TileConfig tile = Config::tile;
  const int64_t heads = a.q.extent<Head>(), tokens = a.q.extent<Token>(), keys = a.k_nope.extent<Key>();
  const Dtype dtype = a.q.dtype();
  Params p{};
  p.q =
      rows_map("q", dtype, a.q.data(), tile.dim(), heads, tokens, a.q.stride<Head>(), a.q.stride<Token>(), group_rows);
  if (keys > 0) {
    const auto map = [&](const char* name, const void* base, int64_t width, int64_t head_stride, int64_t row_stride,
                         int box_rows, int32_t& each) {
      each = head_stride ? -1 : 0;
      return rows_map(name, dtype, base, width, head_stride ? heads : 1, keys, head_stride ? head_stride : panel,
                      row_stride, box_rows);
    };
    p.k_nope = map("k_nope", a.k_nope.data(), tile.nope, a.k_nope.stride<Head>(), a.k_nope.stride<Key>(),
                   tile.keys / tile.cluster, p.nope_heads);
    p.k_pe = map("k_pe", a.k_pe.data(), tile.rope, a.rope_head_stride, a.k_pe.stride<Key>(), tile.keys / tile.cluster,
                 p.rope_heads);
    p.v = map("v", a.v.data(), tile.value, a.v.stride<Head>(), a.v.stride<Key>(), tile.value_keys, p.value_heads);
  } else {  // maps cannot be empty: one row of something there is, which every row of the result masks
    p.nope_heads = p.rope_heads = p.value_heads = 0;
    p.k_nope = rows_map("q", dtype, a.q.data(), panel, 1, 1, panel, panel, tile.keys / tile.cluster);
    p.k_pe = rows_map("q", dtype, a.q.data(), panel, 1, 1, panel, panel, tile.keys / tile.cluster);
    p.v = rows_map("q", dtype, a.q.data(), panel, 1, 1, panel, panel, tile.value_keys);
  }
  p.items = a.items;
  p.out = a.out.data();
  p.lse = a.lse.data();
  p.out_token = a.out.stride<Token>();
  p.out_head = a.out.stride<Head>();
  p.lse_token = a.lse.stride<Token>();
  p.lse_head = a.lse.stride<Head>();
  p.items_count = static_cast<int32_t>(a.item_count);
  p.heads = static_cast<int32_t>(heads);
  p.scale = a.scale;
  p.scale_log2 = a.scale * 1.4426950408889634f;
  p.accumulate = a.accumulate;
  if constexpr (std::is_same_v<Out, Codes>) p.codes = output_codes(a.quantized);
  p.counters = static_cast<int32_t*>(a.workspace);
  p.mask = a.mask.data();
  p.mask_row = a.mask.stride<Token>();
  if constexpr (masked) {
    p.columns_row = prepare_masks(stream, a, tile.keys, p.counters);
    p.columns = static_cast<const uint32_t*>(a.columns);
  }
  const int multiprocessors = cuda::multiprocessors(op);
  p.run_keys = run_keys_of(tile.rows(), multiprocessors, tokens, heads);

  constexpr size_t shared_bytes = sizeof(Shared<tile, Element>);
  static_assert(shared_bytes <= 227 * 1024);
  const int64_t clusters =
      clusters_of(tile.rows(), tile.cluster, multiprocessors, tokens, a.most_queries, a.item_count, heads);
  cuda::launch(
      &attend_expanded_kernel<Config, Element, Out, masked>,
      {.grid = static_cast<unsigned>(clusters * tile.cluster),
       .block = tile.threads(),
       .shared_bytes = shared_bytes,
       .cluster = tile.cluster},
      stream, op, "launch",
      "tokens " + std::to_string(tokens) + ", keys " + std::to_string(keys) + ", heads " + std::to_string(heads), p);
}

/// masked: of calls with masks, for which there are no tiles of 192 rows.
template <class Element, class Out, bool masked>
void dispatch(cudaStream_t stream, const AttendExpandedArgs& a) {
  const int64_t nope = a.k_nope.extent<Nope>(), rope = a.k_pe.extent<Rope>(), value = a.v.extent<Value>();
  const ExpandedTile tile = attend_expanded_tile(a);
  if (nope == 128 && rope == 64 && value == 128) {
    if (tile == ExpandedTile::rows_128) return run<Deepseek128, Element, Out, masked>(stream, a);
    if (tile == ExpandedTile::rows_256) return run<Deepseek256, Element, Out, masked>(stream, a);
    if constexpr (masked || std::is_same_v<Out, Codes>)
      throw UnsupportedError(std::string(op) + ": " + (masked ? "masks" : "a quantised output") +
                             " by tiles of 192 rows");
    else return run<Deepseek192, Element, Out, false>(stream, a);
  }
  if (nope == 192 && rope == 64 && value == 256) {
    if (tile == ExpandedTile::rows_128) return run<Glm128, Element, Out, masked>(stream, a);
    if (tile == ExpandedTile::rows_256) return run<Glm256, Element, Out, masked>(stream, a);
    throw UnsupportedError(std::string(op) + ": tiles of 192 rows at 192/64/256, which has 128 and 256");
  }
  throw UnsupportedError(std::string(op) + ": Nope/Rope/Value " + std::to_string(nope) + "/" + std::to_string(rope) +
                         "/" + std::to_string(value) + "; this kernel has 128/64/128 and 192/64/256");
}

/// Calls with masks.
void attend_masked(cudaStream_t stream, const AttendExpandedArgs& a);

}  // namespace mla::cuda::sm90::expanded
