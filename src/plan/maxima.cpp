// Steps within an engine's maxima: what they need at most, and their plans of one shape.
#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "mla/error.hpp"
#include "plan/internal.hpp"

namespace mla {
namespace planning {

StepMaxima checked(const StepMaxima& given) {
  const auto require = [](const char* what, int64_t found) {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    if (found < 0 || found > kMost)
      throw ShapeError(std::string("plan: maxima ") + what + " is " + std::to_string(found) + ", allowed 0 to " +
                       std::to_string(kMost));
  };
  require("requests", given.requests);
  require("tokens", given.tokens);
  require("query_len", given.query_len);
  require("seq_len", given.seq_len);
  if (given.seq_len < given.query_len)
    throw ShapeError("plan: maxima seq_len is " + std::to_string(given.seq_len) + ", below query_len " +
                     std::to_string(given.query_len));
  StepMaxima m = given;
  m.tokens = std::min(m.tokens, m.requests * m.query_len);
  return m;
}

namespace {

// Which paths a batch within the maxima may take.
struct Possible {
  bool latent = false, expanded = false, sparse = false;
  bool context = false;  // of expanded requests
};
Possible possible_paths(const Plan& p, const StepMaxima& m) {
  const PlanOptions& o = p.options;
  if (o.dummy || m.tokens == 0) return {};
  if (o.cache_use == CacheUse::none) return {.expanded = true};
  Possible can{.sparse = selects(p, m.seq_len)};
  if (ignores_cuts(p)) {  // one path for all, or one for prompts
    const bool by_prompt = o.path == PathPolicy::by_prompt;
    can.expanded = can.context = !can.sparse && (o.path == PathPolicy::expanded || (by_prompt && !o.absorbed));
    can.latent = !can.sparse && o.path != PathPolicy::expanded;
    return can;
  }
  switch (o.path) {
    case PathPolicy::latent: can.latent = true; break;
    case PathPolicy::expanded: can.expanded = true; break;
    case PathPolicy::by_prompt:
      can.latent = true;
      can.expanded = !o.absorbed;
      break;
    case PathPolicy::by_length:
      can.latent = o.reorder_batch_threshold > 0;
      can.expanded = m.query_len > o.reorder_batch_threshold;
      break;
    case PathPolicy::automatic:
      can.latent = true;
      can.expanded = !o.absorbed && (m.query_len > 1 || o.context_parallel.shared());
      break;
  }
  can.context = can.expanded;
  return can;
}

// Tiles of any number of scored rows: fewer rows have more positions.
IndexTiles most_tiles(int64_t rows, int64_t longest, int64_t topk, size_t most_bytes) {
  IndexTiles most = index_tiles(rows, longest, topk, most_bytes);
  for (int64_t r = 1; r < most.rows; ++r)
    most.score_bytes = std::max(most.score_bytes, index_tiles(r, longest, topk, most_bytes).score_bytes);
  return most;
}

// As many entries as any batch needs, those that this one does not have as `empty`.
template <class T>
void pad(std::vector<T>& list, int64_t count, const T& empty, const char* name) {
  if (std::ssize(list) > count)
    throw Error("plan: " + std::string(name) + " has " + std::to_string(list.size()) +
                " entries, the maxima's bound is " + std::to_string(count));
  list.resize(static_cast<size_t>(count), empty);
}

// Rows of a tile ascend, those of no item too.
void pad_tile(std::vector<IndexItem>& rows, int64_t count) {
  const int32_t end = rows.empty() ? 0 : rows.back().row + rows.back().q_count;
  pad(rows, count, IndexItem{.row = end}, "index tile");
}

// Runs of one owner's tokens are items of their own.
int64_t items_of_tile(const Plan& p, const StepMaxima& m) {
  const int64_t rows = p.index_schedule.tiles.rows;
  return p.options.context_parallel.shared() ? rows : std::min(rows, m.requests);
}

void pad_latent(Plan& p, const StepMaxima& m) {
  const MostLatent most = most_latent(p, m);
  pad(p.latent_items, most.items, {}, "latent_items");
  pad(p.splits, most.splits, {.splits = 1}, "splits");
  p.partial_rows = most.partial_rows;
  p.sparse_begin = m.tokens;  // behind all rows
}

void pad_sparse(Plan& p, const StepMaxima& m) {
  p.sparse_tokens = p.latent_tokens;
  p.masked_begin = m.tokens;
  pad(p.sparse_requests, m.tokens, -1, "sparse_requests");
  pad(p.sparse_positions, m.tokens, 0, "sparse_positions");
  if (p.sparse_groups.empty()) p.sparse_groups.emplace_back();
  SparseGroup& g = p.sparse_groups[0];
  const MostSparse most = most_sparse(p, m.tokens, p.topk);
  g.count = static_cast<int32_t>(m.tokens);
  pad(g.work.items, most.items, {}, "sparse items");
  pad(g.work.splits, most.items > 1 ? 1 : 0, {.splits = 1}, "sparse splits");
  g.work.part_keys = invariant(p) ? kInvariantKeys : 0;
  p.partial_rows = g.work.partial_rows = most.partial_rows;
  if (!p.serves_block()) return;
  IndexSchedule& s = p.index_schedule;
  s.tiles = index_tiles_of(p, m.tokens, m.seq_len);
  s.candidates = index_candidates(p, m.seq_len);
  pad(s.all, m.requests, {}, "index rows");
  s.selected.resize(static_cast<size_t>(ceil_div(m.tokens, s.tiles.rows)));
  for (IndexTile& tile : s.selected) {
    if (tile.joined.empty()) join_tile(p, s.candidates, tile);
    pad_tile(tile.rows, items_of_tile(p, m));
  }
}

// A captured launch is as large as the lists that the host has then: these are of requests as long as any, one behind
// another, or over one another where all together would be more than the tokens.
void fill_launches(Plan& p, const StepMaxima& m) {
  const ContextParallel& c = p.options.context_parallel;
  const auto length = static_cast<int32_t>(c.sharding.length(c.member(), m.seq_len));
  const auto most = static_cast<int32_t>(std::min(m.query_len, m.tokens));
  const auto tokens = static_cast<int32_t>(std::min<int64_t>(most, item_tokens(p, m.seq_len)));
  for (size_t i = 0; i < p.latent_items.size(); ++i)
    p.latent_items[i] = {.request = static_cast<int32_t>(static_cast<int64_t>(i) % m.requests),
                         .q_begin = static_cast<int32_t>(std::min(static_cast<int64_t>(i) * tokens, m.tokens - tokens)),
                         .q_count = tokens,
                         .kv_begin = 0,
                         .kv_end = length,
                         .visible = std::max(length - tokens, 0)};
  for (SparseGroup& g : p.sparse_groups)
    g.work.items[0] = {
        .q_begin = 0, .q_count = static_cast<int32_t>(m.tokens), .k_begin = 0, .k_end = static_cast<int32_t>(p.topk)};
  // Rows of index items are disjoint: a launch goes by their number, the longest, and the last row.
  const auto cover = [&](std::vector<IndexItem>& items, int64_t rows, int64_t first, bool scored) {
    int32_t row = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      const auto count = static_cast<int32_t>(std::min<int64_t>(most, rows - row));
      const auto end = scored ? length : static_cast<int32_t>(std::min<int64_t>(m.seq_len, p.topk));
      items[i] = {.request = static_cast<int32_t>(i),
                  .q_begin = static_cast<int32_t>(first + row),
                  .q_count = count,
                  .kv_begin = 0,
                  .kv_end = end,
                  .visible = std::max(end - count, 0),
                  .row = row};
      row += count;
    }
  };
  IndexSchedule& s = p.index_schedule;
  cover(s.all, m.tokens, 0, false);
  for (size_t t = 0; t < s.selected.size(); ++t) {
    const int64_t first = static_cast<int64_t>(t) * s.tiles.rows;
    const int64_t rows = std::min(s.tiles.rows, m.tokens - first);
    cover(s.selected[t].rows, rows, first, true);
    for (IndexItem& joined : s.selected[t].joined) joined.q_count = static_cast<int32_t>(rows);
  }
}

}  // namespace

void require_within(const StepMaxima& m, const Batch& b) {
  const auto fail = [](const std::string& what, int64_t most, const char* name) {
    throw BatchError("batch: " + what + ", the step's maxima allow " + std::to_string(most) +
                     " (PlanOptions::maxima, " + name + ")");
  };
  if (b.requests() > m.requests) fail(std::to_string(b.requests()) + " requests", m.requests, "requests");
  if (b.tokens() > m.tokens) fail(std::to_string(b.tokens()) + " new tokens", m.tokens, "tokens");
  for (int64_t r = 0; r < b.requests(); ++r) {
    const auto of = [&](const std::string& what) { return "request " + std::to_string(r) + ": " + what; };
    if (b.query_len(r) > m.query_len)
      fail(of(std::to_string(b.query_len(r)) + " new tokens"), m.query_len, "query_len");
    // Of an empty request nothing is looked at.
    if (b.query_len(r) > 0 && b.seq_lens[r] > m.seq_len)
      fail(of("seq_len is " + std::to_string(b.seq_lens[r])), m.seq_len, "seq_len");
  }
}

// However short a sequence still is, under batch_invariant: longer ones begin with the same tokens.
bool selects(const Plan& p, int64_t seq_len) { return p.topk > 0 && (seq_len > p.topk || ignores_cuts(p)); }

void pad_to_maxima(Plan& p, const Batch& batch) {
  const StepMaxima& m = *p.options.maxima;
  p.slots.assign(batch.slot_mapping.begin(), batch.slot_mapping.end());
  pad(p.slots, m.tokens, -1, "slot_mapping");
  p.lengths.assign(batch.seq_lens.begin(), batch.seq_lens.end());
  pad(p.lengths, m.requests, 0, "seq_lens");
  p.written_rows.resize(static_cast<size_t>(p.batch_tokens));
  std::iota(p.written_rows.begin(), p.written_rows.end(), 0);
  pad(p.written_rows, m.tokens, -1, "written_rows");
  if (const RowRange own = p.own_rows(); p.sums_own()) {
    p.written_sums.resize(static_cast<size_t>(std::clamp<int64_t>(p.batch_tokens - own.begin, 0, own.count)));
    std::iota(p.written_sums.begin(), p.written_sums.end(), 0);
    pad(p.written_sums, own.count, -1, "written_sums");
  }
  // One path for all: compact rows are the tokens', in their order.
  p.latent_tokens.resize(static_cast<size_t>(m.tokens));
  std::iota(p.latent_tokens.begin(), p.latent_tokens.end(), 0);
  if (m.tokens == 0) return;
  if (selects(p, m.seq_len)) pad_sparse(p, m);
  else pad_latent(p, m);
}

}  // namespace planning

