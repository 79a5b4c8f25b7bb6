// One allocation, cut into named regions that the layer finds by name.
#include <algorithm>
#include <string>

#include "mla/error.hpp"
#include "plan/internal.hpp"

namespace mla {

const Region& Plan::region(std::string_view name) const {
  for (const Region& r : regions)
    if (r.name == name) return r;
  throw Error("plan: no workspace region is called '" + std::string(name) + "'");
}

View<int32_t, Token, Topk> Plan::selected(std::span<std::byte> selection) const {
  return {reinterpret_cast<int32_t*>(selection.data()), {sparse_rows(), topk}};
}
View<int32_t, Token, Topk> Plan::selected_slots(std::span<std::byte> selection) const {
  return {reinterpret_cast<int32_t*>(selection.data() + slots_offset()), {sparse_rows(), topk}};
}

int64_t Plan::absorbed_heads() const { return exchanges_heads() ? planning::attended_heads(*this) : model.heads; }

namespace planning {

std::string why_not_fused(const Plan& plan) {
  const OutputSpec& output = plan.options.output;
  if (plan.exchanges_heads()) return "what ranks found for a head is merged behind W_UV";
  if (!output.groups_within(plan.model.value))
    return "groups of " + std::to_string(output.group_size()) + " span heads of " + std::to_string(plan.model.value);
  if (plan.device.device.kind != DeviceKind::cpu && !plan.expands())
    return "a GPU's products write no codes, and no request takes the expanded path";
  return {};
}

bool value_up_quantises(const Plan& plan) { return plan.fused_output && plan.device.device.kind == DeviceKind::cpu; }

void place_output(Plan& plan) {
  plan.fused_output =
      plan.options.output.kind != OutputKind::none && !plan.options.dummy && why_not_fused(plan).empty();
  plan.head_rows = plan.options.absorbed ? 0 : plan.tokens;  // fully absorbed weights take latent outputs to W_UV W_O
  // On a GPU the latent path's heads are f32 rows, and the expanded path's where no kernel writes the codes itself.
  if (!value_up_quantises(plan)) return;
  // Only rows that a chunk is merged into are still f32 between two calls.
  plan.head_rows = 0;
  for (const ContextChunk& c : plan.chunks)
    for (const ExpandedItem& i : c.items)
      if (!c.first || !i.last)
        plan.head_rows = std::max<int64_t>(plan.head_rows, static_cast<int64_t>(i.q_begin) + i.q_count);
}

WorkspaceRows workspace_rows(const Plan& p) {
  WorkspaceRows w{.tokens = p.tokens,
                  .latent = std::ssize(p.latent_tokens),
                  .partial = p.partial_rows,
                  .expanded = std::ssize(p.expanded_tokens),
                  .heads = p.head_rows,
                  .sparse = p.sparse_rows(),
                  .indexed = p.serves_block() ? p.sparse_rows() : 0,
                  .tiles = p.index_schedule.tiles,
                  .candidates = p.index_schedule.candidates,
                  .mask_words = p.mask_words,
                  .head_dtype = p.head_dtype(),
                  .shares_context = p.shares_context()};
  for (const ContextChunk& c : p.chunks) w.context = std::max(w.context, c.rows);
  for (const SparseGroup& g : p.sparse_groups) w.gathered = std::max(w.gathered, g.rows);
  return w;
}

void lay_out_workspace(Plan& plan, const WorkspaceRows& w) {
  constexpr size_t kAlign = 64;
  const ModelConfig& m = plan.model;
  const PlanOptions& o = plan.options;
  size_t end = 0;
  plan.regions.reserve(40);
  auto add = [&](std::string_view name, size_t bytes) {
    plan.regions.push_back({name, end, bytes});
    end += (bytes + kAlign - 1) / kAlign * kAlign;
  };
  const size_t f = sizeof(float), act = size_of(plan.activations()), t = static_cast<size_t>(w.tokens),
               n = static_cast<size_t>(m.heads);
  const size_t latent_rows = static_cast<size_t>(w.latent), partial_rows = static_cast<size_t>(w.partial);
  const size_t entry = static_cast<size_t>(m.entry()), width = static_cast<size_t>(plan.cache.value_width());
  const size_t context_rows = static_cast<size_t>(w.context),
               key_rows = std::max(static_cast<size_t>(w.expanded), context_rows);
  const size_t compute = size_of(o.compute);

  // The block form's own. Fully absorbed weights give latent queries: of a head's query only the rotated part is its
  // own.
  const size_t block = plan.serves_block() && !o.dummy ? t : 0;
  // The attention form's inputs lie there, too, where they have to be cast.
  const size_t inputs = plan.casts_inputs() && !o.absorbed ? t : block;
  add("hidden_rows", plan.casts_hidden() ? block * static_cast<size_t>(m.hidden) * act : 0);
  add("query", inputs * n * static_cast<size_t>(o.absorbed ? m.rope : m.query_key()) * act);
  add("query_latent", block * static_cast<size_t>(m.query_latent) * act);
  add("kv", inputs * entry * act);
  add("hidden_part", o.tensor_parallel > 1 || plan.casts_hidden() ? block * static_cast<size_t>(m.hidden) * f : 0);
  const size_t absorbed = static_cast<size_t>(plan.absorbed_heads()),
               latent_query = entry * (o.fp8_query ? size_of(query_codes(plan)) : compute);
  add("latent_query", latent_rows * absorbed * latent_query);
  add("latent_query_f32", o.fp8_query ? latent_rows * absorbed * entry * f : 0);
  add("latent_out", latent_rows * absorbed * width * act);
  add("latent_lse", latent_rows * absorbed * f);
  // Of a split cache: queries of all ranks' heads, what is found for them, and what all found for this rank's; latents
  // or heads. Latent queries are made of gathered heads' in their place.
  const bool shares = w.shares_context, exchanges_heads = plan.exchanges_heads();
  const std::span<const int64_t> sharing = shares ? o.context_parallel.group_heads() : std::span<const int64_t>();
  const size_t sharing_rows = shares ? latent_rows : 0,
               all_heads = shares ? static_cast<size_t>(attended_heads(plan)) : n;
  const size_t found_width = exchanges_heads ? static_cast<size_t>(m.value) : width,
               query_bytes = exchanges_heads ? static_cast<size_t>(m.query_key()) * act : latent_query;
  add("rank_own_queries", exchanges_heads ? sharing_rows * n * query_bytes : 0);
  add("rank_queries", sharing_rows * all_heads * query_bytes);
  add("rank_found", sharing_rows * all_heads * found_width * f);
  add("rank_found_lse", exchanges_heads ? 0 : sharing_rows * all_heads * f);
  add("rank_got", sharing_rows * sharing.size() * n * found_width * f);
  add("rank_merged", exchanges_heads ? sharing_rows * n * found_width * f : 0);
  add("rank_got_lse", sharing_rows * sharing.size() * n * f);
  add("rank_lse", exchanges_heads ? sharing_rows * n * f : 0);
  add("partial_out", partial_rows * all_heads * width * f);
  add("partial_lse", partial_rows * all_heads * f);
  // The block form's indexer: keys of all tokens; queries, their narrow form, head weights and tiles of the sparse
  // rows.
  if (m.indexer) {
    const IndexerConfig& x = *m.indexer;
    const size_t heads = static_cast<size_t>(x.heads), dim = static_cast<size_t>(x.dim),
                 rows = static_cast<size_t>(w.sparse), indexed = static_cast<size_t>(w.indexed);
    const size_t narrow = o.index_format == IndexCacheFormat::fp8 ? 1 : o.compute == Dtype::bf16 ? 2 : 0;
    add("index_key", block * dim * f);
    add("index_query", indexed * heads * dim * f);
    add("index_codes", indexed * heads * dim * narrow);
    add("index_weights", indexed * heads * f);
    add("index_scores", w.tiles.score_bytes);
    add("index_topk", w.tiles.state_bytes);
    // Of a split cache: positions and scores that the rank selected of its own, and that all members did.
    const size_t tile_rows = o.context_parallel.shared() ? static_cast<size_t>(w.tiles.rows) : 0,
                 columns = static_cast<size_t>(o.context_parallel.sharding.ranks() * w.candidates);
    for (const std::string_view name : {"index_own", "index_own_scores"})
      add(name, tile_rows * static_cast<size_t>(plan.topk) * f);
    for (const std::string_view name : {"index_all", "index_all_scores"}) add(name, tile_rows * columns * f);
    add("masks", static_cast<size_t>(w.tokens * w.mask_words) * sizeof(uint32_t));
    add("sparse_context", static_cast<size_t>(w.gathered) * entry * compute);
    const size_t chosen = (rows * static_cast<size_t>(plan.topk) * sizeof(int32_t) + kAlign - 1) / kAlign * kAlign;
    plan.selection_bytes = chosen > 0 ? 2 * chosen + Plan::kStampBytes : 0;
  }
  // Products on their way to codes, or all of them.
  const size_t product_rows = plan.prefills_codes() ? std::min(key_rows, size_t{kProductRows}) : key_rows;
  add("keys", product_rows * n * static_cast<size_t>(m.nope + m.value) * compute);
  add("key_rope", key_rows * static_cast<size_t>(m.rope) * (plan.prefills_codes() ? 1 : compute));
  if (plan.prefills_codes()) {
    add("query_codes", key_rows > 0 ? t * n * static_cast<size_t>(m.query_key()) : 0);
    add("key_codes", key_rows * n * static_cast<size_t>(m.nope));
    const auto turned_rows = static_cast<size_t>(round_up(static_cast<int64_t>(key_rows), kCodeRows));
    add("value_codes", turned_rows * n * static_cast<size_t>(m.value));
  }
  add("rank_rows", o.context_parallel.shared() ? context_rows * plan.sent_rows.page_bytes() : 0);
  add("context", context_rows * entry * act);
  add("heads", static_cast<size_t>(w.heads) * n * static_cast<size_t>(m.value) * size_of(w.head_dtype));
  add("heads_lse", o.absorbed || o.dummy ? 0 : t * n * f);
  add("scratch", o.dummy ? 0 : static_cast<size_t>(plan.device.threads) * plan.device.scratch_per_worker);
  // Of lanes: products of few rows, and what selects by the generic kernel.
  const size_t lane_scratch = may_fork(plan) ? plan.device.scratch_per_worker / 4 : 0;
  add("scratch_1", m.indexer ? lane_scratch : 0);
  add("scratch_2", lane_scratch);
  plan.workspace_bytes = end;
}

}  // namespace planning
}  // namespace mla
