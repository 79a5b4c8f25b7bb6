// Attention whose lengths, tables and lists lie in device memory and are the caller's own: one call on a caller's
// stream, as FlashMLA's interface has it. The host reads none of them, nothing is allocated and nothing waits, so calls
// can be captured, and what they read may have changed when they are launched again. Numbers in device memory cannot be
// checked: lengths are clamped to what their table or list holds, pages that lie past the cache are undefined
// behaviour.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/captured_schedule.hpp"
#include "mla/cache.hpp"
#include "mla/view.hpp"

namespace mla::gpu {

/// Where a call runs. workspace: workspace_bytes() of the call, 256-byte aligned, its own until the stream has done it.
struct CallerStream {
  int device = 0;
  void* native = nullptr;  ///< cudaStream_t
  std::byte* workspace = nullptr;
  /// For calls that are captured together, if neither lengths nor table change between them; null: none. Not for two
  /// threads at a time.
  CapturedSchedule* schedule = nullptr;
};
/// The number of the capture that a stream is in; 0: it is in none.
unsigned long long capture_of(int device, void* native);

/// Queries of each request over its cached positions.
struct PagedAttention {
  AnyView<Request, Token, Head, Entry> q;  ///< of any dtype, Entry dense, the others strided at will
  /// Its pages count rows: a position is kv_heads of them, one after another.
  CacheView cache;
  int64_t kv_heads = 1;                            ///< divides q's heads, and each serves so many of them in turn
  View<const int32_t, Request, Page> block_table;  ///< Page dense; entries past a length may hold anything
  View<const int32_t, Request> lengths;            ///< positions that are cached
  bool causal = false;                             ///< queries are their request's last positions
  float scale = 1.0f;
  const float* q_scale = nullptr;                   ///< device; of fp8 queries, which are multiplied by it; null: 1
  const float* k_scale = nullptr;                   ///< device; in place of an fp8 cache's; null: the cache's own
  AnyMutableView<Request, Token, Head, Value> out;  ///< f32, bf16 or f16, dense
  View<float, Request, Head, Token> lse;            ///< nats; +inf where nothing is seen
};

/// A cache and the slots that each row has chosen from it.
struct SlotLists {
  CacheView cache;
  View<const int32_t, Request, Token, Topk> slots;  ///< Topk dense; those below 0 or past the cache are skipped
  View<const int32_t, Request> lengths;             ///< slots of a request's rows that count; without data: all
};

/// Queries of each request over the slots chosen, of all sources in one softmax.
struct ListAttention {
  AnyView<Request, Token, Head, Entry> q;  ///< as above
  std::vector<SlotLists> sources;
  View<const float, Head> sinks;  ///< dense; without data: none
  float scale = 1.0f;
  AnyMutableView<Request, Token, Head, Value> out;
  View<float, Request, Head, Token> lse;
  View<float, Token, Head> max_logits;  ///< of all requests' rows; without data: not wanted
};

/// Sequences one after another in q and in k and v, each over its own keys. Row i of n sees keys j <= i + keys - n
/// where causal. A row that sees nothing: out 0, lse -inf.
struct SequenceAttention {
  AnyView<Token, Head, QueryKey> q;  ///< f32, bf16 or f16, QueryKey dense
  AnyView<Key, Head, QueryKey> k;    ///< dtype of q; its heads divide q's, and each serves so many of them in turn
  AnyView<Key, Head, Value> v;       ///< heads and dtype of k, Value dense
  int64_t sequences = 0;
  /// Where each begins, and a last entry for where the last one ends; clamped to the arrays. Without data: all are
  /// equally long.
  View<const int32_t, Request> q_begins, k_begins;
  bool causal = false;
  float scale = 1.0f;
  AnyMutableView<Token, Head, Value> out;  ///< f32, bf16 or f16, Value dense; rows of no sequence are left alone
  View<float, Token, Head> lse;            ///< nats
};

size_t workspace_bytes(const PagedAttention& a);
size_t workspace_bytes(const ListAttention& a);
size_t workspace_bytes(const SequenceAttention& a);
/// DeviceError, ShapeError or UnsupportedError before anything is launched.
void attend(const PagedAttention& a, const CallerStream& at);
void attend(const ListAttention& a, const CallerStream& at);
void attend(const SequenceAttention& a, const CallerStream& at);

}  // namespace mla::gpu
