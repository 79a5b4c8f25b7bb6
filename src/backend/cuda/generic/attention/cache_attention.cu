#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/find_item.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/generic/attention/cache_attention.hpp"
#include "backend/cuda/generic/attention/cache_keys.cuh"
#include "backend/cuda/generic/attention/join.cuh"
#include "mla/error.hpp"

namespace mla::cuda::generic {
namespace {

constexpr int kMostSources = 16, kJoinThreads = 128, kMostParts = 64;

/// Where batch-invariant items of attend_latent are cut: at fixed positions, multiples of kInvariantKeys, whatever the
/// item's length and rows and whatever else the call holds. The first `each` parts have kInvariantKeys positions, the
/// next twice as many, and so on, so that few parts hold long contexts; the last one has the rest.
struct FixedParts {
  int32_t each = 0, sizes = 0;  // 0: items are not cut so

  /// At most so many, which scratch must hold of some tokens.
  static FixedParts within(int64_t most) {
    constexpr int64_t kMost = 256, kSizes = 8;
    most = std::clamp<int64_t>(most, 1, kMost);
    const int64_t sizes = std::min(most, kSizes);
    return {static_cast<int32_t>(most / sizes), static_cast<int32_t>(sizes)};
  }
  __host__ __device__ int64_t begin(int part) const {
    const int size = part / each;
    return kInvariantKeys * (((int64_t{1} << size) - 1) * each + (int64_t{part % each} << size));
  }
  __host__ __device__ int64_t end(int part) const { return part + 1 < each * sizes ? begin(part + 1) : INT64_MAX; }
  /// Of an item of positions before `end`.
  int count(int64_t end) const {
    int n = 1;
    while (this->end(n - 1) < end) ++n;
    return n;
  }
};

struct CacheAttention {
  Queries q;
  Destination out, partial, scratch;
  const float* sinks = nullptr;
  float scale = 1.0f;
  const float* q_scale = nullptr;  // beside scale
  int32_t heads = 0, width = 0;
  const LatentItem* positions = nullptr;  // one of the two
  const SparseItem* lists = nullptr;
  int32_t items = 0;
  int32_t splits = 1;       // CTAs along a tile's keys
  FixedParts parts;         // positions: of batch-invariant items
  int32_t part_keys = 0;    // lists: of a split; 0: one split has all
  int64_t first_token = 0;  // of this launch, in the items' order; positions: its rows begin a tile of the only item
  int64_t tokens = 0;       // scratch rows of a split
  int32_t tiles = 0;
  int32_t count = 0;
  Copies copies = Copies::none;
  Layout layout;
  CacheSource sources[kMostSources];
};

__device__ inline int64_t lists_end(const CacheAttention& a, int64_t row, int64_t end) {
  int64_t last = 0;  // no key lies past it
  for (int i = 0; i < a.count; ++i) {
    const CacheSource& s = a.sources[i];
    const int64_t n = s.lengths ? s.lengths[row] : s.topk;
    if (n > 0) last = s.first + n;
  }
  return min(end, last);
}

template <class Core>
__global__ void __launch_bounds__(Core::kThreads, Core::kBlocks)
    cache_attention_kernel(const __grid_constant__ CacheAttention a) {
  constexpr int M = Core::M, N = Core::N;
  extern __shared__ __align__(128) std::byte shared[];
  Tile<M>& tile = *reinterpret_cast<Tile<M>*>(shared + a.layout.rows);
  const int64_t number = blockIdx.x;
  const int split = static_cast<int>(number / a.tiles % a.splits);
  const int first_column = static_cast<int>(number / a.tiles / a.splits) * Core::kColumns;
  const int columns = min(a.width - first_column, Core::kColumns);

  // The tile: rows (token, head) of an item, and keys [begin, end) of them.
  int64_t begin, end, row0;
  int rows, blocks, partial;
  int64_t key_row, tokens_before;
  int32_t q_begin, visible = 0;
  if (a.positions) {
    const Found found = find_item(
        a.items, a.first_token * a.heads / M + number % a.tiles,
        [&](int32_t i) { return (static_cast<int64_t>(a.positions[i].q_count) * a.heads + M - 1) / M; },
        [&](int32_t i) { return static_cast<int64_t>(a.positions[i].q_count); });
    if (found.item < 0) return;
    const LatentItem item = a.positions[found.item];
    row0 = static_cast<int64_t>(found.tile) * M;
    rows = static_cast<int>(min(static_cast<int64_t>(M), static_cast<int64_t>(item.q_count) * a.heads - row0));
    q_begin = item.q_begin, visible = item.visible, partial = item.partial, key_row = item.request;
    tokens_before = found.tokens - a.first_token;
    begin = item.kv_begin;
    end = max(begin, min(static_cast<int64_t>(item.kv_end), visible + (row0 + rows - 1) / a.heads + 1));
    if (a.parts.each > 0) {
      begin = max(begin, a.parts.begin(split));
      end = max(begin, min(end, a.parts.end(split)));
    }
    blocks = static_cast<int>((end - begin + N - 1) / N);
    if (partial >= 0) {
      if (split > 0) return;
    } else if (a.parts.each == 0) {
      const int each = (blocks + a.splits - 1) / a.splits, skipped = min(blocks, split * each);
      blocks = min(each, blocks - skipped);
      begin += static_cast<int64_t>(skipped) * N;
      end = min(end, begin + static_cast<int64_t>(blocks) * N);
    }
  } else {
    const int groups = (a.heads + M - 1) / M;
    const Found found = find_item(
        a.items, a.first_token * groups + number % a.tiles,
        [&](int32_t i) { return static_cast<int64_t>(a.lists[i].q_count) * groups; },
        [&](int32_t i) { return static_cast<int64_t>(a.lists[i].q_count); });
    if (found.item < 0) return;
    const SparseItem item = a.lists[found.item];
    const int token = found.tile / groups, head = found.tile % groups * M;
    row0 = static_cast<int64_t>(token) * a.heads + head;
    rows = min(M, a.heads - head);
    q_begin = item.q_begin, partial = item.partial, key_row = item.q_begin + token;
    tokens_before = found.tokens - a.first_token;
    begin = item.k_begin + static_cast<int64_t>(split) * a.part_keys;
    end = a.part_keys > 0 ? min(static_cast<int64_t>(item.k_end), begin + a.part_keys) : item.k_end;
    end = max(begin, lists_end(a, key_row, end));
    blocks = static_cast<int>((end - begin + N - 1) / N);
  }
  const bool to_scratch = a.splits > 1 && !(a.positions && partial >= 0);
  const Destination& d = to_scratch ? a.scratch : partial >= 0 ? a.partial : a.out;
  if (threadIdx.x < M) {
    const int t = static_cast<int>(threadIdx.x);
    const bool is = t < rows;
    const int64_t token = is ? (row0 + t) / a.heads : 0;
    tile.from[t] = static_cast<int32_t>(q_begin + token);
    tile.head[t] = is ? static_cast<int32_t>((row0 + t) % a.heads) : 0;
    tile.to[t] = !is          ? -1
                 : to_scratch ? static_cast<int32_t>(split * a.tokens + tokens_before + token)
                              : static_cast<int32_t>((partial >= 0 ? partial : q_begin) + token);
    const int64_t seen = a.positions ? min(end, visible + token + 1) - begin : end - begin;
    tile.limit[t] = is ? static_cast<int32_t>(max(seen, int64_t{0})) : 0;
  }
  __syncthreads();
  if (blocks > 0) load_queries<Core>(a.q, a.layout, tile, shared);
  Core core;
  CacheKeys<Core> keys(a.sources, a.count, a.lists != nullptr, a.copies, a.layout, shared, key_row, begin, end);
  const RowEnd row = attend(core, a.layout, tile, keys, blocks, a.q_scale ? a.scale * *a.q_scale : a.scale,
                            first_column, columns, shared);
  if (row.mine && row.row < rows) {
    const int to = tile.to[row.row], head = tile.head[row.row];
    const float lse = row.sum == 0.0f ? -INFINITY : row.max + logf(row.sum);
    const bool final = !to_scratch && partial < 0;
    tile.alpha[row.row] = row.sum == 0.0f ? 0.0f : kept(final ? a.sinks : nullptr, head, lse) / row.sum;
    if (first_column == 0) {
      d.lse[to * d.lse_row + head * d.lse_head] = lse;
      if (d.max) d.max[to * d.max_row + head * d.max_head] = row.max;
    }
  }
  __syncthreads();
  if (to_scratch && blocks == 0) return;  // an empty part is not read
  store_rows(core, tile, rows, d, first_column, columns, false);
}

// A block a (token, head).
__global__ void __launch_bounds__(kJoinThreads) join_kernel(const __grid_constant__ CacheAttention a) {
  const int64_t token = blockIdx.x / static_cast<unsigned>(a.heads);
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.heads));
  const Parts parts{static_cast<const float*>(a.scratch.out),
                    a.scratch.out_row,
                    a.scratch.out_head,
                    a.scratch.lse,
                    a.scratch.lse_row,
                    a.scratch.lse_head,
                    a.scratch.max,
                    a.scratch.max_row,
                    a.scratch.max_head};
  if (a.positions) {
    const auto tokens = [&](int32_t i) { return static_cast<int64_t>(a.positions[i].q_count); };
    const Found found = find_item(a.items, a.first_token + token, tokens, tokens);
    if (found.item < 0) return;
    const LatentItem item = a.positions[found.item];
    if (item.partial >= 0) return;
    join_row(parts, token, a.tokens, a.splits, a.out, item.q_begin + found.tile, head, a.width, nullptr);
  } else {
    const auto tokens = [&](int32_t i) { return static_cast<int64_t>(a.lists[i].q_count); };
    const Found found = find_item(a.items, a.first_token + token, tokens, tokens);
    if (found.item < 0) return;
    const SparseItem item = a.lists[found.item];
    const int count = (item.k_end - item.k_begin + a.part_keys - 1) / a.part_keys;
    const bool final = item.partial < 0;
    join_row(parts, token, a.tokens, count, final ? a.out : a.partial,
             (final ? item.q_begin : item.partial) + found.tile, head, a.width, final ? a.sinks : nullptr);
  }
}

