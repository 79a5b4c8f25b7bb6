// Attention itself is the ops' own kernels. Hopper's read the caller's lengths and write lse as the interface has it;
// for the others a kernel before attention turns lengths into work items, and one after it brings lse into form. Rows
// that lie otherwise than attention takes them are copied by another.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/call_counters.hpp"
#include "backend/cuda/core/check.hpp"
#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/generic/attend_expanded/attend_expanded.hpp"
#include "backend/cuda/generic/attention/cache_attention.hpp"
#include "backend/cuda/gpu_model.hpp"
#include "backend/cuda/sm90/ops.hpp"
#include "core/device_attention.hpp"
#include "core/even_stride.hpp"
#include "core/gpu.hpp"
#include "core/row_pages.hpp"
#include "ops/attend_expanded/grouped.hpp"

namespace mla::gpu {
namespace {

using cuda::kScratch;
using cuda::Queue;
using cuda::take_turn;

constexpr int kThreads = 256;
constexpr std::string_view kOp = "device_attention";

// Memory cut off the front of a workspace; without one the cuts are counted alone.
struct Cut {
  std::byte* at = nullptr;
  size_t used = 0;
  template <class T>
  T* take(int64_t count) {
    T* const found = at ? reinterpret_cast<T*>(at + used) : nullptr;
    used += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return found;
  }
};

// Rows of bytes, in four dimensions of two arrays that lie as they like.
struct RowCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::array<int64_t, 4> extents{1, 1, 1, 1}, from_strides{}, to_strides{};  // strides in bytes
  int64_t row_bytes = 0;

  int64_t rows() const { return extents[0] * extents[1] * extents[2] * extents[3]; }
};

// Queries or outputs by request, head of the cache, query, and head among those that the cache's head serves: the ops
// number the first three through as tokens.
struct Rows {
  template <class V>
  Rows(const V& v, int64_t kv_heads)
      : element(static_cast<int64_t>(size_of(v.dtype()))),
        width(v.extents()[3]),
        extents{v.template extent<Request>(), kv_heads, v.template extent<Token>(),
                v.template extent<Head>() / kv_heads},
        strides{v.template stride<Request>(), v.template stride<Head>() * extents[3], v.template stride<Token>(),
                v.template stride<Head>()} {
    if (extents[3] == 1) strides[3] = width;
  }
  int64_t tokens() const { return extents[0] * extents[1] * extents[2]; }
  int64_t bytes() const { return tokens() * extents[3] * width * element; }
  std::optional<int64_t> token_stride() const { return even_stride(extents, strides, 2, extents[3] * strides[3]); }
  std::array<int64_t, 4> byte_strides() const {
    return {strides[0] * element, strides[1] * element, strides[2] * element, strides[3] * element};
  }
  std::array<int64_t, 4> dense_byte_strides() const {
    const int64_t head = width * element, token = extents[3] * head;
    return {extents[1] * extents[2] * token, extents[2] * token, token, head};
  }
  // The view of an op, where the rows lie.
  template <class To, class Data>
  To view(Dtype dtype, Data* data, int64_t token_stride) const {
    return {dtype, data, {tokens(), extents[3], width}, {token_stride, strides[3], 1}};
  }
  template <class To, class Data>
  To dense(Dtype dtype, Data* data) const {
    return {dtype, data, {tokens(), extents[3], width}};
  }

