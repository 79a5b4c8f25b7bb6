// Memory-bound, but for the look-up in the block table, whose rows stay in the caches. Four entries a thread.
#include <algorithm>
#include <bit>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/held_rows.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/core/queue.hpp"

namespace mla::cuda {
namespace generic {
namespace {

struct Entries {
  const int32_t *from = nullptr, *requests = nullptr;
  int32_t* to = nullptr;
  int64_t from_row = 0, to_row = 0;
  int32_t topk = 0;
  uint32_t chunks = 1;  // of a row: blocks
};

/// map(request) gives what maps a position of that request.
template <bool wide, class Map>
__device__ void map_entries(const Entries& a, Map&& map) {
  take_turn();
  constexpr int n = wide ? 4 : 1;
  const uint32_t row = blockIdx.x / a.chunks;
  const int i = static_cast<int>((blockIdx.x - row * a.chunks) * kBlockThreads + threadIdx.x) * n;
  if (i >= a.topk) return;
  int32_t x[n];
  load<wide>(a.from + row * a.from_row + i, x);
  const auto of = map(a.requests[row]);
#pragma unroll
  for (int e = 0; e < n; ++e) x[e] = of(x[e]);
  store<wide>(x, a.to + row * a.to_row + i);
}

struct Table {
  const int32_t *data = nullptr, *lengths = nullptr;
  int64_t request = 0, limit = 0;  // positions below it have a column
  uint32_t page_size = 1;
  int32_t shift = -1;  // of a page size that is a power of two
  int64_t pages = 0;
};

template <bool wide>
__global__ void __launch_bounds__(kBlockThreads) map_to_slots_kernel(Entries a, Table table, HeldRows held) {
  map_entries<wide>(a, [&](int32_t request) {
    const int32_t* const row = table.data + request * table.request;
    const int64_t limit = request < 0 ? 0 : table.limit,
                  length = limit > 0 && table.lengths ? int64_t{table.lengths[request]} : int64_t{1} << 31;
    return [row, limit, length, &table, &held](int32_t position) {
      const int32_t index = position < length ? held.index(position) : -1;
      if (index < 0 || index >= limit) return -1;
      const uint32_t t = static_cast<uint32_t>(index),
                     column = table.shift >= 0 ? t >> table.shift : t / table.page_size;
      const int32_t page = row[column];
      if (page < 0 || page >= table.pages) return -1;
      return static_cast<int32_t>(static_cast<uint32_t>(page) * table.page_size + (t - column * table.page_size));
    };
  });
}

template <bool wide>
__global__ void __launch_bounds__(kBlockThreads)
    map_to_workspace_kernel(Entries a, const int32_t* starts, const int32_t* counts, HeldRows held) {
  map_entries<wide>(a, [&](int32_t request) {
    const int32_t start = request < 0 ? 0 : starts[request], count = request < 0 ? 0 : counts[request];
    return [start, count, &held](int32_t position) {
      const int32_t t = held.index(position);
      return t >= 0 && t < count ? start + t : -1;
    };
  });
}

template <class... Params, class... Args>
void run(const Queue& queue, std::string_view op, void (*wide_kernel)(Entries, Params...),
         void (*kernel)(Entries, Params...), const View<const int32_t, Token, Topk>& from,
         const View<int32_t, Token, Topk>& to, const ops::List<int32_t>& requests, Args... args) {
  Entries a;
  a.from = from.data();
  a.from_row = from.stride<Token>();
  a.to = to.data();
  a.to_row = to.stride<Token>();
  a.topk = static_cast<int32_t>(from.extent<Topk>());
  a.requests = queue.reads(requests, op, "requests");
  const int64_t rows = static_cast<int64_t>(requests.size());
  if (rows == 0 || a.topk == 0) return;
  const auto aligned = [](const void* p, int64_t row) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && row % 4 == 0;
  };
  const bool wide = a.topk % 4 == 0 && aligned(a.from, a.from_row) && aligned(a.to, a.to_row);
  const int64_t threads = wide ? a.topk / 4 : a.topk, chunks = (threads + kBlockThreads - 1) / kBlockThreads;
  a.chunks = static_cast<uint32_t>(chunks);
  const std::string what = "rows " + std::to_string(rows) + ", topk " + std::to_string(a.topk);
  if (rows * chunks > INT32_MAX) throw ShapeError(std::string(op) + ": too many rows for one call (" + what + ")");
  launch(wide ? wide_kernel : kernel,
         {.grid = dim3(static_cast<unsigned>(rows * chunks)), .block = dim3(kBlockThreads), .overlap = queue.hopper()},
         queue.stream(), op, op, what, a, args...);
}

}  // namespace
}  // namespace generic

void map_to_slots(Stream& stream, const ops::MapToSlotsArgs& a) {
  using namespace generic;
  const Queue& queue = stream.queue();
  Table table;
  table.data = queue.reads(a.block_table, "map_to_slots");
  table.request = a.block_table.stride<Request>();
  table.limit = std::min(a.block_table.extent<Page>() * a.page_size, int64_t{1} << 31);
  table.lengths = queue.reads(a.lengths, "map_to_slots", "lengths");
  table.page_size = static_cast<uint32_t>(a.page_size);
  if (std::has_single_bit(table.page_size)) table.shift = std::countr_zero(table.page_size);
  table.pages = a.pages;
  run(queue, "map_to_slots", map_to_slots_kernel<true>, map_to_slots_kernel<false>, a.positions, a.slots, a.requests,
      table, HeldRows(a.held));
}

void map_to_workspace(Stream& stream, const ops::MapToWorkspaceArgs& a) {
  using namespace generic;
  const Queue& queue = stream.queue();
  run(queue, "map_to_workspace", map_to_workspace_kernel<true>, map_to_workspace_kernel<false>, a.positions, a.rows,
      a.requests, queue.reads(a.starts, "map_to_workspace", "starts"),
      queue.reads(a.counts, "map_to_workspace", "counts"), HeldRows(a.held));
}

}  // namespace mla::cuda
