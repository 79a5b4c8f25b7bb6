// Walks a plan's steps. No policy: what runs, over which rows and in which order was decided when the plan was made.
#include "mla/layer.hpp"

#include <algorithm>

#include "core/counted.hpp"
#include "layer/sparse.hpp"
#include "ops/require.hpp"

namespace mla {
namespace layer {
namespace {

class Walk : Runner {
 public:
  Walk(Stream& stream, const LayerContext& context) : Runner(stream, context) {
    check(stream.device(), stream.workers());
  }
  Walk(Survey& survey, const LayerContext& context) : Runner(survey, context) {
    check(plan_.device.device, plan_.device.threads);
  }

  void block(AnyView<Token, Hidden> hidden, AnyMutableView<Token, Hidden> out) {
    const ModelConfig& m = plan_.model;
    if (plan_.options.output.kind != OutputKind::none)
      throw UnsupportedError("layer: plan was made for output " + to_string(plan_.options.output) +
                             "; the block form's output is hidden states after W_O, never quantised");
    if (!plan_.serves_block())
      throw UnsupportedError("layer: plan was made for the attention form alone (PlanOptions::form)");
    const int64_t t = plan_.tokens, n = m.heads;
    require_input("hidden", hidden);
    require_input("out", out);
    ops::require_equal("layer", "hidden Hidden", hidden.extent<Hidden>(), "model hidden", m.hidden);
    ops::require_equal("layer", "out Hidden", out.extent<Hidden>(), "model hidden", m.hidden);
    require_table("rotary table", c_.rotary, m.rotary);
    if (c_.weights.indexer) {
      if (!c_.index_rotary) throw ShapeError("layer: index_rotary is missing");
      require_table("index rotary table", *c_.index_rotary, m.index_rotary());
    } else {
      sparse().require_chosen();
    }
    const AnyView<Token, Head, In> h{
        hidden.dtype(), hidden.data(), {t, 1, m.hidden}, {hidden.stride<Token>(), 0, hidden.stride<Hidden>()}};

    if (c_.weights.absorbed()) return absorbed_block(h, out);

    const AnyMutableView<Token, Head, QueryKey> q(act_, at<std::byte>("query"), {t, n, m.query_key()});
    const AnyView<Token, Head, In> source = query_source(h);
    project("query", source, {}, *c_.weights.query, flat(act_, q.data(), t, n * m.query_key()), {}, t);
    const Rows rows = new_rows(h, rope_part(q));
    if (c_.weights.indexer) sparse().index(h, source);

    const AnyMutableView<Token, Head, Value> heads = heads_region(t);
    attention(q, rows.kv_c, rows.k_pe, heads);
    project("output", flat(heads.dtype(), heads.data(), t, n * m.value).read, {}, *c_.weights.output, hidden_rows(out),
            {}, t);
  }

  void choose(View<const int32_t, Token, Topk> positions) { sparse().choose(positions); }

  void attention_form(AnyView<Token, Head, QueryKey> q, AnyView<Token, Latent> kv_c, AnyView<Token, Rope> k_pe,
                      AnyMutableView<Token, Head, Value> out) {
    const ModelConfig& m = plan_.model;
    const int64_t t = plan_.tokens;
    require_format({});
    require_inputs(q, kv_c, k_pe);
    ops::require_equal("layer", "out Head", out.extent<Head>(), "model heads", m.heads);
    ops::require_equal("layer", "out Value", out.extent<Value>(), "model value", m.value);
    require_input("out", out);
    sparse().require_chosen();
    const AnyMutableView<Token, Head, Value> rows = out.slice<Token>(0, t);
    // f32 is never a rounded f32: not by what else is in the batch, and a quantised output has the same heads.
    if (out.dtype() == Dtype::f32 || out.dtype() == plan_.head_dtype()) return append_and_attend(q, kv_c, k_pe, rows);
    const AnyMutableView<Token, Head, Value> heads = heads_region(t);
    append_and_attend(q, kv_c, k_pe, heads);
    run("cast", ops::CastArgs{.x = {heads.dtype(), heads.data(), heads.extents(), heads.strides()},
                              .x_rows = {},
                              .y = {rows.dtype(), rows.data(), rows.extents(), rows.strides()}});
  }