  int64_t element, width;
  std::array<int64_t, 4> extents, strides;  // in elements
};

// Queries as they lie, and room for them as Hopper's kernels take them: dense, from addresses of 16 bytes, e4m3 codes
// as the bf16 numbers that they are.
struct PlacedQueries {
  using Q = AnyView<Token, Head, Entry>;
  PlacedQueries() = default;
  PlacedQueries(const AnyView<Request, Token, Head, Entry>& q, int64_t kv_heads, Cut& cut) {
    const Rows rows(q, kv_heads);
    if (const auto stride = rows.token_stride()) there = rows.view<Q>(q.dtype(), q.data(), *stride);
    const bool codes = q.dtype() == Dtype::fp8_e4m3;
    if (!codes && there && there->dense() && reinterpret_cast<uintptr_t>(q.data()) % 16 == 0) return;
    auto* const room = cut.take<std::byte>(rows.bytes() * (codes ? 2 : 1));
    copy = rows.dense<Q>(q.dtype(), room);
    how = {.from = static_cast<const std::byte*>(q.data()),
           .to = room,
           .extents = rows.extents,
           .from_strides = rows.byte_strides(),
           .to_strides = rows.dense_byte_strides(),
           .row_bytes = rows.width * rows.element};
    if (!codes) return;
    numbers = rows.dense<Q>(Dtype::bf16, room);
    how_numbers = how;
    for (int64_t& stride : how_numbers.to_strides) stride *= 2;
  }
  std::optional<Q> there, copy, numbers;  // numbers: of codes
  RowCopy how, how_numbers;               // into copy and numbers, which have one room
};

// lse by requests of one head of the cache each.
View<float, Request, Head, Token> lse_by_kv_head(const View<float, Request, Head, Token>& lse, int64_t kv_heads) {
  const int64_t requests = lse.extent<Request>(), heads = lse.extent<Head>() / kv_heads;
  const auto stride = even_stride<2>({requests, kv_heads}, {lse.stride<Request>(), heads * lse.stride<Head>()}, 1, 0);
  if (!stride)
    throw UnsupportedError("device_attention: lse's requests have stride " + std::to_string(lse.stride<Request>()) +
                           ", with " + std::to_string(kv_heads) + " KV heads " +
                           std::to_string(lse.extent<Head>() * lse.stride<Head>()) + " is needed");
  return {lse.data(),
          {requests * kv_heads, heads, lse.extent<Token>()},
          {*stride, lse.stride<Head>(), lse.stride<Token>()}};
}

// lse by rows, for kernels that know no requests: the caller's own where its strides allow it.
View<float, Token, Head> lse_rows(const View<float, Request, Head, Token>& lse, Cut& cut) {
  const int64_t rows = lse.extent<Request>() * lse.extent<Token>(), heads = lse.extent<Head>();
  if (lse.extent<Token>() == 1) return {lse.data(), {rows, heads}, {lse.stride<Request>(), lse.stride<Head>()}};
  return {cut.take<float>(rows * heads), {rows, heads}};
}

// What a call's table reaches, in positions.
int32_t most_positions(const PagedAttention& a) {
  return static_cast<int32_t>(std::min<int64_t>(a.block_table.extent<Page>() * (a.cache.spec.page_size / a.kv_heads),
                                                std::numeric_limits<int32_t>::max()));
}

struct Paged {
  explicit Paged(const PagedAttention& a, std::byte* at) : cut{at}, lse(lse_by_kv_head(a.lse, a.kv_heads)) {
    const int64_t requests = lse.extent<Request>();
    items = cut.take<LatentItem>(requests);
    counters = cut.take<unsigned>(cuda::kCallCounters);
    rows_lse = lse_rows(lse, cut);
    scratch = cut.take<std::byte>(kScratch);
    q = PlacedQueries(a.q, a.kv_heads, cut);
    if (a.kv_heads > 1) table = cut.take<int32_t>(requests * most_positions(a));
    const Rows rows(a.out, a.kv_heads);
    using Out = AnyMutableView<Token, Head, Value>;
    if (const auto stride = rows.token_stride()) {
      out = rows.view<Out>(a.out.dtype(), a.out.data(), *stride);
    } else {
      auto* const room = cut.take<std::byte>(rows.bytes());
      out = rows.dense<Out>(a.out.dtype(), room);
      back = {.from = room,
              .to = static_cast<std::byte*>(a.out.data()),
              .extents = rows.extents,
              .from_strides = rows.dense_byte_strides(),
              .to_strides = rows.byte_strides(),
              .row_bytes = rows.width * rows.element};
    }
  }
  Cut cut;
  View<float, Request, Head, Token> lse;
  LatentItem* items;
  unsigned* counters;
  View<float, Token, Head> rows_lse;
  std::byte* scratch;
  PlacedQueries q;
  int32_t* table = nullptr;  // several KV heads: [request, KV head, position]
  AnyMutableView<Token, Head, Value> out;
  RowCopy back;  // of out where it is not the caller's
};

struct Lists {
  explicit Lists(const ListAttention& a, std::byte* at) : cut{at} {
    item = cut.take<SparseItem>(1);
    counters = cut.take<unsigned>(cuda::kCallCounters);
    lengths = cut.take<int32_t>(static_cast<int64_t>(a.sources.size()) * a.lse.extent<Request>() * a.q.extent<Token>());
    lse = lse_rows(a.lse, cut);
    scratch = cut.take<std::byte>(kScratch);
    q = PlacedQueries(a.q, 1, cut);
    for (const SlotLists& s : a.sources) {
      const int64_t requests = s.slots.extent<Request>(), queries = s.slots.extent<Token>(),
                    topk = s.slots.extent<Topk>();
      const auto stride =
          even_stride<2>({requests, queries}, {s.slots.stride<Request>(), s.slots.stride<Token>()}, 1, topk);
      if (stride) {
        slots.push_back({s.slots.data(), {requests * queries, topk}, {*stride, 1}});
        continue;
      }
      int32_t* const room = cut.take<int32_t>(requests * queries * topk);
      slots.push_back({room, {requests * queries, topk}});
      constexpr int64_t kBytes = sizeof(int32_t);
      slot_copies.push_back(
          {.from = reinterpret_cast<const std::byte*>(s.slots.data()),
           .to = reinterpret_cast<std::byte*>(room),
           .extents = {1, 1, requests, queries},
           .from_strides = {0, 0, s.slots.stride<Request>() * kBytes, s.slots.stride<Token>() * kBytes},
           .to_strides = {0, 0, queries * topk * kBytes, topk * kBytes},
           .row_bytes = topk * kBytes});
    }
  }
  Cut cut;
  SparseItem* item;
  unsigned* counters;
  int32_t* lengths;  // [sources][rows]
  View<float, Token, Head> lse;
  std::byte* scratch;
  PlacedQueries q;
  std::vector<View<const int32_t, Token, Topk>> slots;
  std::vector<RowCopy> slot_copies;
};

// An operand whose rows lie at addresses of 16 bytes, as Hopper's kernels take them: where they do not, room for a
// copy.
template <class View>
struct AlignedRows {
  AlignedRows(const View& v, Cut& cut) : rows(v) {
    const auto element = static_cast<int64_t>(size_of(v.dtype()));
    const auto& extents = v.extents();
    const auto& strides = v.strides();
    if (((reinterpret_cast<uintptr_t>(v.data()) | static_cast<uint64_t>(strides[0] * element) |
          static_cast<uint64_t>(strides[1] * element)) &
         15) == 0)
      return;
    const int64_t row = extents[2] * element;
    auto* const room = cut.take<std::byte>(extents[0] * extents[1] * row);
    rows = {v.dtype(), room, extents};
    how = {.from = static_cast<const std::byte*>(v.data()),
           .to = room,
           .extents = {1, 1, extents[0], extents[1]},
           .from_strides = {0, 0, strides[0] * element, strides[1] * element},
           .to_strides = {0, 0, extents[1] * row, row},
           .row_bytes = row};
  }
  View rows;
  RowCopy how;  // of no bytes where they do
};

struct Sequences {
  explicit Sequences(const SequenceAttention& a, std::byte* at)
      : cut{at},
        items(cut.take<ExpandedItem>(a.sequences)),
        counters(cut.take<unsigned>(cuda::kCallCounters)),
        q(a.q, cut),
        k(a.k, cut),
        v(a.v, cut) {}
  Cut cut;
  ExpandedItem* items;
  unsigned* counters;
  AlignedRows<AnyView<Token, Head, QueryKey>> q;
  AlignedRows<AnyView<Key, Head, QueryKey>> k;
  AlignedRows<AnyView<Key, Head, Value>> v;
};

template <class To, class From>
__device__ To converted(const From& from) {
  if constexpr (std::is_same_v<To, From>) return from;
  else {
    To to;
#pragma unroll
    for (size_t i = 0; i < std::size(to.at); ++i) to.at[i] = cuda::narrow<bf16>(cuda::widen(from.at[i]));
    return to;
  }
}

// A warp a row: each unit of it, converted.
template <class Unit, class ToUnit>
__global__ void __launch_bounds__(kThreads) copy_rows(const __grid_constant__ RowCopy a, int64_t rows) {
  take_turn();
  constexpr int kWarps = kThreads / 32;
  const int64_t units = a.row_bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < rows;
       row += static_cast<int64_t>(gridDim.x) * kWarps) {
    const std::byte* from_row = a.from;
    std::byte* to_row = a.to;
    int64_t rest = row;
#pragma unroll
    for (int d = 3; d >= 0; --d) {
      const int64_t i = rest % a.extents.data()[d];
      rest /= a.extents.data()[d];
      from_row += i * a.from_strides.data()[d], to_row += i * a.to_strides.data()[d];
    }
    const Unit* const __restrict__ from = reinterpret_cast<const Unit*>(from_row);
    ToUnit* const __restrict__ to = reinterpret_cast<ToUnit*>(to_row);
#pragma unroll 4
    for (int64_t i = threadIdx.x % 32; i < units; i += 32) to[i] = converted<ToUnit>(from[i]);
  }
}

