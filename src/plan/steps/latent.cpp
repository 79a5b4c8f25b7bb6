// The latent path: queries through W_UK attend to the cached rows themselves.
#include "plan/internal.hpp"
#include "plan/steps/steps.hpp"

namespace mla::planning {
namespace {

int64_t rows_of(const Steps& s) { return static_cast<int64_t>(s.plan.latent_tokens.size()); }

}  // namespace

Operand<Token, Head, Entry> staged_queries(const Steps& s) {
  const bool fp8 = s.plan.options.fp8_query;
  return s.region<Token, Head, Entry>(fp8 ? "latent_query_f32" : "latent_query",
                                      fp8 ? Dtype::f32 : s.plan.options.compute,
                                      {rows_of(s), s.plan.absorbed_heads(), s.m.entry()});
}

Operand<Token, Head, Rope> latent_rope(const Steps& s) {
  return staged_queries(s).part<Token, Head, Rope>(s.m.latent, {rows_of(s), s.plan.absorbed_heads(), s.m.rope});
}

bool appending_places_rope(const Steps& s) {
  const bool gpu = s.plan.device.device.kind == DeviceKind::cuda;  // a CPU's rows stay in its caches
  return gpu && !s.plan.exchanges_heads() && s.m.rope > 0 && rows_of(s) > 0 && !s.plan.expands() &&
         staged_queries(s).dtype == s.act;
}

void place_rope(Steps& s, Calls calls, const Operand<Token, Head, Rope>& q_pe, const RowList& tokens) {
  if (appending_places_rope(s)) calls.bits &= static_cast<uint8_t>(~kForward.bits);
  if (s.m.rope == 0 || calls.bits == 0) return;
  s.add("query_rope", calls,
        steps::Cast{.x = q_pe.part<Token, Head, In>(0, q_pe.extents()),
                    .x_rows = tokens,
                    .y = latent_rope(s).part<Token, Head, In>(0, {rows_of(s), s.plan.absorbed_heads(), s.m.rope})});
}

Partials partials(const Steps& s, int64_t rows, int64_t heads) {
  return {s.region<Partial, Head, Value>("partial_out", Dtype::f32, {rows, heads, s.plan.cache.value_width()}),
          s.region<Partial, Head>("partial_lse", Dtype::f32, {rows, heads})};
}

namespace {

// Queries over the plan's items, splits merged.
void attend_items(Steps& s, Calls calls, const Operand<Token, Head, Entry>& q, const QueryScales& scales,
                  const Operand<Token, Head, Value>& out, const Operand<Token, Head>& lse) {
  const Plan& p = s.plan;
  const auto [partial_out, partial_lse] = partials(s, p.partial_rows, q.extent<Head>());
  const bool scheduled = p.device.device.kind == DeviceKind::cuda && p.splits.empty();
  if (!p.latent_items.empty()) {
    if (scheduled)
      s.add("schedule_latent", kStaging, steps::ScheduleLatent{q, s.list(ListKind::latent_items, p.latent_items)});
    s.add("attend_latent", calls,
          steps::AttendLatent{.q = q,
                              .q_scale = scales.codes,
                              .items = s.list(ListKind::latent_items, p.latent_items),
                              .scheduled = scheduled,
                              .scale = scales.softmax,
                              .out = out,
                              .lse = lse,
                              .partial_out = partial_out,
                              .partial_lse = partial_lse});
  }
  if (!p.splits.empty())
    s.add("merge_splits", calls,
          steps::MergeSplits{partial_out, partial_lse, s.list(ListKind::splits, p.splits), out, lse});
}

// What all ranks found for this rank's heads, merged in f32.
void exchange_found(Steps& s, Calls calls, const Operand<Token, Head, Value>& found,
                    const Operand<Token, Head>& found_lse, const Operand<Token, Head, Value>& merged,
                    const Operand<Token, Head>& lse) {
  const int64_t rows = rows_of(s), n = s.m.heads, width = found.extent<Value>(),
                ranks = s.plan.options.context_parallel.sharding.ranks();
  const auto got = s.region<Partial, Head, Value>("rank_got", Dtype::f32, {ranks * rows, n, width});
  const auto got_lse = s.region<Partial, Head>("rank_got_lse", Dtype::f32, {ranks * rows, n});
  s.add("exchange_found", calls, steps::ExchangeFound{found, found_lse, got, got_lse});
  s.add("merge_splits", calls,
        steps::MergeSplits{got, got_lse, s.list(ListKind::rank_splits, s.plan.rank_splits), merged, lse});
}

// All ranks' queries over the tokens that this rank holds; merged is what all found for this rank's.
void attend_shared(Steps& s, Calls calls, const Operand<Token, Head, Entry>& q, const QueryScales& scales,
                   const Operand<Token, Head, Value>& out, const Operand<Token, Head>& lse) {
  const Plan& p = s.plan;
  const int64_t rows = rows_of(s), width = p.cache.value_width(), all = attended_heads(p);
  const auto queries = s.region<Token, Head, Entry>("rank_queries", q.dtype, {rows, all, s.m.entry()});
  s.add("gather_queries", calls, steps::GatherQueries{q, queries});
  const auto found = s.region<Token, Head, Value>("rank_found", Dtype::f32, {rows, all, width});
  const auto found_lse = s.region<Token, Head>("rank_found_lse", Dtype::f32, {rows, all});
  attend_items(s, calls, queries, scales, found, found_lse);
  if (const int64_t first = p.sparse_begin; first < rows)
    sparse_steps(s, calls, queries.rows(first, rows - first), scales, found.rows(first, rows - first),
                 found_lse.rows(first, rows - first));
  // Where rows are of 16 bits, rounded behind the merge.
  const auto merged =
      s.act == Dtype::f32 ? out : s.region<Token, Head, Value>("rank_merged", Dtype::f32, out.extents());
  exchange_found(s, calls, found, found_lse, merged, lse);
  if (s.act != Dtype::f32)
    s.add("cast", calls,
          steps::Cast{.x = merged.part<Token, Head, In>(0, out.extents()),
                      .x_rows = {},
                      .y = out.part<Token, Head, In>(0, out.extents())});
}

}  // namespace

Operand<Token, Head, Value> attend_latent(Steps& s, Calls calls) {
  const Plan& p = s.plan;
  const int64_t rows = rows_of(s), n = p.absorbed_heads(), width = p.cache.value_width();
  const bool fp8 = p.options.fp8_query;
  Operand<Token, Head, Entry> q = staged_queries(s);
  if (fp8) {
    const Operand<Token, Head, Entry> staged = q;
    q = s.region<Token, Head, Entry>("latent_query", query_codes(p), staged.extents());
    s.add("quantise_query", calls,
          steps::Cast{.x = staged.part<Token, Head, In>(0, staged.extents()),
                      .x_rows = {},
                      .y = q.part<Token, Head, In>(0, q.extents()),
                      .scale = p.options.q_scale,
                      .through_e4m3 = q.dtype != Dtype::fp8_e4m3});
  }
  QueryScales scales{1.0f, static_cast<float>(s.m.softmax_scale())};
  if (fp8) (q.dtype == Dtype::fp8_e4m3 ? scales.codes : scales.softmax) *= p.options.q_scale;
  const auto out = s.region<Token, Head, Value>("latent_out", s.act, {rows, n, width});
  const auto lse = s.region<Token, Head>("latent_lse", Dtype::f32, {rows, n});
  if (p.shares_context() && !p.exchanges_heads()) {
    attend_shared(s, calls, q, scales, out, lse);
    return out;
  }
  attend_items(s, calls, q, scales, out, lse);
  if (const int64_t first = p.sparse_begin; first < rows)
    sparse_steps(s, calls, q.rows(first, rows - first), scales, out.rows(first, rows - first),
                 lse.rows(first, rows - first));
  return out;
}

namespace {

// Queries of the latent path's tokens, of all ranks' heads.
Operand<Token, Head, QueryKey> gather_heads(Steps& s, Calls calls, const Operand<Token, Head, QueryKey>& q,
                                            const RowList& tokens) {
  const Plan& p = s.plan;
  const int64_t rows = rows_of(s), n = s.m.heads, width = s.m.query_key();
  const auto gathered = s.region<Token, Head, QueryKey>("rank_queries", s.act, {rows, p.absorbed_heads(), width});
  const auto gather = [&](Calls of, const Operand<Token, Head, QueryKey>& own) {
    if (of.bits != 0)
      s.add("gather_queries", of,
            steps::GatherQueries{own.part<Token, Head, Entry>(0, own.extents()),
                                 gathered.part<Token, Head, Entry>(0, gathered.extents())});
  };
  // forward() makes its queries in the workspace: all of them, in their order, are sent from there.
  bool in_order = rows == s.tokens;
  for (int64_t i = 0; in_order && i < rows; ++i) in_order = p.latent_tokens[static_cast<size_t>(i)] == i;
  if (in_order && calls.any_of(kForward)) {
    gather(kForward, s.region<Token, Head, QueryKey>("query", s.act, {rows, n, width}));
    calls.bits &= static_cast<uint8_t>(~kForward.bits);
  }
  if (calls.bits == 0) return gathered;
  const auto own = s.region<Token, Head, QueryKey>("rank_own_queries", s.act, {rows, n, width});
  s.add("pack_queries", calls,
        steps::Cast{.x = q.part<Token, Head, In>(0, q.extents()),
                    .x_rows = tokens,
                    .y = own.part<Token, Head, In>(0, own.extents())});
  gather(calls, own);
  return gathered;
}

}  // namespace

void latent_steps(Steps& s, Calls calls) {
  const ModelConfig& m = s.m;
  const int64_t t = s.tokens, n = m.heads, rows = rows_of(s), absorbed = s.plan.absorbed_heads();
  const bool exchanges = s.plan.exchanges_heads();
  const RowList tokens = s.list(ListKind::latent_tokens, s.plan.latent_tokens);
  auto q = s.input<Token, Head, QueryKey>(Memory::q, s.act, {t, n, m.query_key()});
  RowList q_rows = tokens;
  if (exchanges) q = gather_heads(s, calls, q, tokens), q_rows = {};
  const int64_t q_count = q.extent<Token>();
  s.project("absorb", calls, q.part<Token, Head, In>(0, {q_count, absorbed, m.nope}), q_rows, Weight::absorb_key,
            staged_queries(s).part<Token, Head, Out>(0, {rows, absorbed, m.latent}), {}, rows);
  place_rope(s, calls, q.part<Token, Head, Rope>(m.nope, {q_count, absorbed, m.rope}), q_rows);
  const auto latents = attend_latent(s, calls);
  const auto from = latents.part<Token, Head, In>(0, latents.extents());
  const auto heads = s.input<Token, Head, Out>(Memory::heads, s.act, {s.plan.head_rows, n, m.value});
  // Merged in f32, and rounded where the heads are.
  const auto merged = s.region<Token, Head, Value>("rank_merged", Dtype::f32, {rows, n, m.value});
  if (exchanges) {
    const auto found = s.region<Token, Head, Value>("rank_found", Dtype::f32, {rows, absorbed, m.value});
    s.project("value_up", calls, from, {}, Weight::value_up, found.part<Token, Head, Out>(0, found.extents()), {},
              rows);
    exchange_found(s, calls, found, s.region<Token, Head>("latent_lse", Dtype::f32, {rows, absorbed}), merged,
                   s.region<Token, Head>("rank_lse", Dtype::f32, {rows, n}));
  }
  const auto finish = [&](Calls of, const RowList& y_rows) {
    if (exchanges)
      s.add("place_heads", of,
            steps::Cast{.x = merged.part<Token, Head, In>(0, merged.extents()),
                        .x_rows = {},
                        .y = heads.part<Token, Head, In>(0, heads.extents()),
                        .y_rows = y_rows});
    else s.project("value_up", of, from, {}, Weight::value_up, heads, y_rows, rows, value_up_quantises(s.plan));
  };
  if (!s.plan.options.maxima) return finish(calls, tokens);
  // attend()'s heads may be the caller's, forward()'s lie in the workspace: its products need no list.
  if (calls.any_of(kForward)) finish(kForward, tokens);
  finish(kAttend, s.written());
}

}  // namespace mla::planning
