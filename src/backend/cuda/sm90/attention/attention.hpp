// Latent attention on Hopper: multi-query attention of latent queries over a paged cache, its items on device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backend/cuda/sm90/attention/slots.hpp"
#include "mla/cache.hpp"
#include "mla/dtype.hpp"
#include "mla/view.hpp"
#include "mla/work.hpp"

namespace mla::cuda {

/// What a call may at most hold. Grid, kernel and workspace follow from it alone, so that a captured call serves any
/// smaller batch, its items read on device.
struct AttendLatentLimits {
  int tokens = 0;         ///< rows of q, out and lse
  int requests = 0;       ///< items
  int heads = 0;          ///< 1 to 128
  int query_tokens = 1;   ///< of one request
  int seq_len = 0;        ///< positions of one request: its item's kv_end
  int64_t positions = 0;  ///< of all requests, when known to be less than requests * seq_len; 0: not known
  /// Splits chosen from the row alone (pieces of 1024 positions), tiles from the heads: its bits do not depend on its
  /// neighbours.
  bool batch_invariant = false;
};

struct AttendLatent {
  AttendLatentLimits limits;
  /// [tokens, heads, 576]: 512 latent, 64 rope; fp8_ds_v4, or without rope: 512 in all. 16-byte aligned, dense. bf16,
  /// or over a cache of f16 also f16, over one of fp8 also fp8_e4m3: then products are of codes (codes.cuh) and
  /// probabilities e4m3.
  const void* q = nullptr;
  Dtype q_dtype = Dtype::bf16;
  /// [pages, page_size, row] as the format lays it out, 16-byte aligned. What unused slots hold never reaches an
  /// output.
  const void* cache = nullptr;
  /// bf16, f16 (queries of bf16 are then rounded to f16, saturating), fp8, fp8_ds_mla (scales below 2^96); lists:
  /// fp8_ds_v4.
  CacheFormat format = CacheFormat::bf16;
  float k_scale = 1.0f;  ///< of fp8, positive
  int rope = 64;         ///< columns behind the values; bf16, f16: or none
  /// Of fp8, on device, beside those above: what queries and cached rows are multiplied by; null: 1.
  const float *given_q_scale = nullptr, *given_k_scale = nullptr;
  int64_t page_stride = 0;  ///< bytes from page to page, a multiple of 16; 0: dense. bf16, f16: see box_rows
  int64_t pages = 0;
  int page_size = 64;
  /// Pages are numbered in units of 16 bytes from the cache's start, and hold one row each: `pages` is where the last
  /// may begin, page_size 1, page_stride 0.
  bool page_units = false;
  /// Are cached rows read by several requests? L2 then keeps those of tiles of 16 and 32 rows as long as others.
  bool shared_keys = false;
  /// In place of items, block_table and what is said of pages: each query row has a list of its own, and is a request
  /// of limits.requests. At most one item, of k_begin 0. fp8_ds_mla and fp8_ds_v4.
  const SlotLists* lists = nullptr;
  /// [requests], on device. Each is a whole request (kv_begin 0, partial -1; the kernel splits it), in any order, no
  /// two with the same query rows; q_count 0: nothing to do.
  const LatentItem* items = nullptr;
  /// [requests], on device, in place of items: request i has limits.query_tokens rows, from i * query_tokens on, and as
  /// many positions as its length says, clamped to limits.seq_len. Causal: its queries are the last of these; otherwise
  /// they see all.
  const int32_t* lengths = nullptr;
  int64_t length_stride = 1;
  bool causal = false;
  /// [.., table_stride], on device: position p of an item is in slot p % page_size of page
  /// block_table[item.request][p / page_size]. Entries past kv_end are not read.
  const int32_t* block_table = nullptr;
  int64_t table_stride = 0;
  float scale = 1.0f;             ///< positive
  void* out = nullptr;            ///< [tokens, heads, 512]; rows of no item are left alone
  Dtype out_dtype = Dtype::bf16;  ///< bf16, f32, or of f16 queries f16
  float* lse = nullptr;           ///< [tokens, heads] by these strides, nats; null: not wanted
  int64_t lse_token_stride = 0, lse_head_stride = 1;
  /// Above 1: lse is [requests, queries, heads], requests by lse_token_stride, of rows that are requests x queries.
  int lse_queries = 1;
  int64_t lse_query_stride = 0;
  bool lse_empty_up = false;  ///< lse of a row that sees nothing: +inf, not -inf
  /// [heads], on device: out *= e^lse / (e^lse + e^sink); null: none.
  const float* sinks = nullptr;
  /// [tokens, heads] by these strides: largest logits, where attend_latent_gives_max_logits(); null: not wanted
  float* max_logits = nullptr;
  int64_t max_token_stride = 0, max_head_stride = 1;
  /// attend_latent_counters() of them, zero before the first call that uses them; every call leaves them zero.
  unsigned* counters = nullptr;
  size_t counter_count = 0;
  /// attend_latent_partials() bytes, 256-byte aligned. Neither this nor the counters may be shared by calls that
  /// overlap.
  void* partials = nullptr;
  size_t partials_bytes = 0;
  /// attend_latent_schedule_bytes(), 16-byte aligned: what attend_latent_schedule() made of the same limits, items,
  /// table, cache format and choice. Null: the call finds its own.
  void* schedule = nullptr;
  size_t schedule_bytes = 0;

