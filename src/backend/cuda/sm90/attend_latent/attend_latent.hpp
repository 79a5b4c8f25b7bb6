// attend_latent on Hopper: multi-query attention of latent queries over a paged bf16 or f16 cache, lengths on device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "mla/dtype.hpp"

namespace mla::cuda {

/// What a call may at most hold. Grid, kernel and workspace follow from it alone, so that a captured call serves any
/// smaller batch, its lengths read on device.
struct AttendLatentLimits {
  int tokens = 0;  ///< query tokens of all requests
  int requests = 0;
  int heads = 0;          ///< 1 to 128
  int query_tokens = 1;   ///< of one request
  int seq_len = 0;        ///< context and new tokens of one request
  int64_t positions = 0;  ///< sum of all seq_lens, when known to be less than requests * seq_len; 0: not known
  /// Splits chosen from the row alone (pieces of 1024 positions): its bits do not depend on its neighbours.
  bool batch_invariant = false;
};

struct AttendLatent {
  AttendLatentLimits limits;
  const void* q = nullptr;  ///< [tokens, heads, 576] bf16: 512 latent, 64 rope; 16-byte aligned, dense
  /// [pages, page_size, 576], dense, 16-byte aligned. What unused slots hold never reaches an output.
  const void* cache = nullptr;
  Dtype cache_dtype = Dtype::bf16;  ///< bf16, or f16 (queries are then rounded to f16, saturating)
  int64_t pages = 0;
  int page_size = 64;
  // On device, int32. Request r has query tokens query_start_loc[r] to query_start_loc[r + 1] and seq_lens[r] cached
  // positions, these tokens included; position p is in slot p % page_size of page block_table[r][p / page_size].
  const int32_t* query_start_loc = nullptr;  ///< [requests + 1]
  const int32_t* seq_lens = nullptr;         ///< [requests]
  const int32_t* block_table = nullptr;      ///< [requests, table_stride]; entries past a sequence are not read
  int64_t table_stride = 0;
  float scale = 1.0f;             ///< positive
  void* out = nullptr;            ///< [tokens, heads, 512]; tokens of no request are left alone
  Dtype out_dtype = Dtype::bf16;  ///< bf16 or f32
  float* lse = nullptr;           ///< [tokens, heads], nats
  /// attend_latent_workspace() bytes, 256-byte aligned, its first attend_latent_counters() bytes zero before the first
  /// call that uses it; every call leaves them zero. Not shared by calls that may overlap.
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

/// How a call runs: a pure function of limits, page size and device.
struct AttendLatentChoice {
  int tile_rows = 64;    ///< rows (tokens x heads) that are attended together: 16, 32, 64, 128 (a cluster of two CTAs)
  int workers = 1;       ///< CTAs or clusters, all resident together
  int box_rows = 64;     ///< cache rows of a copy box; 0: rows are copied one by one (page sizes without a factor 8)
  int split_blocks = 0;  ///< blocks of 64 positions in a batch-invariant piece; 0: pieces follow from the batch
  int min_blocks = 1;    ///< least blocks of a piece otherwise
  bool cooperative = true;
  bool overlap = true;  ///< may start while the stream's previous kernel ends

  int ctas() const { return tile_rows == 128 ? 2 : 1; }
};
AttendLatentChoice attend_latent_choice(const AttendLatentLimits& limits, int page_size, int multiprocessors);

size_t attend_latent_workspace(const AttendLatentLimits& limits, const AttendLatentChoice& choice);
/// Bytes at the workspace's start that must be zero before its first use.
size_t attend_latent_counters(const AttendLatentLimits& limits, const AttendLatentChoice& choice);

/// Token i of a request with q query tokens sees positions <= seq_len - q + i. out = softmax(scale q . row) . latent,
/// f32 sums; a row that sees nothing: out 0, lse -inf. One launch on stream; no allocation, no synchronisation. Bitwise
/// repeatable. ShapeError, UnsupportedError or DeviceError before anything is launched.
void attend_latent(const AttendLatent& args, const AttendLatentChoice& choice, cudaStream_t stream);

}  // namespace mla::cuda