// Sixteen warps where sums take half of the registers and one CTA fits an SM; eight where two do.
template <class T, int M, int N>
struct Mma : MmaCore<M, N, M == 64 ? 4 : 8, M == 64 ? 16 : 8, T> {
  static constexpr int kBlocks = M == 64 ? 1 : 2;
};
struct Fma : FmaCore<1> {
  static constexpr int kBlocks = 1;
};

struct Variant {
  void (*kernel)(CacheAttention);
  int threads = 0, rows = 0, keys = 0, columns = 0;
  Layout layout;
  Copies copies = Copies::none;
};

template <class Core>
Variant variant(const CacheAttention& a, Copies copies) {
  int stage_row = 0;
  for (int i = 0; copies == Copies::staged && i < a.count; ++i) {
    const bool apart = a.sources[i].memory.format == CacheFormat::fp8_ds_v4;
    stage_row = std::max(stage_row, a.sources[i].row_bytes + (apart ? static_cast<int>(cache::fp8_ds_v4::kScales) : 0));
  }
  return {cache_attention_kernel<Core>,
          Core::kThreads,
          Core::M,
          Core::N,
          Core::kColumns,
          layout<Core>(a.q.depth, 0, stage_row, CacheKeys<Core>::kKeyBytes, copies == Copies::direct ? 2 : 1),
          copies};
}

