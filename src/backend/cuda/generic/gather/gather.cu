// Memory-bound. A warp a row, sixteen bytes of the output a lane, all of a row's loads ahead of its stores; e4m3 rows
// of the usual shape by fours, since a row of theirs is too few bytes to wait for. Warps take equal runs of the pieces'
// rows, whatever the pieces' lengths, which they read on the device.
#include <algorithm>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/cache_row.cuh"
#include "backend/cuda/core/item_rows.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/core/row_batch.cuh"

namespace mla::cuda {
namespace generic {
namespace {

constexpr int kMostRun = 16;  // rows of a warp

template <class T>
struct GatherRows {
  CacheMemory cache;
  const int32_t* table = nullptr;
  int64_t table_request = 0, table_page = 0;
  const GatherPiece* pieces = nullptr;
  int32_t count = 0;  // of pieces
  T *kv_c = nullptr, *k_pe = nullptr;
  int64_t kv_c_row = 0, k_pe_row = 0;

  struct Place {
    int32_t page, offset;
  };
  /// Of row first + lane of a piece; lanes from count on get page 0.
  __device__ Place place(const GatherPiece& piece, int64_t first, int32_t count, int lane) const {
    const uint32_t size = static_cast<uint32_t>(cache.page_size);
    const uint32_t position = static_cast<uint32_t>(piece.start + first) + lane, column = position / size;
    return {lane < count ? table[piece.request * table_request + column * table_page] : 0,
            static_cast<int32_t>(position - column * size)};
  }
};

template <CacheFormat f, class T, bool wide>
__device__ void gather_row(const GatherRows<T>& a, int32_t page, int32_t offset, int64_t to, int lane) {
  constexpr int n = wide ? 16 / sizeof(T) : 1, rounds = wide ? 3 : 1;
  const CacheRow<f> row(a.cache, page, offset);
  const int latent = a.cache.latent, entry = latent + a.cache.rope;
  T* const kv_c = a.kv_c + to * a.kv_c_row;
  T* const k_pe = a.k_pe + to * a.k_pe_row - latent;
  for (int first = n * lane; first < entry; first += 32 * n * rounds) {
    T x[rounds][n];
#pragma unroll
    for (int k = 0; k < rounds; ++k)
      if (const int i = first + 32 * n * k; i < entry) row.template read<wide>(i, x[k]);
#pragma unroll
    for (int k = 0; k < rounds; ++k)
      if (const int i = first + 32 * n * k; i < entry) store<wide>(x[k], (i < latent ? kv_c : k_pe) + i);
  }
}

// Rows [first, first + count) of the cache, count in [1, RowBatch::kRows], whose places lanes first, first + 1, ...
// have, to rows `to` on.
template <CacheFormat f, class T>
__device__ void gather_batch(const GatherRows<T>& a, const CacheRow<f>& places, int first, int count, int64_t to,
                             int lane) {
  using Batch = RowBatch<f>;
  using Traits = CacheTraits<f>;
  constexpr int n = Batch::kN;
  // Where a row lies, or its scales. Past the last row of a short batch it is the last again.
  const auto of_row = [&](const std::byte* mine, int row) {
    return a.cache.data + __shfl_sync(0xffffffffu, mine - a.cache.data, first + min(row, count - 1));
  };
  uint2 codes[Batch::kRounds];
  uint4 rope{};
  const std::byte* from = nullptr;
#pragma unroll
  for (int k = 0; k < Batch::kRounds; ++k) {
    if (!Batch::same_row(k)) from = of_row(places.bytes(), Batch::row(k, lane));
    const int at = Batch::at(k, lane);
    if (!Batch::rope(k)) codes[k] = *reinterpret_cast<const uint2*>(from + at);
    else if (Traits::kGrouped) rope = *reinterpret_cast<const uint4*>(from + CacheRow<f>::kRopeAt + 2 * at);
    else codes[k] = *reinterpret_cast<const uint2*>(from + Batch::kLatent + at);
  }
  // Lane groups * r + g has the scale of group g of row r.
  constexpr int groups = f == CacheFormat::fp8_ds_mla ? 4 : 8;
  float scale[Batch::kRounds];
  if constexpr (Traits::kGrouped) {
    from = of_row(places.scales(), lane / groups);
    float mine;
    if constexpr (f == CacheFormat::fp8_ds_mla) mine = reinterpret_cast<const float*>(from)[lane % groups];
    else mine = from_ue8m0(static_cast<uint8_t>(from[lane % groups]));
#pragma unroll
    for (int k = 0; k < Batch::kRounds - 1; ++k)
      scale[k] = __shfl_sync(0xffffffffu, mine, groups * Batch::row(k, lane) + Batch::at(k, lane) / Traits::kGroup);
  } else {
#pragma unroll
    for (float& s : scale) s = a.cache.k_scale;
  }
  T* const kv_c = a.kv_c + to * a.kv_c_row;
  T* const k_pe = a.k_pe + to * a.k_pe_row;
#pragma unroll
  for (int k = 0; k < Batch::kRounds; ++k) {
    const int row = Batch::row(k, lane), at = Batch::at(k, lane);
    T out[n];
    if (Batch::rope(k) && Traits::kGrouped) {
      bf16 stored[n];
      memcpy(stored, &rope, sizeof(stored));
      if constexpr (std::is_same_v<T, bf16>) {
        memcpy(out, stored, sizeof(out));
      } else {
        float x[n];
        widen_all(stored, x);
        narrow_all<false>(x, out);
      }
    } else {
      fp8_e4m3 stored[n];
      memcpy(stored, &codes[k], sizeof(stored));
      float x[n];
      widen_all(stored, x);
#pragma unroll
      for (int e = 0; e < n; ++e) x[e] *= scale[k];
      narrow_all<false>(x, out);
    }
    if (row < count) store<true>(out, (Batch::rope(k) ? k_pe + row * a.k_pe_row : kv_c + row * a.kv_c_row) + at);
  }
}

template <CacheFormat f, class T>
__global__ void __launch_bounds__(kBlockThreads, CacheTraits<f>::kGrouped ? 3 : 4)
    gather_batches_kernel(GatherRows<T> a, int32_t run) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto rows_of = [](const GatherPiece& p) { return p.count; };
  for_item_rows(a.pieces, a.count, run, rows_of, [&](const GatherPiece& piece, int64_t first, int32_t count) {
    const auto mine = a.place(piece, first, count, lane);
    const CacheRow<f> place(a.cache, mine.page, mine.offset);
    for (int i = 0; i < count; i += RowBatch<f>::kRows)
      gather_batch<f>(a, place, i, min(RowBatch<f>::kRows, count - i), piece.row + first + i, lane);
  });
}

template <CacheFormat f, class T, bool wide>
__global__ void __launch_bounds__(kBlockThreads, sizeof(T) == 2 ? 5 : 4) gather_kernel(GatherRows<T> a, int32_t run) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto rows_of = [](const GatherPiece& p) { return p.count; };
  for_item_rows(a.pieces, a.count, run, rows_of, [&](const GatherPiece& piece, int64_t first, int32_t count) {
    const auto mine = a.place(piece, first, count, lane);
    for (int i = 0; i < count; ++i)
      gather_row<f, T, wide>(a, __shfl_sync(0xffffffffu, mine.page, i), __shfl_sync(0xffffffffu, mine.offset, i),
                             piece.row + first + i, lane);
  });
}

template <class T>
void run(const Queue& queue, const ops::GatherArgs& a) {
  int64_t rows = 0;
  for (const GatherPiece& p : a.pieces) rows += p.count;
  if (rows == 0) return;
  GatherRows<T> r;
  r.cache = CacheMemory("gather", a.cache);
  r.table = queue.reads(a.block_table, "gather");
  r.table_request = a.block_table.template stride<Request>();
  r.table_page = a.block_table.template stride<Page>();
  r.pieces = queue.reads(a.pieces, "gather", "pieces");
  r.count = static_cast<int32_t>(a.pieces.size());
  r.kv_c = static_cast<T*>(a.kv_c.data());
  r.k_pe = static_cast<T*>(a.k_pe.data());
  r.kv_c_row = a.kv_c.template stride<Key>();
  r.k_pe_row = a.k_pe.template stride<Key>();
  constexpr int n = 16 / sizeof(T);
  const auto aligned = [](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % n == 0;
  };
  const bool wide =
      r.cache.wide(n) && aligned(r.kv_c, r.kv_c_row) && (r.cache.rope == 0 || aligned(r.k_pe, r.k_pe_row));
  const std::string what = "rows " + std::to_string(rows) + ", pieces " + std::to_string(a.pieces.size()) +
                           ", latent " + std::to_string(r.cache.latent) + ", rope " + std::to_string(r.cache.rope) +
                           ", format " + std::string(to_string(r.cache.format));
  for_format(r.cache.format, [&](auto format) {
    constexpr CacheFormat f = decltype(format)::value;
    if constexpr (sizeof(T) == 2 && std::is_same_v<typename CacheTraits<f>::Element, fp8_e4m3>) {
      const ItemGrid grid(rows, queue.multiprocessors(), kBlockThreads, kMostRun, RowBatch<f>::kRows);
      if (wide && grid.run >= RowBatch<f>::kRows && RowBatch<f>::fits(r.cache))
        return launch(gather_batches_kernel<f, T>, {.grid = dim3(grid.blocks), .block = dim3(kBlockThreads)},
                      queue.stream(), "gather", "gather_batches_kernel", what, r, grid.run);
    }
    const ItemGrid grid(rows, queue.multiprocessors(), kBlockThreads, kMostRun);
    launch(wide ? gather_kernel<f, T, true> : gather_kernel<f, T, false>,
           {.grid = dim3(grid.blocks), .block = dim3(kBlockThreads)}, queue.stream(), "gather", "gather_kernel", what,
           r, grid.run);
  });
}

}  // namespace
}  // namespace generic

void gather(Stream& stream, const ops::GatherArgs& a) {
  const Queue& queue = stream.queue();
  switch (a.kv_c.dtype()) {
    case Dtype::f32: return generic::run<float>(queue, a);
    case Dtype::bf16: return generic::run<bf16>(queue, a);
    default: return generic::run<f16>(queue, a);
  }
}

}  // namespace mla::cuda
