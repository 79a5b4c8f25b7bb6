// Memory-bound. A warp a row, sixteen bytes of the output a lane, all of a row's loads ahead of its stores. Warps take
// equal runs of the pieces' rows, whatever the pieces' lengths, which they read on the device.
#include <algorithm>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/cache_row.cuh"
#include "backend/cuda/core/item_rows.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"

namespace mla::cuda {
namespace generic {
namespace {

constexpr int kThreads = 256;

template <class T>
struct GatherRows {
  CacheMemory cache;
  const int32_t* table = nullptr;
  int64_t table_request = 0, table_page = 0;
  const GatherPiece* pieces = nullptr;
  int32_t count = 0;  // of pieces
  T *kv_c = nullptr, *k_pe = nullptr;
  int64_t kv_c_row = 0, k_pe_row = 0;
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

template <CacheFormat f, class T, bool wide>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 5 : 4) gather_kernel(GatherRows<T> a, int32_t run) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto rows_of = [](const GatherPiece& p) { return p.count; };
  for_item_rows(a.pieces, a.count, run, rows_of, [&](const GatherPiece& piece, int64_t first, int32_t count) {
    // Lane i finds the page of row first + i.
    const uint32_t size = static_cast<uint32_t>(a.cache.page_size);
    const uint32_t position = static_cast<uint32_t>(piece.start + first) + lane, column = position / size;
    int32_t page = 0;
    if (lane < count) page = a.table[piece.request * a.table_request + column * a.table_page];
    const int32_t offset = static_cast<int32_t>(position - column * size);
    for (int i = 0; i < count; ++i)
      gather_row<f, T, wide>(a, __shfl_sync(0xffffffffu, page, i), __shfl_sync(0xffffffffu, offset, i),
                             piece.row + first + i, lane);
  });
}

template <class T>
void run(const Queue& queue, const ops::GatherArgs& a) {
  const auto table = queue.staged(a.block_table, "gather", "block_table");
  int64_t rows = 0;
  for (const GatherPiece& p : a.pieces) rows += p.count;
  if (rows == 0) return;
  GatherRows<T> r;
  r.cache = CacheMemory("gather", a.cache);
  r.table = table.data();
  r.table_request = table.template stride<Request>();
  r.table_page = table.template stride<Page>();
  r.pieces = queue.staged(a.pieces, "gather", "pieces");
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
  const ItemGrid grid(rows, queue.multiprocessors(), kThreads);
  const std::string what = "rows " + std::to_string(rows) + ", pieces " + std::to_string(a.pieces.size()) +
                           ", latent " + std::to_string(r.cache.latent) + ", rope " + std::to_string(r.cache.rope) +
                           ", format " + std::string(to_string(r.cache.format));
  for_format(r.cache.format, [&](auto format) {
    constexpr CacheFormat f = decltype(format)::value;
    launch(wide ? gather_kernel<f, T, true> : gather_kernel<f, T, false>,
           {.grid = dim3(grid.blocks), .block = dim3(kThreads)}, queue.stream(), "gather", "gather_kernel", what, r,
           grid.run);
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
