// What steps within an engine's maxima need at most.
#include <algorithm>
#include <limits>
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
  const bool cached = o.cache_use != CacheUse::none, shared = o.context_parallel.sharding.ranks() > 1;
  Possible can{.sparse = cached && p.topk > 0 && m.seq_len > p.topk};
  switch (o.path) {
    case PathPolicy::latent: can.latent = true; break;
    case PathPolicy::expanded: can.expanded = true; break;
    case PathPolicy::by_length:
      can.latent = o.reorder_batch_threshold > 0;
      can.expanded = m.query_len > o.reorder_batch_threshold;
      break;
    case PathPolicy::automatic:
      can.latent = true;
      can.expanded = !o.absorbed && (m.query_len > 1 || shared);
      break;
  }
  if (!cached) can = {.expanded = true};
  if (shared) can.latent = true;  // requests with context
  can.context = can.expanded && cached && !shared;
  return can;
}

// Tiles of any number of scored rows: fewer rows have more positions.
IndexTiles most_tiles(int64_t rows, int64_t longest, int64_t topk, size_t most_bytes) {
  IndexTiles most = index_tiles(rows, longest, topk, most_bytes);
  for (int64_t r = 1; r < most.rows; ++r)
    most.score_bytes = std::max(most.score_bytes, index_tiles(r, longest, topk, most_bytes).score_bytes);
  return most;
}

}  // namespace
}  // namespace planning

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
                  .expanded = can.expanded ? m.tokens : 0,
                  .heads = o.absorbed ? 0 : m.tokens,
                  .head_dtype = can.context ? Dtype::f32 : p.head_dtype(),
                  .shares_context = can.latent && o.context_parallel.sharding.ranks() > 1};
  if (can.context) w.context = std::min(chunk_rows(p, m.seq_len, m.requests), m.requests * (m.seq_len - 1));
  if (p.fused_output && !can.context) w.heads = 0;
  if (can.sparse) {
    w.sparse = m.tokens;
    w.indexed = p.serves_block() ? m.tokens : 0;
    w.partial = std::max(w.partial, most_sparse(p, m.tokens, p.topk).partial_rows);
    if (p.serves_block()) w.tiles = most_tiles(m.tokens, m.seq_len, p.topk, index_tile_bytes(p));
    if (may_upconvert(p, m.query_len))
      w.gathered =
          std::min(std::max(context_workspace_rows(p, m.seq_len, m.requests), m.seq_len), m.requests * m.seq_len);
  }
  lay_out_workspace(p, w);
  return {p.workspace_bytes, p.selection_bytes};
}

}  // namespace mla