  void attention_form(AnyView<Token, Head, QueryKey> q, AnyView<Token, Latent> kv_c, AnyView<Token, Rope> k_pe,
                      const QuantizedView& out) {
    const ModelConfig& m = plan_.model;
    const int64_t t = plan_.tokens, width = m.heads * m.value;
    require_format(out.spec);
    require_inputs(q, kv_c, k_pe);
    ops::check_quantized("layer", out, t, width);
    sparse().require_chosen();
    const AnyMutableView<Token, Head, Value> heads = heads_region(plan_.head_rows);
    if (plan_.fused_output) quantized_ = out;
    append_and_attend(q, kv_c, k_pe, heads);
    if (plan_.fused_output) run("scale_padding", ops::QuantizePaddingArgs{out, t});
    else run("quantize", ops::QuantizeArgs{.x = {heads.dtype(), heads.data(), {t, width}}, .y = out});
  }

 private:
  void check(Device here, int workers) {
    const ModelConfig& m = plan_.model;
    const ModelConfig& w = c_.weights.config;
    auto same = [](const char* what, int64_t weights, int64_t plan) {
      if (weights != plan)
        ops::require_equal("layer", std::string("weights ") + what, weights, std::string("plan ") + what, plan);
    };
    auto lies = [&](const char* what, Device there) {
      if (there != here)
        throw UnsupportedError("layer: " + std::string(what) + " of " + to_string(there) + " on a stream of " +
                               to_string(here));
    };
    same("hidden", w.hidden, m.hidden);
    same("heads", w.heads, m.heads);
    same("query latent", w.query_latent, m.query_latent);
    same("latent", w.latent, m.latent);
    same("nope", w.nope, m.nope);
    same("rope", w.rope, m.rope);
    same("value", w.value, m.value);
    if (w.query_growth_beta != m.query_growth_beta || w.query_growth_length != m.query_growth_length)
      throw ShapeError("layer: weights' and plan's queries grow differently with their positions");
    lies("weights", c_.weights.device);
    lies("plan", plan_.device.device);
    if (c_.weights.absorbed() != plan_.options.absorbed)
      throw UnsupportedError("layer: weights are prepared with absorption " +
                             std::string(to_string(c_.weights.absorption)) + ", the plan is for " +
                             (plan_.options.absorbed ? "fully absorbed ones" : "runtime absorption") +
                             " (PlanOptions::absorbed)");
    if (c_.weights.up() != plan_.options.up)
      throw UnsupportedError("layer: weights hold W_UK and W_UV as " + std::string(to_string(c_.weights.up())) +
                             ", the plan is for " + std::string(to_string(plan_.options.up)) + " (PlanOptions::up)");
    if (plan_.options.activations != Activations::plain && !c_.weights.any_fp8())
      throw UnsupportedError("layer: plan was made for activations " +
                             std::string(to_string(plan_.options.activations)) +
                             ", no map of the weights is held in fp8 (PrepareOptions::products)");
    ops::require_equal("layer", "batch tokens", c_.batch.tokens(), "plan tokens", plan_.tokens);
    ops::require_equal("layer", "batch requests", c_.batch.requests(), "plan requests",
                       static_cast<int64_t>(plan_.requests.size()));
    ops::require_equal("layer", "cache page size", c_.cache.spec.page_size, "plan page size", plan_.cache.page_size);
    if (c_.cache.spec.format != plan_.cache.format)
      throw ShapeError("layer: cache format is " + std::string(to_string(c_.cache.spec.format)) +
                       ", plan was made for " + std::string(to_string(plan_.cache.format)));
    ops::require_pages("layer", "cache", c_.cache);
    if (const uintptr_t past = reinterpret_cast<uintptr_t>(c_.cache.data) % 16; past != 0)
      throw ShapeError("layer: cache is at an address that is " + std::to_string(past) + " past a multiple of 16");
    require_memory("workspace", c_.workspace, plan_.workspace_bytes);
    if (workers > plan_.device.threads)
      throw ShapeError("layer: stream has " + counted(workers, "thread") + ", plan was made for " +
                       std::to_string(plan_.device.threads));
    scratch_ = {at<std::byte>("scratch"), plan_.device.scratch_per_worker};
    sparse().check();
  }

