// Memory-bound. Rows of the cache: a warp a token, each lane sixteen bytes of the input at a time, all of a row's loads
// ahead of its first store; groups find their scale by shuffles. Many bf16 rows of the usual shape that are not to be
// normed: a warp four tokens, in a kernel of few instructions. Queries, with rope_append: blocks of their own in the
// same launch, as in rope.
#include <algorithm>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/cache_row.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/core/rotate.cuh"
#include "backend/cuda/core/row_batch.cuh"
#include "backend/cuda/generic/cast/cast.hpp"

namespace mla::cuda {
namespace generic {
namespace {

template <class T>
struct AppendRows {
  const T* kv_c = nullptr;
  T* k_pe = nullptr;  // written only where pairs rotate
  int64_t kv_c_row = 0, k_pe_row = 0;
  const int32_t *slots = nullptr, *positions = nullptr;
  int64_t tokens = 0, query_rows = 0;
  Rotation rotation;
  HeadRows<T> q;
  CacheMemory cache;
  T* normed = nullptr;  // kv_c again, to be normed in place: see norms_in_lanes()
  const float* weight = nullptr;
  float eps = 0;
};

/// Rows that a warp norms in registers as norm's own kernel does, in the same order: two rounds of sixteen bytes a
/// lane.
template <class T>
bool norms_in_lanes(const CacheMemory& cache) {
  return cache.latent == 2 * 32 * 16 / static_cast<int>(sizeof(T));
}

template <class T, int rounds, int n>
__device__ void norm_in_lanes(T (&x)[rounds][n], const AppendRows<T>& a, int64_t token, int lane) {
  float squares = 0;
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int e = 0; e < n; ++e) squares += widen(x[k][e]) * widen(x[k][e]);
  const float variance = warp_sum(squares) * (1.0f / static_cast<float>(a.cache.latent));
  const float inverse = 1.0f / sqrtf(variance + a.eps);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int i = n * (32 * k + lane);
    float w[n], y[n];
    load<true>(a.weight + i, w);
#pragma unroll
    for (int e = 0; e < n; ++e) y[e] = widen(x[k][e]) * inverse * w[e];
    narrow_all(y, x[k]);
    store<true>(x[k], a.normed + token * a.kv_c_row + i);
  }
}

// The rope part of a row in the lanes' registers, rotated and written back: lane u holds elements [n u, n u + n), as
// many lanes as it takes, which are at most 32. Halves meet by shuffles.
template <class T, int n>
__device__ void rotate_in_lanes(T* row, const Rotation& r, const float* cos_sin, int lane, bool mine, float (&y)[n]) {
  T x[n];
  if (r.interleaved) {
    if (!mine) return;
    float cos[n / 2], sin[n / 2];
    load<true>(cos_sin + n / 2 * lane, cos);
    load<true>(cos_sin + r.pairs + n / 2 * lane, sin);
#pragma unroll
    for (int e = 0; e < n; e += 2) {
      const Pair p = rotated(y[e], y[e + 1], cos[e / 2], sin[e / 2]);
      y[e] = p.a;
      y[e + 1] = p.b;
    }
  } else {
    const int half = r.pairs / n;
    const bool second = lane >= half;
    float cos[n] = {}, sin[n] = {};
    if (mine) {
      const int first = n * (second ? lane - half : lane);
      load<true>(cos_sin + first, cos);
      load<true>(cos_sin + r.pairs + first, sin);
    }
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const float other = __shfl_sync(0xffffffffu, y[e], second ? lane - half : lane + half);
      const Pair p = second ? rotated(other, y[e], cos[e], sin[e]) : rotated(y[e], other, cos[e], sin[e]);
      y[e] = second ? p.b : p.a;
    }
    if (!mine) return;
  }
  narrow_all(y, x);
  store<true>(x, row + n * lane);
  widen_all(x, y);  // the cache takes the row as it is stored
}

