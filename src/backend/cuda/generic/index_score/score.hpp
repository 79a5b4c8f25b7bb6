// What the index_score kernels take.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "backend/cuda/core/queue.hpp"
#include "mla/dtype.hpp"
#include "mla/index_cache.hpp"
#include "mla/work.hpp"

namespace mla::cuda::generic {

struct IndexScore {
  const IndexItem* items = nullptr;  // on the device
  int item_count = 0;
  const void* q = nullptr;
  Dtype q_dtype = Dtype::f32;
  int64_t q_token = 0, q_head = 0;
  const float* weights = nullptr;
  int64_t weights_token = 0, weights_head = 0;
  int heads = 0, dim = 0;
  float scale = 1;
  IndexCacheFormat format = IndexCacheFormat::fp8;
  const std::byte* cache = nullptr;
  int64_t page_stride = 0;
  uint32_t page_size = 1;
  int page_shift = -1;  // log2 of page_size, -1 when it has none
  const int32_t* table = nullptr;
  int64_t table_row = 0;
  int64_t first = 0, columns = 0;  // the window
  float* scores = nullptr;
  int64_t scores_row = 0;
  // A block takes `tokens` of an item's over every `ranges`-th tile of its columns (of `range`, by plain arithmetic),
  // then those of the next group and tile that no block has: items on the device may be other ones than those of the
  // launch.
  int tokens = 1, groups = 1;
  int64_t range = 0, ranges = 1;
};

/// Keys of kIndexDim numbers, 16-byte rows: what the matrix units take.
constexpr int kIndexDim = 128;

/// Products by wgmma, where key and query are both fp8 (their products exact in f16) or both bf16. On Hopper.
void score_by_warpgroups(const Queue& queue, const IndexScore& a, int64_t blocks, const std::string& shape);

/// Heads that IndexArithmetic::fp8 is served for, and what a page's tokens are a multiple of.
constexpr int kFp8Heads = 128, kFp8Page = 16;
/// IndexArithmetic::fp8, of fp8 keys and queries. On Hopper. pages: of the cache; q_tokens: of q; tokens: the most of
/// an item; a.tokens, groups and ranges are not read: `blocks` blocks, at most one a multiprocessor, share whatever
/// items there are.
void score_by_fp8(cudaStream_t stream, const IndexScore& a, int64_t pages, int64_t q_tokens, int64_t tokens, int blocks,
                  const std::string& shape);

}  // namespace mla::cuda::generic