// What is multiplied: f32 where a query or a row is; f16 queries with f16 rows as they are, with others as f32, which
// holds either.
enum class Operands : uint8_t { f32, bf16, f16 };
Operands operands_of(const CacheAttention& a) {
  bool f32 = a.q.dtype == Dtype::f32, halves = true;
  for (int i = 0; i < a.count; ++i) {
    f32 = f32 || a.sources[i].memory.format == CacheFormat::f32;
    halves = halves && a.sources[i].memory.format == CacheFormat::f16;
  }
  if (f32) return Operands::f32;
  if (a.q.dtype != Dtype::f16) return Operands::bf16;
  return halves ? Operands::f16 : Operands::f32;
}

/// The best way that the sources allow.
Copies copies_of(const CacheAttention& a, Operands operands) {
  const CacheFormat own = operands == Operands::f16 ? CacheFormat::f16 : CacheFormat::bf16;
  bool direct = true;
  for (int i = 0; i < a.count; ++i) {
    const CacheSource& s = a.sources[i];
    if (s.unit == 0 || s.memory.latent % 16 != 0 || s.memory.rope % 16 != 0) return Copies::none;
    direct = direct && s.memory.format == own;
  }
  return direct ? Copies::direct : Copies::staged;
}

/// The kernel for tiles of up to `rows` rows.
Variant choose(const CacheAttention& a, int64_t rows, std::string_view op, int* blocks) {
  int device = 0, most = 0, all = 0;
  check(cudaGetDevice(&device), op, "current device");
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), op, "shared memory");
  check(cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device), op, "shared memory");
  std::vector<Variant> variants;
  const Operands operands = operands_of(a);
  const auto add = [&]<class T>(T) {
    for (const Copies copies : {copies_of(a, operands), Copies::none}) {
      if (rows > 16)
        variants.push_back(variant<Mma<T, 64, 64>>(a, copies)), variants.push_back(variant<Mma<T, 64, 32>>(a, copies));
      variants.push_back(variant<Mma<T, 16, 32>>(a, copies));  // two fit an SM
    }
  };
  switch (operands) {
    case Operands::f32: variants = {variant<Fma>(a, Copies::none)}; break;
    case Operands::bf16: add(bf16{}); break;
    case Operands::f16: add(f16{}); break;
  }
  for (const Variant& v : variants) {
    if (v.layout.total > most) continue;
    *blocks = v.rows == 64 || 2 * (v.layout.total + 1024) > all ? 1 : 2;
    return v;
  }
  throw UnsupportedError(std::string(op) + ": rows of " + std::to_string(a.q.depth) + " elements need " +
                         std::to_string(variants.back().layout.total) + " bytes of shared memory, this GPU has " +
                         std::to_string(most));
}

