// Attention whose lengths, tables and lists lie in device memory and are the caller's own: one call on a caller's
// stream, as FlashMLA's interface has it. The host reads none of them, nothing is allocated and nothing waits, so calls
// can be captured, and what they read may have changed when they are launched again. Numbers in device memory cannot be
// checked: lengths are clamped to what their table or list holds, pages that lie past the cache are undefined
// behaviour.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mla/cache.hpp"
#include "mla/view.hpp"

namespace mla::gpu {

/// Where a call runs. workspace: workspace_bytes() of the call, 256-byte aligned, its own until the stream has done it.
struct CallerStream {
  int device = 0;
  void* native = nullptr;  ///< cudaStream_t
  std::byte* workspace = nullptr;
};

/// Queries of each request over its cached positions.
struct PagedAttention {
  AnyView<Token, Head, Entry> q;  ///< f32, bf16 or fp8_e4m3, Entry dense; `queries` rows a request
  int64_t queries = 1;
  CacheView cache;
  View<const int32_t, Request, Page> block_table;  ///< Page dense; entries past a length may hold anything
  View<const int32_t, Request> lengths;            ///< positions that are cached
  bool causal = false;                             ///< queries are their request's last positions
  float scale = 1.0f;
  const float* q_scale = nullptr;          ///< device; of fp8 queries, which are multiplied by it; null: 1
  const float* k_scale = nullptr;          ///< device; in place of an fp8 cache's; null: the cache's own
  AnyMutableView<Token, Head, Value> out;  ///< f32 or bf16, dense
  View<float, Request, Head, Token> lse;   ///< nats; +inf where nothing is seen
};

/// A cache and the slots that each row has chosen from it.
struct SlotLists {
  CacheView cache;
  View<const int32_t, Token, Topk> slots;  ///< Topk dense; those below 0 or past the cache are skipped
  View<const int32_t, Request> lengths;    ///< slots of a request's rows that count; without data: all
};

/// Queries of each request over the slots chosen, of all sources in one softmax.
struct ListAttention {
  AnyView<Token, Head, Entry> q;
  int64_t queries = 1;
  std::vector<SlotLists> sources;
  View<const float, Head> sinks;  ///< dense; without data: none
  float scale = 1.0f;
  AnyMutableView<Token, Head, Value> out;
  View<float, Request, Head, Token> lse;
  View<float, Token, Head> max_logits;  ///< without data: not wanted
};

size_t workspace_bytes(const PagedAttention& a);
size_t workspace_bytes(const ListAttention& a);
/// DeviceError, ShapeError or UnsupportedError before anything is launched.
void attend(const PagedAttention& a, const CallerStream& at);
void attend(const ListAttention& a, const CallerStream& at);

}  // namespace mla::gpu
