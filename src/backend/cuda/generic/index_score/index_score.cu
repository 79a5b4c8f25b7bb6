// Matrix units where key and query are narrow and rows of 128 numbers lie on 16 bytes (tensor.cuh; on Hopper by
// warpgroups, sm90/index_score); plain f32 arithmetic for everything else: f32 on either side, and odd sizes.
#include <algorithm>
#include <bit>
#include <limits>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/core/warpgroup.cuh"
#include "backend/cuda/generic/index_score/tensor.cuh"
#include "backend/cuda/gpu_model.hpp"
#include "mla/error.hpp"

namespace mla::cuda {
namespace generic {
namespace {

// mma.sync, 16 keys a warp.
template <class T, int N>
struct WarpProduct {
  static __device__ void publish() {}
  static __device__ void multiply(float (&acc)[N / 2], const uint32_t (&keys)[kSteps][4], uint32_t queries) {
    const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (float& x : acc) x = 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int j = 0; j < N / 16; ++j) {
        uint32_t b[4];
        const uint32_t at =
            queries + s / 4 * (N * 128) + (16 * j + row) * 128 + (((s % 4 * 2 + lane / 8 % 2) ^ row % 8) * 16);
        load_matrix_x4(at, b[0], b[1], b[2], b[3]);
        step(acc + 8 * j, keys[s], b[0], b[1]);
        step(acc + 8 * j + 4, keys[s], b[2], b[3]);
      }
  }

