#include "step.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "cache.hpp"
#include "mla/layer.hpp"
#include "mla/quant_scales.hpp"
#include "ranks.hpp"
#include "stream.hpp"
#include "tensor.hpp"

namespace mla::python {
namespace {

bool is_sequence(nb::handle x) { return nb::isinstance<nb::list>(x) || nb::isinstance<nb::tuple>(x); }

// Arrays without conversion but of int64 whose values fit, or any sequence of integers.
std::vector<int32_t> int32_values(nb::handle values, const std::string& name) {
  if (!is_sequence(values)) {
    const Tensor t(values, name, Access::read);
    t.require_rank(1, "one dimension");
    return t.int32_values();
  }
  std::vector<int32_t> list;
  for (nb::handle value : values) {
    if (int32_t x; nb::try_cast(value, x)) list.push_back(x);
    else
      throw ShapeError(name + ": element " + std::to_string(list.size()) + " is " +
                       std::string(nb::repr(value).c_str()).substr(0, 60) + ", int32 is needed");
  }
  return list;
}

// Pages of each request: [requests, columns], or a sequence for each, -1 behind the shorter ones.
struct Table {
  int64_t rows = 0, columns = 0;
  std::vector<int32_t> pages;
};
Table make_table(nb::handle values) {
  const std::string name = "block_table";
  if (!is_sequence(values)) {
    const Tensor t(values, name, Access::read);
    t.require_rank(2, "[Request, Page]");
    return {t.extent(0), t.extent(1), t.int32_values()};
  }
  std::vector<std::vector<int32_t>> rows;
  Table table;
  for (nb::handle row : values) {
    const std::string row_name = name + " of request " + std::to_string(rows.size());
    rows.push_back(int32_values(row, row_name));
    table.columns = std::max(table.columns, static_cast<int64_t>(rows.back().size()));
  }
  table.rows = static_cast<int64_t>(rows.size());
  for (std::vector<int32_t>& row : rows) {
    row.resize(static_cast<size_t>(table.columns), -1);
    table.pages.insert(table.pages.end(), row.begin(), row.end());
  }
  return table;
}

PyBatch make_batch(nb::handle query_start_loc, nb::handle seq_lens, nb::handle block_table, nb::handle slot_mapping,
                   nb::handle prompt_lens) {
  auto b = std::make_shared<BatchArrays>();
  b->query_start_loc = int32_values(query_start_loc, "query_start_loc");
  b->seq_lens = int32_values(seq_lens, "seq_lens");
  b->slot_mapping = int32_values(slot_mapping, "slot_mapping");
  if (!prompt_lens.is_none()) {
    b->prompt_lens = int32_values(prompt_lens, "prompt_lens");
    ops::require_equal("Batch", "prompt_lens length", static_cast<int64_t>(b->prompt_lens.size()), "seq_lens length",
                       static_cast<int64_t>(b->seq_lens.size()));
  }
  Table table = make_table(block_table);
  ops::require_equal("Batch", "block_table Request", table.rows, "seq_lens length",
                     static_cast<int64_t>(b->seq_lens.size()));
  b->table_columns = table.columns;
  b->block_table = std::move(table.pages);
  return {std::move(b)};
}

struct Call {
  PyStream& stream;
  std::shared_ptr<Step> step;
  const Placed<LayerWeights>& weights;
  const Placed<RotaryTable>& rotary;
  const PyCache& cache;
  const PyIndexCache* index_cache;
  const Placed<RotaryTable>* index_rotary;
  Profile* profile;
  PyCommunicator* ranks = nullptr;
  double rank_seconds = 60;

