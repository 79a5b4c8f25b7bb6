// The calls behind mla.flash_mla: attention over a paged cache whose layout follows from the array that holds it. On
// the CPU lengths and lists are read and planned here; on a GPU they stay where they are (core/device_attention.hpp).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "core/device_attention.hpp"
#include "mla/plan.hpp"
#include "stream.hpp"
#include "tensor.hpp"

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

// [blocks, page, 1, row], or a page of one row a block as [rows, 1, row].
CacheView cache_of(const Tensor& t, int64_t entry, int64_t value) {
  const bool paged = t.rank() != 3;
  if (paged) t.require_rank(4, "[blocks, page, 1, row]");
  const size_t last = t.rank() - 1;
  const int64_t page_size = paged ? t.extent(1) : 1, row = t.extent(last);
  ops::require_equal(kOp, t.name() + "'s KV heads", t.extent(last - 1), "needed", 1);
  ops::require_range(kOp, t.name() + "'s page size", page_size, 1, int64_t{1} << 31);
  const CacheSpec spec = spec_of(t, row, page_size, entry, value);
  if (row > 1 && t.stride(last) != 1)
    throw ShapeError(t.name() + ": a row's elements have stride " + std::to_string(t.stride(last)) + ", 1 is needed");
  if (paged && page_size > 1 && t.stride(1) != row)
    throw ShapeError(t.name() + ": rows of a page have stride " + std::to_string(t.stride(1)) + ", " +
                     std::to_string(row) + " is needed");
  const int64_t stride = t.extent(0) > 1 ? t.stride(0) : page_size * row;
  if (stride < page_size * row)
    throw ShapeError(t.name() + ": pages have stride " + std::to_string(stride) + ", at least " +
                     std::to_string(page_size * row) + " is needed");
  ops::require_range(kOp, t.name() + "'s pages", t.extent(0), 0, (int64_t{1} << 31) / page_size + 1);
  return {spec, t.data(), t.extent(0), static_cast<size_t>(stride * t.element_bytes())};
}

// A part of a call's memory, cut off the front: the first pass, without memory, counts.
class Cut {
 public:
  explicit Cut(std::byte* memory) : memory_(memory) {}
  template <class T>
  T* take(int64_t count) {
    T* at = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return at;
  }
  size_t used() const { return used_; }

 private:
  std::byte* memory_;
  size_t used_ = 0;
};

// What both forms share: queries, outputs and where they are computed. Ops of the CPU write f32; bf16 follows from it.
struct Heads {
  AnyView<Token, Head, Entry> q;
  AnyMutableView<Token, Head, Value> out;
  int64_t tokens = 0, heads = 0, value = 0, entry = 0;

  bool direct() const { return out.dtype() == Dtype::f32; }
};