__global__ void __launch_bounds__(kThreads)
    list_requests(LatentItem* items, int32_t requests, const int32_t* lengths, int64_t stride, int32_t kv_heads,
                  int32_t queries, int32_t most, bool causal) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= requests) return;
  const int32_t length = min(max(lengths[i / kv_heads * stride], 0), most);
  items[i] = {.request = static_cast<int32_t>(i),
              .q_begin = static_cast<int32_t>(i) * queries,
              .q_count = queries,
              .kv_begin = 0,
              .kv_end = length,
              .visible = causal ? length - queries : length - 1,
              .partial = -1};
}

struct PositionTable {
  int32_t* to;  // [request, KV head, most]
  const int32_t* table;
  int64_t table_stride;
  const int32_t* lengths;
  int64_t length_stride;
  int64_t count;  // of to
  int32_t most, page_size, kv_heads, page_rows;
};

// Which row of the cache, counted through its pages, a head of a position is.
__global__ void __launch_bounds__(kThreads) list_positions(const PositionTable a) {
  take_turn();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.count) return;
  const int32_t position = static_cast<int32_t>(i % a.most);
  const int64_t request = i / a.most / a.kv_heads;
  if (position >= a.lengths[request * a.length_stride]) return;
  const int32_t page = a.table[request * a.table_stride + position / a.page_size],
                head = static_cast<int32_t>(i / a.most % a.kv_heads);
  a.to[i] = page * a.page_rows + position % a.page_size * a.kv_heads + head;
}