template <CacheFormat f, class T, bool wide>
__device__ void append_row(const AppendRows<T>& a, int64_t token, int lane) {
  constexpr int n = wide ? 16 / sizeof(T) : CacheTraits<f>::kGrouped ? 4 : 1;
  constexpr int rounds = wide ? 3 : 1;
  const int32_t slot = a.slots[token];
  const T* const kv_c = a.kv_c + token * a.kv_c_row;
  T* const k_pe = a.k_pe + token * a.k_pe_row;
  const float* const cos_sin = a.rotation.pairs > 0 ? a.rotation.at(a.positions[token]) : nullptr;
  const int latent = a.cache.latent, rope = a.cache.rope;
  const bool in_lanes =
      wide && rope <= 32 * n && (a.rotation.interleaved || a.rotation.pairs % n == 0);  // else through memory
  if (cos_sin && !in_lanes) {
    constexpr int m = wide ? 4 : 1;
    for (int unit = lane; unit < a.rotation.pairs / m; unit += 32)
      rotate_pairs<wide, m, 1>(
          k_pe, 0, k_pe, 0, 1, a.rotation, [=] { return cos_sin; }, unit);
    __syncwarp();
  }
  const bool norms = wide && a.weight;
  if (slot < 0 && !norms && !(cos_sin && in_lanes)) return;

  const CacheRow<f> row = CacheRow<f>::at(a.cache, slot < 0 ? 0 : slot);
  T pe[n];
  const bool has_pe = n * lane < rope;
  if (has_pe) load<wide>(k_pe + n * lane, pe);
  for (int first = 0; first < latent; first += 32 * n * rounds) {
    T x[rounds][n];
#pragma unroll
    for (int k = 0; k < rounds; ++k) {
      const int i = first + n * (32 * k + lane);
      if (i < latent && (slot >= 0 || norms)) load<wide>(kv_c + i, x[k]);
    }
    if constexpr (wide)
      if (norms) norm_in_lanes(x, a, token, lane);
#pragma unroll
    for (int k = 0; k < rounds; ++k) {
      const int i = first + n * (32 * k + lane);
      if (first + n * 32 * k >= latent || slot < 0) break;
      float y[n] = {};
      if (i < latent) widen_all(x[k], y);
      row.template write<wide>(i, y, i < latent);
    }
  }
  for (int first = 0; first < rope; first += 32 * n) {
    const int i = first + n * lane;
    const bool mine = i < rope;
    if (first > 0 && mine) load<wide>(k_pe + i, pe);
    float y[n] = {};
    if (mine) widen_all(pe, y);
    if constexpr (wide)
      if (cos_sin && in_lanes) rotate_in_lanes(k_pe, a.rotation, cos_sin, lane, mine, y);
    if (slot >= 0) row.template write<wide>(latent + i, y, mine);
  }
}

// Blocks [0, row_blocks): the cache's rows. The rest: queries, as RotateShape has them.
template <CacheFormat f, class T, bool wide>
__global__ void __launch_bounds__(256, wide && sizeof(T) == 2 ? 3 : 1)
    append_kernel(AppendRows<T> a, unsigned row_blocks, int rows, int chunks) {
  take_turn();
  if (blockIdx.x < row_blocks) {
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x,
                   warps = blockDim.x * blockDim.y * blockDim.z / 32;
    const int64_t token = static_cast<int64_t>(blockIdx.x) * warps + thread / 32;
    if (thread / 32 < warps && token < a.tokens) append_row<f, T, wide>(a, token, static_cast<int>(thread % 32));
    return;
  }
  rotate_heads<wide>(a.q, a.rotation, a.positions, a.query_rows, blockIdx.x - row_blocks, rows, chunks);
}

// Eight elements of a rope part of 64, the unit-th of eight lanes', rotated; by all lanes of those.
__device__ inline void rotate_eight(uint32_t (&x)[4], const Rotation& r, const float* cos_sin, int unit) {
  bf16 stored[8];
  float y[8];
  memcpy(stored, x, sizeof x);
  widen_all(stored, y);
  if (r.interleaved) {
    float cos[4], sin[4];
    load<true>(cos_sin + 4 * unit, cos);
    load<true>(cos_sin + r.pairs + 4 * unit, sin);
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const Pair p = rotated(y[e], y[e + 1], cos[e / 2], sin[e / 2]);
      y[e] = p.a, y[e + 1] = p.b;
    }
  } else {
    float cos[8], sin[8];
    load<true>(cos_sin + 8 * (unit % 4), cos);
    load<true>(cos_sin + r.pairs + 8 * (unit % 4), sin);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float other = __shfl_xor_sync(0xffffffffu, y[e], 4);
      const Pair p = unit < 4 ? rotated(y[e], other, cos[e], sin[e]) : rotated(other, y[e], cos[e], sin[e]);
      y[e] = unit < 4 ? p.a : p.b;
    }
  }
  narrow_all(y, stored);
  memcpy(x, stored, sizeof x);
}

