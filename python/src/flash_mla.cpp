// The calls behind mla.flash_mla: attention over a paged cache whose layout follows from the array that holds it. On
// the CPU lengths and lists are read and planned here; on a GPU they stay where they are (core/device_attention.hpp).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "core/even_stride.hpp"
#include "core/row_pages.hpp"
#include "mla/plan.hpp"
#include "place.hpp"

namespace mla::python {
namespace {

constexpr std::string_view kOp = "flash_mla";
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Optional = std::optional<nb::object>;

// Bytes a token of the formats that bring their own scales.
constexpr int64_t kDsMlaBytes = 656, kDsV4Bytes = 584;

// A cache of rows that `entry` query elements meet; `value` of them are the value.
CacheSpec spec_of(const Tensor& t, int64_t row, int64_t page_size, int64_t entry, int64_t value) {
  CacheSpec spec{.format = CacheFormat::bf16, .latent = value, .rope = entry - value, .page_size = page_size};
  const bool bytes = t.element() == Element::byte || t.element() == Element::fp8_e4m3;
  if (bytes && row == kDsMlaBytes) {
    spec.format = CacheFormat::fp8_ds_mla;
  } else if (bytes && row == kDsV4Bytes) {
    spec.format = CacheFormat::fp8_ds_v4;
    spec.latent = 448;
    spec.rope = 64;
  } else {
    if (t.element() == Element::byte)
      throw ShapeError(t.name() + " is " + t.element_text() + " with rows of " + std::to_string(row) +
                       " bytes, formats of such elements have 656 or 584");
    ops::require_equal(kOp, t.name() + "'s row", row, "q's head dim", entry);
    switch (t.dtype()) {
      case Dtype::f32: spec.format = CacheFormat::f32; break;
      case Dtype::bf16: spec.format = CacheFormat::bf16; break;
      case Dtype::f16: spec.format = CacheFormat::f16; break;
      case Dtype::fp8_e4m3: spec.format = CacheFormat::fp8; break;
    }
  }
  spec.validate();
  ops::require_equal(kOp, "q's head dim", entry, t.name() + "'s entry", spec.entry());
  ops::require_equal(kOp, "value width", value, t.name() + "'s", spec.value_width());
  return spec;
}

// [blocks, page, KV heads, row], or a page of one row a block as [rows, 1, row]. The view's pages count rows, those of
// the KV heads of a position one after another.
CacheView cache_of(const Tensor& t, int64_t entry, int64_t value) {
  const bool paged = t.rank() != 3;
  if (paged) t.require_rank(4, "[blocks, page, KV heads, row]");
  const size_t last = t.rank() - 1;
  const int64_t heads = t.extent(last - 1), row = t.extent(last);
  ops::require_range(kOp, t.name() + "'s KV heads", heads, 1, int64_t{1} << 31);
  const int64_t positions = paged ? t.extent(1) : 1;
  ops::require_range(kOp, t.name() + "'s page size", positions, 1, (int64_t{1} << 31) / heads);
  const int64_t page_size = positions * heads;
  const CacheSpec spec = spec_of(t, row, page_size, entry, value);
  const auto require_stride = [&](std::string_view what, int64_t found, int64_t needed) {
    if (found != needed)
      throw ShapeError(t.name() + ": " + std::string(what) + " have stride " + std::to_string(found) + ", " +
                       std::to_string(needed) + " is needed");
  };
  if (row > 1) require_stride("a row's elements", t.stride(last), 1);
  if (heads > 1) require_stride("KV heads", t.stride(last - 1), row);
  if (positions > 1) require_stride("rows of a page", t.stride(1), heads * row);
  const int64_t stride = t.extent(0) > 1 ? t.stride(0) : page_size * row;
  if (stride < page_size * row)
    throw ShapeError(t.name() + ": pages have stride " + std::to_string(stride) + ", at least " +
                     std::to_string(page_size * row) + " is needed");
  ops::require_range(kOp, t.name() + "'s pages", t.extent(0), 0, (int64_t{1} << 31) / page_size + 1);
  return {spec, t.data(), t.extent(0), static_cast<size_t>(stride * t.element_bytes())};
}

// [batch, queries, heads, width] of an array, or [rows, heads, width] as rows of one query each.
struct FourDims {
  explicit FourDims(const Tensor& t) {
    if (t.rank() != 3) t.require_rank(4, "[batch, queries, heads, head dim]");
    for (size_t i = 0; i < 4; ++i) {
      const size_t from = t.rank() == 4 || i == 0 ? i : i - 1;
      const bool single = t.rank() == 3 && i == 1;
      extents[i] = single ? 1 : t.extent(from), strides[i] = single ? 0 : t.stride(from);
    }
  }
  std::array<int64_t, 4> extents, strides;
};

// What both forms share: queries, outputs and where they are computed. Ops of the CPU write f32; bf16 follows from it.
// Ops number queries [request, KV head, query] through as tokens, of the heads that a KV head serves.
struct Heads {
  AnyView<Request, Token, Head, Entry> q;
  AnyMutableView<Request, Token, Head, Value> out;
  int64_t requests = 0, kv_heads = 1, queries = 0, heads = 0, value = 0, entry = 0;