 private:
  static __device__ void step(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, f16>)
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// Plain arithmetic: a block takes a token over a range of columns, 32 keys at a time. A lane is a key, a warp takes
// every fourth four of the heads.
constexpr int kPlainWarps = 4, kPlainThreads = 32 * kPlainWarps, kPlainKeys = 32, kPlainHeads = 4 * kPlainWarps;
constexpr int kMostPlainDim = 512;

__device__ float key_number(const IndexScore& a, const std::byte* page, int64_t offset, int d) {
  const int64_t at = offset * a.dim + d;
  switch (a.format) {
    case IndexCacheFormat::f32: return reinterpret_cast<const float*>(page)[at];
    case IndexCacheFormat::bf16: return widen(reinterpret_cast<const bf16*>(page)[at]);
    default: return widen(reinterpret_cast<const fp8_e4m3*>(page)[at]);
  }
}
__device__ float key_scale(const IndexScore& a, const std::byte* page, int64_t offset) {
  if (a.format != IndexCacheFormat::fp8) return 1;
  const std::byte* at = page + int64_t{a.page_size} * a.dim + offset * 4;  // at any byte
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(at[i]) << (8 * i);
  return __uint_as_float(bits);
}

__global__ void __launch_bounds__(kPlainThreads, 4) plain_kernel(const IndexScore a) {
  extern __shared__ float memory[];
  const int stride = a.dim + 1;
  float *keys = memory, *queries = keys + kPlainKeys * stride, *parts = queries + kPlainHeads * a.dim;
  const int64_t unit = blockIdx.x;
  const IndexItem item = clipped(a.items[unit / (a.groups * a.ranges)], a.first, a.columns);
  const int32_t* table = a.table + item.request * a.table_row;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64_t i = unit / a.ranges % a.groups; i < item.q_count; i += a.groups) {
    const int64_t seen = item.columns(i), token = item.q_begin + i;
    for (int64_t begin = unit % a.ranges * a.range; begin < seen; begin += a.ranges * a.range)
      for (int64_t tile = begin; tile < min(begin + a.range, seen); tile += kPlainKeys) {
        const int count = static_cast<int>(min(int64_t{kPlainKeys}, seen - tile));
        __syncthreads();
        for (int n = threadIdx.x; n < count * a.dim; n += kPlainThreads) {
          const int64_t at = item.kv_begin + tile + n / a.dim;
          keys[n / a.dim * stride + n % a.dim] =
              key_number(a, a.cache + table[at / a.page_size] * a.page_stride, at % a.page_size, n % a.dim);
        }
        float sum = 0;
        for (int head = 0; head < a.heads; head += kPlainHeads) {
          __syncthreads();
          for (int n = threadIdx.x; n < kPlainHeads * a.dim; n += kPlainThreads) {
            const int h = head + n / a.dim, d = n % a.dim;
            const int64_t at = token * a.q_token + h * a.q_head + d;
            float x = 0;
            if (h < a.heads)
              x = a.q_dtype == Dtype::f32    ? static_cast<const float*>(a.q)[at]
                  : a.q_dtype == Dtype::bf16 ? widen(static_cast<const bf16*>(a.q)[at])
                                             : widen(static_cast<const fp8_e4m3*>(a.q)[at]);
            queries[n] = x;
          }
          __syncthreads();
          if (lane < count) {
            float product[4] = {0, 0, 0, 0};
            for (int d = 0; d < a.dim; ++d) {
              const float k = keys[lane * stride + d];
#pragma unroll
              for (int h = 0; h < 4; ++h) product[h] = fmaf(queries[(4 * warp + h) * a.dim + d], k, product[h]);
            }
#pragma unroll
            for (int h = 0; h < 4; ++h) {
              const int which = head + 4 * warp + h;
              if (which < a.heads)
                sum =
                    fmaf(relu(product[h]), a.weights[token * a.weights_token + which * a.weights_head] * a.scale, sum);
            }
          }
        }
        parts[warp * 32 + lane] = sum;
        __syncthreads();
        if (warp == 0 && lane < count) {
          sum = parts[lane];
          for (int w = 1; w < kPlainWarps; ++w) sum += parts[w * 32 + lane];
          const int64_t at = item.kv_begin + tile + lane;
          a.scores[(item.row + i) * a.scores_row + tile + lane] =
              sum * key_scale(a, a.cache + table[at / a.page_size] * a.page_stride, at % a.page_size);
        }
      }
  }
}

// Heads of a block's queries, in chunks of 64, and bytes that a token's take in shared memory.
int chunks_of(int64_t heads) { return static_cast<int>((heads + 63) / 64); }
int token_bytes_of(int chunks) { return std::max(1, chunks) * 64 * 260; }

// Blocks for each of so many groups' tiles, where so many run at a time: those that are done first, if each pays for
// its queries what some tiles take.
int64_t ranges_of(int64_t groups, int64_t tiles, int64_t places) {
  constexpr int64_t kQueries = 6;  // an H200 takes 3.5 us for a token's, 0.6 for a tile
  int64_t best = 1, least = std::numeric_limits<int64_t>::max();
  for (int64_t waves = 1; waves <= 8; ++waves) {
    const int64_t ranges = std::clamp<int64_t>(places * waves / groups, 1, tiles),
                  time = (groups * ranges + places - 1) / places * (kQueries + (tiles + ranges - 1) / ranges);
    if (time < least) best = ranges, least = time;
  }
  return best;
}

enum class Kernel : uint8_t { plain, warps, warpgroups, fp8 };

Kernel kernel_for(const backend::GpuModel& gpu, const ops::IndexScoreArgs& a) {
  const IndexCacheSpec& spec = a.cache.spec;
  const bool narrow_keys = spec.format != IndexCacheFormat::f32, narrow_queries = a.q.dtype() != Dtype::f32;
  const bool tensor = narrow_keys && narrow_queries && spec.dim == kIndexDim && a.cache.page_stride % 16 == 0 &&
                      reinterpret_cast<uintptr_t>(a.cache.data) % 16 == 0 &&
                      token_bytes_of(chunks_of(a.q.extent<IndexHead>())) <= kQueryBytes + 1024;
  if (!tensor) return Kernel::plain;
  const bool fp8_keys = spec.format == IndexCacheFormat::fp8, fp8_queries = a.q.dtype() == Dtype::fp8_e4m3;
  if (!gpu.hopper || fp8_keys != fp8_queries) return Kernel::warps;
  const bool fp8 = a.arithmetic == IndexArithmetic::fp8 && fp8_keys && a.q.extent<IndexHead>() <= kFp8Heads &&
                   spec.page_size % kFp8Page == 0;
  return fp8 ? Kernel::fp8 : Kernel::warpgroups;
}

}  // namespace
}  // namespace generic

std::string index_score_kernel(const backend::GpuModel& gpu, const ops::IndexScoreArgs& a) {
  switch (generic::kernel_for(gpu, a)) {
    case generic::Kernel::fp8: return "cuda/sm90, fp8 products";
    case generic::Kernel::warpgroups: return "cuda/sm90, matrix units by warpgroups";
    case generic::Kernel::warps: return "cuda/generic, matrix units by warps";
    case generic::Kernel::plain: break;
  }
  return "cuda/generic, f32 arithmetic";
}