// Four tokens, by a warp: see RowBatch. What is read of a token without a slot is not written to the cache.
template <CacheFormat f, bool rotates>
__device__ void append_batch(const AppendRows<bf16>& a, const Reciprocal& by_k_scale, int64_t first, int lane) {
  using Batch = RowBatch<f>;
  using Traits = CacheTraits<f>;
  constexpr bool coded = std::is_same_v<typename Traits::Element, fp8_e4m3>;
  if (first >= a.tokens) return;
  const int rows = static_cast<int>(min(int64_t{Batch::kRows}, a.tokens - first));
  const int32_t slot = lane < rows ? a.slots[first + lane] : -1;  // lane r: of row r
  const int32_t position = rotates && lane < rows ? a.positions[first + lane] : 0;
  uint32_t x[Batch::kRounds][4];  // pairs
#pragma unroll
  for (int k = 0; k < Batch::kRounds; ++k) {
    const int64_t token = first + min(Batch::row(k, lane), rows - 1);  // of a short batch, the last row again
    const bf16* const from = Batch::rope(k) ? a.k_pe + token * a.k_pe_row : a.kv_c + token * a.kv_c_row;
    load<true>(reinterpret_cast<const uint32_t*>(from + Batch::at(k, lane)), x[k]);
  }
  if constexpr (rotates) {
    constexpr int k = Batch::kRounds - 1;
    const int r = Batch::row(k, lane);
    const int32_t at = __shfl_sync(0xffffffffu, position, min(r, rows - 1));
    rotate_eight(x[k], a.rotation, a.rotation.at(at), lane % 8);
    if (r < rows)
      store<true>(x[k], reinterpret_cast<uint32_t*>(a.k_pe + (first + r) * a.k_pe_row + Batch::at(k, lane)));
  }
  const uint32_t live = __ballot_sync(0xffffffffu, slot >= 0);
  const CacheRow<f> mine = CacheRow<f>::at(a.cache, max(slot, 0));
  const int64_t place = mine.bytes() - a.cache.data;
  const int32_t scales_from_row = static_cast<int32_t>(mine.scales() - mine.bytes());

  // Of this lane's group in round k, in half k % 2 of word k / 2.
  uint32_t most[(Batch::kRounds + 1) / 2] = {};
  if constexpr (Traits::kGrouped) {
#pragma unroll
    for (int k = 0; k < Batch::kRounds - 1; k += 2) {
      uint32_t m = largest_bf16(x[k]);
      if (!Batch::rope(k + 1)) m = __byte_perm(m, largest_bf16(x[k + 1]), 0x5410);
      m = max_bf16x2(m, 0);  // where all are NaN
#pragma unroll
      for (int d = Traits::kGroup / Batch::kN / 2; d; d /= 2) m = max_bf16x2(m, __shfl_xor_sync(0xffffffffu, m, d));
      most[k / 2] = m;
    }
  }
  std::byte* row = nullptr;
  int32_t scales = 0;
#pragma unroll
  for (int k = 0; k < Batch::kRounds; ++k) {
    const int r = Batch::row(k, lane), at = Batch::at(k, lane);
    if (!Batch::same_row(k)) {
      row = a.cache.data + __shfl_sync(0xffffffffu, place, r);
      if constexpr (Traits::kGrouped) scales = __shfl_sync(0xffffffffu, scales_from_row, r);
    }
    if (!(live >> r & 1)) continue;
    if constexpr (!coded) {
      store<true>(x[k], reinterpret_cast<uint32_t*>(row + 2 * (Batch::rope(k) ? Batch::kLatent + at : at)));
    } else if constexpr (!Traits::kGrouped) {
      *reinterpret_cast<uint2*>(row + (Batch::rope(k) ? Batch::kLatent + at : at)) =
          encode8(x[k], [&](float v) { return over(by_k_scale, v); });
    } else if (Batch::rope(k)) {
      store<true>(x[k], reinterpret_cast<uint32_t*>(row + CacheRow<f>::kRopeAt + 2 * at));
      if (f == CacheFormat::fp8_ds_v4 && at == 0) row[scales + 7] = std::byte{0};
    } else {
      const float amax = __uint_as_float(k % 2 == 0 ? most[k / 2] << 16 : most[k / 2] & 0xffff0000u);
      const int exponent = scale_exponent(amax);
      const float inverse = power_of_two(-exponent);
      *reinterpret_cast<uint2*>(row + at) = encode8(x[k], [&](float v) { return v * inverse; });
      if (at % Traits::kGroup != 0) continue;
      if constexpr (f == CacheFormat::fp8_ds_v4)
        row[scales + at / Traits::kGroup] = static_cast<std::byte>(exponent + 127);
      else *reinterpret_cast<float*>(row + Batch::kLatent + at / (Traits::kGroup / 4)) = power_of_two(exponent);
    }
  }
}

