// The sparse path: the indexer scores and selects, the selection is mapped to rows once, attention reads those rows.
#include <algorithm>
#include <cmath>

#include "plan/internal.hpp"
#include "plan/steps/steps.hpp"

namespace mla::planning {
namespace {

// Selected positions of each sparse row, and the same as the rows that the group's attention reads.
Operand<Token, Topk> selected(const Steps& s) {
  return {Memory::selection, Dtype::f32, 0, {s.plan.sparse_rows(), s.plan.topk}};
}
Operand<Token, Topk> selected_slots(const Steps& s) {
  return {
      Memory::selection, Dtype::f32, static_cast<int64_t>(s.plan.slots_offset()), {s.plan.sparse_rows(), s.plan.topk}};
}

RowList sparse_tokens(Steps& s) { return s.list(ListKind::sparse_tokens, s.plan.sparse_tokens); }

// Each member's best of a tile's rows, then the best of all: the order of scores and positions is total, so that they
// are those that one rank would select.
void join_candidates(Steps& s, size_t at, const Operand<Token, Topk>& state) {
  const IndexSchedule& schedule = s.plan.index_schedule;
  const auto& maxima = s.plan.options.maxima;
  const IndexTile& tile = schedule.selected[at];
  const int64_t most = schedule.tiles.rows,
                rows =
                    maxima ? std::min(most, maxima->tokens - static_cast<int64_t>(at) * most) : tile.joined[0].q_count,
                columns = s.plan.options.context_parallel.sharding.ranks() * schedule.candidates;
  const auto joined = s.list(ListKind::index_joined, tile.joined, at);
  const auto own = s.region<Token, Topk>("index_own", Dtype::f32, {rows, s.plan.topk}),
             own_scores = s.region<Token, Topk>("index_own_scores", Dtype::f32, {rows, s.plan.topk});
  const auto all = s.region<Token, Key>("index_all", Dtype::f32, {rows, columns}),
             all_scores = s.region<Token, Key>("index_all_scores", Dtype::f32, {rows, columns});
  s.add("select_topk", kIndexer, steps::FinishTopk{state, joined, own, own_scores, true});
  s.add("gather_candidates", kIndexer, steps::GatherCandidates{own, own_scores, all, all_scores});
  s.add("select_topk", kIndexer, steps::SelectTopk{all_scores, joined, 0, state, all});
}

Operand<Token, IndexHead> head_weights(const Steps& s) {
  return s.region<Token, IndexHead>("index_weights", Dtype::f32, {s.plan.sparse_rows(), s.m.indexer->heads});
}

void select(Steps& s, const Operand<Token, IndexHead, IndexDim>& q, const Operand<Token, IndexHead>& weights) {
  const IndexerConfig& x = *s.m.indexer;
  const IndexSchedule& schedule = s.plan.index_schedule;
  const int64_t rows = schedule.tiles.rows, keys = schedule.tiles.keys;
  const auto scores = s.region<Token, Key>("index_scores", Dtype::f32, {rows, keys});
  const auto state = s.region<Token, Topk>("index_topk", Dtype::f32, {rows, s.plan.topk});
  const bool shared = s.plan.options.context_parallel.shared();
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(x.heads * x.dim)));
  for (size_t i = 0; i < schedule.selected.size(); ++i) {
    const IndexTile& tile = schedule.selected[i];
    const auto items = s.list(ListKind::index_tile, tile.rows, i);
    const std::optional<StepMaxima>& maxima = s.plan.options.maxima;
    const int64_t rounds =
        maxima ? std::max<int64_t>(1, ceil_div(s.plan.options.context_parallel.longest(maxima->seq_len), keys))
               : tile.rounds(keys);
    for (int64_t r = 0; r < rounds; ++r) {
      s.add("index_score", kIndexer,
            steps::IndexScore{q, weights, scale, items, r * keys, scores, s.plan.options.index_arithmetic});
      steps::SelectTopk step{scores, items, r * keys, state};
      if (!shared && r == rounds - 1) step.indices = selected(s);
      s.add("select_topk", kIndexer, step);
    }
    if (!shared) continue;
    join_candidates(s, i, state);
    s.add("select_topk", kIndexer, steps::FinishTopk{state, items, selected(s)});
  }
}