template <class V>
bool aligned(const V& view, int64_t n) {
  const int64_t size = static_cast<int64_t>(size_of(view.dtype()));
  bool fits = reinterpret_cast<uintptr_t>(view.data()) % static_cast<uintptr_t>(std::min<int64_t>(16, n * size)) == 0;
  for (size_t i = 0; i + 1 < V::rank; ++i) fits = fits && view.strides()[i] % n == 0;
  return fits;
}

Queries queries(const AnyView<Token, Head, Entry>& q) {
  return {.data = q.data(),
          .row = q.stride<Token>(),
          .head = q.stride<Head>(),
          .dtype = q.dtype(),
          .depth = static_cast<int32_t>(q.extent<Entry>()),
          .wide = aligned(q, 8)};
}

template <class Row>
Destination destination(const AnyMutableView<Row, Head, Value>& out, const View<float, Row, Head>& lse,
                        const View<float, Row, Head>& max) {
  return {.out = out.data(),
          .out_row = out.template stride<Row>(),
          .out_head = out.template stride<Head>(),
          .lse = lse.data(),
          .lse_row = lse.template stride<Row>(),
          .lse_head = lse.template stride<Head>(),
          .max = max.data(),
          .max_row = max.template stride<Row>(),
          .max_head = max.template stride<Head>(),
          .dtype = out.dtype(),
          .wide = aligned(out, 2)};
}