constexpr int kBatchThreads = 128;

template <CacheFormat f>
__global__ void __launch_bounds__(kBatchThreads) append_batches_kernel(AppendRows<bf16> a, Reciprocal by_k_scale) {
  take_turn();
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kBatchThreads / 32) + threadIdx.x / 32;
  append_batch<f, false>(a, by_k_scale, warp * RowBatch<f>::kRows, static_cast<int>(threadIdx.x % 32));
}

// Blocks [0, row_blocks): the cache's rows. The rest: queries, as RotateShape has them.
template <CacheFormat f>
__global__ void __launch_bounds__(256, 3)
    rope_append_batches_kernel(AppendRows<bf16> a, Reciprocal by_k_scale, unsigned row_blocks, int rows, int chunks) {
  take_turn();
  if (blockIdx.x < row_blocks) {
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x,
                   warps = blockDim.x * blockDim.y * blockDim.z / 32;
    if (thread / 32 >= warps) return;
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * warps + thread / 32;
    return append_batch<f, true>(a, by_k_scale, warp * RowBatch<f>::kRows, static_cast<int>(thread % 32));
  }
  rotate_heads<true>(a.q, a.rotation, a.positions, a.query_rows, blockIdx.x - row_blocks, rows, chunks);
}

// Do batches serve the call? Few rows are sooner done by a warp each.
template <CacheFormat f>
bool by_batches(const Queue& queue, const AppendRows<bf16>& a) {
  constexpr bool grouped = CacheTraits<f>::kGrouped;
  return (a.rotation.pairs == 0 || a.rotation.pairs == RowBatch<f>::kRope / 2) && !a.weight &&
         RowBatch<f>::fits(a.cache) && (!grouped || a.cache.powers_of_two) &&
         (f != CacheFormat::fp8 || Reciprocal::serves(a.cache.k_scale)) &&
         a.tokens >= int64_t{8} * RowBatch<f>::kRows * queue.multiprocessors();
}

template <class T>
bool wide_rows(const AppendRows<T>& a) {
  return a.cache.wide(16 / sizeof(T)) && rows_aligned<T>(a.kv_c, a.kv_c_row) &&
         (a.cache.rope == 0 || rows_aligned<T>(a.k_pe, a.k_pe_row)) &&
         (a.rotation.pairs == 0 ||
          (a.rotation.pairs % 4 == 0 && rows_aligned<T>(a.q.data, a.q.token, a.q.head) &&
           rows_aligned<T>(a.q.to, a.q.to_row, a.q.to_head) && rows_aligned<float>(a.rotation.table)));
}