  /// lse by requests, +inf of rows that see nothing.
  void put_lse(const View<float, Request, Head, Token>& to) {
    lse = to.data(), lse_token_stride = to.stride<Request>(), lse_head_stride = to.stride<Head>();
    lse_queries = static_cast<int>(to.extent<Token>()), lse_query_stride = to.stride<Token>();
    lse_empty_up = true;
  }
};

/// How a call runs: a pure function of limits, page size and device.
struct AttendLatentChoice {
  int tile_rows = 64;  ///< rows (tokens x heads) that are attended together: 16, 32, 64, 128 (a cluster of two CTAs)
  int workers = 1;     ///< CTAs or clusters
  /// Cache rows of a copy. bf16, f16: of a box in tiles of 64 and 128 rows; 0: rows are copied one by one, as they
  /// always are for 16 and 32 (page sizes without a factor 8, pages that do not lie whole rows apart).
  int box_rows = 64;
  /// e4m3, tiles of 128 rows: cached rows become bf16 in shared memory, for the kernel over caches of 16 bits.
  bool converts = false;
  /// Queries are e4m3, as the cache is: products of codes, tiles of 64 and 128 rows, boxes of any number of rows.
  bool codes = false;
  int split_blocks = 0;   ///< blocks of 64 positions in a batch-invariant piece; 0: pieces follow from the batch
  int min_blocks = 1;     ///< least blocks of a piece otherwise
  int line_overhead = 3;  ///< what a tile costs beside its blocks, in blocks, where workers take equal stretches of all
  /// Tiles of 16 rows over a 16-bit cache, where every worker has one piece: only every second one merges. The others
  /// leave early, and in their place the next call's first ones begin, which copy what they may (`settled`) meanwhile.
  bool relay = false;
  /// Cycles that a worker waits for the others' pieces of a tile before it leaves its share of merging them to whoever
  /// is last: a call ends even if its workers never run together. 0: hardly any waiting.
  int patience = 1 << 18;
  /// May start while the stream's previous kernel ends: items, lengths, block_table and schedule, read at once, must
  /// not be what that kernel writes (everything else may be) unless late_items.
  bool overlap = true;
  /// They are what that kernel writes: the call waits for it before it reads any.
  bool late_items = false;
  /// That kernel writes nothing of the cache, and whatever did was complete before it began, or before it let this one
  /// begin: cached rows are then read at once, too.
  bool settled = false;

  int ctas() const { return tile_rows == 128 ? 2 : 1; }  ///< of a worker
};
AttendLatentChoice attend_latent_choice(const AttendLatentLimits& limits, int page_size, int multiprocessors,
                                        CacheFormat format = CacheFormat::bf16, Dtype q_dtype = Dtype::bf16);

/// Does such a call give largest logits?
bool attend_latent_gives_max_logits(const AttendLatentChoice& choice, CacheFormat format);

size_t attend_latent_partials(const AttendLatentLimits& limits, const AttendLatentChoice& choice,
                              CacheFormat format);                                                  ///< bytes
size_t attend_latent_counters(const AttendLatentLimits& limits, const AttendLatentChoice& choice);  ///< how many

/// What no call that is not batch-invariant exceeds on such a device: two pieces of 64 rows of 512 values, a sum and a
/// largest logit for each of its multiprocessors.
constexpr size_t attend_latent_most_partials(int multiprocessors) {
  return (size_t{2} * multiprocessors * 64 * (512 + 2) * 4 + 255) / 256 * 256;
}
constexpr size_t attend_latent_most_counters(int multiprocessors) { return size_t{3} * multiprocessors; }

size_t attend_latent_schedule_bytes(const AttendLatentChoice& choice);
/// Makes args.schedule: who attends what of the batch, worked out once for several calls (layers) that attend by the
/// same lengths and table. Short ones then take 0.2 to 1 us less. One launch on stream, of what limits, cache format,
/// items or lengths, table and schedule say. overlap: the call right behind it may begin before the schedule is there,
/// and must find its own; otherwise no later kernel begins before it is.
void attend_latent_schedule(const AttendLatent& args, const AttendLatentChoice& choice, cudaStream_t stream);

/// Token i of an item sees positions j <= item.visible + i, j < item.kv_end. out = softmax(scale q . row) . latent,
/// f32 sums; a row that sees nothing: out 0, lse -inf or +inf. Where a tile of 64 rows or more over a 16-bit cache is
/// split, its pieces are rounded to 2^-11 of a row's largest element before they are added. One launch on stream; no
/// allocation, no synchronisation. Bitwise repeatable. ShapeError, UnsupportedError or DeviceError before anything is
/// launched.
void attend_latent(const AttendLatent& args, const AttendLatentChoice& choice, cudaStream_t stream);

}  // namespace mla::cuda
