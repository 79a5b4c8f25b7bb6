// A kernel before attention turns the caller's lengths into work items; where Hopper's kernels do not serve a call, one
// after it brings lse into the interface's form. Attention itself is the ops' own kernels.
#include <algorithm>
#include <cmath>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/generic/attention/cache_attention.hpp"
#include "backend/cuda/gpu_model.hpp"
#include "backend/cuda/sm90/ops.hpp"
#include "core/device_attention.hpp"
#include "core/gpu.hpp"

namespace mla::gpu {
namespace {

using cuda::kScratch;
using cuda::Queue;

constexpr int kThreads = 256;
constexpr int64_t kCounters = Queue::kCounters;
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

// lse by rows, for kernels that know no requests: the caller's own where its strides allow it.
View<float, Token, Head> lse_rows(const View<float, Request, Head, Token>& lse, int64_t queries, Cut& cut) {
  const int64_t rows = lse.extent<Request>() * queries, heads = lse.extent<Head>();
  if (queries == 1) return {lse.data(), {rows, heads}, {lse.stride<Request>(), lse.stride<Head>()}};
  return {cut.take<float>(rows * heads), {rows, heads}};
}

struct Paged {
  explicit Paged(const PagedAttention& a, std::byte* at) : cut{at} {
    items = cut.take<LatentItem>(a.lengths.extent<Request>());
    counters = cut.take<unsigned>(kCounters);
    lse = lse_rows(a.lse, a.queries, cut);
    scratch = cut.take<std::byte>(kScratch);
  }
  Cut cut;
  LatentItem* items;
  unsigned* counters;
  View<float, Token, Head> lse;
  std::byte* scratch;
};

struct Lists {
  explicit Lists(const ListAttention& a, std::byte* at) : cut{at} {
    item = cut.take<SparseItem>(1);
    counters = cut.take<unsigned>(kCounters);
    lengths = cut.take<int32_t>(static_cast<int64_t>(a.sources.size()) * a.q.extent<Token>());
    lse = lse_rows(a.lse, a.queries, cut);
    scratch = cut.take<std::byte>(kScratch);
  }
  Cut cut;
  SparseItem* item;
  unsigned* counters;
  int32_t* lengths;  // [sources][rows]
  View<float, Token, Head> lse;
  std::byte* scratch;
};

__global__ void __launch_bounds__(kThreads)
    list_requests(LatentItem* items, int32_t requests, const int32_t* lengths, int64_t stride, int32_t queries,
                  int32_t most, bool causal, unsigned* counters) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < kCounters) counters[i] = 0;
  if (i >= requests) return;
  const int32_t length = min(max(lengths[i * stride], 0), most);
  items[i] = {.request = static_cast<int32_t>(i),
              .q_begin = static_cast<int32_t>(i) * queries,
              .q_count = queries,
              .kv_begin = 0,
              .kv_end = length,
              .visible = causal ? length - queries : length - 1,
              .partial = -1};
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

// An array that is on the device already: ops take the address for the host's and find it again.
template <class T>
std::span<const T> known(Queue& queue, const T* data, int64_t count) {
  const auto* at = reinterpret_cast<const std::byte*>(data);
  if (count > 0) queue.publish({&queue, at, static_cast<size_t>(count) * sizeof(T), at});
  return {data, static_cast<size_t>(count)};
}

}  // namespace

size_t workspace_bytes(const PagedAttention& a) { return Paged(a, nullptr).cut.used; }
size_t workspace_bytes(const ListAttention& a) { return Lists(a, nullptr).cut.used; }