template <class T>
void run(const Queue& queue, const AppendRows<T>& a, std::string_view op) {
  if (a.tokens == 0) return;
  const bool rotates = a.rotation.pairs > 0, wide = wide_rows(a);
  const int64_t heads = rotates ? a.q.heads : 0;
  RotateShape shape(rotates ? a.rotation.pairs : 1, wide && rotates ? 4 : 1, heads, a.query_rows,
                    wide ? kRotateRows<true> : kRotateRows<false>, queue.multiprocessors());
  if (heads == 0) shape.block = dim3(128);
  const int64_t warps = shape.block.x * shape.block.y * shape.block.z / 32, row_blocks = (a.tokens + warps - 1) / warps,
                blocks = row_blocks + shape.blocks(a.query_rows);
  const std::string what = "tokens " + std::to_string(a.tokens) + ", heads " + std::to_string(heads) + ", latent " +
                           std::to_string(a.cache.latent) + ", rope " + std::to_string(a.cache.rope) + ", format " +
                           std::string(to_string(a.cache.format));
  if (blocks > INT32_MAX) throw ShapeError(std::string(op) + ": too many rows for one call (" + what + ")");
  const bool overlap = queue.hopper();
  const LaunchConfig config{.grid = dim3(static_cast<unsigned>(blocks)), .block = shape.block, .overlap = overlap};
  for_format(a.cache.format, [&](auto format) {
    constexpr CacheFormat f = decltype(format)::value;
    if constexpr (std::is_same_v<T, bf16> && f != CacheFormat::f32 && f != CacheFormat::f16) {
      if (wide && by_batches<f>(queue, a)) {
        const Reciprocal by_k_scale = f == CacheFormat::fp8 ? Reciprocal(a.cache.k_scale) : Reciprocal();
        const auto blocks_of = [&](int64_t warps) {
          return (a.tokens + warps * RowBatch<f>::kRows - 1) / (warps * RowBatch<f>::kRows);
        };
        if (!rotates)
          return launch(append_batches_kernel<f>,
                        {.grid = dim3(static_cast<unsigned>(blocks_of(kBatchThreads / 32))),
                         .block = dim3(kBatchThreads),
                         .overlap = overlap},
                        queue.stream(), op, "append_batches_kernel", what, a, by_k_scale);
        const int64_t batches = blocks_of(warps);
        return launch(rope_append_batches_kernel<f>,
                      {.grid = dim3(static_cast<unsigned>(batches + shape.blocks(a.query_rows))),
                       .block = shape.block,
                       .overlap = overlap},
                      queue.stream(), op, "rope_append_batches_kernel", what, a, by_k_scale,
                      static_cast<unsigned>(batches), shape.rows, std::max(shape.chunks, 1));
      }
    }
    launch(wide ? append_kernel<f, T, true> : append_kernel<f, T, false>, config, queue.stream(), op, "append_kernel",
           what, a, static_cast<unsigned>(row_blocks), shape.rows, std::max(shape.chunks, 1));
  });
}

}  // namespace

void run_append(Stream& stream, const ops::AppendArgs& a) {
  const Queue& queue = stream.queue();
  if (a.kv_c.dtype() == Dtype::f16) throw UnsupportedError("append: kv_c is f16, a GPU takes f32 and bf16");
  for_activation(a.kv_c.dtype(), [&](auto element) {
    using T = decltype(element);
    AppendRows<T> rows;
    rows.kv_c = static_cast<const T*>(a.kv_c.data());
    rows.k_pe = static_cast<T*>(const_cast<void*>(a.k_pe.data()));
    rows.kv_c_row = a.kv_c.stride<Token>();
    rows.k_pe_row = a.k_pe.stride<Token>();
    rows.slots = queue.reads(a.slots, "append", "slots");
    rows.tokens = static_cast<int64_t>(a.slots.size());
    rows.cache = CacheMemory("append", a.cache);
    run(queue, rows, "append");
  });
}

void copy_queries(const Queue& queue, const ops::RopeAppendArgs& a, const int32_t* tokens) {
  const auto& [to, named] = a.placed;
  copy_rows(queue,
            {.x = {a.q_pe.dtype(), a.q_pe.data(), a.q_pe.extents(), a.q_pe.strides()},
             .y = {to.dtype(), to.data(), to.extents(), to.strides()},
             .x_rows = tokens,
             .rows = a.query_rows()},
            "rope_append");
}

