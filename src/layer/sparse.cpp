#include "layer/sparse.hpp"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/selection_log.hpp"
#include "mla/error.hpp"
#include "ops/require.hpp"

namespace mla::layer {
namespace {

View<const int32_t, Token, Topk> rows_of(View<int32_t, Token, Topk> all, const SparseGroup& g) {
  return all.slice<Token>(g.begin, g.count);
}

// The choice's stamp stands behind it, after a number that memory with anything in it does not hold.
struct Stamp {
  uint64_t chosen = 0, stamp = 0;
};
constexpr uint64_t kChosen = 0xc4053e2be91f7a61u;

}  // namespace

std::function<Profile::Work()> work_of_selection(const Stream& stream, const ops::AttendSparseArgs& args) {
  return [stream = Stream(stream), here = args,
          sources = std::vector(args.sources.begin(), args.sources.end())]() mutable {
    std::vector<std::vector<int32_t>> lists;
    for (ops::SparseSource& s : sources) {
      const int64_t rows = s.slots.extent<Token>(), topk = s.slots.extent<Topk>();
      if (rows == 0) continue;
      std::vector<int32_t>& list = lists.emplace_back(static_cast<size_t>((rows - 1) * s.slots.stride<Token>() + topk));
      copy(stream, list.data(), s.slots.data(), list.size() * sizeof(int32_t));
      s.slots = {list.data(), s.slots.extents(), s.slots.strides()};
    }
    stream.synchronize();
    here.sources = sources;
    const ops::Cost cost = ops::cost(here);
    return Profile::Work{cost.bytes, cost.flops};
  };
}

void Sparse::begin_choice() const {
  if (survey_ || plan_.sparse_rows() == 0) return;
  if (stream_->device().kind == DeviceKind::cuda) return stream_->selections().forget(c_.selection.data());
  const Stamp none;
  std::memcpy(c_.selection.data() + plan_.selection_bytes - Plan::kStampBytes, &none, sizeof none);
}

void Sparse::end_choice() const {
  if (survey_ || plan_.sparse_rows() == 0) return;
  if (stream_->device().kind == DeviceKind::cuda)
    return stream_->selections().note(c_.selection.data(), plan_.selection_stamp, gpu::capturing(stream_->queue()));
  const Stamp made{kChosen, plan_.selection_stamp};
  std::memcpy(c_.selection.data() + plan_.selection_bytes - Plan::kStampBytes, &made, sizeof made);
}

void Sparse::require_chosen() const {
  if (survey_ || plan_.sparse_rows() == 0) return;
  using Found = SelectionLog::Found;
  Found found;
  if (stream_->device().kind == DeviceKind::cuda) {
    found = stream_->selections().look(c_.selection.data(), plan_.selection_stamp);
  } else {
    Stamp there;
    std::memcpy(&there, c_.selection.data() + plan_.selection_bytes - Plan::kStampBytes, sizeof there);
    found = there.chosen != kChosen ? Found::none : there.stamp != plan_.selection_stamp ? Found::other : Found::same;
  }
  if (found == Found::same) return;
  throw BatchError("layer: " + std::to_string(plan_.sparse_rows()) +
                   " tokens attend to chosen keys, and the selection " +
                   (found == Found::none ? "holds no choice" : "holds the choice of another step") +
                   ": select() or a layer with an indexer makes it first");
}

void Sparse::check() const {
  if (plan_.sparse_rows() > 0) require_memory("selection", c_.selection, plan_.selection_bytes);
  if (!c_.weights.indexer) return;
  if (!plan_.model.indexer) throw ShapeError("layer: weights have an indexer, plan was made for a model without one");
  ops::require_equal("layer", "index cache's number of pages", c_.index_cache.pages, "the cache's", c_.cache.pages);
  const IndexCacheSpec &found = c_.index_cache.spec, &planned = plan_.index_cache;
  if (found.format != planned.format)
    throw ShapeError("layer: index cache format is " + std::string(to_string(found.format)) + ", plan was made for " +
                     std::string(to_string(planned.format)));
  ops::require_equal("layer", "index cache page size", found.page_size, "plan page size", planned.page_size);
  ops::require_equal("layer", "index cache dim", found.dim, "model index dim", planned.dim);
  ops::require_pages("layer", "index cache", c_.index_cache);
}

void Sparse::index(const AnyView<Token, Head, In>& hidden, const AnyView<Token, Head, In>& query_latent) const {
  const ModelConfig& m = plan_.model;
  const IndexerConfig& x = *m.indexer;
  const IndexerWeights& w = *c_.weights.indexer;
  const int64_t t = plan_.tokens;
  begin_choice();
  float* key = at<float>("index_key");
  const View<float, Token, IndexDim> keys(key, {t, x.dim});
  project("index_key", hidden, {}, *w.key, flat(Dtype::f32, key, t, x.dim), {}, t);
  run("index_norm", ops::LayerNormArgs{.x = {key, {t, x.dim}},
                                       .weight = w.key_norm.values(),
                                       .bias = w.key_norm_bias.values(),
                                       .y = {key, {t, x.dim}}});
  run("index_rope",
      ops::RopeArgs{
          .q = {}, .k = {key, {t, m.rope}, {x.dim, 1}}, .positions = plan_.positions, .table = c_.index_rotary});
  if (plan_.options.index_hadamard) run("hadamard", ops::HadamardArgs{.q = {}, .k = keys});
  run("index_append", ops::IndexAppendArgs{keys, c_.batch.slot_mapping, c_.index_cache});
  if (plan_.sparse_rows() == 0) return;

  const int64_t rows = plan_.sparse_rows();
  const std::span<const int32_t> tokens =
      std::span(plan_.latent_tokens).subspan(static_cast<size_t>(plan_.sparse_begin));
  float* q = at<float>("index_query");
  const View<float, Token, IndexHead, IndexDim> queries(q, {rows, x.heads, x.dim});
  project("index_query", query_latent, tokens, *w.query, flat(Dtype::f32, q, rows, x.heads * x.dim), {}, rows);
  run("index_rope", ops::RopeArgs{.q = {q, {rows, x.heads, m.rope}, queries.strides()},
                                  .k = {},
                                  .positions = plan_.sparse_positions,
                                  .table = c_.index_rotary});
  if (plan_.options.index_hadamard) run("hadamard", ops::HadamardArgs{.q = queries, .k = {}});
  float* weight = at<float>("index_weights");
  const View<float, Token, IndexHead> weights(weight, {rows, x.heads});
  project("index_weights", hidden, tokens, *w.head_weights, flat(Dtype::f32, weight, rows, x.heads), {}, rows);

  AnyView<Token, IndexHead, IndexDim> scored(Dtype::f32, q, {rows, x.heads, x.dim});
  std::byte* narrow = at<std::byte>("index_codes");
  if (c_.index_cache.spec.format == IndexCacheFormat::fp8) {
    const View<fp8_e4m3, Token, IndexHead, IndexDim> codes(reinterpret_cast<fp8_e4m3*>(narrow), {rows, x.heads, x.dim});
    run("index_quantise", ops::IndexQueryArgs{queries, weights, codes, weights});
    scored = codes;
  } else if (plan_.options.compute == Dtype::bf16) {
    run("index_quantise",
        ops::CastArgs{
            .x = {q, {rows, x.heads, x.dim}}, .x_rows = {}, .y = {Dtype::bf16, narrow, {rows, x.heads, x.dim}}});
    scored = {Dtype::bf16, narrow, {rows, x.heads, x.dim}};
  }
  select(scored, weights);
  map();
  end_choice();
}

void Sparse::select(const AnyView<Token, IndexHead, IndexDim>& q, View<const float, Token, IndexHead> weights) const {
  const IndexerConfig& x = *plan_.model.indexer;
  const IndexSchedule& schedule = plan_.index_schedule;
  const View<int32_t, Token, Topk> selected = plan_.selected(c_.selection);
  if (!schedule.all.empty()) run("select_topk", ops::FillTopkArgs{schedule.all, selected});
  const View<float, Token, Key> scores(at<float>("index_scores"), {schedule.tiles.rows, schedule.tiles.keys});
  const ops::TopkState state{at<std::byte>("index_topk"), schedule.tiles.rows, plan_.topk};
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(x.heads * x.dim)));
  for (const IndexTile& tile : schedule.selected) {
    const int64_t keys = schedule.tiles.keys, rounds = tile.rounds(keys);
    for (int64_t r = 0; r < rounds; ++r) {
      run("index_score", ops::IndexScoreArgs{.q = q,
                                             .weights = weights,
                                             .scale = scale,
                                             .cache = c_.index_cache,
                                             .block_table = c_.batch.block_table,
                                             .items = tile.rows,
                                             .first = r * keys,
                                             .scores = scores,
                                             .scratch = scratch_});
      run("select_topk", ops::SelectTopkArgs{.scores = scores,
                                             .items = tile.rows,
                                             .first = r * keys,
                                             .positions = {},
                                             .begin = r == 0,
                                             .state = state,
                                             .scratch = scratch_});
    }
    run("select_topk", ops::FinishTopkArgs{.state = state, .items = tile.rows, .indices = selected, .scores = {}});
  }
}