void attend(const PagedAttention& a, const CallerStream& at) {
  const OnDevice on({DeviceKind::cuda, at.device});
  const Paged m(a, at.workspace);
  Queue queue(at.device, at.native, m.counters);
  const int64_t requests = a.lengths.extent<Request>(), columns = a.block_table.extent<Page>();
  const int32_t most =
      static_cast<int32_t>(std::min<int64_t>(columns * a.cache.spec.page_size, std::numeric_limits<int32_t>::max()));
  cuda::launch(list_requests, grid_of(std::max(requests, kCounters)), queue.stream(), kOp, "items",
               "requests " + std::to_string(requests), m.items, static_cast<int32_t>(requests), a.lengths.data(),
               a.lengths.stride<Request>(), static_cast<int32_t>(a.queries), most, a.causal, m.counters);
  // What launches are sized by: every request as long as its table is.
  std::vector<LatentItem> bounds(static_cast<size_t>(requests));
  for (int32_t r = 0; r < static_cast<int32_t>(requests); ++r)
    bounds[static_cast<size_t>(r)] = {.request = r,
                                      .q_begin = r * static_cast<int32_t>(a.queries),
                                      .q_count = static_cast<int32_t>(a.queries),
                                      .kv_end = most,
                                      .visible = most};
  queue.publish({&queue, reinterpret_cast<const std::byte*>(bounds.data()), bounds.size() * sizeof(LatentItem),
                 reinterpret_cast<const std::byte*>(m.items)});
  if (columns > 0) known(queue, a.block_table.data(), (requests - 1) * a.block_table.stride<Request>() + columns);
  const ops::AttendLatentArgs args{.q = a.q,
                                   .cache = a.cache,
                                   .block_table = a.block_table,
                                   .items = bounds,
                                   .scale = a.scale,
                                   .out = a.out,
                                   .lse = m.lse,
                                   .scratch = {m.scratch, kScratch}};
  // Hopper's kernels take neither fp8 queries nor a scale that the host does not know.
  if (!a.q_scale && !a.k_scale && cuda::sm90::serves(cuda::model_of(queue), args)) {
    const cuda::sm90::CallerArrays arrays{.lse = a.lse};
    return cuda::sm90::attend_latent(queue, args, &arrays);
  }
  cuda::generic::attend_positions(queue, args, {.q = a.q_scale, .k = a.k_scale});
  form(queue, m.lse, a.lse);
}

void attend(const ListAttention& a, const CallerStream& at) {
  const OnDevice on({DeviceKind::cuda, at.device});
  const Lists m(a, at.workspace);
  Queue queue(at.device, at.native, m.counters);
  const int64_t rows = a.q.extent<Token>(), heads = a.q.extent<Head>();
  std::vector<ops::SparseSource> sources;
  int64_t keys = 0;
  for (const SlotLists& s : a.sources) sources.push_back({s.cache, s.slots, {}}), keys += s.slots.extent<Topk>();
  const SparseItem item{
      .q_begin = 0, .q_count = static_cast<int32_t>(rows), .k_begin = 0, .k_end = static_cast<int32_t>(keys)};
  const ops::AttendSparseArgs args{.q = a.q,
                                   .sources = sources,
                                   .items = {&item, 1},
                                   .scale = a.scale,
                                   .sinks = a.sinks ? known(queue, a.sinks.data(), heads) : std::span<const float>{},
                                   .out = a.out,
                                   .lse = m.lse,
                                   .max_logits = a.max_logits,
                                   .scratch = {m.scratch, kScratch}};
  if (cuda::sm90::serves(cuda::model_of(queue), args)) {
    cuda::sm90::CallerArrays arrays{.lse = a.lse, .lengths = {}};
    for (size_t i = 0; i < a.sources.size(); ++i) arrays.lengths[i] = a.sources[i].lengths;
    return cuda::sm90::attend_sparse(queue, args, &arrays);
  }

  queue.publish(
      {&queue, reinterpret_cast<const std::byte*>(&item), sizeof item, reinterpret_cast<const std::byte*>(m.item)});
  for (size_t i = 0; i < a.sources.size(); ++i) {
    const SlotLists& s = a.sources[i];
    int32_t* const lengths = m.lengths + static_cast<int64_t>(i) * rows;
    if (i == 0 || s.lengths)
      cuda::launch(list_rows, grid_of(rows), queue.stream(), kOp, "items", "rows " + std::to_string(rows), m.item, item,
                   lengths, s.lengths.data(), s.lengths.stride<Request>(), static_cast<int32_t>(a.queries),
                   static_cast<int32_t>(rows), static_cast<int32_t>(s.slots.extent<Topk>()));
    if (s.lengths) sources[i].lengths = known(queue, static_cast<const int32_t*>(lengths), rows);
  }
  cuda::generic::attend_lists(queue, args);
  form(queue, m.lse, a.lse);
}

}  // namespace mla::gpu