// norm: of kv_c, if it is wanted.
void run_append(Stream& stream, const ops::RopeAppendArgs& a, const ops::NormArgs* norm) {
  const Queue& queue = stream.queue();
  for_activation(a.kv_c.dtype(), [&](auto element) {
    using T = decltype(element);
    AppendRows<T> rows;
    rows.kv_c = static_cast<const T*>(a.kv_c.data());
    rows.k_pe = static_cast<T*>(a.k_pe.data());
    rows.kv_c_row = a.kv_c.stride<Token>();
    rows.k_pe_row = a.k_pe.stride<Token>();
    rows.slots = queue.reads(a.slots, "rope_append", "slots");
    rows.positions = queue.reads(a.positions, "rope_append", "positions");
    rows.tokens = static_cast<int64_t>(a.slots.size());
    rows.rotation = Rotation(*a.table);
    rows.q = {static_cast<T*>(a.q_pe.data()), a.q_pe.stride<Token>(), a.q_pe.stride<Head>(),
              static_cast<int32_t>(a.q_pe.extent<Head>())};
    rows.query_rows = a.query_rows();
    if (a.placed.q) {
      rows.q.to = static_cast<T*>(a.placed.q.data());
      rows.q.to_row = a.placed.q.stride<Token>();
      rows.q.to_head = a.placed.q.stride<Head>();
      rows.q.tokens = queue.reads(a.placed.tokens, "rope_append", "placed tokens");
      if (!a.table->rotates()) copy_queries(queue, a, rows.q.tokens);
    }
    rows.cache = CacheMemory("rope_append", a.cache);
    if (norm) {
      rows.normed = static_cast<T*>(norm->y.data());
      rows.weight = norm->weight.data();
      rows.eps = static_cast<float>(norm->eps);
    }
    // What no warp norms in registers on the way is normed before.
    if (norm && !(norms_in_lanes<T>(rows.cache) && wide_rows(rows) && rows_aligned<float>(rows.weight))) {
      cuda::norm(stream, *norm);
      rows.weight = nullptr;
    }
    run(queue, rows, norm ? "norm_rope_append" : "rope_append");
  });
}

namespace {

constexpr int64_t kCopyBlock = 16384;  // bytes of a page a block copies

template <class Word>
__global__ void copy_pages_kernel(std::byte* data, int64_t stride, int64_t words, const ops::PageCopy* copies,
                                  unsigned parts) {
  const ops::PageCopy c = copies[blockIdx.x / parts];
  if (c.from == c.to) return;
  const Word* const from = reinterpret_cast<const Word*>(data + c.from * stride);
  Word* const to = reinterpret_cast<Word*>(data + c.to * stride);
  constexpr int64_t share = kCopyBlock / static_cast<int64_t>(sizeof(Word));
  const int64_t first = blockIdx.x % parts * share, end = words < first + share ? words : first + share;
  for (int64_t i = first + threadIdx.x; i < end; i += blockDim.x * 4) {
    Word w[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (i + k * blockDim.x < end) w[k] = from[i + k * blockDim.x];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (i + k * blockDim.x < end) to[i + k * blockDim.x] = w[k];
  }
}

}  // namespace
}  // namespace generic

void append(Stream& stream, const ops::AppendArgs& a) { generic::run_append(stream, a); }
void rope_append(Stream& stream, const ops::RopeAppendArgs& a) { generic::run_append(stream, a, nullptr); }
void norm_rope_append(Stream& stream, const ops::NormRopeAppendArgs& a) {
  const ops::NormArgs norm = a.norm();
  generic::run_append(stream, a.rope_append(), &norm);
}

void copy_pages(Stream& stream, const ops::CopyPagesArgs& a) {
  const Queue& queue = stream.queue();
  const int64_t bytes = static_cast<int64_t>(a.cache.page_bytes), stride = static_cast<int64_t>(a.cache.page_stride),
                copies = static_cast<int64_t>(a.copies.size());
  if (copies == 0 || bytes == 0) return;
  const int64_t parts = (bytes + generic::kCopyBlock - 1) / generic::kCopyBlock;
  const std::string what = "pages " + std::to_string(copies) + ", bytes " + std::to_string(bytes);
  if (copies * parts > INT32_MAX) throw ShapeError("copy_pages: too much for one call (" + what + ")");
  const LaunchConfig config{.grid = dim3(static_cast<unsigned>(copies * parts)), .block = dim3(256)};
  const auto run = [&](auto word) {
    using Word = decltype(word);
    launch(generic::copy_pages_kernel<Word>, config, queue.stream(), "copy_pages", "copy_pages_kernel", what,
           a.cache.data, stride, bytes / static_cast<int64_t>(sizeof(Word)),
           queue.reads(a.copies, "copy_pages", "copies"), static_cast<unsigned>(parts));
  };
  const auto multiple_of = [&](int64_t n) {
    return reinterpret_cast<uintptr_t>(a.cache.data) % static_cast<uintptr_t>(n) == 0 && bytes % n == 0 &&
           stride % n == 0;
  };
  if (multiple_of(16)) run(uint4{});
  else if (multiple_of(4)) run(uint32_t{});
  else run(uint8_t{});
}

}  // namespace mla::cuda