  int64_t tokens() const { return requests * kv_heads * queries; }
  /// Does the op write the caller's out?
  bool direct() const { return out.dtype() == Dtype::f32 && (kv_heads == 1 || queries == 1); }
};

Heads heads_of(const Tensor& q, const Tensor& out, int64_t kv_heads) {
  out.require_device(q.device());
  const FourDims from(q), to(out);
  if (q.device().kind == DeviceKind::cpu) {
    ops::require_dtype(kOp, "q", q.dtype(), {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3});
    ops::require_dtype(kOp, "out", out.dtype(), {Dtype::f32, Dtype::bf16});
  }
  ops::require_dtype(kOp, "out", out.dtype(), {Dtype::f32, Dtype::bf16, Dtype::f16});
  Heads h{.q = {q.dtype(), q.data(), from.extents, from.strides},
          .out = {out.dtype(), out.data(), to.extents, to.strides},
          .requests = from.extents[0],
          .kv_heads = kv_heads,
          .queries = from.extents[1],
          .value = to.extents[3],
          .entry = from.extents[3]};
  if (h.entry > 1 && from.strides[3] != 1)
    throw ShapeError("q: head dim has stride " + std::to_string(from.strides[3]) + ", 1 is needed");
  ops::require_equal(kOp, "out's batch", to.extents[0], "q's", from.extents[0]);
  ops::require_equal(kOp, "out's queries", to.extents[1], "q's", from.extents[1]);
  ops::require_equal(kOp, "out's heads", to.extents[2], "q's", from.extents[2]);
  h.out = {out.dtype(), out.data(), to.extents};
  // What the dimension of a single query strides by is nobody's.
  for (size_t i = 0; i < 4 && h.out.size() > 0; ++i)
    if (to.extents[i] > 1 && to.strides[i] != h.out.strides()[i]) throw ShapeError("out: must lie dense");
  if (from.extents[2] % kv_heads != 0)
    throw ShapeError("flash_mla: q has " + std::to_string(from.extents[2]) + " heads, k_cache's " +
                     std::to_string(kv_heads) + " KV heads must divide them");
  h.heads = from.extents[2] / kv_heads;
  ops::require_range(kOp, "q's rows", h.tokens(), 0, int64_t{1} << 31);
  return h;
}

// The queries as ops of the CPU number them: where they lie, if that is evenly, or copied.
AnyView<Token, Head, Entry> numbered(const Heads& h, std::vector<std::byte>& copy) {
  const std::array<int64_t, 4> extents{h.requests, h.kv_heads, h.queries, h.heads};
  const int64_t head = h.q.stride<Head>();
  const std::array<int64_t, 4> strides{h.q.stride<Request>(), h.heads * head, h.q.stride<Token>(), head};
  const auto even = even_stride(extents, strides, 2, h.heads * h.entry);
  if (even) return {h.q.dtype(), h.q.data(), {h.tokens(), h.heads, h.entry}, {*even, head, 1}};
  const size_t bytes = static_cast<size_t>(h.entry) * size_of(h.q.dtype());
  copy.resize(static_cast<size_t>(h.tokens() * h.heads) * bytes);
  std::byte* to = copy.data();
  for (int64_t r = 0; r < h.requests; ++r)
    for (int64_t kv = 0; kv < h.kv_heads; ++kv)
      for (int64_t i = 0; i < h.queries; ++i)
        for (int64_t j = 0; j < h.heads; ++j, to += bytes) std::memcpy(to, h.q.at(r, i, kv * h.heads + j, 0), bytes);
  return {h.q.dtype(), copy.data(), {h.tokens(), h.heads, h.entry}};
}

struct Memory {
  Memory(std::byte* at, const Heads& h, int64_t partial_rows, size_t scratch_per_worker, int workers) : cut(at) {
    out = {h.direct() ? static_cast<float*>(h.out.data()) : cut.take<float>(h.tokens() * h.heads * h.value),
           {h.tokens(), h.heads, h.value}};
    lse = {cut.take<float>(h.tokens() * h.heads), {h.tokens(), h.heads}};
    max_logits = {cut.take<float>(h.tokens() * h.heads), {h.tokens(), h.heads}};
    partial_out = {cut.take<float>(partial_rows * h.heads * h.value), {partial_rows, h.heads, h.value}};
    partial_lse = {cut.take<float>(partial_rows * h.heads), {partial_rows, h.heads}};
    partial_max = {cut.take<float>(partial_rows * h.heads), {partial_rows, h.heads}};
    scratch = {cut.take<std::byte>(static_cast<int64_t>(scratch_per_worker) * workers), scratch_per_worker};
  }
  Cut cut;
  View<float, Token, Head, Value> out;
  View<float, Token, Head> lse, max_logits;
  View<float, Partial, Head, Value> partial_out;
  View<float, Partial, Head> partial_lse, partial_max;
  ops::Scratch scratch;
};

Memory memory_for(PyStream& stream, const Heads& h, int64_t partial_rows) {
  const size_t scratch =
      backend::backend(stream.device())
          .scratch_per_worker({.heads = h.heads, .latent = h.value, .rope = h.entry, .value = h.value});
  const size_t bytes = Memory(nullptr, h, partial_rows, scratch, stream.threads()).cut.used();
  return Memory(stream.memory(bytes).data(), h, partial_rows, scratch, stream.threads());
}

// A row's results in the caller's form: bf16, lse +inf for a row that sees nothing, and their own strides.
void finish(PyStream& stream, const Heads& h, const Memory& m, View<float, Request, Head, Token> lse,
            View<float, Token, Head> max_logits) {
  stream.stream.pool().run(h.tokens(), [&](int64_t token, int) {
    const int64_t request = token / h.queries / h.kv_heads, query = token % h.queries,
                  first = token / h.queries % h.kv_heads * h.heads;
    for (int64_t head = 0; head < h.heads; ++head) {
      const float l = m.lse(token, head);
      lse(request, first + head, query) = l == -kInfinity ? kInfinity : l;
      if (max_logits) max_logits(token, head) = m.max_logits(token, head);
    }
    if (h.direct()) return;
    const float* x = &m.out(token, 0, 0);
    void* const to = h.out.at(request, query, first, 0);
    if (h.out.dtype() == Dtype::f32) {
      std::copy_n(x, h.heads * h.value, static_cast<float*>(to));
    } else {
      for (int64_t i = 0; i < h.heads * h.value; ++i) static_cast<bf16*>(to)[i] = to_bf16(x[i]);
    }
  });
}

View<float, Request, Head, Token> lse_view(const Tensor& t, int64_t requests, int64_t heads, int64_t queries) {
  const AnyMutableView<Request, Head, Token> v = t.mutable_view<Request, Head, Token>();
  ops::require_equal(kOp, "lse's batch", v.extent<Request>(), "q's", requests);
  ops::require_equal(kOp, "lse's heads", v.extent<Head>(), "q's", heads);
  ops::require_equal(kOp, "lse's queries", v.extent<Token>(), "q's", queries);
  return v.as<float>();
}

// [rows, heads] of rows with one query each.
View<float, Request, Head, Token> one_query(const Tensor& t, int64_t rows, int64_t heads) {
  const View<float, Request, Head> v = t.mutable_view<Request, Head>().as<float>();
  ops::require_equal(kOp, "lse's rows", v.extent<Request>(), "q's", rows);
  ops::require_equal(kOp, "lse's heads", v.extent<Head>(), "q's", heads);
  return {v.data(), {rows, heads, 1}, {v.stride<Request>(), v.stride<Head>(), 1}};
}

// FlashMLA's descale_q and descale_k: one f32 number, on q's device.
const float* descale_of(std::optional<Tensor>& t, const Optional& array, std::string_view name, Device device) {
  if (!array) return nullptr;
  t.emplace(*array, name, Access::read);
  t->require_device(device);
  int64_t numbers = 1;
  for (size_t i = 0; i < t->rank(); ++i) numbers *= t->extent(i);
  if (t->element() != Element::f32 || numbers != 1)
    throw ShapeError(t->name() + " is " + t->element_text() + " " + t->shape_text() + ", one f32 number is needed");
  const auto* at = reinterpret_cast<const float*>(t->data());
  if (device.kind == DeviceKind::cpu && !(std::isnormal(*at) && *at > 0))
    throw InputError(t->name() + ": is " + std::to_string(*at) + ", a positive number is needed");
  return at;
}

// Where rows_as_pages() has the rows of each head of a position: a table of [request, KV head] by position.
View<const int32_t, Request, Page> by_kv_head(std::vector<int32_t>& memory, const CacheView& cache,
                                              const View<const int32_t, Request, Page>& table,
                                              const View<const int32_t, Request>& lengths, int64_t kv_heads) {
  const int64_t requests = lengths.extent<Request>(), positions = cache.spec.page_size / kv_heads;
  const auto page_rows = static_cast<int64_t>(cache.page_stride / rows_as_pages(kOp, cache).page_stride);
  int64_t longest = 0;
  for (int64_t r = 0; r < requests; ++r) longest = std::max<int64_t>(longest, lengths(r));
  memory.resize(static_cast<size_t>(requests * kv_heads * longest));
  for (int64_t r = 0; r < requests; ++r)
    for (int64_t p = 0; p < lengths(r); ++p) {
      const int64_t page = table(r, p / positions);
      ops::require_range(kOp, "page id", page, 0, cache.pages);
      for (int64_t kv = 0; kv < kv_heads; ++kv)
        memory[static_cast<size_t>((r * kv_heads + kv) * longest + p)] =
            static_cast<int32_t>(page * page_rows + p % positions * kv_heads + kv);
    }
  return {memory.data(), {requests * kv_heads, longest}};
}

void dense(nb::handle stream_object, nb::handle q_array, nb::handle cache_array, nb::handle table_array,
           nb::handle lengths_array, float scale, bool causal, nb::handle out_array, nb::handle lse_array,
           const Optional& descale_q, const Optional& descale_k, Schedule* schedule, nb::handle allocate) {
  const Tensor q(q_array, "q", Access::read), cache_t(cache_array, "k_cache", Access::read),
      table_t(table_array, "block_table", Access::read), lengths_t(lengths_array, "cache_seqlens", Access::read),
      out(out_array, "out", Access::write), lse_t(lse_array, "lse", Access::write);
  q.require_rank(4, "[batch, queries, heads, head dim]");
  out.require_rank(4, "[batch, queries, heads, value]");
  CacheView cache = cache_of(cache_t, q.extent(3), out.extent(3));
  const int64_t positions = cache_t.rank() == 3 ? 1 : cache_t.extent(1);  // of a page
  const Heads h = heads_of(q, out, cache.spec.page_size / positions);
  for (const Tensor* t : {&cache_t, &table_t, &lengths_t, &lse_t}) t->require_device(q.device());
  const int64_t requests = h.requests;
  const View<float, Request, Head, Token> lse = lse_view(lse_t, requests, q.extent(2), h.queries);
  if (h.kv_heads > 1) rows_as_pages(kOp, cache);
  std::optional<Tensor> q_scale_t, k_scale_t;
  const float *q_scale = descale_of(q_scale_t, descale_q, "descale_q", q.device()),
              *k_scale = descale_of(k_scale_t, descale_k, "descale_k", q.device());
  if (q_scale && q.element() != Element::fp8_e4m3)
    throw UnsupportedError("descale_q: q is " + q.element_text() + ", fp8 e4m3 queries have one");
  if (k_scale && cache.spec.format != CacheFormat::fp8)
    throw UnsupportedError("descale_k: k_cache is " + std::string(to_string(cache.spec.format)) +
                           ", caches of fp8 e4m3 rows of q's head dim have one");
  const auto table = table_t.int32_view<Request, Page>();
  ops::require_equal(kOp, "block_table's batch", table.extent<Request>(), "q's", requests);
  const auto given = lengths_t.int32_view<Request>();
  ops::require_equal(kOp, "cache_seqlens length", given.extent<Request>(), "q's batch", requests);
  const Place place{kOp, stream_object, allocate, schedule};
  if (h.tokens() == 0 || h.heads == 0) return;

  if (q.device().kind == DeviceKind::cuda) {
    ops::require_dense<Page>(kOp, "block_table", table);
    const int64_t columns = table.extent<Page>(), stride = requests > 1 ? table.stride<Request>() : columns;
    return place.run(gpu::PagedAttention{.q = h.q,
                                         .cache = cache,
                                         .kv_heads = h.kv_heads,
                                         .block_table = {table.data(), {requests, columns}, {stride, 1}},
                                         .lengths = given,
                                         .causal = causal,
                                         .scale = scale,
                                         .q_scale = q_scale,
                                         .k_scale = k_scale,
                                         .out = h.out,
                                         .lse = lse},
                     q.device());
  }
  if (k_scale) cache.spec.k_scale = *k_scale;

  PyStream& stream = place.cpu(q);
  const int64_t most = std::min<int64_t>(table.extent<Page>() * positions, (int64_t{1} << 31) - 1);
  for (int64_t r = 0; r < requests; ++r) ops::require_range(kOp, "cache_seqlens entry", given(r), 0, most + 1);
  std::vector<int32_t> kv_table;
  View<const int32_t, Request, Page> rows_table = table;
  if (h.kv_heads > 1) rows_table = by_kv_head(kv_table, cache, table, given, h.kv_heads);
  std::vector<LatentRows> rows;
  for (int64_t r = 0; r < requests * h.kv_heads; ++r) {
    // Causal queries are a sequence's last.
    const int64_t length = given(r / h.kv_heads);
    rows.push_back({static_cast<int32_t>(r), static_cast<int32_t>(r * h.queries), static_cast<int32_t>(h.queries),
                    causal ? length - h.queries : length - 1, length});
  }
  std::vector<std::byte> copy;
  const Turn turn(stream);
  const LatentWork work = plan_latent(rows, SplitPolicy::fast);
  const Memory m = memory_for(stream, h, work.partial_rows);
  ops::run(stream.stream, ops::AttendLatentArgs{.q = numbered(h, copy),
                                                .q_scale = q_scale ? *q_scale : 1.0f,
                                                .cache = h.kv_heads > 1 ? rows_as_pages(kOp, cache) : cache,
                                                .block_table = rows_table,
                                                .items = work.items,
                                                .scale = scale,
                                                .out = m.out,
                                                .lse = m.lse,
                                                .partial_out = m.partial_out,
                                                .partial_lse = m.partial_lse,
                                                .scratch = m.scratch});
  if (!work.splits.empty())
    ops::run(stream.stream, ops::MergeSplitsArgs{m.partial_out, m.partial_lse, work.splits, m.out, m.lse});
  finish(stream, h, m, lse, {});
}

// A cache and the slots chosen from it, [.., topk], with the rows' lengths given once a request or not at all.
struct Source {
  Source(nb::handle cache_array, std::string_view cache_name, nb::handle slots_array, const Optional& lengths_array,
         std::string_view prefix, const Heads& h, int64_t requests, Device device)
      : cache_t(cache_array, cache_name, Access::read),
        slots_t(slots_array, std::string(prefix) + "indices", Access::read) {
    slots_t.require_rank(3, "[batch, queries, topk]");
    for (const Tensor* t : {&cache_t, &slots_t}) t->require_device(device);
    cache = cache_of(cache_t, h.entry, h.value);
    if (const int64_t kv = cache_t.extent(cache_t.rank() - 2); kv != 1)
      throw ShapeError(cache_t.name() + "'s KV heads is " + std::to_string(kv) +
                       ", 1 is needed with indices, which name a row for all heads");
    slots = slots_t.int32_view<Request, Token, Topk>();
    ops::require_equal(kOp, slots_t.name() + "' batch", slots.extent<Request>(), "q's", requests);
    ops::require_equal(kOp, slots_t.name() + "' queries", slots.extent<Token>(), "q's", h.queries);
    if (slots.extent<Topk>() > 1 && slots.stride<Topk>() != 1)
      throw ShapeError(slots_t.name() + ": topk has stride " + std::to_string(slots.stride<Topk>()) + ", 1 is needed");
    if (!lengths_array) return;
    lengths_t.emplace(*lengths_array, std::string(prefix) + "topk_length", Access::read);
    lengths_t->require_device(device);
    lengths = lengths_t->int32_view<Request>();
    ops::require_equal(kOp, lengths_t->name() + " length", lengths.extent<Request>(), "q's batch", requests);
  }
  Source(const Source&) = delete;