StepOfMaxima plan_maxima(const ModelConfig& model, const CacheSpec& cache, const DeviceInfo& device,
                         const PlanOptions& options) {
  if (!options.maxima) throw ShapeError("plan_maxima: the options have no maxima (PlanOptions::maxima)");
  const StepMaxima m = planning::checked(*options.maxima);
  cache.validate();
  const ContextParallel& c = options.context_parallel;
  const int64_t pages = c.sharding.pages(c.member(), m.seq_len, cache.page_size);
  StepOfMaxima s;
  s.starts = {0};
  s.table.assign(static_cast<size_t>(m.requests * pages), 0);
  s.batch = {s.starts, {}, {s.table.data(), {m.requests, pages}}, {}};
  s.plan = plan(model, cache, 1, s.batch, device, options);
  // A CPU reads its lists when it runs.
  if (device.device.kind == DeviceKind::cuda) planning::fill_launches(s.plan, m);
  return s;
}

StepMemory step_memory(const ModelConfig& model, const CacheSpec& cache, const StepMaxima& maxima,
                       const DeviceInfo& device, const PlanOptions& options) {
  using namespace planning;
  Plan p = begin_plan(model, cache, device, options);
  const StepMaxima m = checked(maxima);
  const Possible can = possible_paths(p, m);
  const PlanOptions& o = p.options;
  place_output(p);  // whether it is fused

  WorkspaceRows w{.tokens = m.tokens,
                  .latent = can.latent || can.sparse ? m.tokens : 0,
                  .partial = can.latent ? most_latent(p, m).partial_rows : 0,
                  .heads = o.absorbed ? 0 : m.tokens,
                  .head_dtype = can.context ? Dtype::f32 : p.head_dtype(),
                  .shares_context = (can.latent || can.sparse) && o.context_parallel.shared()};
  const int64_t grain = key_grain(p), masked = can.sparse ? most_masked_context(p, m.query_len, m.seq_len) : -1;
  if ((can.expanded || masked >= 0) && !ignores_cuts(p))
    w.expanded = m.tokens + (grain - 1) * std::min(m.requests, m.tokens);
  const int64_t context = !can.context ? masked : ignores_cuts(p) ? m.seq_len : m.seq_len - 1;
  if (context > 0) w.context = std::min(chunk_rows(p, m.seq_len, m.requests), m.requests * round_up(context, grain));
  if (masked > 0) w.head_dtype = Dtype::f32;
  if (masked >= 0) w.mask_words = ceil_div(std::min(masked + m.query_len, m.seq_len), 32);
  if (p.fused_output && context <= 0) w.heads = 0;
  if (can.sparse) {
    w.sparse = m.tokens;
    w.indexed = p.serves_block() ? m.tokens : 0;
    w.partial = std::max(w.partial, most_sparse(p, m.tokens, p.topk).partial_rows);
    if (p.serves_block()) {
      w.tiles = most_tiles(m.tokens, o.context_parallel.longest(m.seq_len), p.topk, index_tile_bytes(p));
      w.candidates = index_candidates(p, m.seq_len);
    }
    if (may_upconvert(p, m.query_len)) {
      const int64_t longest = o.context_parallel.longest(m.seq_len);
      w.gathered = std::min(std::max(context_workspace_rows(p, longest, m.requests), longest), m.requests * longest);
    }
  }
  lay_out_workspace(p, w);
  return {p.workspace_bytes, p.selection_bytes};
}

}  // namespace mla