  void require_format(const OutputSpec& found) const {
    auto name = [](const OutputSpec& s) { return s.kind == OutputKind::none ? "plain f32" : to_string(s); };
    if (!found.same_format(plan_.options.output))
      throw ShapeError("layer: output is " + name(found) + ", plan was made for " + name(plan_.options.output));
  }

  void require_inputs(const AnyView<Token, Head, QueryKey>& q, const AnyView<Token, Latent>& kv_c,
                      const AnyView<Token, Rope>& k_pe) const {
    const ModelConfig& m = plan_.model;
    if (c_.weights.absorbed())
      throw UnsupportedError(
          "layer: the attention form takes queries and gives values per head, weights with absorption " +
          std::string(to_string(c_.weights.absorption)) + " know neither");
    ops::require_equal("layer", "q Head", q.extent<Head>(), "model heads", m.heads);
    ops::require_equal("layer", "q QueryKey", q.extent<QueryKey>(), "model nope + rope", m.query_key());
    ops::require_equal("layer", "kv_c Latent", kv_c.extent<Latent>(), "model latent", m.latent);
    ops::require_equal("layer", "k_pe Rope", k_pe.extent<Rope>(), "model rope", m.rope);
    ops::require_dtype("layer", "q", q.dtype(), {act_});
    ops::require_dtype("layer", "kv_c", kv_c.dtype(), {act_});
    ops::require_dtype("layer", "k_pe", k_pe.dtype(), {act_});
    require_input("q", q);
    require_input("kv_c", kv_c);
    require_input("k_pe", k_pe);
  }

  // Rows of the caller's, one a token.
  template <class V>
  void require_input(const char* name, const V& view) const {
    ops::require_view("layer", name, view);
    ops::require_rows("layer", name, view.template extent<Token>(), plan_.tokens);
  }

  void append_and_attend(const AnyView<Token, Head, QueryKey>& q, const AnyView<Token, Latent>& kv_c,
                         const AnyView<Token, Rope>& k_pe, const AnyMutableView<Token, Head, Value>& out) {
    const int64_t t = plan_.tokens;
    run("append", ops::AppendArgs{kv_c, k_pe, c_.batch.slot_mapping, c_.cache});
    attention(q.slice<Token>(0, t), kv_c.slice<Token>(0, t), k_pe.slice<Token>(0, t), out);
  }

  AnyMutableView<Token, Head, Value> heads_region(int64_t rows) const {
    return {plan_.head_dtype(), at<std::byte>("heads"), {rows, plan_.model.heads, plan_.model.value}};
  }

  // A head's query: what W_UK takes, and what is rotated.
  template <class View>
  AnyView<Token, Head, In> nope_part(const View& q) const {
    return {q.dtype(), q.data(), {q.template extent<Token>(), plan_.model.heads, plan_.model.nope}, q.strides()};
  }
  AnyMutableView<Token, Head, Rope> rope_part(const AnyMutableView<Token, Head, QueryKey>& q) const {
    return {
        q.dtype(), q.at(0, 0, plan_.model.nope), {q.extent<Token>(), plan_.model.heads, plan_.model.rope}, q.strides()};
  }
  AnyView<Token, Head, Rope> rope_part(const AnyView<Token, Head, QueryKey>& q) const {
    return {
        q.dtype(), q.at(0, 0, plan_.model.nope), {q.extent<Token>(), plan_.model.heads, plan_.model.rope}, q.strides()};
  }