void index_score(Stream& stream, const ops::IndexScoreArgs& a) {
  using namespace generic;
  const Queue& queue = stream.queue();
  const IndexCacheSpec& spec = a.cache.spec;
  int64_t most_tokens = 0, columns = 0;
  for (const IndexItem& whole : a.items) {
    if (whole.q_count == 0) continue;
    const IndexItem i = clipped(whole, a.first, a.scores.extent<Key>());
    most_tokens = std::max<int64_t>(most_tokens, i.q_count);
    columns = std::max<int64_t>(columns, i.columns(i.q_count - 1));
  }
  if (columns == 0 || a.q.extent<IndexHead>() == 0) return;
  const int64_t items = static_cast<int64_t>(a.items.size());
  const uint32_t page_size = static_cast<uint32_t>(spec.page_size);
  IndexScore s{.items = queue.reads(a.items, "index_score", "items"),
               .item_count = static_cast<int>(items),
               .q = a.q.data(),
               .q_dtype = a.q.dtype(),
               .q_token = a.q.stride<Token>(),
               .q_head = a.q.stride<IndexHead>(),
               .weights = a.weights.data(),
               .weights_token = a.weights.stride<Token>(),
               .weights_head = a.weights.stride<IndexHead>(),
               .heads = static_cast<int>(a.q.extent<IndexHead>()),
               .dim = static_cast<int>(spec.dim),
               .scale = a.scale,
               .format = spec.format,
               .cache = a.cache.data,
               .page_stride = static_cast<int64_t>(a.cache.page_stride),
               .page_size = page_size,
               .page_shift = std::has_single_bit(page_size) ? std::countr_zero(page_size) : -1,
               .table = queue.reads(a.block_table, "index_score"),
               .table_row = a.block_table.stride<Request>(),
               .first = a.first,
               .columns = a.scores.extent<Key>(),
               .scores = a.scores.data(),
               .scores_row = a.scores.stride<Token>()};
  const std::string shape = "items " + std::to_string(items) + ", tokens " + std::to_string(most_tokens) +
                            ", columns " + std::to_string(columns) + ", heads " + std::to_string(s.heads) + ", dim " +
                            std::to_string(s.dim);
  const int chunks = chunks_of(s.heads);
  const Kernel kernel = kernel_for(model_of(queue), a);
  if (kernel == Kernel::plain) {
    if (s.dim > kMostPlainDim)
      throw UnsupportedError("index_score: cache dim is " + std::to_string(s.dim) + ", cuda serves up to " +
                             std::to_string(kMostPlainDim));
    s.groups = static_cast<int>(most_tokens);
    // Whole waves of blocks, each with keys enough to be worth its queries' layout.
    const int64_t each = std::max<int64_t>(1, int64_t{queue.multiprocessors()} * 16 / (items * s.groups));
    s.range = std::clamp<int64_t>((columns / each + 63) / 64 * 64, 64, 1024);
    s.ranges = (columns + s.range - 1) / s.range;
    const int64_t blocks = items * s.groups * s.ranges;
    launch(plain_kernel,
           {.grid = dim3(static_cast<unsigned>(blocks)),
            .block = dim3(kPlainThreads),
            .shared_bytes =
                sizeof(float) * static_cast<size_t>(kPlainKeys * (s.dim + 1) + kPlainHeads * s.dim + kPlainWarps * 32)},
           queue.stream(), "index_score", "plain scores", shape, s);
    return;
  }
  if (kernel == Kernel::fp8) {
    score_by_fp8(queue.stream(), s, a.cache.pages, a.q.extent<Token>(), most_tokens, queue.multiprocessors(), shape);
    return;
  }
  s.tokens = static_cast<int>(std::clamp<int64_t>(kQueryBytes / (chunks * 64 * 256), 1, most_tokens));
  s.groups = static_cast<int>((most_tokens + s.tokens - 1) / s.tokens);
  s.ranges = ranges_of(items * s.groups, (columns + kTile - 1) / kTile, int64_t{queue.multiprocessors()} * 2);
  const int64_t blocks = items * s.groups * s.ranges;
  const bool fp8_keys = spec.format == IndexCacheFormat::fp8, fp8_queries = s.q_dtype == Dtype::fp8_e4m3;
  if (kernel == Kernel::warpgroups) score_by_warpgroups(queue, s, blocks, shape);
  else if (fp8_keys && fp8_queries) launch_by_heads<fp8_e4m3, f16, WarpProduct>(queue, s, blocks, shape);
  else if (fp8_keys) launch_by_heads<fp8_e4m3, bf16, WarpProduct>(queue, s, blocks, shape);
  else launch_by_heads<bf16, bf16, WarpProduct>(queue, s, blocks, shape);
}

}  // namespace mla::cuda
