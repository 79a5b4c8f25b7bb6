// attend_expanded on Hopper with e4m3 operands: the products are of codes, scales touch f32 alone.
//
// As attend_expanded.hpp says, with code times scale for every operand's value (ops/attend_expanded/op.hpp). The keys
// of v are its innermost dimension: tensor cores want both operands of a product of codes with the summed dimension
// innermost. Weights of the softmax are rounded to e4m3, 128 or more at a row's largest score so far; their sum is
// not rounded.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/sm90/attend_expanded/attend_expanded.hpp"
#include "ops/attend_expanded/op.hpp"

namespace mla::cuda::sm90 {

struct AttendExpandedFp8Args {
  AnyView<Token, Head, QueryKey> q;  ///< e4m3, QueryKey dense; strides of all four multiples of 16 bytes
  AnyView<Key, Head, Nope> k_nope;   ///< Nope dense
  AnyView<Key, Rope> k_pe;           ///< Rope dense
  AnyView<Key, Head, Value> v;       ///< Key dense
  View<const float, Group, Head> q_scale, k_scale, v_scale;  ///< device; without data: 1
  const ops::ScaleRows* scale_rows = nullptr;                ///< device, one an item; null: row 0 for all rows
  ops::ExpandedSums sums = ops::ExpandedSums::precise;
  /// k_begin of those with queries and keys: multiples of 16, or the copy engine stops the kernel with an error.
  const ExpandedItem* items = nullptr;  ///< device, item_count of them; q_count 0 is padding
  int64_t item_count = 0;
  int64_t most_queries = 0;                     ///< no item has more query rows; 0: as many as q
  float scale = 1.0f;                           ///< above 0
  AnyMutableView<Token, Head, Value> out;       ///< bf16 or f32; Value dense, rows aligned to 16 bytes
  View<float, Token, Head> lse;                 ///< any strides; may be null unless accumulate
  bool accumulate = false;                      ///< as AttendExpandedArgs::accumulate
  QuantizedView quantized;                      ///< as AttendExpandedArgs::quantized
  ExpandedTile tile = ExpandedTile::automatic;  ///< not rows_192
  void* workspace = nullptr;                    ///< as AttendExpandedArgs::workspace
};

/// The tile that attend_expanded takes for these arguments; `automatic` if there are no items.
ExpandedTile attend_expanded_tile(const AttendExpandedFp8Args& args);

/// One launch on `stream`; nothing is allocated or waited for. Errors as attend_expanded.hpp has them.
void attend_expanded(cudaStream_t stream, const AttendExpandedFp8Args& args);

}  // namespace mla::cuda::sm90