CacheSource source(std::string_view op, const CacheView& c) {
  CacheSource s;
  s.memory = CacheMemory(op, c);
  s.slots = c.pages * c.spec.page_size;
  const int entry = static_cast<int>(c.spec.entry());
  switch (c.spec.format) {
    case CacheFormat::f32: s.row_bytes = 4 * entry; break;
    case CacheFormat::bf16:
    case CacheFormat::f16: s.row_bytes = 2 * entry; break;
    case CacheFormat::fp8: s.row_bytes = entry; break;
    case CacheFormat::fp8_ds_mla: s.row_bytes = static_cast<int>(cache::fp8_ds_mla::kToken); break;
    case CacheFormat::fp8_ds_v4: s.row_bytes = static_cast<int>(cache::fp8_ds_v4::kRow); break;
    default:
      throw UnsupportedError(std::string(op) + ": cuda reads no cache format " + std::string(to_string(c.spec.format)) +
                             " yet");
  }
  const auto at = [&](uintptr_t n) {
    return reinterpret_cast<uintptr_t>(c.data) % n == 0 && c.page_stride % n == 0 &&
           static_cast<uintptr_t>(s.row_bytes) % n == 0;
  };
  s.unit = at(16) ? 16 : at(8) ? 8 : at(4) ? 4 : 0;
  s.wide = s.memory.wide(8);
  return s;
}

/// Lays `splits` parts of a.tokens rows each out in scratch.
void use_scratch(CacheAttention& a, std::byte* data) {
  float* const lse = reinterpret_cast<float*>(data);
  const int64_t rows = a.splits * a.tokens * a.heads;
  a.scratch = {.out = lse + 2 * rows,
               .out_row = static_cast<int64_t>(a.heads) * a.width,
               .out_head = a.width,
               .lse = lse,
               .lse_row = a.heads,
               .lse_head = 1,
               .max = lse + rows,
               .max_row = a.heads,
               .max_head = 1,
               .dtype = Dtype::f32,
               .wide = a.width % 2 == 0};
}

int64_t divide_up(int64_t x, int64_t by) { return (x + by - 1) / by; }

void run(const Queue& queue, CacheAttention& a, const Variant& v, int64_t tiles, std::string_view op,
         const std::string& shape) {
  const int64_t grid = tiles * a.splits * divide_up(a.width, v.columns);
  if (tiles == 0 || grid == 0) return;
  if (grid >= int64_t{1} << 31) throw UnsupportedError(std::string(op) + ": " + shape + " need too many blocks");
  a.tiles = static_cast<int32_t>(tiles);
  launch(v.kernel,
         {.grid = dim3(static_cast<unsigned>(grid)),
          .block = dim3(static_cast<unsigned>(v.threads)),
          .shared_bytes = static_cast<size_t>(v.layout.total)},
         queue.stream(), op, "attention over cached rows", shape, a);
}

void join(const Queue& queue, const CacheAttention& a, int64_t tokens, std::string_view op, const std::string& shape) {
  if (a.splits <= 1 || tokens == 0) return;
  launch(join_kernel, {.grid = dim3(static_cast<unsigned>(tokens * a.heads)), .block = dim3(kJoinThreads)},
         queue.stream(), op, "join of splits", shape, a);
}

}  // namespace