// Positions to the rows that each group's attention reads: once for all layers that share the selection.
void map(Steps& s) {
  const Plan& p = s.plan;
  const int64_t requests = p.options.maxima ? p.options.maxima->requests : std::ssize(p.requests);
  for (const SparseGroup& g : p.sparse_groups) {
    const RowList of = Steps::slice(s.list(ListKind::sparse_requests, p.sparse_requests), g.begin, g.count);
    const auto from = selected(s).rows(g.begin, g.count), to = selected_slots(s).rows(g.begin, g.count);
    if (g.rows == 0)
      s.add("map_indices", kIndexer | kSelect, steps::MapToSlots{from, of, s.list(ListKind::seq_lens, requests), to});
    else
      s.add("map_indices", kIndexer | kSelect,
            steps::MapToWorkspace{from, of, s.list(ListKind::gathered_starts, p.gathered_starts),
                                  s.list(ListKind::gathered_counts, p.gathered_counts), to});
  }
}

}  // namespace

void index_products(Steps& s, const Operand<Token, Head, In>& hidden) {
  const IndexerConfig& x = *s.m.indexer;
  const int64_t t = s.tokens, rows = s.plan.sparse_rows();
  s.project("index_key", kIndexer, hidden, {}, Weight::index_key,
            s.region<Token, Head, Out>("index_key", Dtype::f32, {t, 1, x.dim}), {}, t);
  if (rows == 0) return;
  s.project("index_weights", kIndexer, hidden, sparse_tokens(s), Weight::index_head_weights,
            s.region<Token, Head, Out>("index_weights", Dtype::f32, {rows, 1, x.heads}), {}, rows);
}

void append_index_keys(Steps& s) {
  const ModelConfig& m = s.m;
  const IndexerConfig& x = *m.indexer;
  const int64_t t = s.tokens;
  const auto keys = s.region<Token, IndexDim>("index_key", Dtype::f32, {t, x.dim});
  s.add("index_norm", kIndexer, steps::LayerNorm{s.region<Token, In>("index_key", Dtype::f32, {t, x.dim})});
  s.add("index_rope", kIndexer,
        steps::Rotate{{}, keys.part<Token, Rope>(0, {t, m.rope}), s.list(ListKind::positions, t)});
  if (s.plan.options.index_hadamard) s.add("hadamard", kIndexer, steps::Hadamard{{}, keys});
  s.add("index_append", kIndexer, steps::IndexAppend{keys, s.list(ListKind::slot_mapping, t)});
  if (s.plan.sparse_rows() == 0) return;
  s.add("begin_choice", kIndexer, steps::BeginChoice{});
  if (const auto& all = s.plan.index_schedule.all; !all.empty())
    s.add("select_topk", kIndexer, steps::FillTopk{s.list(ListKind::index_rows, all), selected(s)});
}

Operand<Token, IndexHead, IndexDim> index_queries(Steps& s, const Operand<Token, Head, In>& source) {
  const ModelConfig& m = s.m;
  const IndexerConfig& x = *m.indexer;
  const int64_t rows = s.plan.sparse_rows();
  const RowList tokens = sparse_tokens(s);
  const auto q = s.region<Token, IndexHead, IndexDim>("index_query", Dtype::f32, {rows, x.heads, x.dim});
  s.project("index_query", kIndexer, source, tokens, Weight::index_query,
            s.region<Token, Head, Out>("index_query", Dtype::f32, {rows, 1, x.heads * x.dim}), {}, rows);
  const RowList positions = s.list(ListKind::sparse_positions, s.plan.sparse_positions);
  // Codes are made of rotated queries on the way, unless something else comes between.
  const bool fp8 = s.plan.options.index_format == IndexCacheFormat::fp8,
             rotates_later = fp8 && !s.plan.options.index_hadamard;
  if (!rotates_later)
    s.add("index_rope", kIndexer, steps::Rotate{q.part<Token, Head, Rope>(0, {rows, x.heads, m.rope}), {}, positions});
  if (s.plan.options.index_hadamard) s.add("hadamard", kIndexer, steps::Hadamard{q, {}});

  s.wait(kIndexer, 2);
  Operand<Token, IndexHead, IndexDim> scored = q;
  if (fp8) {
    scored = s.region<Token, IndexHead, IndexDim>("index_codes", Dtype::fp8_e4m3, q.extents());
    s.add("index_quantise", kIndexer,
          steps::IndexQuery{q, head_weights(s), scored, rotates_later ? positions : RowList{}});
  } else if (s.plan.options.compute == Dtype::bf16) {
    scored = s.region<Token, IndexHead, IndexDim>("index_codes", Dtype::bf16, q.extents());
    s.add("index_quantise", kIndexer,
          steps::Cast{.x = q.part<Token, Head, In>(0, q.extents()),
                      .x_rows = {},
                      .y = scored.part<Token, Head, In>(0, q.extents())});
  }
  return scored;
}