// Positions to the rows that each group's attention reads: once for all layers that share the selection.
void Sparse::map() const {
  const View<int32_t, Token, Topk> selected = plan_.selected(c_.selection), slots = plan_.selected_slots(c_.selection);
  for (const SparseGroup& g : plan_.sparse_groups) {
    const std::span<const int32_t> requests =
        std::span(plan_.sparse_requests).subspan(static_cast<size_t>(g.begin), static_cast<size_t>(g.count));
    const View<int32_t, Token, Topk> to = slots.slice<Token>(g.begin, g.count);
    if (g.rows == 0)
      run("map_indices", ops::MapToSlotsArgs{.positions = rows_of(selected, g),
                                             .requests = requests,
                                             .block_table = c_.batch.block_table,
                                             .page_size = c_.cache.spec.page_size,
                                             .pages = c_.cache.pages,
                                             .lengths = c_.batch.seq_lens,
                                             .slots = to});
    else
      run("map_indices", ops::MapToWorkspaceArgs{.positions = rows_of(selected, g),
                                                 .requests = requests,
                                                 .starts = plan_.gathered_starts,
                                                 .counts = plan_.gathered_counts,
                                                 .rows = to});
  }
}

void Sparse::choose(View<const int32_t, Token, Topk> positions) const {
  ops::require_equal("select", "positions Topk", positions.extent<Topk>(), "plan topk", plan_.topk);
  ops::require_view("select", "positions", positions);
  ops::require_rows("select", "positions", positions.extent<Token>(), plan_.tokens);
  const std::span<const int32_t> tokens =
      std::span(plan_.latent_tokens).subspan(static_cast<size_t>(plan_.sparse_begin));
  begin_choice();
  run("map_indices", ops::PickRowsArgs{positions, tokens, plan_.selected(c_.selection)});
  map();
  end_choice();
}