void attend_positions(const Queue& queue, const ops::AttendLatentArgs& args, const DeviceScales& scales) {
  constexpr std::string_view op = "attend_latent";
  CacheAttention a;
  a.q = queries(args.q);
  a.heads = static_cast<int32_t>(args.q.extent<Head>());
  a.width = static_cast<int32_t>(args.out.extent<Value>());
  a.scale = args.scale * (args.q.dtype() == Dtype::fp8_e4m3 ? args.q_scale : 1.0f);
  a.q_scale = scales.q;
  a.out = destination<Token>(args.out, args.lse, {});
  a.partial = destination<Partial>(args.partial_out, args.partial_lse, {});
  int64_t all_tokens = 0, most = 0;
  bool explicit_partials = false;
  for (const LatentItem& i : args.items) {
    all_tokens += i.q_count;
    most = std::max<int64_t>(most, i.q_count);
    explicit_partials = explicit_partials || i.partial >= 0;
  }
  if (all_tokens == 0 || a.heads == 0 || a.width == 0) return;
  const LatentItem* const items = queue.reads(args.items, op, "items");
  a.sources[0] = source(op, args.cache);
  a.sources[0].given_scale = scales.k;
  const ops::BlockTable& table = args.block_table;
  if (table.extent<Page>() > 1 && table.stride<Page>() != 1)
    throw UnsupportedError("attend_latent: block_table's Page stride is " + std::to_string(table.stride<Page>()) +
                           ", 1 is needed");
  a.sources[0].table = queue.reads(table, op);
  a.sources[0].table_stride = table.stride<Request>();
  a.count = 1;
  // Tiles of other rows sum in another order: they too must not follow from the longest query.
  const bool invariant = args.batch_invariant && !explicit_partials;
  int blocks = 1;
  const Variant v = choose(a, invariant ? a.heads : most * a.heads, op, &blocks);
  a.layout = v.layout, a.copies = v.copies;
  const int64_t room = static_cast<int64_t>(kScratch / (static_cast<size_t>(a.heads) * (a.width + 2) * 4));
  const int64_t whole = v.rows / std::gcd<int64_t>(v.rows, a.heads);  // tokens whose rows fill tiles
  if (invariant) a.parts = FixedParts::within(room / whole);

  // As many items at a time as scratch holds the parts of, or of one item as many tokens: all of them unless they are
  // batch-invariant and long.
  for (size_t begin = 0; begin < args.items.size();) {
    size_t count = args.items.size() - begin;
    int64_t tokens = 0, tiles = 0, longest = 0;
    const auto measure = [&] {
      tokens = tiles = longest = 0;
      a.splits = 1;
      for (const LatentItem& i : args.items.subspan(begin, count)) {
        tokens += i.q_count;
        tiles += divide_up(static_cast<int64_t>(i.q_count) * a.heads, v.rows);
        longest = std::max<int64_t>(longest, i.kv_end - i.kv_begin);
        if (invariant) a.splits = std::max(a.splits, a.parts.count(i.kv_end));
      }
    };
    measure();
    while (invariant && count > 1 && a.splits > 1 && tokens * a.splits > room) count = (count + 1) / 2, measure();
    // Otherwise as many CTAs as run at a time, at least four blocks of keys each.
    if (!invariant && !explicit_partials && tiles > 0)
      a.splits = static_cast<int32_t>(
          std::clamp<int64_t>(std::min({static_cast<int64_t>(queue.multiprocessors()) * blocks / tiles,
                                        divide_up(longest, 4 * v.keys), room / tokens}),
                              1, kMostParts));
    a.positions = items + begin;
    a.items = static_cast<int32_t>(count);
    const bool fits = !invariant || a.splits == 1 || tokens * a.splits <= room;
    const int64_t at_once = fits ? tokens : room / a.splits / whole * whole;
    for (a.first_token = 0; a.first_token < tokens; a.first_token += at_once) {
      a.tokens = std::min(at_once, tokens - a.first_token);
      if (!fits) tiles = divide_up(a.tokens * a.heads, v.rows);
      use_scratch(a, args.scratch.data);
      const std::string shape = "items " + std::to_string(a.items) + ", tokens " + std::to_string(a.tokens) +
                                ", heads " + std::to_string(a.heads) + ", splits " + std::to_string(a.splits);
      run(queue, a, v, tiles, op, shape);
      join(queue, a, a.tokens, op, shape);
    }
    begin += count;
  }
}