  AnyMutableView<Token, Head, Out> hidden_rows(AnyMutableView<Token, Hidden> out) const {
    return {
        out.dtype(), out.data(), {plan_.tokens, 1, plan_.model.hidden}, {out.stride<Token>(), 0, out.stride<Hidden>()}};
  }

  // Normed query latents, where the model has them: what queries are projected from.
  AnyView<Token, Head, In> query_source(AnyView<Token, Head, In> hidden) {
    const ModelConfig& m = plan_.model;
    const int64_t t = plan_.tokens;
    if (m.query_latent == 0) return hidden;
    std::byte* q_latent = at<std::byte>("query_latent");
    project("query_down", hidden, {}, *c_.weights.query_down, flat(act_, q_latent, t, m.query_latent), {}, t);
    const AnyMutableView<Token, In> rows(act_, q_latent, {t, m.query_latent});
    ops::NormArgs norm{rows, c_.weights.query_norm.values(), m.rms_eps, rows};
    // The rows' maps and rotation are linear, so that queries grow with them.
    if (m.query_growth_beta > 0)
      norm.growth = {plan_.positions, m.query_growth_beta, static_cast<int32_t>(m.query_growth_length)};
    run("norm", norm);
    return flat(act_, q_latent, t, m.query_latent).read;
  }

  // The new tokens' cache rows, rotated and appended; q_pe is rotated with them.
  struct Rows {
    AnyView<Token, Latent> kv_c;
    AnyView<Token, Rope> k_pe;
  };
  Rows new_rows(AnyView<Token, Head, In> hidden, const AnyMutableView<Token, Head, Rope>& q_pe) {
    const ModelConfig& m = plan_.model;
    const int64_t t = plan_.tokens;
    const AnyMutableView<Token, Entry> kv(act_, at<std::byte>("kv"), {t, m.entry()});
    project("kv_down", hidden, {}, *c_.weights.kv_down, flat(act_, kv.data(), t, m.entry()), {}, t);
    const AnyMutableView<Token, Latent> kv_c(act_, kv.data(), {t, m.latent}, kv.strides());
    const AnyMutableView<Token, Rope> k_pe(act_, kv.at(0, m.latent), {t, m.rope}, kv.strides());
    run("norm_rope_append", ops::NormRopeAppendArgs{.q_pe = q_pe,
                                                    .kv_c = kv_c,
                                                    .k_pe = k_pe,
                                                    .weight = c_.weights.kv_norm.values(),
                                                    .eps = m.rms_eps,
                                                    .positions = plan_.positions,
                                                    .table = &c_.rotary,
                                                    .slots = c_.batch.slot_mapping,
                                                    .cache = c_.cache});
    return {kv_c, k_pe};
  }

  void attention(const AnyView<Token, Head, QueryKey>& q, const AnyView<Token, Latent>& kv_c,
                 const AnyView<Token, Rope>& k_pe, const AnyMutableView<Token, Head, Value>& out) {
    if (!plan_.latent_tokens.empty()) latent_path(q, out);
    if (!plan_.expanded_tokens.empty()) expanded_path(q, kv_c, k_pe, out);
  }

  // Absorbed queries over the cache itself, then W_UV.
  void latent_path(const AnyView<Token, Head, QueryKey>& q, const AnyMutableView<Token, Head, Value>& out) {
    const ModelConfig& m = plan_.model;
    const int64_t rows = latent_rows(), n = m.heads;
    const AnyMutableView<Token, Head, Entry> entry = staged_queries();
    project("absorb", nope_part(q), plan_.latent_tokens, *c_.weights.absorb_key, latent_part(entry), {}, rows);
    place_rope(rope_part(q), entry);
    const AnyMutableView<Token, Head, Value> latent_out = attend_latent(entry);
    project("value_up", {latent_out.dtype(), latent_out.data(), latent_out.extents(), latent_out.strides()}, {},
            *c_.weights.value_up, {out.dtype(), out.data(), {out.extent<Token>(), n, m.value}, out.strides()},
            plan_.latent_tokens, rows, quantized_);
  }

