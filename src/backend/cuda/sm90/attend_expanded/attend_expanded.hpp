// attend_expanded on Hopper: multi-head attention over flat keys and values, any number of work items in one launch.
//
// Of item t, query row i < q_count sees the keys j < k_count with j <= i + visible, of a masked item those of them
// whose bit mask_begin + j is set in the row's mask:
//   out = softmax(scale * ([q_nope | q_pe] . [k_nope | k_pe])) v,   lse = natural log of the sum of exponentials
// A row that sees nothing: out 0, lse -inf. Rows of no item are left alone. No row belongs to two items of a call.
//
// The items are read on the device: a captured launch serves other lengths, as long as they fit the extents and limits
// it was captured with. A row's bits depend only on its query, its item's keys and its index in the item (and what it
// is merged with).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mla/quant.hpp"
#include "mla/view.hpp"
#include "mla/work.hpp"

namespace mla::cuda::sm90 {

/// Query rows that share their keys and values on the way from memory.
enum class ExpandedTile : uint8_t {
  automatic,  ///< rows_128 or rows_256, whose bits are the same: by the extents of q and k_nope and by item_count
  rows_128,
  rows_192,  ///< other bits; some percent faster for items under 1024 keys or 128 queries; 128/64/128 only
  rows_256,  ///< two multiprocessors share a tile
};

struct AttendExpandedArgs {
  AnyView<Token, Head, QueryKey> q;  ///< bf16 or f16, [nope | rope], rotated; QueryKey dense
  /// dtype of q, Nope dense, strides multiples of 16 bytes, from head to head 0 where they share one.
  AnyView<Key, Head, Nope> k_nope;
  AnyView<Key, Rope> k_pe;              ///< dtype of q; the first head's, where each has its own
  int64_t rope_head_stride = 0;         ///< from a head's k_pe to the next one's; 0: they share it
  AnyView<Key, Head, Value> v;          ///< as k_nope; may be a slice of the array that k_nope is a slice of
  const ExpandedItem* items = nullptr;  ///< device, item_count of them; q_count 0 is padding
  int64_t item_count = 0;
  /// Of masked items: words of each row of q, Word dense. Of bf16 operands and outputs of bf16 or f32, by tiles other
  /// than rows_192.
  View<const uint32_t, Token, Word> mask;
  int64_t most_masked_keys = 0;  ///< no masked item has more keys; 0: as many as k_nope
  void* columns = nullptr;       ///< of calls with a mask: device, masked_columns_bytes; not for two launches at a time
  int64_t most_queries = 0;      ///< no item has more query rows; 0: as many as q
  float scale = 1.0f;            ///< above 0
  AnyMutableView<Token, Head, Value> out;  ///< bf16, f16 or f32; Value dense, rows aligned to 16 bytes
  View<float, Token, Head> lse;            ///< any strides; may be null unless accumulate
  /// true: out and lse already hold a part of each row's softmax; the result is merged into it. An lse of -inf, +inf or
  /// NaN holds nothing, and its out is not read.
  bool accumulate = false;
  /// Rows of items that are the rows' `last` part go here in place of out, which is f32 then: e4m3 codes and scales, to
  /// the same rows. Data and row_stride are multiples of 8 bytes; its scales' padding is left alone. Of bf16 operands,
  /// by tiles other than rows_192.
  QuantizedView quantized;
  ExpandedTile tile = ExpandedTile::automatic;
  void* workspace = nullptr;  ///< device, attend_expanded_workspace bytes, zeroed once; each launch leaves it zeroed.
                              ///< Not for two launches at a time
};

/// Bytes of workspace, whatever the shape.
constexpr size_t attend_expanded_workspace = 16;

/// Bytes of AttendExpandedArgs::columns, below 8 GiB.
size_t masked_columns_bytes(const AttendExpandedArgs& args);

/// Whether these kernels write such an output, of heads with `value` values.
bool writes_codes(const QuantizedView& y, int64_t value);

/// The tile that attend_expanded takes for these arguments; `automatic` if there are no items.
ExpandedTile attend_expanded_tile(const AttendExpandedArgs& args);

/// One launch on `stream`; nothing is allocated or waited for. ShapeError: extents, strides or alignment do not fit;
/// UnsupportedError: dimensions other than 128/64/128 and 192/64/256, a tile they do not have, or another dtype;
/// DeviceError: not a Hopper
/// device, or the launch was refused.
void attend_expanded(cudaStream_t stream, const AttendExpandedArgs& args);

}  // namespace mla::cuda::sm90