struct SequenceList {
  ExpandedItem* items;
  int32_t count;
  const int32_t *q, *k;  // where each begins; null: all are equally long
  int64_t q_stride, k_stride;
  int32_t q_rows, k_rows;
  bool causal;
};

// Rows [begin, end) of sequence i.
__device__ int2 sequence_rows(const int32_t* begins, int64_t stride, int32_t rows, int32_t i, int32_t count) {
  if (!begins) return make_int2(rows / count * i, rows / count * (i + 1));
  const int32_t begin = min(max(begins[i * stride], 0), rows);
  return make_int2(begin, min(max(begins[(i + 1) * stride], begin), rows));
}

__global__ void __launch_bounds__(kThreads) list_sequences(const SequenceList a) {
  const int32_t i = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= a.count) return;
  const int2 q = sequence_rows(a.q, a.q_stride, a.q_rows, i, a.count),
             k = sequence_rows(a.k, a.k_stride, a.k_rows, i, a.count);
  a.items[i] = {.q_begin = q.x,
                .q_count = q.y - q.x,
                .k_begin = k.x,
                .k_count = k.y - k.x,
                .visible = a.causal ? (k.y - k.x) - (q.y - q.x) : ExpandedItem::everything(),
                .last = true};
}

__global__ void __launch_bounds__(kThreads)
    list_rows(SparseItem* item, SparseItem value, int32_t* rows, const int32_t* lengths, int64_t stride,
              int32_t queries, int32_t count, int32_t topk) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i == 0) *item = value;
  if (lengths && i < count) rows[i] = min(max(lengths[i / queries * stride], 0), topk);
}

struct LseForm {
  float* to;
  int64_t to_request, to_head, to_query;
  const float* from;
  int64_t from_row, from_head;
  int64_t heads, queries, count;
};

__global__ void __launch_bounds__(kThreads) form_lse(const LseForm a) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.count) return;
  const int64_t query = i % a.queries, head = i / a.queries % a.heads, request = i / a.queries / a.heads;
  const float x = a.from[(request * a.queries + query) * a.from_row + head * a.from_head];
  a.to[request * a.to_request + head * a.to_head + query * a.to_query] = x == -INFINITY ? INFINITY : x;
}