  // With other Python threads running and the stream taken.
  template <class Run>
  void operator()(Run&& run) const {
    const Device device = stream.device();
    require_device("weights", weights.device, device);
    require_device("rotary", rotary.device, device);
    require_device("cache", cache.device, device);
    if (step->plan.device.device != device)
      throw ShapeError("plan was made for " + to_string(step->plan.device.device) + ", the stream is on " +
                       to_string(device));
    ops::require_range("layer", "cache pages", cache.view.pages, step->pages, int64_t{1} << 31);
    if (index_cache) {
      require_device("index_cache", index_cache->device, device);
      ops::require_range("layer", "index_cache pages", index_cache->view.pages, step->pages, int64_t{1} << 31);
    }
    if (index_rotary) require_device("index_rotary", index_rotary->device, device);
    LayerContext context{.plan = step->plan,
                         .batch = step->batch->view(),
                         .weights = weights.value,
                         .rotary = rotary.value,
                         .cache = cache.view,
                         .workspace = stream.memory(step->plan.workspace_bytes),
                         .profile = profile,
                         .index_cache = index_cache ? index_cache->view : IndexCacheView{},
                         .index_rotary = index_rotary ? &index_rotary->value : nullptr,
                         .selection = {step->selection.data(), step->selection.size()},
                         .staged = stream.stage(step),
                         .deadline = deadline_of(rank_seconds)};
    if (!ranks) return run(stream.stream, context);
    ranks->use([&](Communicator& group) {
      context.ranks = &group;
      run(stream.stream, context);
    });
  }
};

void bind_batch(nb::module_& m) {
  nb::class_<PyBatch>(
      m, "Batch",
      "One step's requests. Arrays are int32 on the CPU, or int64 whose values fit; lists serve, too. All are copied.")
      .def(nb::new_(&make_batch), nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("block_table"),
           nb::arg("slot_mapping"), nb::arg("prompt_lens") = nb::none(),
           "query_start_loc [requests + 1]: first token row of each request.\n"
           "seq_lens [requests]: cached and new tokens.\n"
           "block_table [requests, columns]: pages of each request; entries past its end may hold anything. As lists,\n"
           "rows may be of different lengths.\n"
           "slot_mapping [tokens]: where each new token's row goes; below 0: nowhere.\n"
           "prompt_lens [requests]: the tokens of each request that are its prompt, cached or not; for plans of path\n"
           "by_prompt.")
      .def_prop_ro("requests", [](const PyBatch& b) { return b.arrays->view().requests(); })
      .def_prop_ro("tokens", [](const PyBatch& b) { return b.arrays->view().tokens(); })
      .def("__repr__", [](const PyBatch& b) {
        const Batch batch = b.arrays->view();
        return "mla.Batch(requests=" + std::to_string(batch.requests()) + ", tokens=" + std::to_string(batch.tokens()) +
               ")";
      });
}

void bind_plan(nb::module_& m) {
  nb::class_<PlanOptions>(m, "PlanOptions", "How a step is to be executed.")
      .def(
          "__init__",
          [](PlanOptions* self, std::string_view path, std::string_view split, std::string_view compute,
             std::string_view sparse, int64_t reorder_batch_threshold, bool absorbed, std::string_view up,
             std::string_view activations, bool fp8_query, float q_scale, std::string_view index_format,
             bool index_hadamard, int64_t context_rows, int64_t max_model_len, int64_t max_requests,
             std::string_view form, std::string_view cache_use, bool dummy, std::string_view index_arithmetic,
             std::string_view prefill, std::string_view decode, std::string_view activation_dtype, int tensor_parallel,
             const CacheSharding* sharding, int rank, std::vector<int64_t> rank_heads, std::string_view exchange,
             std::string_view sums) {
            if (!sharding && (!rank_heads.empty() || exchange != "latents"))
              throw InputError("PlanOptions: rank_heads and exchange are read with sharding, which is None");
            if (!sharding && rank != 0 && sums == "all")
              throw InputError("PlanOptions: rank is read with sharding, which is None, and with sums own");
            new (self) PlanOptions{.form = parse_layer_form(form),
                                   .cache_use = parse_cache_use(cache_use),
                                   .dummy = dummy,
                                   .tensor_parallel = tensor_parallel,
                                   .context_parallel = {.sharding = sharding ? *sharding : CacheSharding(),
                                                        .rank = rank,
                                                        .heads = std::move(rank_heads),
                                                        .exchange = parse_context_exchange(exchange)},
                                   .sums = parse_hidden_sums(sums),
                                   .path = parse_path_policy(path),
                                   .reorder_batch_threshold = reorder_batch_threshold,
                                   .absorbed = absorbed,
                                   .up = parse_weight_format(up),
                                   .activations = parse_activations(activations),
                                   .activation_dtype = parse_activation_dtype(activation_dtype),
                                   .split = parse_split_policy(split),
                                   .compute = parse_dtype(compute),
                                   .prefill = parse_prefill_operands(prefill),
                                   .fp8_query = fp8_query,
                                   .q_scale = q_scale,
                                   .decode = parse_decode_operands(decode),
                                   .sparse = parse_sparse_policy(sparse),
                                   .index_format = parse_index_cache_format(index_format),
                                   .index_hadamard = index_hadamard,
                                   .index_arithmetic = parse_index_arithmetic(index_arithmetic),
                                   .context_rows = context_rows,
                                   .max_model_len = max_model_len,
                                   .max_requests = max_requests};
          },
          nb::kw_only(), nb::arg("path") = "automatic", nb::arg("split") = "fast", nb::arg("compute") = "f32",
          nb::arg("sparse") = "automatic", nb::arg("reorder_batch_threshold") = 1, nb::arg("absorbed") = false,
          nb::arg("up") = "plain", nb::arg("activations") = "plain", nb::arg("fp8_query") = false,
          nb::arg("q_scale") = 1.0f, nb::arg("index_format") = "fp8", nb::arg("index_hadamard") = false,
          nb::arg("context_rows") = 0, nb::arg("max_model_len") = 0, nb::arg("max_requests") = 0,
          nb::arg("form") = "block", nb::arg("cache_use") = "append", nb::arg("dummy") = false,
          nb::arg("index_arithmetic") = "exact", nb::arg("prefill") = "compute", nb::arg("decode") = "compute",
          nb::arg("activation_dtype") = "native", nb::arg("tensor_parallel") = 1,
          nb::arg("sharding").none() = nb::none(), nb::arg("rank") = 0, nb::arg("rank_heads") = std::vector<int64_t>(),
          nb::arg("exchange") = "latents", nb::arg("sums") = "all",
          "path: automatic, latent, expanded, by_length or by_prompt. split: fast, or batch_invariant, by which a "
          "request's bits\n"
          "follow from its tokens alone, neither from other requests nor from how its prompt was cut into steps "
          "(paths\n"
          "automatic and by_length are then latent). compute: f32 or bf16\n"
          "operands. sparse: automatic, mixed, direct, upconvert, masked or dense. absorbed, up: as the weights were "
          "prepared.\n"
          "activations: what products with fp8 weights take their inputs as, plain or fp8_128. form: block, or\n"
          "attention for plans that attend() and select() alone are called with. cache_use, of form attention:\n"
          "append the step's rows; read, they are there already; none, new requests without a cache (of 0 pages),\n"
          "whose batch needs neither block_table nor slot_mapping. dummy: calls write zeros and do nothing else.\n"
          "index_arithmetic, of scores of an fp8 index cache: exact products, or fp8, which Hopper GPUs are up to "
          "twice\n"
          "as fast with. prefill, what the expanded path multiplies: compute, or e4m3 codes as fp8 or fp8_raw.\n"
          "decode, what the latent path multiplies with fp8_query: compute, or fp8, on Hopper GPUs codes by codes.\n"
          "activation_dtype: of hidden states, or of attend's q, kv_c and k_pe: f32, bf16 or f16, or native: hidden\n"
          "states of f32 or bf16, as each call has them, the others f32 (on a GPU of compute's dtype).\n"
          "tensor_parallel: ranks that split the heads, each with a plan of its own; forward() then sums their hidden\n"
          "rows over its argument ranks. sharding: how groups of as many ranks, which divide\n"
          "tensor_parallel, split every sequence's cached tokens, too: the batch has the pages and slots of this "
          "rank,\n"
          "member rank % sharding.ranks of its group. rank: this one, rank_heads: of each rank of tensor_parallel.\n"
          "exchange: what the group's ranks send each other, latents, or heads, a third to a quarter of the numbers, "
          "by\n"
          "weights that were prepared from part_of(.., group=..). sums: what forward() writes of the hidden rows that\n"
          "the ranks' parts are summed to: all, or own, Plan.own_rows of them on each rank.")
      .def_ro("tensor_parallel", &PlanOptions::tensor_parallel)
      .def_prop_ro("cache_use", [](const PlanOptions& o) { return std::string(to_string(o.cache_use)); })
      .def_ro("dummy", &PlanOptions::dummy)
      .def_prop_ro("form", [](const PlanOptions& o) { return std::string(to_string(o.form)); })
      .def_prop_ro("path", [](const PlanOptions& o) { return std::string(to_string(o.path)); })
      .def_prop_ro("split", [](const PlanOptions& o) { return std::string(to_string(o.split)); })
      .def_prop_ro("activation_dtype", [](const PlanOptions& o) { return std::string(to_string(o.activation_dtype)); })
      .def_prop_ro("decode", [](const PlanOptions& o) { return std::string(to_string(o.decode)); })
      .def_prop_ro("prefill", [](const PlanOptions& o) { return std::string(to_string(o.prefill)); })
      .def_prop_ro("compute", [](const PlanOptions& o) { return std::string(to_string(o.compute)); })
      .def_prop_ro("sparse", [](const PlanOptions& o) { return std::string(to_string(o.sparse)); })
      .def("__repr__", [](const PlanOptions& o) {
        return "mla.PlanOptions(path='" + std::string(to_string(o.path)) + "', split='" +
               std::string(to_string(o.split)) + "', compute='" + std::string(to_string(o.compute)) + "', sparse='" +
               std::string(to_string(o.sparse)) + "')";
      });
  nb::class_<PyPlan>(m, "Plan", "A planned step: which path each request takes, chunks, splits, workspace. Immutable.")
      .def_prop_ro("tokens", [](const PyPlan& p) { return p.step->plan.tokens; })
      .def_prop_ro(
          "own_rows",
          [](const PyPlan& p) {
            const RowRange own = p.step->plan.own_rows();
            return std::pair(own.begin, own.count);
          },
          "(first, number) of the rows that forward() writes, as rows 0, 1, .. of its output: all, or with sums own\n"
          "this rank's.")
      .def_prop_ro(
          "topk", [](const PyPlan& p) { return p.step->plan.topk; }, "Positions selected for a row; 0: none are.")
      .def_prop_ro("workspace_bytes", [](const PyPlan& p) { return p.step->plan.workspace_bytes; })
      .def_prop_ro("selection_bytes", [](const PyPlan& p) { return p.step->plan.selection_bytes; })
      .def_prop_ro("device", [](const PyPlan& p) { return to_string(p.step->plan.device.device); })
      .def_prop_ro("model", [](const PyPlan& p) { return p.step->plan.model; })
      .def_prop_ro(
          "paths",
          [](const PyPlan& p) {
            std::vector<std::string> paths;
            for (const RequestPlan& r : p.step->plan.requests) paths.emplace_back(to_string(r.path));
            return paths;
          },
          "Of each request: latent, expanded or sparse.")
      .def("__repr__",
           [](const PyPlan& p) {
             std::string text =
                 "mla.Plan('" + p.step->plan.model.name + "', tokens=" + std::to_string(p.step->plan.tokens);
             for (Path path : {Path::latent, Path::expanded, Path::sparse})
               if (const auto n = std::count_if(p.step->plan.requests.begin(), p.step->plan.requests.end(),
                                                [&](const RequestPlan& r) { return r.path == path; }))
                 text += ", " + std::string(to_string(path)) + "=" + std::to_string(n);
             return text + ", device='" + to_string(p.step->plan.device.device) + "')";
           })
      .def(
          "describe", [](const PyPlan& p) { return p.step->plan.describe(); }, "Several lines a person can read.");
  m.def(
      "step_memory",
      [](const ModelConfig& model, const PyCache& cache, PyStream& stream, int64_t requests, int64_t tokens,
         int64_t query_len, int64_t seq_len, const PlanOptions* options) {
        const StepMemory most =
            step_memory(model, cache.view.spec,
                        {.requests = requests, .tokens = tokens, .query_len = query_len, .seq_len = seq_len},
                        device_info(stream.stream, model), options ? *options : PlanOptions{});
        return std::pair(most.workspace_bytes, most.selection_bytes);
      },
      nb::arg("model"), nb::arg("cache"), nb::kw_only(), nb::arg("stream"), nb::arg("requests"), nb::arg("tokens"),
      nb::arg("query_len"), nb::arg("seq_len"), nb::arg("options").none() = nb::none(),
      "Bytes of workspace and of selection that are enough for every step of at most so many requests, new tokens\n"
      "of all and of one request, and cached and new tokens of one.");
  m.def(
      "plan",
      [](const ModelConfig& model, const PyCache& cache, const PyBatch& batch, PyStream& stream,
         const PlanOptions* options) {
        auto step = std::make_shared<Step>();
        nb::gil_scoped_release released;
        step->pages = cache.view.pages;
        step->plan = plan(model, cache.view.spec, cache.view.pages, batch.arrays->view(),
                          device_info(stream.stream, model), options ? *options : PlanOptions{});
        step->batch = batch.arrays;
        step->selection = Buffer(step->plan.selection_bytes, stream.device());
        return PyPlan{std::move(step)};
      },
      nb::arg("model"), nb::arg("cache"), nb::arg("batch"), nb::kw_only(), nb::arg("stream"),
      nb::arg("options").none() = nb::none(),
      "Validates the batch and plans it: BatchError, ShapeError or UnsupportedError on anything that does not fit.");
}

using ProfileRow = nb::typed<nb::dict, nb::str, nb::object>;

void bind_layer(nb::module_& m) {
  m.def(
      "calc_kv_scales",
      [](PyStream& stream, nb::handle q, nb::handle kv_c, float q_divisor, float k_divisor, float v_divisor) {
        std::optional<Tensor> q_t;
        AnyView<Token, Head, QueryKey> q_view;
        if (!q.is_none()) {
          q_view = q_t.emplace(q, "q", Access::read).view<Token, Head, QueryKey>();
          q_t->require_device(stream.device());
        }
        const Tensor kv_t(kv_c, "kv_c", Access::read);
        kv_t.require_device(stream.device());
        const auto kv_view = kv_t.view<Token, Latent>();
        const Turn turn(stream);
        const KvScales s =
            calc_kv_scales(stream.stream, q_view, kv_view, {.q = q_divisor, .k = k_divisor, .v = v_divisor});
        return std::tuple(s.q_scale, s.k_scale, s.v_scale);
      },
      nb::arg("stream"), nb::arg("q").none(), nb::arg("kv_c"), nb::arg("q_divisor"), nb::arg("k_divisor"),
      nb::arg("v_divisor"));
  nb::class_<Profile>(m, "Profile", "Time and counted work by op, summed over the calls it is given to.")
      .def(nb::init<>())
      .def_prop_ro("rows",
                   [](const Profile& p) {
                     nb::typed<nb::list, ProfileRow> rows;
                     for (const Profile::Row& r : p.rows()) {
                       ProfileRow d;
                       d["op"] = std::string(r.op);
                       d["seconds"] = r.seconds;
                       d["bytes"] = r.bytes;
                       d["flops"] = r.flops;
                       d["calls"] = r.calls;
                       rows.append(d);
                     }
                     return rows;
                   })
      .def("clear", &Profile::clear);
  m.def(
      "forward",
      [](PyStream& stream, const PyPlan& plan, const Placed<LayerWeights>& weights, const Placed<RotaryTable>& rotary,
         const PyCache& cache, nb::handle hidden, nb::handle out, const PyIndexCache* index_cache,
         const Placed<RotaryTable>* index_rotary, Profile* profile, PyCommunicator* ranks, double rank_seconds) {
        const Tensor h(hidden, "hidden", Access::read), o(out, "out", Access::write);
        h.require_device(stream.device());
        o.require_device(stream.device());
        const auto h_view = h.view<Token, Hidden>();
        const auto o_view = o.mutable_view<Token, Hidden>();
        const Turn turn(stream);
        Call{stream, plan.step, weights, rotary, cache, index_cache, index_rotary, profile, ranks, rank_seconds}(
            [&](Stream& s, const LayerContext& c) { forward(s, c, h_view, o_view); });
      },
      nb::arg("stream"), nb::arg("plan"), nb::arg("weights"), nb::arg("rotary"), nb::arg("cache"), nb::arg("hidden"),
      nb::arg("out"), nb::kw_only(), nb::arg("index_cache").none() = nb::none(),
      nb::arg("index_rotary").none() = nb::none(), nb::arg("profile").none() = nb::none(),
      nb::arg("ranks").none() = nb::none(), nb::arg("rank_seconds") = 60.0);
  m.def(
      "attend",
      [](PyStream& stream, const PyPlan& plan, const Placed<LayerWeights>& weights, const Placed<RotaryTable>& rotary,
         const PyCache& cache, nb::handle q, nb::handle kv_c, nb::handle k_pe, nb::handle out,
         const PyIndexCache* index_cache, const Placed<RotaryTable>* index_rotary, Profile* profile,
         PyCommunicator* ranks, double rank_seconds) {
        const Tensor q_t(q, "q", Access::read), o(out, "out", Access::write);
        std::optional<Tensor> c_t, p_t;
        AnyView<Token, Latent> c_view;
        AnyView<Token, Rope> p_view;
        // None only where the plan does not look at them.
        const bool given = plan.step->plan.reads_new_rows();
        if (given || !kv_c.is_none()) c_view = c_t.emplace(kv_c, "kv_c", Access::read).view<Token, Latent>();
        if (given || !k_pe.is_none()) p_view = p_t.emplace(k_pe, "k_pe", Access::read).view<Token, Rope>();
        for (const Tensor* t : {&q_t, c_t ? &*c_t : &q_t, p_t ? &*p_t : &q_t, &o}) t->require_device(stream.device());
        const auto q_view = q_t.view<Token, Head, QueryKey>();
        const auto o_view = o.mutable_view<Token, Head, Value>();
        const Turn turn(stream);
        Call{stream, plan.step, weights, rotary, cache, index_cache, index_rotary, profile, ranks, rank_seconds}(
            [&](Stream& s, const LayerContext& c) { attend(s, c, q_view, c_view, p_view, o_view); });
      },
      nb::arg("stream"), nb::arg("plan"), nb::arg("weights"), nb::arg("rotary"), nb::arg("cache"), nb::arg("q"),
      nb::arg("kv_c").none(), nb::arg("k_pe").none(), nb::arg("out"), nb::kw_only(),
      nb::arg("index_cache").none() = nb::none(), nb::arg("index_rotary").none() = nb::none(),
      nb::arg("profile").none() = nb::none(), nb::arg("ranks").none() = nb::none(), nb::arg("rank_seconds") = 60.0);
  m.def(
      "select",
      [](PyStream& stream, const PyPlan& plan, const Placed<LayerWeights>& weights, const Placed<RotaryTable>& rotary,
         const PyCache& cache, nb::handle positions, const PyIndexCache* index_cache,
         const Placed<RotaryTable>* index_rotary) {
        const Tensor p(positions, "positions", Access::read);
        p.require_device(stream.device());
        const auto view = p.int32_view<Token, Topk>();
        const Turn turn(stream);
        Call{stream, plan.step, weights, rotary, cache, index_cache, index_rotary, nullptr}(
            [&](Stream& s, const LayerContext& c) { select(s, c, view); });
      },
      nb::arg("stream"), nb::arg("plan"), nb::arg("weights"), nb::arg("rotary"), nb::arg("cache"), nb::arg("positions"),
      nb::kw_only(), nb::arg("index_cache").none() = nb::none(), nb::arg("index_rotary").none() = nb::none(),
      "The caller's own choice of positions [tokens, topk] for the attention form, unused entries negative.");
}

}  // namespace

void bind_step(nb::module_& m) {
  bind_batch(m);
  bind_plan(m);
  bind_layer(m);
}

}  // namespace mla::python
