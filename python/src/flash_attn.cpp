// The call behind mla.flash_mla's flash_attn_varlen_func: sequences one after another, each over its own keys. On the
// CPU where they begin is read here; on a GPU it stays there (core/device_attention.hpp).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "ops/attend_expanded/grouped.hpp"
#include "place.hpp"

namespace mla::python {
namespace {

constexpr std::string_view kOp = "flash_attn_varlen";

using Optional = std::optional<nb::object>;

// Where sequences begin in rows of q or of k and v.
struct Begins {
  Begins(const Optional& array, std::string_view name, Device device, int64_t sequences) {
    if (!array) return;
    t.emplace(*array, name, Access::read);
    t->require_device(device);
    view = t->int32_view<Request>();
    ops::require_equal(kOp, t->name() + " length", view.extent<Request>(), "sequences + 1", sequences + 1);
  }

  // Rows [first, last) of a sequence, in host memory; `most` of them at most.
  struct Span {
    int32_t first, last;
  };
  Span of(int64_t sequence, int64_t rows, int64_t sequences, int64_t most) const {
    if (!t) {
      const int64_t each = rows / sequences;
      return {static_cast<int32_t>(each * sequence), static_cast<int32_t>(each * (sequence + 1))};
    }
    const Span s{view(sequence), view(sequence + 1)};
    ops::require_range(kOp, t->name() + " entry", s.first, 0, rows + 1);
    ops::require_range(kOp, t->name() + " entry behind " + std::to_string(s.first), s.last, s.first, rows + 1);
    if (s.last - s.first > most)
      throw ShapeError(std::string(kOp) + ": sequence " + std::to_string(sequence) + " is " +
                       std::to_string(s.last - s.first) + " long by " + t->name() + ", max_seqlen" +
                       t->name().substr(std::string_view("cu_seqlens").size()) + " is " + std::to_string(most));
    return s;
  }

  std::optional<Tensor> t;
  View<const int32_t, Request> view;
};

// [.., .., Last] of an array whose last dimension is dense; of a single element it may stride as it likes.
template <class Rows, class Last>
AnyMutableView<Rows, Head, Last> dense_rows(const Tensor& t, std::string_view dims) {
  t.require_rank(3, dims);
  const auto v = t.mutable_view<Rows, Head, Last>();
  if (v.template extent<Last>() > 1 && v.template stride<Last>() != 1)
    throw ShapeError(t.name() + ": " + std::string(Last::name) + " has stride " +
                     std::to_string(v.template stride<Last>()) + ", 1 is needed");
  return {v.dtype(), v.data(), v.extents(), {v.template stride<Rows>(), v.template stride<Head>(), 1}};
}

void varlen(nb::handle stream_object, nb::handle q_array, nb::handle k_array, nb::handle v_array,
            const Optional& q_begins, const Optional& k_begins, int64_t sequences, int64_t most_queries,
            int64_t most_keys, float scale, bool causal, nb::handle out_array, nb::handle lse_array,
            nb::handle allocate) {
  const Tensor q_t(q_array, "q", Access::read), k_t(k_array, "k", Access::read), v_t(v_array, "v", Access::read),
      out_t(out_array, "out", Access::write), lse_t(lse_array, "lse", Access::write);
  const Device device = q_t.device();
  for (const Tensor* t : {&k_t, &v_t, &out_t, &lse_t}) t->require_device(device);
  const AnyView<Token, Head, QueryKey> q = dense_rows<Token, QueryKey>(q_t, "[rows, heads, head dim]");
  const AnyView<Key, Head, QueryKey> k = dense_rows<Key, QueryKey>(k_t, "[keys, KV heads, head dim]");
  const AnyView<Key, Head, Value> v = dense_rows<Key, Value>(v_t, "[keys, KV heads, value dim]");
  const auto out = dense_rows<Token, Value>(out_t, "[rows, heads, value dim]");
  const View<float, Token, Head> lse = lse_t.mutable_view<Token, Head>().as<float>();
  if (device.kind == DeviceKind::cpu) {
    ops::require_dtype(kOp, "q", q.dtype(), {Dtype::f32, Dtype::bf16});
    ops::require_dtype(kOp, "out", out.dtype(), {Dtype::f32, Dtype::bf16});
  }
  for (const auto& [name, dtype] : {std::pair("q", q.dtype()), std::pair("out", out.dtype())})
    ops::require_dtype(kOp, name, dtype, {Dtype::f32, Dtype::bf16, Dtype::f16});
  for (const auto& [name, dtype] : {std::pair("k", k.dtype()), std::pair("v", v.dtype())})
    if (dtype != q.dtype())
      throw ShapeError(std::string(kOp) + ": " + name + " is " + std::string(to_string(dtype)) + ", q is " +
                       std::string(to_string(q.dtype())));
  const int64_t rows = q.extent<Token>(), keys = k.extent<Key>(), heads = q.extent<Head>(), kv_heads = k.extent<Head>();
  ops::require_equal(kOp, "k's head dim", k.extent<QueryKey>(), "q's", q.extent<QueryKey>());
  ops::require_equal(kOp, "v's keys", v.extent<Key>(), "k's", keys);
  ops::require_equal(kOp, "v's KV heads", v.extent<Head>(), "k's", kv_heads);
  if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0)
    throw ShapeError(std::string(kOp) + ": q has " + std::to_string(heads) + " heads, k's " + std::to_string(kv_heads) +
                     " KV heads must divide them");
  ops::require_equal(kOp, "out's rows", out.extent<Token>(), "q's", rows);
  ops::require_equal(kOp, "out's heads", out.extent<Head>(), "q's", heads);
  ops::require_equal(kOp, "out's value dim", out.extent<Value>(), "v's", v.extent<Value>());
  ops::require_equal(kOp, "lse's rows", lse.extent<Token>(), "q's", rows);
  ops::require_equal(kOp, "lse's heads", lse.extent<Head>(), "q's", heads);
  constexpr int64_t kRows = int64_t{1} << 31;
  ops::require_range(kOp, "q's rows", rows, 0, kRows);
  ops::require_range(kOp, "k's keys", keys, 0, kRows);
  ops::require_range(kOp, "sequences", sequences, 0, kRows - 1);
  const Begins from_q(q_begins, "cu_seqlens_qo", device, sequences),
      from_k(k_begins, "cu_seqlens_kv", device, sequences);
  for (const auto& [name, n, there] :
       {std::tuple("q's rows", rows, bool(from_q.t)), std::tuple("k's keys", keys, bool(from_k.t))})
    if (!there && sequences > 0 && n % sequences != 0)
      throw ShapeError(std::string(kOp) + ": " + name + " are " + std::to_string(n) + ", " + std::to_string(sequences) +
                       " sequences of equal lengths must divide them");
  const Place place{kOp, stream_object, allocate};
  if (rows == 0 || heads == 0 || sequences == 0 || v.extent<Value>() == 0) return;