cuda::LaunchConfig grid_of(int64_t count) {
  if (count > int64_t{kThreads} * 0x7fffffff)
    throw UnsupportedError("device_attention: " + std::to_string(count) + " rows need too many blocks");
  return {.grid = dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)), .block = dim3(kThreads)};
}

void form(const Queue& queue, const View<float, Token, Head>& from, const View<float, Request, Head, Token>& to) {
  const LseForm a{.to = to.data(),
                  .to_request = to.stride<Request>(),
                  .to_head = to.stride<Head>(),
                  .to_query = to.stride<Token>(),
                  .from = from.data(),
                  .from_row = from.stride<Token>(),
                  .from_head = from.stride<Head>(),
                  .heads = to.extent<Head>(),
                  .queries = to.extent<Token>(),
                  .count = to.size()};
  cuda::launch(form_lse, grid_of(a.count), queue.stream(), kOp, "lse", "rows " + std::to_string(a.count), a);
}

__global__ void __launch_bounds__(kThreads) clear(unsigned* counters, int count) {
  take_turn();
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) counters[i] = 0;
}

// Counters that are 0, for Hopper's kernels; `room` for them where a stream or graph has none.
std::span<unsigned> counters_of(const Queue& queue, unsigned* room) {
  unsigned* at = cuda::call_counters(queue.device(), queue.stream());
  if (!at) {
    cuda::launch(clear, {.grid = dim3(1), .block = dim3(kThreads), .overlap = true}, queue.stream(), kOp, "counters",
                 "", room, cuda::kCallCounters);
    at = room;
  }
  return {at, size_t{cuda::kCallCounters}};
}

// numbers: e4m3 codes become bf16.
void copy(const Queue& queue, const RowCopy& a, bool numbers = false) {
  const int64_t rows = a.rows();
  if (rows == 0 || a.row_bytes == 0) return;
  // The largest unit that addresses, rows and the strides of dimensions that have any are multiples of.
  uint64_t bits =
      reinterpret_cast<uintptr_t>(a.from) | reinterpret_cast<uintptr_t>(a.to) | static_cast<uint64_t>(a.row_bytes);
  for (size_t d = 0; d < a.extents.size(); ++d)
    if (a.extents[d] > 1) bits |= static_cast<uint64_t>(a.from_strides[d]) | static_cast<uint64_t>(a.to_strides[d]);
  using Codes = cuda::Pack<fp8_e4m3, 4>;
  using Code = cuda::Pack<fp8_e4m3, 1>;
  const auto kernel =
      numbers          ? (bits % 4 == 0 ? copy_rows<Codes, cuda::Pack<bf16, 4>> : copy_rows<Code, cuda::Pack<bf16, 1>>)
      : bits % 16 == 0 ? copy_rows<uint4, uint4>
      : bits % 4 == 0  ? copy_rows<uint32_t, uint32_t>
      : bits % 2 == 0  ? copy_rows<uint16_t, uint16_t>
                       : copy_rows<uint8_t, uint8_t>;
  cuda::LaunchConfig config = cuda::strided(rows * 32, kThreads, int64_t{16} * queue.multiprocessors());
  config.overlap = true;
  cuda::launch(kernel, config, queue.stream(), kOp, "rows", "rows " + std::to_string(rows), a, rows);
}

// Gives a call its queries and says whether Hopper's kernels serve it: they need dense ones, which the others do not.
template <class Args>
bool place(const Queue& queue, const PlacedQueries& q, Args& args, bool hopper_may) {
  args.q = q.numbers ? *q.numbers : q.copy ? *q.copy : *q.there;
  if (hopper_may && cuda::sm90::serves(cuda::model_of(queue), args)) {
    if (q.numbers) copy(queue, q.how_numbers, true);
    else if (q.copy) copy(queue, q.how);
    return true;
  }
  args.q = q.there ? *q.there : *q.copy;
  if (!q.there) copy(queue, q.how);
  return false;
}

}  // namespace

size_t workspace_bytes(const PagedAttention& a) { return Paged(a, nullptr).cut.used; }
size_t workspace_bytes(const ListAttention& a) { return Lists(a, nullptr).cut.used; }
size_t workspace_bytes(const SequenceAttention& a) { return Sequences(a, nullptr).cut.used; }