  // The block form with W_Q W_UK^T and W_UV W_O: latent queries straight from the query source, hidden straight from
  // latent outputs.
  void absorbed_block(AnyView<Token, Head, In> hidden, AnyMutableView<Token, Hidden> out) {
    const ModelConfig& m = plan_.model;
    const int64_t t = plan_.tokens, n = m.heads, rows = latent_rows();
    const AnyView<Token, Head, In> source = query_source(hidden);
    const AnyMutableView<Token, Head, Rope> q_pe(act_, at<std::byte>("query"), {t, n, m.rope});
    if (m.rope > 0)
      project("query_rope", source, {}, *c_.weights.query_rope, flat(act_, q_pe.data(), t, n * m.rope), {}, t);
    new_rows(hidden, q_pe);
    if (c_.weights.indexer) sparse().index(hidden, source);
    if (rows == 0) return;

    const AnyMutableView<Token, Head, Entry> entry = staged_queries();
    const AnyView<Token, Head, In> shared{source.dtype(),
                                          source.data(),
                                          {source.extent<Token>(), n, source.extent<In>()},
                                          {source.stride<Token>(), 0, source.stride<In>()}};
    project("absorbed_query", shared, plan_.latent_tokens, *c_.weights.absorbed_query, latent_part(entry), {}, rows);
    place_rope(q_pe, entry);
    const AnyMutableView<Token, Head, Value> latent_out = attend_latent(entry);
    project("absorbed_output", flat(latent_out.dtype(), latent_out.data(), rows, n * m.latent).read, {},
            *c_.weights.absorbed_output, hidden_rows(out), plan_.latent_tokens, rows);
  }

  Sparse sparse() const { return Sparse(*this); }

  int64_t latent_rows() const { return static_cast<int64_t>(plan_.latent_tokens.size()); }

  // Latent queries before their quantisation: [latent | rope] per head.
  AnyMutableView<Token, Head, Entry> staged_queries() const {
    const bool fp8 = plan_.options.fp8_query;
    return {fp8 ? Dtype::f32 : plan_.options.compute,
            at<std::byte>(fp8 ? "latent_query_f32" : "latent_query"),
            {latent_rows(), plan_.model.heads, plan_.model.entry()}};
  }
  AnyMutableView<Token, Head, Out> latent_part(AnyMutableView<Token, Head, Entry> entry) const {
    return {entry.dtype(), entry.data(), {latent_rows(), plan_.model.heads, plan_.model.latent}, entry.strides()};
  }
  void place_rope(const AnyView<Token, Head, Rope>& q_pe, AnyMutableView<Token, Head, Entry> entry) {
    const ModelConfig& m = plan_.model;
    if (m.rope == 0) return;
    run("query_rope",
        ops::CastArgs{
            .x = {q_pe.dtype(), q_pe.data(), q_pe.extents(), q_pe.strides()},
            .x_rows = plan_.latent_tokens,
            .y = {entry.dtype(), entry.at(0, 0, m.latent), {latent_rows(), m.heads, m.rope}, entry.strides()}});
  }

