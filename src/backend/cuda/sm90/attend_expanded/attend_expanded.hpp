// attend_expanded on Hopper: multi-head attention over flat keys and values, several requests of any lengths in one
// launch.
//
// Request r owns query rows [query_start[r], query_start[r + 1]) and key rows [key_start[r], key_start[r + 1]). Its
// query i (of q) sees its keys j (of k) with j <= i + k - q when causal, all of them otherwise:
//   out = softmax(scale * ([q_nope | q_pe] . [k_nope | k_pe])) v,   lse = natural log of the sum of exponentials
// A row that sees nothing: out 0, lse -inf. Rows of no request are left alone.
//
// The starts are read on the device: a captured launch serves other lengths, as long as they fit the extents it was
// captured with. A row's bits depend only on its query, its request's keys and its index in the request.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mla/view.hpp"

namespace mla::cuda::sm90 {

struct AttendExpandedArgs {
  AnyView<Token, Head, QueryKey> q;      ///< bf16 or f16, [nope | rope], rotated; QueryKey dense
  AnyView<Key, Head, Nope> k_nope;       ///< dtype of q, Nope dense, strides multiples of 16 bytes
  AnyView<Key, Rope> k_pe;               ///< dtype of q, shared by the heads
  AnyView<Key, Head, Value> v;           ///< dtype of q; may be a slice of the array that k_nope is a slice of
  const int32_t* query_start = nullptr;  ///< device, requests + 1, ascending
  const int32_t* key_start = nullptr;    ///< device, requests + 1, ascending
  int64_t requests = 0;
  bool causal = true;
  float scale = 1.0f;                      ///< above 0
  AnyMutableView<Token, Head, Value> out;  ///< dtype of q, or f32; Value dense, rows aligned to 16 bytes
  View<float, Token, Head> lse;            ///< any strides
  void* workspace = nullptr;  ///< device, attend_expanded_workspace bytes, zeroed once; each launch leaves it zeroed.
                              ///< Not for two launches at a time
};

/// Bytes of workspace, whatever the shape.
constexpr size_t attend_expanded_workspace = 16;

/// One launch on `stream`; nothing is allocated or waited for. ShapeError: extents, strides or alignment do not fit;
/// UnsupportedError: dimensions other than 128/64/128 and 192/64/256, or another dtype; DeviceError: not a Hopper
/// device, or the launch was refused.
void attend_expanded(cudaStream_t stream, const AttendExpandedArgs& args);

}  // namespace mla::cuda::sm90