unsigned long long capture_of(int device, void* native) {
  const OnDevice on({DeviceKind::cuda, device});
  cudaStreamCaptureStatus status{};
  unsigned long long capture = 0;
  cuda::check(cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(native), &status, &capture), kOp, "capture");
  return status == cudaStreamCaptureStatusActive ? capture : 0;
}

void attend(const PagedAttention& a, const CallerStream& at) {
  const OnDevice on({DeviceKind::cuda, at.device});
  const Paged m(a, at.workspace);
  Queue queue(at.device, at.native, Queue::Bare::queue);
  const int64_t requests = m.lse.extent<Request>();
  const int32_t most = most_positions(a), queries = static_cast<int32_t>(a.q.extent<Token>());
  // What launches are sized by: every request as long as its table is.
  std::vector<LatentItem> bounds(static_cast<size_t>(requests));
  for (int32_t r = 0; r < static_cast<int32_t>(requests); ++r)
    bounds[static_cast<size_t>(r)] = {
        .request = r, .q_begin = r * queries, .q_count = queries, .kv_end = most, .visible = most};
  CacheView cache = a.cache;
  View<const int32_t, Request, Page> table = a.block_table;
  if (a.kv_heads > 1) {
    cache = rows_as_pages(kOp, a.cache);
    table = {m.table, {requests, most}};
    if (table.size() > 0) {
      cuda::LaunchConfig config = grid_of(table.size());
      config.overlap = true;
      cuda::launch(list_positions, config, queue.stream(), kOp, "positions", "requests " + std::to_string(requests),
                   PositionTable{.to = m.table,
                                 .table = a.block_table.data(),
                                 .table_stride = a.block_table.stride<Request>(),
                                 .lengths = a.lengths.data(),
                                 .length_stride = a.lengths.stride<Request>(),
                                 .count = table.size(),
                                 .most = most,
                                 .page_size = static_cast<int32_t>(a.cache.spec.page_size / a.kv_heads),
                                 .kv_heads = static_cast<int32_t>(a.kv_heads),
                                 .page_rows = static_cast<int32_t>(a.cache.page_stride / cache.page_stride)});
    }
  }
  ops::AttendLatentArgs args{.cache = cache,
                             .block_table = {table, table.data()},
                             .items = {bounds, m.items},
                             .scale = a.scale,
                             .out = m.out,
                             .lse = m.rows_lse,
                             .scratch = {m.scratch, kScratch}};
  // Scales that the host does not know are for Hopper's kernels over fp8 caches alone.
  const bool unknown = a.q_scale || a.k_scale;
  const bool hopper = place(queue, m.q, args, !unknown || a.cache.spec.format == CacheFormat::fp8),
             by_lengths = hopper && a.kv_heads == 1;
  if (!by_lengths)
    cuda::launch(list_requests, grid_of(requests), queue.stream(), kOp, "items", "requests " + std::to_string(requests),
                 m.items, static_cast<int32_t>(requests), a.lengths.data(), a.lengths.stride<Request>(),
                 static_cast<int32_t>(a.kv_heads), queries, most, a.causal);
  if (hopper) {
    cuda::sm90::CallerArrays arrays{
        .lse = m.lse, .causal = a.causal, .counters = counters_of(queue, m.counters), .schedule = at.schedule};
    if (by_lengths) arrays.lengths[0] = a.lengths;
    if (unknown) arrays.q_scale = a.q_scale, arrays.k_scale = a.k_scale;
    if (a.k_scale) args.cache.spec.k_scale = 1;  // that one in its place
    cuda::sm90::attend_latent(queue, args, &arrays);
  } else {
    cuda::generic::attend_positions(queue, args, {.q = a.q_scale, .k = a.k_scale});
    form(queue, m.rows_lse, m.lse);
  }
  copy(queue, m.back);
}