void Sparse::attend(const AnyView<Token, Head, Entry>& q, float q_scale, AnyMutableView<Token, Head, Value> out,
                    View<float, Token, Head> lse) const {
  const ModelConfig& m = plan_.model;
  const View<int32_t, Token, Topk> slots = plan_.selected_slots(c_.selection);
  for (const SparseGroup& g : plan_.sparse_groups) {
    const int64_t width = out.extent<Value>(), n = m.heads;
    const View<float, Partial, Head, Value> partial_out(at<float>("partial_out"), {g.work.partial_rows, n, width});
    const View<float, Partial, Head> partial_lse(at<float>("partial_lse"), {g.work.partial_rows, n});
    const ops::SparseSource source{g.rows == 0 ? c_.cache : gather(g), rows_of(slots, g), {}};
    const auto rows = [&](auto view) { return view.template slice<Token>(g.begin, g.count); };
    run("attend_sparse", ops::AttendSparseArgs{.q = rows(q),
                                               .q_scale = q_scale,
                                               .sources = {&source, 1},
                                               .items = g.work.items,
                                               .part_keys = g.work.part_keys,
                                               .scale = static_cast<float>(m.softmax_scale()),
                                               .sinks = {},
                                               .out = rows(out),
                                               .lse = rows(lse),
                                               .max_logits = {},
                                               .partial_out = partial_out,
                                               .partial_lse = partial_lse,
                                               .partial_max = {},
                                               .scratch = scratch_});
    if (!g.work.splits.empty())
      run("merge_sparse", ops::MergeSparseArgs{.partial_out = partial_out,
                                               .partial_lse = partial_lse,
                                               .partial_max = {},
                                               .items = g.work.splits,
                                               .sinks = {},
                                               .out = rows(out),
                                               .lse = rows(lse),
                                               .max_logits = {}});
  }
}

// Whole sequences as a cache of single-row pages in the compute dtype.
CacheView Sparse::gather(const SparseGroup& g) const {
  const ModelConfig& m = plan_.model;
  const Dtype t = plan_.options.compute;
  std::byte* data = at<std::byte>("sparse_context");
  const AnyMutableView<Key, Entry> rows(t, data, {g.rows, m.entry()});
  run("gather_sparse", ops::GatherArgs{.cache = c_.cache,
                                       .block_table = c_.batch.block_table,
                                       .pieces = g.pieces,
                                       .kv_c = {t, data, {g.rows, m.latent}, rows.strides()},
                                       .k_pe = {t, rows.at(0, m.latent), {g.rows, m.rope}, rows.strides()}});
  CacheSpec spec = cache_spec(m, t == Dtype::bf16 ? CacheFormat::bf16 : CacheFormat::f32, 1);
  return {spec, data, g.rows, spec.page_bytes()};
}

}  // namespace mla::layer
