// Multi-head attention over flat keys: a CTA has rows of one head and item. Takes every shape; Hopper's own kernel
// takes the usual ones.
#include <algorithm>
#include <string>
#include <vector>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/find_item.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/generic/attend_expanded/attend_expanded.hpp"
#include "backend/cuda/generic/attention/flat_keys.cuh"
#include "backend/cuda/generic/attention/join.cuh"
#include "mla/error.hpp"

namespace mla::cuda::generic {
namespace {

struct FlatAttention {
  Queries q;
  const void *nope = nullptr, *rope = nullptr, *value = nullptr;
  int64_t nope_row = 0, nope_head = 0, rope_row = 0, value_row = 0, value_head = 0;
  int32_t nope_width = 0, rope_width = 0, value_width = 0;
  bool wide = false, accumulate = false;
  Destination out;
  float scale = 1.0f;
  const ExpandedItem* items = nullptr;
  int32_t count = 0, heads = 0, tiles = 0;
  Layout layout;
  // Of codes.
  int64_t value_step = 1;
  View<const float, Group, Head> q_scale, k_scale, v_scale;
  const ops::ScaleRows* scale_rows = nullptr;
  View<const uint32_t, Token, Word> mask;
};

__device__ RowScales scales_of(const View<const float, Group, Head>& x, int64_t head, int32_t first, bool rows) {
  if (!x.data()) return {};
  return {.x = x.data() + head * x.stride<Head>(),
          .group = x.stride<Group>(),
          .first = first,
          .rows = rows ? static_cast<int32_t>(ops::ExpandedScales::kRows) : 0};
}

template <class Core, class Stored = typename Core::T>
__global__ void __launch_bounds__(Core::kThreads, Core::kBlocks)
    flat_attention_kernel(const __grid_constant__ FlatAttention a) {
  constexpr int M = Core::M, N = Core::N;
  extern __shared__ __align__(128) std::byte shared[];
  Tile<M>& tile = *reinterpret_cast<Tile<M>*>(shared + a.layout.rows);
  const int64_t number = blockIdx.x;
  const int first_column = static_cast<int>(number / a.tiles) * Core::kColumns,
            columns = min(a.value_width - first_column, Core::kColumns);
  const auto row_tiles = [&](int32_t i) { return (a.items[i].q_count + M - 1) / M; };
  const Found found = find_item(
      a.count, number % a.tiles, [&](int32_t i) { return static_cast<int64_t>(row_tiles(i)) * a.heads; },
      [](int32_t) { return int64_t{0}; });
  if (found.item < 0) return;
  const ExpandedItem item = a.items[found.item];
  // A head's tiles side by side, the last rows, which see most, first.
  const int tiles = row_tiles(found.item), head = found.tile / tiles, row0 = (tiles - 1 - found.tile % tiles) * M;
  const int rows = min(M, item.q_count - row0);
  const int64_t seen = min(static_cast<int64_t>(item.k_count), static_cast<int64_t>(item.visible) + row0 + rows);
  const int blocks = seen > 0 ? static_cast<int>((seen + N - 1) / N) : 0;
  if (threadIdx.x < M) {
    const int t = static_cast<int>(threadIdx.x);
    const bool is = t < rows;
    tile.from[t] = item.q_begin + row0 + (is ? t : 0);
    tile.to[t] = is ? item.q_begin + row0 + t : -1;
    tile.head[t] = head;
    const int64_t limit = min(static_cast<int64_t>(item.k_count), static_cast<int64_t>(item.visible) + row0 + t + 1);
    tile.limit[t] = is ? static_cast<int32_t>(max(limit, int64_t{0})) : 0;
  }
  __syncthreads();
  if (blocks > 0) load_queries<Core>(a.q, a.layout, tile, shared);
  Core core;
  FlatRows<Stored> from{static_cast<const Stored*>(a.nope) + item.k_begin * a.nope_row + head * a.nope_head,
                        static_cast<const Stored*>(a.rope) + item.k_begin * a.rope_row,
                        static_cast<const Stored*>(a.value) + item.k_begin * a.value_row + head * a.value_head,
                        a.nope_row,
                        a.rope_row,
                        a.value_row,
                        a.nope_width,
                        a.rope_width,
                        a.value_width,
                        a.wide};
  if (item.masked) {
    from.mask = a.mask.data() + (item.q_begin + row0) * a.mask.stride<Token>();
    from.mask_row = a.mask.stride<Token>();
    from.mask_begin = item.mask_begin;
  }
  float scale = a.scale;
  if constexpr (!std::is_same_v<Stored, typename Core::T>) {
    static_assert(ops::ExpandedScales::kRows % M == 0);  // a tile's queries have one scale
    const ops::ScaleRows first = a.scale_rows ? a.scale_rows[found.item] : ops::ScaleRows{};
    const bool by_rows = a.scale_rows != nullptr;
    from.value_step = a.value_step;
    from.key_scale = scales_of(a.k_scale, head, first.k, by_rows);
    from.value_scale = scales_of(a.v_scale, head, first.k, by_rows);
    scale *= scales_of(a.q_scale, head, first.q, by_rows).at(row0);
  }
  FlatKeys<Core, Stored> keys(from, a.layout, shared, seen);
  const RowEnd row = attend(core, a.layout, tile, keys, blocks, scale, first_column, columns, shared);
  if (row.mine && row.row < rows) {
    float* const at = a.out.lse + tile.to[row.row] * a.out.lse_row + head * a.out.lse_head;
    float lse = row.sum == 0.0f ? -INFINITY : row.max + logf(row.sum), factor = row.sum == 0.0f ? 0.0f : 1.0f / row.sum;
    if (a.accumulate) {
      const float old = usable_part(*at, a.out, tile.to[row.row], head), m = base_of(fmaxf(old, lse));
      const float mine = expf(lse - m), theirs = expf(old - m), sum = mine + theirs;
      float keep = 0.0f;
      if (sum != 0.0f) {
        factor *= mine / sum, keep = theirs / sum;
        lse = m + logf(sum);
      }
      tile.keep[row.row] = keep;
    }
    tile.alpha[row.row] = factor;
    // Column chunks of a row would each merge with the other's lse.
    if (first_column + columns == a.value_width) *at = lse;
  }
  __syncthreads();
  store_rows(core, tile, rows, a.out, first_column, columns, a.accumulate);
}

// Values of up to 128 leave room for two CTAs an SM.
template <class T, int kColumnTiles, int warps>
struct Mma : MmaCore<64, 64, kColumnTiles, warps, T> {
  static constexpr int kBlocks = warps > 8 ? 1 : 2;
};
struct Fma : FmaCore<1> {
  static constexpr int kBlocks = 1;
};

struct Variant {
  void (*kernel)(FlatAttention);
  int threads, rows, columns;
  Layout layout;
};
template <class Core, class Stored = typename Core::T>
Variant variant(const FlatAttention& a) {
  return {flat_attention_kernel<Core, Stored>, Core::kThreads, Core::M, Core::kColumns,
          layout<Core>(a.q.depth, a.value_width, 0, 0)};
}

template <class T, class Stored = T>
Variant choose_mma(const FlatAttention& a) {
  if (a.value_width <= Mma<T, 2, 8>::kColumns) return variant<Mma<T, 2, 8>, Stored>(a);
  return a.value_width <= Mma<T, 2, 16>::kColumns ? variant<Mma<T, 2, 16>, Stored>(a)
                                                  : variant<Mma<T, 4, 16>, Stored>(a);
}
Variant choose(const FlatAttention& a, Dtype keys) {
  switch (keys) {
    case Dtype::f32: return variant<Fma>(a);
    case Dtype::bf16: return choose_mma<bf16>(a);
    case Dtype::f16: return choose_mma<f16>(a);
    case Dtype::fp8_e4m3: break;
  }
  return choose_mma<bf16, fp8_e4m3>(a);
}

template <class V>
bool wide(const V& view) {
  const int64_t n = 8, bytes = std::min<int64_t>(16, n * static_cast<int64_t>(size_of(view.dtype())));
  bool fits = reinterpret_cast<uintptr_t>(view.data()) % static_cast<uintptr_t>(bytes) == 0 &&
              view.extents()[V::rank - 1] % n == 0;
  for (size_t i = 0; i + 1 < V::rank; ++i) fits = fits && view.strides()[i] % n == 0;
  return fits;
}

}  // namespace

void attend_flat(const Queue& queue, const ops::AttendExpandedArgs& a) {
  constexpr std::string_view op = "attend_expanded";
  if (a.quantized) throw UnsupportedError("attend_expanded: cuda writes f32 or bf16 rows, not quantised ones");
  FlatAttention call;
  call.q = {.data = a.q.data(),
            .row = a.q.stride<Token>(),
            .head = a.q.stride<Head>(),
            .dtype = a.q.dtype(),
            .depth = static_cast<int32_t>(a.q.extent<QueryKey>()),
            .wide = wide(a.q)};
  call.nope = a.k_nope.data(), call.rope = a.k_pe.data(), call.value = a.v.data();
  call.nope_row = a.k_nope.stride<Key>(), call.nope_head = a.k_nope.stride<Head>();
  call.rope_row = a.k_pe.stride<Key>();
  call.value_row = a.v.stride<Key>(), call.value_head = a.v.stride<Head>();
  call.nope_width = static_cast<int32_t>(a.k_nope.extent<Nope>());
  call.rope_width = static_cast<int32_t>(a.k_pe.extent<Rope>());
  call.value_width = static_cast<int32_t>(a.v.extent<Value>());
  call.wide = wide(a.k_nope) && (call.rope_width == 0 || wide(a.k_pe)) && wide(a.v);
  call.value_step = a.v.stride<Value>();
  call.q_scale = a.scales.q, call.k_scale = a.scales.k, call.v_scale = a.scales.v;
  call.scale_rows = queue.reads(a.scales.rows, op, "scales' rows");
  call.mask = a.mask;
  call.accumulate = a.accumulate;
  call.out = {.out = a.out.data(),
              .out_row = a.out.stride<Token>(),
              .out_head = a.out.stride<Head>(),
              .lse = a.lse.data(),
              .lse_row = a.lse.stride<Token>(),
              .lse_head = a.lse.stride<Head>(),
              .dtype = a.out.dtype(),
              .wide = reinterpret_cast<uintptr_t>(a.out.data()) % (2 * size_of(a.out.dtype())) == 0 &&
                      a.out.stride<Token>() % 2 == 0 && a.out.stride<Head>() % 2 == 0};
  call.scale = a.scale;
  call.heads = static_cast<int32_t>(a.q.extent<Head>());
  call.count = static_cast<int32_t>(a.items.size());
  const Variant v = choose(call, a.k_nope.dtype());
  call.layout = v.layout;
  int64_t tiles = 0, rows = 0;
  for (const ExpandedItem& i : a.items)
    tiles += static_cast<int64_t>((i.q_count + v.rows - 1) / v.rows) * call.heads, rows += i.q_count;
  const int64_t chunks = (call.value_width + v.columns - 1) / v.columns, grid = tiles * chunks;
  if (grid == 0) return;
  const std::string shape = "items " + std::to_string(call.count) + ", rows " + std::to_string(rows) + ", heads " +
                            std::to_string(call.heads) + ", keys of " + std::to_string(call.q.depth) + ", values of " +
                            std::to_string(call.value_width);
  if (grid >= int64_t{1} << 31) throw UnsupportedError("attend_expanded: " + shape + " need too many blocks");
  if (chunks > 1 && a.accumulate)
    throw UnsupportedError("attend_expanded: values of " + std::to_string(call.value_width) +
                           " elements are merged up to " + std::to_string(v.columns) + " wide on cuda");
  call.tiles = static_cast<int32_t>(tiles);
  int device = 0, most = 0;
  check(cudaGetDevice(&device), op, "current device");
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), op, "shared memory");
  if (v.layout.total > most)
    throw UnsupportedError("attend_expanded: " + shape + " take " + std::to_string(v.layout.total) +
                           " bytes of shared memory, this GPU has " + std::to_string(most));
  call.items = queue.reads(a.items, op, "items");
  launch(v.kernel,
         {.grid = dim3(static_cast<unsigned>(grid)),
          .block = dim3(static_cast<unsigned>(v.threads)),
          .shared_bytes = static_cast<size_t>(v.layout.total)},
         queue.stream(), op, "attention over flat keys", shape, call);
}

void attend_expanded(Stream& stream, const ops::AttendExpandedArgs& a) { attend_flat(stream.queue(), a); }

}  // namespace mla::cuda::generic
