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

// What all ranks found for this rank's heads.
Partials found_by_ranks(const Steps& s, int64_t width) {
  const int64_t rows = s.plan.options.context_parallel.sharding.ranks() * rows_of(s), n = s.m.heads;
  return {s.region<Partial, Head, Value>("rank_got", Dtype::f32, {rows, n, width}),
          s.region<Partial, Head>("rank_got_lse", Dtype::f32, {rows, n})};
}
// It comes here, and is merged in f32.
void exchange_found(Steps& s, Calls calls, const Operand<Token, Head, Value>& found,
                    const Operand<Token, Head>& found_lse) {
  const auto [got, got_lse] = found_by_ranks(s, found.extent<Value>());
  s.add("exchange_found", calls, steps::ExchangeFound{found, found_lse, got, got_lse});
}
void merge_found(Steps& s, Calls calls, const Operand<Token, Head, Value>& merged, const Operand<Token, Head>& lse) {
  const auto [got, got_lse] = found_by_ranks(s, merged.extent<Value>());
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
  exchange_found(s, calls, found, found_lse);
  merge_found(s, calls, out, lse);
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

// Queries of these rows through W_UK, over the cache.
Operand<Token, Head, Value> absorb_and_attend(Steps& s, Calls calls, const Operand<Token, Head, QueryKey>& q,
                                              const RowList& tokens) {
  const int64_t count = q.extent<Token>(), n = s.plan.absorbed_heads(), rows = rows_of(s);
  s.project("absorb", calls, q.part<Token, Head, In>(0, {count, n, s.m.nope}), tokens, Weight::absorb_key,
            staged_queries(s).part<Token, Head, Out>(0, {rows, n, s.m.latent}), {}, rows);
  place_rope(s, calls, q.part<Token, Head, Rope>(s.m.nope, {count, n, s.m.rope}), tokens);
  return attend_latent(s, calls);
}

// Whether the latent path's rows are the step's, in their order.
bool in_order(const Steps& s) {
  const std::vector<int32_t>& tokens = s.plan.latent_tokens;
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] != static_cast<int32_t>(i)) return false;
  return rows_of(s) == s.tokens;
}

// Heads' queries of all ranks, attended as latents; what was found behind W_UV to its owner.
void exchange_heads(Steps& s, Calls calls, const Operand<Token, Head, QueryKey>& q, const RowList& tokens) {
  const ModelConfig& m = s.m;
  const int64_t rows = rows_of(s), n = m.heads, all = s.plan.absorbed_heads();
  const bool in_place = in_order(s);
  Operand<Token, Head, QueryKey> own = q;
  if (!in_place) {
    own = s.region<Token, Head, QueryKey>("rank_own_queries", s.act, {rows, n, m.query_key()});
    s.add("pack_queries", calls,
          steps::Cast{.x = q.part<Token, Head, In>(0, q.extents()),
                      .x_rows = tokens,
                      .y = own.part<Token, Head, In>(0, own.extents())});
  }
  const auto queries = s.region<Token, Head, QueryKey>("rank_queries", s.act, {rows, all, m.query_key()});
  s.add("gather_queries", calls,
        steps::GatherQueries{own.part<Token, Head, Entry>(0, own.extents()),
                             queries.part<Token, Head, Entry>(0, queries.extents())});
  const auto latents = absorb_and_attend(s, calls, queries, {});
  const auto found = s.region<Token, Head, Value>("rank_found", Dtype::f32, {rows, all, m.value});
  s.project("value_up", calls, latents.part<Token, Head, In>(0, latents.extents()), {}, Weight::value_up,
            found.part<Token, Head, Out>(0, found.extents()), {}, rows);
  exchange_found(s, calls, found, s.region<Token, Head>("latent_lse", Dtype::f32, {rows, all}));
  const auto heads = s.input<Token, Head, Value>(Memory::heads, s.act, {s.plan.head_rows, n, m.value});
  const auto lse = s.region<Token, Head>("rank_lse", Dtype::f32, {rows, n});
  // Rows of attend()'s output past a batch within maxima are left alone: there the written ones are listed.
  const bool listed = s.plan.options.maxima.has_value();
  Calls places = !in_place ? calls : listed ? kAttend : Calls{};
  places.bits &= calls.bits;
  const Calls merges{static_cast<uint8_t>(calls.bits & ~places.bits)};
  if (merges.bits != 0) merge_found(s, merges, heads, lse);
  if (places.bits == 0) return;
  const auto merged = s.region<Token, Head, Value>("rank_merged", Dtype::f32, {rows, n, m.value});
  merge_found(s, places, merged, lse);
  s.add("place_heads", places,
        steps::Cast{.x = merged.part<Token, Head, In>(0, merged.extents()),
                    .x_rows = {},
                    .y = heads.part<Token, Head, In>(0, heads.extents()),
                    .y_rows = listed ? s.written() : tokens});
}

}  // namespace

void latent_steps(Steps& s, Calls calls) {
  const ModelConfig& m = s.m;
  const RowList tokens = s.list(ListKind::latent_tokens, s.plan.latent_tokens);
  const auto q = s.input<Token, Head, QueryKey>(Memory::q, s.act, {s.tokens, m.heads, m.query_key()});
  if (s.plan.exchanges_heads()) return exchange_heads(s, calls, q, tokens);
  const auto latents = absorb_and_attend(s, calls, q, tokens);
  const auto value_up = [&](Calls of, const RowList& y_rows) {
    s.project("value_up", of, latents.part<Token, Head, In>(0, latents.extents()), {}, Weight::value_up,
              s.input<Token, Head, Out>(Memory::heads, s.act, {s.plan.head_rows, m.heads, m.value}), y_rows, rows_of(s),
              value_up_quantises(s.plan));
  };
  if (!s.plan.options.maxima) return value_up(calls, tokens);
  // attend()'s heads may be the caller's, forward()'s lie in the workspace: its products need no list.
  if (calls.any_of(kForward)) value_up(kForward, tokens);
  value_up(kAttend, s.written());
}

}  // namespace mla::planning
