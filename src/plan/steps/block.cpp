// The block form: projections, norms and rotation around attention.
#include "plan/steps/steps.hpp"

namespace mla::planning {

Operand<Token, Head, In> hidden_rows(Steps& s) {
  const int64_t t = s.tokens, width = s.m.hidden;
  const auto given = s.input<Token, Head, In>(Memory::hidden, s.act, {t, 1, width});
  if (!s.plan.casts_hidden()) return given;
  const auto rows = s.region<Token, Head, In>("hidden_rows", s.act, {t, 1, width});
  s.add("cast", kForward, steps::Cast{.x = given, .x_rows = {}, .y = rows});
  return rows;
}

Operand<Token, Head, In> query_source(Steps& s, const Operand<Token, Head, In>& hidden) {
  const int64_t width = s.m.query_latent;
  if (width == 0) return hidden;
  const auto latents = s.region<Token, Head, In>("query_latent", s.act, {s.tokens, 1, width});
  const auto made = s.region<Token, Head, Out>("query_latent", s.act, {s.tokens, 1, width});
  // An indexer selects by them: what one rank would, to the bit.
  if (s.m.indexer) s.project("query_down", kForward, hidden, {}, Weight::query_down, made, {}, s.tokens);
  else s.project_shared("query_down", "gather_query_down", kForward, hidden, Weight::query_down, made);
  steps::Norm norm{.x = s.region<Token, In>("query_latent", s.act, {s.tokens, width}), .eps = s.m.rms_eps};
  // The rows' maps and rotation are linear, so that queries grow with them.
  if (s.m.query_growth_beta > 0) {
    norm.positions = s.list(ListKind::positions, s.tokens);
    norm.growth_beta = s.m.query_growth_beta;
    norm.growth_length = static_cast<int32_t>(s.m.query_growth_length);
  }
  s.add("norm", kForward, norm);
  return latents;
}

void new_rows(Steps& s, const Operand<Token, Head, In>& hidden) {
  s.project_shared("kv_down", "gather_kv_down", kForward, hidden, Weight::kv_down,
                   s.region<Token, Head, Out>("kv", s.act, {s.tokens, 1, s.m.entry()}));
}

void append_new_rows(Steps& s, const Operand<Token, Head, Rope>& q_pe) {
  const ModelConfig& m = s.m;
  const auto kv = s.region<Token, Entry>("kv", s.act, {s.tokens, m.entry()});
  s.join(kForward);
  steps::NormRopeAppend step{.q_pe = q_pe,
                             .kv_c = kv.part<Token, Latent>(0, {s.tokens, m.latent}),
                             .k_pe = kv.part<Token, Rope>(m.latent, {s.tokens, m.rope}),
                             .eps = m.rms_eps,
                             .positions = s.list(ListKind::positions, s.tokens),
                             .slots = s.list(ListKind::slot_mapping, s.tokens)};
  if (appending_places_rope(s)) {
    step.q_placed = latent_rope(s);
    step.q_tokens = s.list(ListKind::latent_tokens, s.plan.latent_tokens);
  }
  s.add("norm_rope_append", kForward, step);
}

Operand<Token, Head, In> begin_block(Steps& s, const Operand<Token, Head, In>& hidden) {
  // Attention waits longest for an indexer's choice. Ranks make their calls in one order, so that collectives stay in
  // the first lane.
  const bool beside = s.m.indexer && !s.plan.options.context_parallel.shared(), chooses = s.plan.sparse_rows() > 0;
  const int choice = beside ? 1 : 0, keys = beside ? 2 : 0, rows = s.plan.divides_rows() ? 0 : beside ? 1 : 2;
  s.go_on_in(rows);
  s.wait(kForward, 0);
  s.go_on_in(keys);
  s.wait(kIndexer, 0);
  if (s.m.indexer) index_products(s, hidden);
  s.go_on_in(0);
  const auto source = query_source(s, hidden);
  s.go_on_in(rows);
  new_rows(s, hidden);
  Operand<Token, IndexHead, IndexDim> queries;
  if (chooses) {
    s.go_on_in(choice);
    s.wait(kIndexer | kSelect, 0);
    queries = index_queries(s, source);
    // Products of queries hold every multiprocessor: scores are to have begun.
    s.go_on_in(0);
    s.wait(kForward, choice);
  }
  s.go_on_in(keys);
  if (s.m.indexer) append_index_keys(s);
  s.go_on_in(choice);
  if (chooses) index_choice(s, queries);
  s.go_on_in(0);
  return source;
}

void project_hidden(Steps& s, std::string_view name, const Operand<Token, Head, In>& x, Weight weights,
                    const RowList& y_rows, int64_t rows) {
  const int64_t t = s.tokens, width = s.m.hidden;
  const bool sums = s.plan.options.tensor_parallel > 1;
  if (!sums && !s.plan.casts_hidden())
    return s.project(name, kForward, x, {}, weights,
                     s.input<Token, Head, Out>(Memory::hidden_out, s.act, {t, 1, width}),
                     s.plan.options.maxima ? s.written() : y_rows, rows);
  // f32 until all are added, and where products give no such rows.
  s.project(name, kForward, x, {}, weights, s.region<Token, Head, Out>("hidden_part", Dtype::f32, {t, 1, width}),
            y_rows, rows);
  const auto part = s.region<Token, In>("hidden_part", Dtype::f32, {t, width});
  if (s.plan.sums_own()) s.add("reduce_scatter", kForward, steps::ReduceScatter{part});
  else if (sums) s.add("all_reduce", kForward, steps::AllReduce{part});
  const RowRange rows_out = s.plan.own_rows();
  s.add(
      "cast", kForward,
      steps::Cast{
          .x = s.region<Token, Head, In>("hidden_part", Dtype::f32, {t, 1, width}).rows(rows_out.begin, rows_out.count),
          .x_rows = {},
          .y = s.input<Token, Head, In>(Memory::hidden_out, s.act, {rows_out.count, 1, width}),
          .y_rows = s.written_sums()});
}

void block_steps(Steps& s) {
  const ModelConfig& m = s.m;
  const int64_t t = s.tokens, n = m.heads;
  const auto hidden = hidden_rows(s);
  const auto q = s.region<Token, Head, QueryKey>("query", s.act, {t, n, m.query_key()});
  const auto source = begin_block(s, hidden);
  s.project("query", kForward, source, {}, Weight::query,
            s.region<Token, Head, Out>("query", s.act, {t, 1, n * m.query_key()}), {}, t);
  append_new_rows(s, q.part<Token, Head, Rope>(m.nope, {t, n, m.rope}));
  attention_steps(s, kForward | kAttend);
  s.join(kAnyCall);
  project_hidden(s, "output", s.region<Token, Head, In>("heads", s.plan.head_dtype(), {t, 1, n * m.value}),
                 Weight::output, {}, t);
}

}  // namespace mla::planning