  /// With the rows' slots evenly apart, and the lengths of every row, in host memory.
  ops::SparseSource planned() {
    const int64_t requests = slots.extent<Request>(), queries = slots.extent<Token>(), topk = slots.extent<Topk>();
    if (lengths)
      for (int64_t row = 0; row < requests * queries; ++row) {
        const int32_t n = lengths(row / queries);
        ops::require_range(kOp, lengths_t->name() + " entry", n, 0, topk + 1);
        row_lengths.push_back(n);
      }
    const auto even = even_stride<2>({requests, queries}, {slots.stride<Request>(), slots.stride<Token>()}, 1, topk);
    if (even) return {cache, {slots.data(), {requests * queries, topk}, {*even, 1}}, row_lengths};
    for (int64_t r = 0; r < requests; ++r)
      for (int64_t i = 0; i < queries; ++i) row_slots.insert(row_slots.end(), &slots(r, i, 0), &slots(r, i, 0) + topk);
    return {cache, {row_slots.data(), {requests * queries, topk}}, row_lengths};
  }

  Tensor cache_t, slots_t;
  std::optional<Tensor> lengths_t;
  CacheView cache;
  View<const int32_t, Request, Token, Topk> slots;
  View<const int32_t, Request> lengths;
  std::vector<int32_t> row_lengths, row_slots;
};

void sparse(nb::handle stream_object, nb::handle q_array, nb::handle cache_array, nb::handle slots_array, float scale,
            nb::handle out_array, nb::handle lse_array, const Optional& max_array, const Optional& sinks_array,
            const Optional& lengths_array, const Optional& extra_cache, const Optional& extra_slots,
            const Optional& extra_lengths, nb::handle allocate) {
  const Tensor q(q_array, "q", Access::read), out(out_array, "out", Access::write),
      lse_t(lse_array, "lse", Access::write);
  if (q.rank() != 3) q.require_rank(4, "[batch, queries, heads, head dim]");
  out.require_rank(q.rank(), "as many dimensions as q");
  const Heads h = heads_of(q, out, 1);
  const Device device = q.device();
  lse_t.require_device(device);
  const int64_t requests = h.requests;
  const View<float, Request, Head, Token> lse =
      lse_t.rank() == 2 ? one_query(lse_t, requests, h.heads) : lse_view(lse_t, requests, h.heads, h.queries);
  if (extra_cache.has_value() != extra_slots.has_value())
    throw ShapeError("flash_mla: extra_k_cache and extra_indices_in_kvcache go together, one is missing");
  if (extra_lengths && !extra_cache) throw ShapeError("flash_mla: extra_topk_length without extra_k_cache");
  std::vector<std::unique_ptr<Source>> sources;
  sources.push_back(std::make_unique<Source>(cache_array, q.rank() == 3 ? "kv" : "k_cache", slots_array, lengths_array,
                                             "", h, requests, device));
  if (extra_cache)
    sources.push_back(std::make_unique<Source>(*extra_cache, "extra_k_cache", *extra_slots, extra_lengths, "extra_", h,
                                               requests, device));
  std::optional<Tensor> sinks_t, max_t;
  View<const float, Head> sinks;
  if (sinks_array) {
    sinks_t.emplace(*sinks_array, "attn_sink", Access::read);
    sinks_t->require_device(device);
    sinks = sinks_t->view<Head>().as<float>();
    ops::require_equal(kOp, "attn_sink's heads", sinks.extent<Head>(), "q's", h.heads);
  }
  View<float, Token, Head> max_logits;
  if (max_array) {
    max_t.emplace(*max_array, "max_logits", Access::write);
    max_t->require_device(device);
    max_logits = max_t->mutable_view<Token, Head>().as<float>();
    ops::require_equal(kOp, "max_logits' rows", max_logits.extent<Token>(), "q's", h.tokens());
    ops::require_equal(kOp, "max_logits' heads", max_logits.extent<Head>(), "q's", h.heads);
  }
  int64_t keys = 0;
  for (const auto& s : sources) keys += s->slots.extent<Topk>();
  ops::require_range(kOp, "slots of all caches", keys, 0, int64_t{1} << 31);
  const Place place{kOp, stream_object, allocate};
  if (h.tokens() == 0 || h.heads == 0) return;

  if (device.kind == DeviceKind::cuda) {
    ops::require_dense<Head>(kOp, "attn_sink", sinks);
    gpu::ListAttention a{
        .q = h.q, .sources = {}, .sinks = sinks, .scale = scale, .out = h.out, .lse = lse, .max_logits = max_logits};
    for (const auto& s : sources) a.sources.push_back({s->cache, s->slots, s->lengths});
    return place.run(a, device);
  }

  PyStream& stream = place.cpu(q);
  std::vector<ops::SparseSource> planned;
  for (const auto& s : sources) planned.push_back(s->planned());
  std::vector<float> sink_values;
  for (int64_t i = 0; sinks && i < h.heads; ++i) sink_values.push_back(sinks(i));
  std::vector<std::byte> copy;
  const Turn turn(stream);
  const SparseWork work = plan_sparse(h.tokens(), keys, h.heads, SplitPolicy::fast);
  const Memory m = memory_for(stream, h, work.partial_rows);
  ops::run(stream.stream, ops::AttendSparseArgs{.q = numbered(h, copy),
                                                .sources = planned,
                                                .items = work.items,
                                                .part_keys = work.part_keys,
                                                .scale = scale,
                                                .sinks = sink_values,
                                                .out = m.out,
                                                .lse = m.lse,
                                                .max_logits = m.max_logits,
                                                .partial_out = m.partial_out,
                                                .partial_lse = m.partial_lse,
                                                .partial_max = m.partial_max,
                                                .scratch = m.scratch});
  if (!work.splits.empty())
    ops::run(stream.stream, ops::MergeSparseArgs{.partial_out = m.partial_out,
                                                 .partial_lse = m.partial_lse,
                                                 .partial_max = m.partial_max,
                                                 .items = work.splits,
                                                 .sinks = sink_values,
                                                 .out = m.out,
                                                 .lse = m.lse,
                                                 .max_logits = m.max_logits});
  finish(stream, h, m, lse, max_logits);
}

}  // namespace

void bind_flash_mla(nb::module_& m) {
  nb::class_<Schedule>(m, "Schedule", "Who attends what, shared by calls that a GPU's graph captures together.")
      .def(nb::init<>());
  m.def("flash_mla_dense", &dense, nb::arg("stream"), nb::arg("q"), nb::arg("k_cache"), nb::arg("block_table"),
        nb::arg("cache_seqlens"), nb::arg("scale"), nb::arg("causal"), nb::arg("out"), nb::arg("lse"), nb::kw_only(),
        nb::arg("descale_q") = nb::none(), nb::arg("descale_k") = nb::none(), nb::arg("schedule").none() = nb::none(),
        nb::arg("allocate") = nb::none(),
        "out [batch, queries, heads, value] and lse [batch, heads, queries], both written.\n"
        "descale_q, descale_k: one f32 number each, what fp8 queries and an fp8 cache are multiplied by.\n"
        "schedule: shared by calls that a GPU's graph captures together, of the same lengths and table.\n"
        "stream: a Stream of the CPU, or on a GPU a cudaStream_t, with allocate(bytes) for the call's memory there.");
  m.def("flash_mla_sparse", &sparse, nb::arg("stream"), nb::arg("q"), nb::arg("k_cache"), nb::arg("indices"),
        nb::arg("scale"), nb::arg("out"), nb::arg("lse"), nb::kw_only(), nb::arg("max_logits") = nb::none(),
        nb::arg("attn_sink") = nb::none(), nb::arg("topk_length") = nb::none(), nb::arg("extra_k_cache") = nb::none(),
        nb::arg("extra_indices") = nb::none(), nb::arg("extra_topk_length") = nb::none(),
        nb::arg("allocate") = nb::none(),
        "The same over chosen slots, also of q [rows, heads, head dim] with one query each; lse then [rows, heads].");
}

}  // namespace mla::python
