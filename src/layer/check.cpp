#include "layer/check.hpp"

#include <string>

#include "core/counted.hpp"
#include "mla/communicator.hpp"
#include "mla/error.hpp"
#include "ops/quantize/op.hpp"
#include "ops/require.hpp"

namespace mla::layer {
namespace {

// Memory that the caller lends.
void require_memory(const char* name, std::span<std::byte> memory, size_t needed) {
  if (memory.size() < needed)
    throw ShapeError("layer: " + std::string(name) + " is " + std::to_string(memory.size()) + " bytes, plan needs " +
                     std::to_string(needed));
  if (needed > 0 && !memory.data()) throw ShapeError("layer: " + std::string(name) + " has no data");
  if (const uintptr_t past = reinterpret_cast<uintptr_t>(memory.data()) % 64; past != 0)
    throw ShapeError("layer: " + std::string(name) + " is at an address that is " + std::to_string(past) +
                     " past a multiple of 64");
}

// The table that positions are rotated with.
void require_table(const LayerContext& c, Device device, const char* name, const RotaryTable& table,
                   const RopeConfig& model) {
  if (const std::string why = table.difference(model, c.plan.model.rope); !why.empty())
    throw ShapeError("layer: " + std::string(name) + " " + why);
  if (!table.rotates()) return;
  if (table.device() != device)
    throw UnsupportedError("layer: " + std::string(name) + " of " + to_string(table.device()) + " on a stream of " +
                           to_string(device));
  if (const auto& maxima = c.plan.options.maxima; maxima && maxima->seq_len > table.positions())
    throw ShapeError("layer: " + std::string(name) + " has " + std::to_string(table.positions()) +
                     " positions, the step's maxima allow sequences of " + std::to_string(maxima->seq_len));
  for (const RequestPlan& r : c.plan.requests)
    if (const int64_t last = int64_t{r.context} + r.query_len; r.query_len > 0 && last > table.positions())
      throw ShapeError("layer: " + std::string(name) + " has " + std::to_string(table.positions()) +
                       " positions, a request's sequence has " + std::to_string(last));
}

// Rows of the caller's, one a token.
template <class V>
void require_input(const LayerContext& c, const char* name, const V& view) {
  ops::require_view("layer", name, view);
  ops::require_rows("layer", name, view.template extent<Token>(), c.plan.tokens);
}

// Hidden states of the plan's dtype; results of it, or of f32 or bf16, which products write anyway.
void require_hidden(const LayerContext& c, Dtype hidden, Dtype out) {
  const ActivationDtype planned = c.plan.options.activation_dtype;
  const auto fail = [&](const char* name, Dtype found) {
    throw ShapeError("layer: " + std::string(name) + " is " + std::string(to_string(found)) +
                     ", plan was made for activations of " +
                     (planned == ActivationDtype::native ? "f32 or bf16" : std::string(to_string(planned))) +
                     " (PlanOptions::activation_dtype)");
  };
  const auto plain = [](Dtype t) { return t == Dtype::f32 || t == Dtype::bf16; };
  if (planned == ActivationDtype::native ? !plain(hidden) : hidden != c.plan.inputs()) fail("hidden", hidden);
  if (!plain(out) && !(out == Dtype::f16 && c.plan.casts_hidden())) fail("out", out);
}

void require_format(const LayerContext& c, const OutputSpec& found) {
  auto name = [](const OutputSpec& s) { return s.kind == OutputKind::none ? "plain f32" : to_string(s); };
  if (!found.same_format(c.plan.options.output))
    throw ShapeError("layer: output is " + name(found) + ", plan was made for " + name(c.plan.options.output));
}

void require_inputs(const LayerContext& c, const AnyView<Token, Head, QueryKey>& q, const AnyView<Token, Latent>& kv_c,
                    const AnyView<Token, Rope>& k_pe) {
  const ModelConfig& m = c.plan.model;
  if (c.weights.absorbed())
    throw UnsupportedError(
        "layer: the attention form takes queries and gives values per head, weights with absorption " +
        std::string(to_string(c.weights.absorption)) + " know neither");
  if (c.plan.options.dummy) return;
  ops::require_equal("layer", "q Head", q.extent<Head>(), "model heads", m.heads);
  ops::require_equal("layer", "q QueryKey", q.extent<QueryKey>(), "model nope + rope", m.query_key());
  ops::require_dtype("layer", "q", q.dtype(), {c.plan.inputs()});
  require_input(c, "q", q);
  if (!c.plan.reads_new_rows()) return;
  ops::require_equal("layer", "kv_c Latent", kv_c.extent<Latent>(), "model latent", m.latent);
  ops::require_equal("layer", "k_pe Rope", k_pe.extent<Rope>(), "model rope", m.rope);
  ops::require_dtype("layer", "kv_c", kv_c.dtype(), {c.plan.inputs()});
  ops::require_dtype("layer", "k_pe", k_pe.dtype(), {c.plan.inputs()});
  require_input(c, "kv_c", kv_c);
  require_input(c, "k_pe", k_pe);
}

void require_cache(const LayerContext& c) {
  ops::require_equal("layer", "cache page size", c.cache.spec.page_size, "plan page size", c.plan.cache.page_size);
  if (c.cache.spec.format != c.plan.cache.format)
    throw ShapeError("layer: cache format is " + std::string(to_string(c.cache.spec.format)) + ", plan was made for " +
                     std::string(to_string(c.plan.cache.format)));
  if (c.plan.gathers_context() && c.cache.page_stride % sizeof(float) != 0)
    throw ShapeError("layer: cache page_stride is " + std::to_string(c.cache.page_stride) +
                     ", must be a multiple of 4: ranks send each other rows as they are stored");
  ops::require_pages("layer", "cache", c.cache);
  if (const uintptr_t past = reinterpret_cast<uintptr_t>(c.cache.data) % 16; past != 0)
    throw ShapeError("layer: cache is at an address that is " + std::to_string(past) + " past a multiple of 16");
}

// What forward() runs the indexer on.
void require_index_cache(const LayerContext& c) {
  ops::require_equal("layer", "index cache's number of pages", c.index_cache.pages, "the cache's", c.cache.pages);
  const IndexCacheSpec &found = c.index_cache.spec, &planned = c.plan.index_cache;
  if (found.format != planned.format)
    throw ShapeError("layer: index cache format is " + std::string(to_string(found.format)) + ", plan was made for " +
                     std::string(to_string(planned.format)));
  ops::require_equal("layer", "index cache page size", found.page_size, "plan page size", planned.page_size);
  ops::require_equal("layer", "index cache dim", found.dim, "model index dim", planned.dim);
  ops::require_pages("layer", "index cache", c.index_cache);
}

}  // namespace

void check(const LayerContext& c, Device here, int workers) {
  const ModelConfig& m = c.plan.model;
  const ModelConfig& w = c.weights.config;
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
  const std::shared_ptr<const Linear>& up = c.weights.absorb_key;
  if (const int64_t heads = c.plan.absorbed_heads(); up && up->heads != heads)
    throw ShapeError("layer: weights hold W_UK and W_UV of " + counted(up->heads, "head") + ", plan needs those of " +
                     std::to_string(heads) +
                     (c.plan.exchanges_heads() ? ": its group's (LayerTensors::group_kv_up)" : ""));
  if (w.query_growth_beta != m.query_growth_beta || w.query_growth_length != m.query_growth_length)
    throw ShapeError("layer: weights' and plan's queries grow differently with their positions");
  lies("weights", c.weights.device);
  lies("plan", c.plan.device.device);
  if (c.weights.absorbed() != c.plan.options.absorbed)
    throw UnsupportedError("layer: weights are prepared with absorption " +
                           std::string(to_string(c.weights.absorption)) + ", the plan is for " +
                           (c.plan.options.absorbed ? "fully absorbed ones" : "runtime absorption") +
                           " (PlanOptions::absorbed)");
  if (c.weights.up() != c.plan.options.up)
    throw UnsupportedError("layer: weights hold W_UK and W_UV as " + std::string(to_string(c.weights.up())) +
                           ", the plan is for " + std::string(to_string(c.plan.options.up)) + " (PlanOptions::up)");
  if (c.plan.options.fp8_query && c.plan.options.q_scale == 0 && !(c.weights.query_scale > 0))
    throw UnsupportedError(
        "layer: plan was made for the layer's own scale of fp8 queries (q_scale 0), these weights came without one "
        "that "
        "all heads share");
  if (c.plan.options.activations != Activations::plain && !c.weights.any_fp8())
    throw UnsupportedError("layer: plan was made for activations " +
                           std::string(to_string(c.plan.options.activations)) +
                           ", no map of the weights is held in fp8 (PrepareOptions::products)");
  ops::require_equal("layer", "batch tokens", c.batch.tokens(), "plan tokens", c.plan.batch_tokens);
  ops::require_equal("layer", "batch requests", c.batch.requests(), "plan requests",
                     static_cast<int64_t>(c.plan.requests.size()));
  if (c.plan.uses_cache()) require_cache(c);
  require_memory("workspace", c.workspace, c.plan.workspace_bytes);
  if (workers > c.plan.device.threads)
    throw ShapeError("layer: stream has " + counted(workers, "thread") + ", plan was made for " +
                     std::to_string(c.plan.device.threads));
  if (c.plan.sparse_rows() > 0) require_memory("selection", c.selection, c.plan.selection_bytes);
  if (c.weights.indexer && !c.plan.model.indexer)
    throw ShapeError("layer: weights have an indexer, plan was made for a model without one");
}

void check_block(const LayerContext& c, const AnyView<Token, Hidden>& hidden,
                 const AnyMutableView<Token, Hidden>& out) {
  if (c.plan.options.output.kind != OutputKind::none)
    throw UnsupportedError("layer: plan was made for output " + to_string(c.plan.options.output) +
                           "; the block form's output is hidden states after W_O, never quantised");
  if (!c.plan.serves_block())
    throw UnsupportedError("layer: plan was made for the attention form alone (PlanOptions::form)");
  const bool dummy = c.plan.options.dummy;
  if (!dummy) require_hidden(c, hidden.dtype(), out.dtype());
  if (!dummy) require_input(c, "hidden", hidden);
  ops::require_view("layer", "out", out);
  ops::require_rows("layer", c.plan.sums_own() ? "out, of this rank's rows," : "out", out.extent<Token>(),
                    c.plan.own_rows().count);
  if (!dummy)
    ops::require_equal("layer", "hidden Hidden", hidden.extent<Hidden>(), "model hidden", c.plan.model.hidden);
  ops::require_equal("layer", "out Hidden", out.extent<Hidden>(), "model hidden", c.plan.model.hidden);
  if (dummy) return;
  if (c.weights.indexer) require_index_cache(c);
}

void check_ranks(const LayerContext& c, bool forward) {
  const int ranks = c.plan.options.tensor_parallel;
  if (ranks == 1 || c.plan.options.dummy || !(forward || c.plan.shares_context() || c.plan.gathers_context())) return;
  if (!c.ranks) throw ShapeError("layer: ranks is missing, plan was made for tensor_parallel " + std::to_string(ranks));
  ops::require_equal("layer", "ranks", c.ranks->ranks(), "plan tensor_parallel", ranks);
  if (c.plan.options.context_parallel.shared() || c.plan.sums_own())
    ops::require_equal("layer", "ranks' own", c.ranks->rank(), "plan context_parallel rank",
                       c.plan.options.context_parallel.rank);
}

void check_tables(const LayerContext& c, Device device) {
  if (c.plan.options.dummy) return;
  const ModelConfig& m = c.plan.model;
  require_table(c, device, "rotary table", c.rotary, m.rotary);
  if (!c.weights.indexer) return;
  if (!c.index_rotary) throw ShapeError("layer: index_rotary is missing");
  require_table(c, device, "index rotary table", *c.index_rotary, m.index_rotary());
}

void check_attention(const LayerContext& c, const AnyView<Token, Head, QueryKey>& q, const AnyView<Token, Latent>& kv_c,
                     const AnyView<Token, Rope>& k_pe, const AnyMutableView<Token, Head, Value>& out) {
  require_format(c, {});
  require_inputs(c, q, kv_c, k_pe);
  ops::require_equal("layer", "out Head", out.extent<Head>(), "model heads", c.plan.model.heads);
  ops::require_equal("layer", "out Value", out.extent<Value>(), "model value", c.plan.model.value);
  ops::require_dtype("layer", "out", out.dtype(), {Dtype::f32, Dtype::bf16, Dtype::f16});
  require_input(c, "out", out);
}

void check_attention(const LayerContext& c, const AnyView<Token, Head, QueryKey>& q, const AnyView<Token, Latent>& kv_c,
                     const AnyView<Token, Rope>& k_pe, const QuantizedView& out) {
  require_format(c, out.spec);
  require_inputs(c, q, kv_c, k_pe);
  ops::check_quantized("layer", out, c.plan.tokens, c.plan.model.heads * c.plan.model.value);
}

void check_choice(const LayerContext& c, View<const int32_t, Token, Topk> positions) {
  if (c.plan.options.dummy) return;
  ops::require_equal("select", "positions Topk", positions.extent<Topk>(), "plan topk", c.plan.topk);
  ops::require_view("select", "positions", positions);
  ops::require_rows("select", "positions", positions.extent<Token>(), c.plan.tokens);
  if (const int64_t masked = c.plan.masked_rows(); masked > 0)
    throw UnsupportedError("select: " + counted(masked, "token") +
                           " of the plan attend by masks, which name a position " +
                           "once and none past the token: plan with sparse mixed, direct or upconvert");
}

}  // namespace mla::layer