void attend_lists(const Queue& queue, const ops::AttendSparseArgs& args) {
  constexpr std::string_view op = "attend_sparse";
  if (args.sources.size() > kMostSources)
    throw UnsupportedError("attend_sparse: " + std::to_string(args.sources.size()) + " sources, cuda takes up to " +
                           std::to_string(kMostSources));
  CacheAttention a;
  a.q = queries(args.q);
  a.heads = static_cast<int32_t>(args.q.extent<Head>());
  a.width = static_cast<int32_t>(args.out.extent<Value>());
  a.scale = args.scale * (args.q.dtype() == Dtype::fp8_e4m3 ? args.q_scale : 1.0f);
  a.out = destination<Token>(args.out, args.lse, args.max_logits);
  a.partial = destination<Partial>(args.partial_out, args.partial_lse, args.partial_max);
  a.sinks = queue.reads(args.sinks, op, "sinks");
  a.items = static_cast<int32_t>(args.items.size());
  int64_t tokens = 0, keys = 0;
  bool explicit_partials = false;
  for (const SparseItem& i : args.items) {
    tokens += i.q_count;
    if (i.q_count > 0) keys = std::max(keys, static_cast<int64_t>(i.k_end) - i.k_begin);
    explicit_partials = explicit_partials || i.partial >= 0;
  }
  if (tokens == 0 || a.heads == 0 || a.width == 0) return;
  a.lists = queue.reads(args.items, op, "items");
  a.count = static_cast<int32_t>(args.sources.size());
  int32_t first = 0;
  for (int i = 0; i < a.count; ++i) {
    const ops::SparseSource& s = args.sources[static_cast<size_t>(i)];
    CacheSource& to = a.sources[i];
    to = source(op, s.cache);
    to.table = s.slots.data();
    to.table_stride = s.slots.stride<Token>();
    to.lengths = queue.reads(s.lengths, op, "lengths");
    to.first = first;
    to.topk = static_cast<int32_t>(s.slots.extent<Topk>());
    first += to.topk;
  }
  int blocks = 1;
  const Variant v = choose(a, a.heads, op, &blocks);
  a.layout = v.layout, a.copies = v.copies;
  const int64_t groups = divide_up(a.heads, v.rows);
  // Where nobody says how keys are cut: until every multiprocessor has a part, none shorter than four blocks.
  a.part_keys = args.part_keys;
  if (a.part_keys == 0 && !explicit_partials) {
    const int64_t parts =
        std::clamp<int64_t>(static_cast<int64_t>(queue.multiprocessors()) * blocks / (tokens * groups), 1,
                            std::max<int64_t>(1, keys / (4 * v.keys)));
    a.part_keys = static_cast<int32_t>(divide_up(divide_up(keys, parts), v.keys) * v.keys);
  }
  const int64_t parts = a.part_keys > 0 ? std::max<int64_t>(1, divide_up(keys, a.part_keys)) : 1;
  a.splits = static_cast<int32_t>(parts);
  if (parts == 1) a.part_keys = 0;
  int64_t at_once = tokens;
  if (parts > 1) {
    const int64_t row = parts * a.heads * (a.width + 2) * 4;
    at_once = std::min(tokens, static_cast<int64_t>(kScratch) / row);
    if (at_once == 0)
      throw UnsupportedError("attend_sparse: " + std::to_string(parts) + " parts of " + std::to_string(a.part_keys) +
                             " keys and " + std::to_string(a.heads) + " heads do not fit the scratch of " +
                             std::to_string(kScratch) + " bytes");
  }
  a.tokens = at_once;
  use_scratch(a, args.scratch.data);
  for (int64_t t = 0; t < tokens; t += at_once) {
    const int64_t n = std::min(at_once, tokens - t);
    a.first_token = t;
    const std::string shape =
        "rows " + std::to_string(n) + ", heads " + std::to_string(a.heads) + ", parts " + std::to_string(parts);
    run(queue, a, v, n * groups, op, shape);
    join(queue, a, n, op, shape);
  }
}

}  // namespace mla::cuda::generic
