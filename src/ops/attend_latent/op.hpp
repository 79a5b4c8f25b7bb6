// attend_latent: multi-query attention of latent queries over the paged cache (the data-movement-friendly form).
// For item t, query row i < q_count, head h: cached positions j in [kv_begin, kv_end) with j <= visible + i are seen;
// out = softmax(scale * q . row_j) . row_j[0 : value_width], row_j the dequantised cache row [latent | rope]; lse in
// nats. A row that sees nothing: out 0, lse -inf. Splits of one request write partial rows, joined by merge_splits.
// NaN and infinities: docs/numerics.md.
//
// schedule_latent: what a backend works out once for all calls that attend by the same items, a step's layers: which
// worker begins where.
#pragma once

#include <span>

#include "core/captured_schedule.hpp"
#include "mla/cache.hpp"
#include "mla/view.hpp"
#include "mla/work.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"
#include "ops/scratch.hpp"

namespace mla::ops {

struct AttendLatentArgs {
  /// f32, bf16 or fp8_e4m3 (times q_scale), Entry dense. On Hopper queries of e4m3 multiply a cache of fp8 as codes,
  /// and probabilities become e4m3, too (docs/numerics.md).
  AnyView<Token, Head, Entry> q;
  float q_scale = 1.0f;  ///< fp8 queries only
  CacheView cache;
  BlockTable block_table;
  List<LatentItem> items;  ///< of one without query rows nothing else is looked at
  float scale = 1.0f;
  AnyMutableView<Token, Head, Value> out;  ///< f32 or bf16; Value = the format's value width
  View<float, Token, Head> lse;
  View<float, Partial, Head, Value> partial_out;  ///< needed when an item has partial >= 0
  View<float, Partial, Head> partial_lse;
  /// An item without partial rows may be split by the backend itself: then from its own length alone.
  bool batch_invariant = false;
  /// The op before this one on the stream had something to do and wrote nothing of the cache: a GPU may then read the
  /// cache while that op ends.
  bool cache_settled = false;
  /// What schedule_latent made of this call's items, block table, cache and extents, before the call on its stream;
  /// empty: the call works it out itself.
  std::span<const std::byte> schedule;
  Scratch scratch;
};

constexpr size_t kLatentScheduleBytes = CapturedSchedule::kBytes;

/// As attend_latent calls will be given them.
struct ScheduleLatentArgs {
  int64_t tokens = 0, heads = 0;  ///< extents of q
  Dtype q_dtype = Dtype::f32;
  CacheSpec cache;
  BlockTable block_table;
  List<LatentItem> items;
  bool batch_invariant = false;
  size_t scratch_bytes = 0;  ///< that calls have, a worker
  /// kLatentScheduleBytes on the device, 16-byte aligned. A backend without a use for it leaves it alone.
  std::span<std::byte> schedule;
};

void check(const AttendLatentArgs& a);
void check(const ScheduleLatentArgs& a);
Cost cost(const AttendLatentArgs& a);
/// Items of one request's row that are splits of it are not joined here: pass unsplit items.
void reference(const AttendLatentArgs& a, View<double, Token, Head, Value> out, View<double, Token, Head> lse);

}  // namespace mla::ops