struct Memory {
  Memory(std::byte* at, const Heads& h, int64_t partial_rows, size_t scratch_per_worker, int workers) : cut(at) {
    out = {h.direct() ? static_cast<float*>(h.out.data()) : cut.take<float>(h.tokens * h.heads * h.value),
           {h.tokens, h.heads, h.value}};
    lse = {cut.take<float>(h.tokens * h.heads), {h.tokens, h.heads}};
    max_logits = {cut.take<float>(h.tokens * h.heads), {h.tokens, h.heads}};
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

// A dimension before the last ones, evenly spaced over several of the array's.
struct Rows {
  int64_t count = 1, stride = 0;
};

// [.., last dimensions] as rows of the last `inner` dimensions: the leading ones must follow one another evenly.
Rows rows_of(const Tensor& t, size_t inner) {
  Rows rows;
  int64_t dense = 1;
  for (size_t i = t.rank() - inner; i < t.rank(); ++i) dense *= t.extent(i);
  rows.stride = dense;
  bool found = false;
  for (size_t i = t.rank() - inner; i-- > 0;) {
    if (t.extent(i) != 1) {
      if (found && t.stride(i) != rows.stride * rows.count)
        throw ShapeError(t.name() + ": dimension " + std::to_string(i) + " has stride " + std::to_string(t.stride(i)) +
                         ", " + std::to_string(rows.stride * rows.count) + " is needed for evenly spaced rows");
      if (!found) rows.stride = t.stride(i);
      found = true;
    }
    rows.count *= t.extent(i);
  }
  return rows;
}

AnyView<Token, Head, Entry> heads_view(const Tensor& q) {
  const size_t head = q.rank() - 2;
  const Rows rows = rows_of(q, 2);
  return {q.dtype(),
          q.data(),
          {rows.count, q.extent(head), q.extent(head + 1)},
          {rows.stride, q.stride(head), q.stride(head + 1)}};
}

Heads heads_of(const Tensor& q, const Tensor& out) {
  out.require_device(q.device());
  Heads h;
  h.q = heads_view(q);
  const AnyView<Token, Head, Entry> rows = heads_view(out);
  ops::require_dtype(kOp, "q", q.dtype(), {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3});
  ops::require_dtype(kOp, "out", out.dtype(), {Dtype::f32, Dtype::bf16});
  h.tokens = h.q.extent<Token>();
  h.heads = h.q.extent<Head>();
  h.entry = h.q.extent<Entry>();
  h.value = rows.extent<Entry>();
  if (h.entry > 1 && h.q.stride<Entry>() != 1)
    throw ShapeError("q: head dim has stride " + std::to_string(h.q.stride<Entry>()) + ", 1 is needed");
  if (!rows.dense()) throw ShapeError("out: must lie dense");
  ops::require_equal(kOp, "out's rows", rows.extent<Token>(), "q's", h.tokens);
  ops::require_equal(kOp, "out's heads", rows.extent<Head>(), "q's", h.heads);
  ops::require_range(kOp, "q's rows", h.tokens, 0, int64_t{1} << 31);
  h.out = {out.dtype(), out.data(), {h.tokens, h.heads, h.value}};
  return h;
}

// Where a call runs: a Stream of the CPU, or on a GPU a cudaStream_t, with memory that `allocate(bytes)` gives for the
// call.
struct Place {
  nb::handle stream;
  nb::handle allocate;

  PyStream& cpu(const Tensor& q) const {
    if (!nb::isinstance<PyStream>(stream))
      throw ShapeError("q lies on " + to_string(q.device()) + ", a mla.Stream is needed as its stream");
    PyStream& found = nb::cast<PyStream&>(stream);
    q.require_device(found.device());
    return found;
  }

  template <class Attention>
  void run(const Attention& a, Device device) const {
    uintptr_t native = 0;
    if (!nb::try_cast(stream, native) || allocate.is_none())
      throw ShapeError("q lies on " + to_string(device) + ", a cudaStream_t and an allocator are needed");
    constexpr size_t kAlignment = 256;
    const size_t bytes = gpu::workspace_bytes(a) + kAlignment;
    const Tensor workspace(allocate(bytes), "workspace", Access::write);
    workspace.require_device(device);
    ops::require_range(kOp, "workspace bytes", workspace.extent(0) * workspace.element_bytes(),
                       static_cast<int64_t>(bytes), std::numeric_limits<int64_t>::max());
    std::byte* const at = workspace.data() + (-reinterpret_cast<uintptr_t>(workspace.data()) & (kAlignment - 1));
    const nb::gil_scoped_release released;
    gpu::attend(a, {device.index, reinterpret_cast<void*>(native), at});
  }
};

// A row's results in the caller's form: bf16, lse +inf for a row that sees nothing, and lse's own strides.
void finish(PyStream& stream, const Heads& h, const Memory& m, View<float, Request, Head, Token> lse,
            View<float, Token, Head> max_logits) {
  const int64_t queries = std::max<int64_t>(1, lse.extent<Token>());
  stream.stream.pool().run(h.tokens, [&](int64_t token, int) {
    for (int64_t head = 0; head < h.heads; ++head) {
      const float l = m.lse(token, head);
      lse(token / queries, head, token % queries) = l == -kInfinity ? kInfinity : l;
      if (max_logits) max_logits(token, head) = m.max_logits(token, head);
    }
    if (h.direct()) return;
    const float* x = &m.out(token, 0, 0);
    bf16* y = static_cast<bf16*>(h.out.data()) + token * h.heads * h.value;
    for (int64_t i = 0; i < h.heads * h.value; ++i) y[i] = to_bf16(x[i]);
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

void dense(nb::handle stream_object, nb::handle q_array, nb::handle cache_array, nb::handle table_array,
           nb::handle lengths_array, float scale, bool causal, nb::handle out_array, nb::handle lse_array,
           const Optional& descale_q, const Optional& descale_k, nb::handle allocate) {
  const Tensor q(q_array, "q", Access::read), cache_t(cache_array, "k_cache", Access::read),
      table_t(table_array, "block_table", Access::read), lengths_t(lengths_array, "cache_seqlens", Access::read),
      out(out_array, "out", Access::write), lse_t(lse_array, "lse", Access::write);
  q.require_rank(4, "[batch, queries, heads, head dim]");
  out.require_rank(4, "[batch, queries, heads, value]");
  const Heads h = heads_of(q, out);
  for (const Tensor* t : {&cache_t, &table_t, &lengths_t, &lse_t}) t->require_device(q.device());
  const int64_t requests = q.extent(0), queries = q.extent(1);
  const View<float, Request, Head, Token> lse = lse_view(lse_t, requests, h.heads, queries);
  CacheView cache = cache_of(cache_t, h.entry, h.value);
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
  const Place place{stream_object, allocate};
  if (h.tokens == 0 || h.heads == 0) return;

  if (q.device().kind == DeviceKind::cuda) {
    ops::require_dense<Page>(kOp, "block_table", table);
    const int64_t columns = table.extent<Page>(), stride = requests > 1 ? table.stride<Request>() : columns;
    return place.run(gpu::PagedAttention{.q = h.q,
                                         .queries = queries,
                                         .cache = cache,
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
  std::vector<LatentRows> rows;
  const int64_t most = std::min<int64_t>(table.extent<Page>() * cache.spec.page_size, (int64_t{1} << 31) - 1);
  for (int64_t r = 0; r < requests; ++r) {
    ops::require_range(kOp, "cache_seqlens entry", given(r), 0, most + 1);
    // Causal queries are a sequence's last.
    const int64_t length = given(r);
    rows.push_back({static_cast<int32_t>(r), static_cast<int32_t>(r * queries), static_cast<int32_t>(queries),
                    causal ? length - queries : length - 1, length});
  }
  const Turn turn(stream);
  const LatentWork work = plan_latent(rows, SplitPolicy::fast);
  const Memory m = memory_for(stream, h, work.partial_rows);
  ops::run(stream.stream, ops::AttendLatentArgs{.q = h.q,
                                                .q_scale = q_scale ? *q_scale : 1.0f,
                                                .cache = cache,
                                                .block_table = table,
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
    slots_t.require_int32();
    if (slots_t.rank() < 2) slots_t.require_rank(3, "[batch, queries, topk]");
    for (const Tensor* t : {&cache_t, &slots_t}) t->require_device(device);
    cache = cache_of(cache_t, h.entry, h.value);
    const Rows rows = rows_of(slots_t, 1);
    ops::require_equal(kOp, slots_t.name() + "'s rows", rows.count, "q's", h.tokens);
    const size_t last = slots_t.rank() - 1;
    slots = {reinterpret_cast<const int32_t*>(slots_t.data()),
             {rows.count, slots_t.extent(last)},
             {rows.stride, slots_t.stride(last)}};
    if (slots_t.extent(last) > 1 && slots_t.stride(last) != 1)
      throw ShapeError(slots_t.name() + ": topk has stride " + std::to_string(slots_t.stride(last)) + ", 1 is needed");
    if (!lengths_array) return;
    lengths_t.emplace(*lengths_array, std::string(prefix) + "topk_length", Access::read);
    lengths_t->require_device(device);
    lengths = lengths_t->int32_view<Request>();
    ops::require_equal(kOp, lengths_t->name() + " length", lengths.extent<Request>(), "q's batch", requests);
  }
  Source(const Source&) = delete;

  /// With the lengths of every row, in host memory.
  ops::SparseSource planned(int64_t queries) {
    if (lengths)
      for (int64_t row = 0; row < slots.extent<Token>(); ++row) {
        const int32_t n = lengths(row / queries);
        ops::require_range(kOp, lengths_t->name() + " entry", n, 0, slots.extent<Topk>() + 1);
        row_lengths.push_back(n);
      }
    return {cache, slots, row_lengths};
  }

  Tensor cache_t, slots_t;
  std::optional<Tensor> lengths_t;
  CacheView cache;
  View<const int32_t, Token, Topk> slots;
  View<const int32_t, Request> lengths;
  std::vector<int32_t> row_lengths;
};

void sparse(nb::handle stream_object, nb::handle q_array, nb::handle cache_array, nb::handle slots_array, float scale,
            nb::handle out_array, nb::handle lse_array, const Optional& max_array, const Optional& sinks_array,
            const Optional& lengths_array, const Optional& extra_cache, const Optional& extra_slots,
            const Optional& extra_lengths, nb::handle allocate) {
  const Tensor q(q_array, "q", Access::read), out(out_array, "out", Access::write),
      lse_t(lse_array, "lse", Access::write);
  if (q.rank() != 3) q.require_rank(4, "[batch, queries, heads, head dim]");
  out.require_rank(q.rank(), "as many dimensions as q");
  const Heads h = heads_of(q, out);
  const Device device = q.device();
  lse_t.require_device(device);
  const int64_t requests = q.extent(0), queries = q.rank() == 4 ? q.extent(1) : 1;
  const View<float, Request, Head, Token> lse =
      lse_t.rank() == 2 ? one_query(lse_t, requests, h.heads) : lse_view(lse_t, requests, h.heads, queries);
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
    ops::require_equal(kOp, "max_logits' rows", max_logits.extent<Token>(), "q's", h.tokens);
    ops::require_equal(kOp, "max_logits' heads", max_logits.extent<Head>(), "q's", h.heads);
  }
  int64_t keys = 0;
  for (const auto& s : sources) keys += s->slots.extent<Topk>();
  ops::require_range(kOp, "slots of all caches", keys, 0, int64_t{1} << 31);
  const Place place{stream_object, allocate};
  if (h.tokens == 0 || h.heads == 0) return;

  if (device.kind == DeviceKind::cuda) {
    ops::require_dense<Head>(kOp, "attn_sink", sinks);
    gpu::ListAttention a{.q = h.q,
                         .queries = queries,
                         .sources = {},
                         .sinks = sinks,
                         .scale = scale,
                         .out = h.out,
                         .lse = lse,
                         .max_logits = max_logits};
    for (const auto& s : sources) a.sources.push_back({s->cache, s->slots, s->lengths});
    return place.run(a, device);
  }

  PyStream& stream = place.cpu(q);
  std::vector<ops::SparseSource> planned;
  for (const auto& s : sources) planned.push_back(s->planned(queries));
  std::vector<float> sink_values;
  for (int64_t i = 0; sinks && i < h.heads; ++i) sink_values.push_back(sinks(i));
  const Turn turn(stream);
  const SparseWork work = plan_sparse(h.tokens, keys, h.heads, SplitPolicy::fast);
  const Memory m = memory_for(stream, h, work.partial_rows);
  ops::run(stream.stream, ops::AttendSparseArgs{.q = h.q,
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
  m.def("flash_mla_dense", &dense, nb::arg("stream"), nb::arg("q"), nb::arg("k_cache"), nb::arg("block_table"),
        nb::arg("cache_seqlens"), nb::arg("scale"), nb::arg("causal"), nb::arg("out"), nb::arg("lse"), nb::kw_only(),
        nb::arg("descale_q") = nb::none(), nb::arg("descale_k") = nb::none(), nb::arg("allocate") = nb::none(),
        "out [batch, queries, heads, value] and lse [batch, heads, queries], both written.\n"
        "descale_q, descale_k: one f32 number each, what fp8 queries and an fp8 cache are multiplied by.\n"
        "stream: a Stream of the CPU, or on a GPU a cudaStream_t, with allocate(bytes) for the call's memory there.");
  m.def("flash_mla_sparse", &sparse, nb::arg("stream"), nb::arg("q"), nb::arg("k_cache"), nb::arg("indices"),
        nb::arg("scale"), nb::arg("out"), nb::arg("lse"), nb::kw_only(), nb::arg("max_logits") = nb::none(),
        nb::arg("attn_sink") = nb::none(), nb::arg("topk_length") = nb::none(), nb::arg("extra_k_cache") = nb::none(),
        nb::arg("extra_indices") = nb::none(), nb::arg("extra_topk_length") = nb::none(),
        nb::arg("allocate") = nb::none(),
        "The same over chosen slots, also of q [rows, heads, head dim] with one query each; lse then [rows, heads].");
}

}  // namespace mla::python