  if (device.kind == DeviceKind::cuda)
    return place.run(gpu::SequenceAttention{.q = q,
                                            .k = k,
                                            .v = v,
                                            .sequences = sequences,
                                            .q_begins = from_q.view,
                                            .k_begins = from_k.view,
                                            .causal = causal,
                                            .scale = scale,
                                            .out = out,
                                            .lse = lse},
                     device);

  PyStream& stream = place.cpu(q_t);
  std::vector<ExpandedItem> items;
  for (int64_t s = 0; s < sequences; ++s) {
    const auto queries = from_q.of(s, rows, sequences, most_queries), seen = from_k.of(s, keys, sequences, most_keys);
    const int32_t q_count = queries.last - queries.first, k_count = seen.last - seen.first;
    items.push_back({.q_begin = queries.first,
                     .q_count = q_count,
                     .k_begin = seen.first,
                     .k_count = k_count,
                     .visible = causal ? k_count - q_count : ExpandedItem::everything(),
                     .last = true});
  }
  const Turn turn(stream);
  const int64_t width = v.extent<Value>();
  const size_t scratch =
      backend::backend(device).scratch_per_worker({.heads = heads, .nope = q.extent<QueryKey>(), .value = width});
  // The CPU's op takes and writes f32 rows, which bf16 ones become and are made of.
  const bool wide_q = q.dtype() == Dtype::f32, wide_out = out.dtype() == Dtype::f32;
  struct Memory {
    float *q, *out;
    std::byte* scratch;
  };
  const auto take = [&](Cut& cut) {
    return Memory{wide_q ? nullptr : cut.take<float>(rows * heads * q.extent<QueryKey>()),
                  wide_out ? nullptr : cut.take<float>(rows * heads * width),
                  cut.take<std::byte>(static_cast<int64_t>(scratch) * stream.threads())};
  };
  Cut counted(nullptr);
  take(counted);
  Cut cut(stream.memory(counted.used()).data());
  const Memory memory = take(cut);
  ops::AttendExpandedArgs args{.q = q,
                               .k_nope = {k.dtype(), k.data(), k.extents(), k.strides()},
                               .k_pe = {k.dtype(), k.data(), {keys, 0}},
                               .v = v,
                               .items = items,
                               .scale = scale,
                               .out = out,
                               .lse = lse,
                               .scratch = {memory.scratch, scratch}};
  const auto for_rows = [&](const auto& f) {
    stream.stream.pool().run(rows, [&](int64_t row, int) {
      for (int64_t head = 0; head < heads; ++head) f(row, head);
    });
  };
  if (!wide_q) {
    const View<float, Token, Head, QueryKey> to(memory.q, q.extents());
    args.q = to;
    for_rows([&](int64_t row, int64_t head) {
      const bf16* x = static_cast<const bf16*>(q.at(row, head, 0));
      std::transform(x, x + q.extent<QueryKey>(), &to(row, head, 0), [](bf16 e) { return to_float(e); });
    });
  }
  if (!wide_out) args.out = {Dtype::f32, memory.out, out.extents()};
  ops::for_each_group(args, [&](const ops::AttendExpandedArgs& part) { ops::run(stream.stream, part); });
  if (!wide_out)
    for_rows([&](int64_t row, int64_t head) {
      const float* x = static_cast<const float*>(args.out.at(row, head, 0));
      std::transform(x, x + width, static_cast<bf16*>(out.at(row, head, 0)), to_bf16);
    });
}

}  // namespace

void bind_flash_attn(nb::module_& m) {
  m.def("flash_attn_varlen", &varlen, nb::arg("stream"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
        nb::arg("cu_seqlens_qo").none(), nb::arg("cu_seqlens_kv").none(), nb::arg("sequences"),
        nb::arg("max_seqlen_qo"), nb::arg("max_seqlen_kv"), nb::arg("scale"), nb::arg("causal"), nb::arg("out"),
        nb::arg("lse"), nb::kw_only(), nb::arg("allocate") = nb::none(),
        "out [rows, heads, value dim] and lse [rows, heads], both written for the sequences' rows.\n"
        "cu_seqlens_qo, cu_seqlens_kv: where each begins and the last one ends; None: all are equally long.\n"
        "stream: a Stream of the CPU, or on a GPU a cudaStream_t, with allocate(bytes) for the call's memory there.");
}

}  // namespace mla::python