void attend(const ListAttention& a, const CallerStream& at) {
  const OnDevice on({DeviceKind::cuda, at.device});
  const Lists m(a, at.workspace);
  Queue queue(at.device, at.native, Queue::Bare::queue);
  const int64_t queries = a.q.extent<Token>(), rows = a.q.extent<Request>() * queries, heads = a.q.extent<Head>();
  for (const RowCopy& c : m.slot_copies) copy(queue, c);
  std::vector<ops::SparseSource> sources;
  int64_t keys = 0;
  for (size_t i = 0; i < a.sources.size(); ++i)
    sources.push_back({a.sources[i].cache, m.slots[i], {}}), keys += m.slots[i].extent<Topk>();
  const SparseItem item{
      .q_begin = 0, .q_count = static_cast<int32_t>(rows), .k_begin = 0, .k_end = static_cast<int32_t>(keys)};
  ops::AttendSparseArgs args{.sources = sources,
                             .items = {{&item, 1}, m.item},
                             .scale = a.scale,
                             .sinks = {{a.sinks.data(), a.sinks ? static_cast<size_t>(heads) : 0}, a.sinks.data()},
                             .out = {a.out.dtype(), a.out.data(), {rows, heads, a.out.extent<Value>()}},
                             .lse = m.lse,
                             .max_logits = a.max_logits,
                             .scratch = {m.scratch, kScratch}};
  if (place(queue, m.q, args, true)) {
    cuda::sm90::CallerArrays arrays{.lse = a.lse, .counters = counters_of(queue, m.counters)};
    for (size_t i = 0; i < a.sources.size(); ++i) arrays.lengths[i] = a.sources[i].lengths;
    return cuda::sm90::attend_sparse(queue, args, &arrays);
  }
  for (size_t i = 0; i < a.sources.size(); ++i) {
    const SlotLists& s = a.sources[i];
    int32_t* const lengths = m.lengths + static_cast<int64_t>(i) * rows;
    if (i == 0 || s.lengths)
      cuda::launch(list_rows, grid_of(rows), queue.stream(), kOp, "items", "rows " + std::to_string(rows), m.item, item,
                   lengths, s.lengths.data(), s.lengths.stride<Request>(), static_cast<int32_t>(queries),
                   static_cast<int32_t>(rows), static_cast<int32_t>(s.slots.extent<Topk>()));
    if (s.lengths) sources[i].lengths = {{lengths, static_cast<size_t>(rows)}, lengths};
  }
  cuda::generic::attend_lists(queue, args);
  form(queue, m.lse, a.lse);
}

void attend(const SequenceAttention& a, const CallerStream& at) {
  const OnDevice on({DeviceKind::cuda, at.device});
  const Sequences m(a, at.workspace);
  Queue queue(at.device, at.native, Queue::Bare::queue);
  const int64_t rows = a.q.extent<Token>(), keys = a.k.extent<Key>();
  cuda::launch(list_sequences, grid_of(a.sequences), queue.stream(), kOp, "items",
               "sequences " + std::to_string(a.sequences),
               SequenceList{.items = m.items,
                            .count = static_cast<int32_t>(a.sequences),
                            .q = a.q_begins.data(),
                            .k = a.k_begins.data(),
                            .q_stride = a.q_begins.stride<Request>(),
                            .k_stride = a.k_begins.stride<Request>(),
                            .q_rows = static_cast<int32_t>(rows),
                            .k_rows = static_cast<int32_t>(keys),
                            .causal = a.causal});
  // What launches are sized by: however so many rows are cut into sequences, these have as many tiles or more.
  std::vector<ExpandedItem> bounds(static_cast<size_t>(a.sequences), ExpandedItem{.q_count = 1});
  bounds[0].q_count = static_cast<int32_t>(rows);
  const auto args = [&](const auto& q, const auto& k, const auto& v) {
    return ops::AttendExpandedArgs{.q = q,
                                   .k_nope = {k.dtype(), k.data(), k.extents(), k.strides()},
                                   .k_pe = {k.dtype(), k.data(), {keys, 0}},
                                   .v = v,
                                   .items = {bounds, m.items},
                                   .scale = a.scale,
                                   .out = a.out,
                                   .lse = a.lse};
  };
  const ops::AttendExpandedArgs aligned = args(m.q.rows, m.k.rows, m.v.rows);
  if (cuda::sm90::serves(cuda::model_of(queue), aligned)) {
    for (const RowCopy& how : {m.q.how, m.k.how, m.v.how}) copy(queue, how);
    const std::span<unsigned> counters = counters_of(queue, m.counters);
    ops::for_each_group(aligned, [&](const ops::AttendExpandedArgs& part) {
      cuda::sm90::attend_expanded(queue, part, counters.data());
    });
  } else {
    ops::for_each_group(args(a.q, a.k, a.v),
                        [&](const ops::AttendExpandedArgs& part) { cuda::generic::attend_flat(queue, part); });
  }
}

}  // namespace mla::gpu