void index_choice(Steps& s, const Operand<Token, IndexHead, IndexDim>& queries) {
  s.wait(kIndexer, 2);
  select(s, queries, head_weights(s));
  choice_steps(s);
}

void choice_steps(Steps& s) {
  const Plan& p = s.plan;
  if (p.sparse_rows() == 0) return;
  s.add("begin_choice", kSelect, steps::BeginChoice{});
  s.add("map_indices", kSelect,
        steps::PickRows{s.input<Token, Topk>(Memory::positions, Dtype::f32, {s.tokens, p.topk}), sparse_tokens(s),
                        selected(s)});
  map(s);
  s.add("end_choice", kIndexer | kSelect, steps::EndChoice{});
}

Operand<Token, Word> mask_steps(Steps& s, Calls calls) {
  const Plan& p = s.plan;
  const int64_t rows = p.masked_rows();
  if (rows == 0) return {};
  s.join(kIndexer | kSelect);
  const auto mask = s.region<Token, Word>("masks", Dtype::f32, {s.tokens, p.mask_words});
  s.add("map_indices", calls,
        steps::MapToMask{selected(s).rows(p.masked_begin, rows), Steps::slice(sparse_tokens(s), p.masked_begin, rows),
                         mask});
  return mask;
}

void sparse_steps(Steps& s, Calls calls, const Operand<Token, Head, Entry>& q, const QueryScales& scales,
                  const Operand<Token, Head, Value>& out, const Operand<Token, Head>& lse) {
  const ModelConfig& m = s.m;
  const Dtype compute = s.plan.options.compute;
  const auto requests = std::count_if(s.plan.requests.begin(), s.plan.requests.end(), [](const RequestPlan& r) {
    return r.path == Path::sparse && !r.masked && r.query_len > 0;
  });
  const bool shared_keys = s.plan.masked_begin >= 2 * requests;
  s.join(kIndexer | kSelect);
  for (size_t i = 0; i < s.plan.sparse_groups.size(); ++i) {
    const SparseGroup& g = s.plan.sparse_groups[i];
    Operand<Key, Entry> gathered;
    if (g.rows > 0) {
      gathered = s.region<Key, Entry>("sparse_context", compute, {g.rows, m.entry()});
      s.add(
          "gather_sparse", calls,
          steps::Gather{s.list(ListKind::sparse_pieces, g.pieces, i), gathered.part<Key, Latent>(0, {g.rows, m.latent}),
                        gathered.part<Key, Rope>(m.latent, {g.rows, m.rope})});
    }
    const auto [partial_out, partial_lse] = partials(s, g.work.partial_rows, q.extent<Head>());
    const auto group_out = out.rows(g.begin, g.count);
    const auto group_lse = lse.rows(g.begin, g.count);
    s.add("attend_sparse", calls,
          steps::AttendSparse{.q = q.rows(g.begin, g.count),
                              .q_scale = scales.codes,
                              .gathered = gathered,
                              .slots = selected_slots(s).rows(g.begin, g.count),
                              .items = s.list(ListKind::sparse_items, g.work.items, i),
                              .part_keys = g.work.part_keys,
                              .many_holes = s.plan.options.context_parallel.sharding.ranks() > 1,
                              .shared_keys = shared_keys,
                              .scale = scales.softmax,
                              .out = group_out,
                              .lse = group_lse,
                              .partial_out = partial_out,
                              .partial_lse = partial_lse});
    if (!g.work.splits.empty())
      s.add("merge_sparse", calls,
            steps::MergeSparse{partial_out, partial_lse, s.list(ListKind::sparse_splits, g.work.splits, i), group_out,
                               group_lse});
  }
}

}  // namespace mla::planning