  // Staged queries over the cached rows; their quantisation first, where the plan asks for it. Splits are merged.
  AnyMutableView<Token, Head, Value> attend_latent(AnyMutableView<Token, Head, Entry> entry) {
    const ModelConfig& m = plan_.model;
    const int64_t rows = latent_rows(), n = m.heads, width = plan_.cache.value_width();
    const bool fp8 = plan_.options.fp8_query;
    AnyMutableView<Token, Head, Entry> latent_query = entry;
    if (fp8) {
      latent_query = {Dtype::fp8_e4m3, at<std::byte>("latent_query"), {rows, n, m.entry()}};
      run("quantise_query", ops::CastArgs{.x = {Dtype::f32, entry.data(), {rows, n, m.entry()}},
                                          .x_rows = {},
                                          .y = {Dtype::fp8_e4m3, latent_query.data(), {rows, n, m.entry()}},
                                          .scale = plan_.options.q_scale});
    }

    const AnyMutableView<Token, Head, Value> latent_out(act_, at<std::byte>("latent_out"), {rows, n, width});
    const View<float, Token, Head> lse(at<float>("latent_lse"), {rows, n});
    const View<float, Partial, Head, Value> partial_out(at<float>("partial_out"), {plan_.partial_rows, n, width});
    const View<float, Partial, Head> partial_lse(at<float>("partial_lse"), {plan_.partial_rows, n});
    if (!plan_.latent_items.empty())
      run("attend_latent", ops::AttendLatentArgs{.q = latent_query,
                                                 .q_scale = fp8 ? plan_.options.q_scale : 1.0f,
                                                 .cache = c_.cache,
                                                 .block_table = c_.batch.block_table,
                                                 .items = plan_.latent_items,
                                                 .scale = static_cast<float>(m.softmax_scale()),
                                                 .out = latent_out,
                                                 .lse = lse,
                                                 .partial_out = partial_out,
                                                 .partial_lse = partial_lse,
                                                 .batch_invariant = plan_.options.split == SplitPolicy::batch_invariant,
                                                 .cache_settled = true,  // queries are absorbed after the append
                                                 .scratch = scratch_});
    if (!plan_.splits.empty())
      run("merge_splits", ops::MergeSplitsArgs{partial_out, partial_lse, plan_.splits, latent_out.as<float>(), lse});
    if (const int64_t first = plan_.sparse_begin; first < rows)
      sparse().attend(latent_query.slice<Token>(first, rows - first), fp8 ? plan_.options.q_scale : 1.0f,
                      latent_out.slice<Token>(first, rows - first), lse.slice<Token>(first, rows - first));
    return latent_out;
  }

  // Keys and values of `rows` latent rows, in the compute dtype; the shared rope part keeps its own array.
  struct Expanded {
    AnyView<Key, Head, Nope> k_nope;
    AnyView<Key, Rope> k_pe;
    AnyView<Key, Head, Value> v;
  };
  Expanded expand(const AnyView<Token, Latent>& kv_c, const AnyView<Token, Rope>& k_pe, std::span<const int32_t> list,
                  int64_t rows) {
    const ModelConfig& m = plan_.model;
    const Dtype t = plan_.options.compute;
    const int64_t n = m.heads, width = m.nope + m.value;
    const AnyMutableView<Key, Head, Out> keys(t, at<std::byte>("keys"), {rows, n, width});
    std::byte* rope = at<std::byte>("key_rope");
    project("kv_up", {kv_c.dtype(), kv_c.data(), {kv_c.extent<Token>(), 1, m.latent}, {kv_c.stride<Token>(), 0, 1}},
            list, *c_.weights.kv_up, {t, keys.data(), {rows, 1, n * width}}, {}, rows);
    if (m.rope > 0)
      run("key_rope",
          ops::CastArgs{
              .x = {k_pe.dtype(), k_pe.data(), {k_pe.extent<Token>(), 1, m.rope}, {k_pe.stride<Token>(), 0, 1}},
              .x_rows = list,
              .y = {t, rope, {rows, 1, m.rope}}});
    return {{t, keys.data(), {rows, n, m.nope}, keys.strides()},
            {t, rope, {rows, m.rope}},
            {t, keys.at(0, 0, m.nope), {rows, n, m.value}, keys.strides()}};
  }

