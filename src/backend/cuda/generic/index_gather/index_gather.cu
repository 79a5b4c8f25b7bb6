// Memory-bound. Rows are short (128 bytes of codes): half a warp or less takes one, eight elements a lane, and a warp
// several.
#include <algorithm>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/index_row.cuh"
#include "backend/cuda/core/item_rows.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"
#include "mla/work.hpp"

namespace mla::cuda {
namespace generic {
namespace {

template <class T>
struct KeyRows {
  IndexMemory cache;
  const int32_t* table = nullptr;
  int64_t table_request = 0, table_page = 0;
  const GatherPiece* pieces = nullptr;
  int32_t count = 0;
  T* keys = nullptr;
  float* scales = nullptr;  // of codes
  int64_t keys_row = 0, scales_row = 0;
};

template <class S, class T, bool wide>
__device__ void copy_row(const KeyRows<T>& a, int32_t page, int32_t offset, int64_t to, int lane, int lanes) {
  constexpr int n = wide ? 8 : 1;
  constexpr bool codes = dtype_of<T>::value == Dtype::fp8_e4m3, scaled = dtype_of<S>::value == Dtype::fp8_e4m3;
  const IndexRow<S> row(a.cache, page, offset);
  float scale = 1;
  if constexpr (scaled) scale = row.scale();
  if constexpr (codes)
    if (lane == 0) a.scales[to * a.scales_row] = scale;
  for (int i = n * lane; i < a.cache.dim; i += n * lanes) {
    S x[n];
    T y[n];
    load<wide>(row.row() + i, x);
    if constexpr (std::is_same_v<S, T>) {
#pragma unroll
      for (int e = 0; e < n; ++e) y[e] = x[e];
    } else {
      float f[n];
      widen_all(x, f);
      if constexpr (scaled) {
#pragma unroll
        for (int e = 0; e < n; ++e) f[e] *= scale;
      }
      narrow_all(f, y);
    }
    store<wide>(y, a.keys + to * a.keys_row + i);
  }
}

template <class S, class T, bool wide>
__global__ void __launch_bounds__(kBlockThreads) index_gather_kernel(KeyRows<T> a, int32_t run, int lanes) {
  const int lane = static_cast<int>(threadIdx.x % 32), share = 32 / lanes;
  const auto rows_of = [](const GatherPiece& p) { return p.count; };
  for_item_rows(a.pieces, a.count, run, rows_of, [&](const GatherPiece& piece, int64_t first, int32_t count) {
    // Lane i finds the page of row first + i.
    const uint32_t size = static_cast<uint32_t>(a.cache.page_size);
    const uint32_t position = static_cast<uint32_t>(piece.start + first) + lane, column = position / size;
    int32_t page = 0;
    if (lane < count) page = a.table[piece.request * a.table_request + column * a.table_page];
    const int32_t offset = static_cast<int32_t>(position - column * size);
    for (int i = 0; i < count; i += share) {
      const int mine = i + lane / lanes;
      const int32_t row_page = __shfl_sync(0xffffffffu, page, mine),
                    row_offset = __shfl_sync(0xffffffffu, offset, mine);
      if (mine < count) copy_row<S, T, wide>(a, row_page, row_offset, piece.row + first + mine, lane % lanes, lanes);
    }
  });
}

template <class S, class T>
void run(const Queue& queue, const ops::IndexGatherArgs& a) {
  int64_t rows = 0;
  for (const GatherPiece& p : a.pieces) rows += p.count;
  if (rows == 0) return;
  KeyRows<T> r;
  r.cache = IndexMemory("index_gather", a.cache);
  r.table = queue.reads(a.block_table, "index_gather");
  r.table_request = a.block_table.template stride<Request>();
  r.table_page = a.block_table.template stride<Page>();
  r.pieces = queue.reads(a.pieces, "index_gather", "pieces");
  r.count = static_cast<int32_t>(a.pieces.size());
  r.keys = static_cast<T*>(a.keys.data());
  r.keys_row = a.keys.template stride<Key>();
  r.scales = a.scales.data();
  r.scales_row = a.scales.template stride<Key>();
  const bool wide =
      r.cache.wide(8) && reinterpret_cast<uintptr_t>(r.keys) % 16 == 0 && r.keys_row * sizeof(T) % 16 == 0;
  int lanes = 32;
  while (lanes > 1 && (wide ? 8 : 1) * lanes / 2 >= r.cache.dim) lanes /= 2;
  const ItemGrid grid(rows, queue.multiprocessors(), kBlockThreads, 32);
  launch(wide ? index_gather_kernel<S, T, true> : index_gather_kernel<S, T, false>,
         {.grid = dim3(grid.blocks), .block = dim3(kBlockThreads)}, queue.stream(), "index_gather",
         "index_gather_kernel",
         "rows " + std::to_string(rows) + ", pieces " + std::to_string(a.pieces.size()) + ", dim " +
             std::to_string(r.cache.dim),
         r, grid.run, lanes);
}

template <class S>
void to_any(const Queue& queue, const ops::IndexGatherArgs& a) {
  if (a.keys.dtype() == Dtype::f32) run<S, float>(queue, a);
  else if (a.keys.dtype() == Dtype::bf16) run<S, bf16>(queue, a);
}

}  // namespace
}  // namespace generic

void index_gather(Stream& stream, const ops::IndexGatherArgs& a) {
  const Queue& queue = stream.queue();
  switch (a.cache.spec.format) {
    case IndexCacheFormat::f32: return generic::to_any<float>(queue, a);
    case IndexCacheFormat::bf16: return generic::to_any<bf16>(queue, a);
    case IndexCacheFormat::fp8:
      if (a.keys.dtype() == Dtype::fp8_e4m3) return generic::run<fp8_e4m3, fp8_e4m3>(queue, a);
      return generic::to_any<fp8_e4m3>(queue, a);
  }
}

}  // namespace mla::cuda