  // New tokens among themselves, then one chunk of cached context after another, merged in place.
  void expanded_path(const AnyView<Token, Head, QueryKey>& q, const AnyView<Token, Latent>& kv_c,
                     const AnyView<Token, Rope>& k_pe, const AnyMutableView<Token, Head, Value>& out) {
    const ModelConfig& m = plan_.model;
    const View<float, Token, Head> lse(at<float>("heads_lse"), {plan_.tokens, m.heads});
    auto attend = [&](const Expanded& e, std::span<const ExpandedItem> items, bool accumulate) {
      run(accumulate ? "attend_context" : "attend_expanded",
          ops::AttendExpandedArgs{.q = q,
                                  .k_nope = e.k_nope,
                                  .k_pe = e.k_pe,
                                  .v = e.v,
                                  .items = items,
                                  .scale = static_cast<float>(m.softmax_scale()),
                                  .out = out,
                                  .lse = lse,
                                  .accumulate = accumulate,
                                  .quantized = quantized_,
                                  .scratch = scratch_});
    };
    attend(expand(kv_c, k_pe, plan_.expanded_tokens, static_cast<int64_t>(plan_.expanded_tokens.size())),
           plan_.suffix_items, false);
    for (const ContextChunk& chunk : plan_.chunks) {
      const AnyMutableView<Token, Entry> context(act_, at<std::byte>("context"), {chunk.rows, m.entry()});
      const AnyMutableView<Token, Latent> rows(act_, context.data(), {chunk.rows, m.latent}, context.strides());
      const AnyMutableView<Token, Rope> rope(act_, context.at(0, m.latent), {chunk.rows, m.rope}, context.strides());
      run("gather", ops::GatherArgs{.cache = c_.cache,
                                    .block_table = c_.batch.block_table,
                                    .pieces = chunk.pieces,
                                    .kv_c = {act_, rows.data(), {chunk.rows, m.latent}, rows.strides()},
                                    .k_pe = {act_, rope.data(), {chunk.rows, m.rope}, rope.strides()}});
      attend(expand(rows, rope, {}, chunk.rows), chunk.items, true);
    }
  }

  QuantizedView quantized_;  // of a fused output: what finishes heads writes here
};

}  // namespace

void survey(Survey& survey, const LayerContext& context, std::byte* anywhere) {
  const Plan& p = context.plan;
  const ModelConfig& m = p.model;
  const int64_t t = p.tokens;
  Walk walk(survey, context);
  if (p.serves_block())
    return walk.block({p.activations(), anywhere, {t, m.hidden}}, {p.activations(), anywhere, {t, m.hidden}});
  const AnyView<Token, Head, QueryKey> q(p.activations(), anywhere, {t, m.heads, m.query_key()});
  const AnyView<Token, Latent> kv_c(p.activations(), anywhere, {t, m.latent});
  const AnyView<Token, Rope> k_pe(p.activations(), anywhere, {t, m.rope});
  if (p.options.output.kind == OutputKind::none)
    return walk.attention_form(q, kv_c, k_pe,
                               AnyMutableView<Token, Head, Value>(p.head_dtype(), anywhere, {t, m.heads, m.value}));
  const int64_t width = m.heads * m.value;
  const QuantizedView out{.spec = p.options.output,
                          .tokens = t,
                          .width = width,
                          .data = anywhere,
                          .row_stride = p.options.output.row_bytes(width),
                          .scales = anywhere};
  walk.attention_form(q, kv_c, k_pe, out);
}

}  // namespace layer

using layer::Walk;

void forward(Stream& stream, const LayerContext& context, AnyView<Token, Hidden> hidden,
             AnyMutableView<Token, Hidden> out) {
  Walk(stream, context).block(hidden, out);
}

void attend(Stream& stream, const LayerContext& context, AnyView<Token, Head, QueryKey> q, AnyView<Token, Latent> kv_c,
            AnyView<Token, Rope> k_pe, AnyMutableView<Token, Head, Value> out) {
  Walk(stream, context).attention_form(q, kv_c, k_pe, out);
}

void attend(Stream& stream, const LayerContext& context, AnyView<Token, Head, QueryKey> q, AnyView<Token, Latent> kv_c,
            AnyView<Token, Rope> k_pe, const QuantizedView& out) {
  Walk(stream, context).attention_form(q, kv_c, k_pe, out);
}

void select(Stream& stream, const LayerContext& context, View<const int32_t, Token, Topk> positions) {
  Walk(stream, context).choose(positions);
}

}  // namespace mla
