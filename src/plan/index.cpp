// The sparse indexer's tiles and work items.
#include <algorithm>
#include <string>

#include "mla/error.hpp"
#include "mla/index_plan.hpp"
#include "plan/internal.hpp"

namespace mla {
namespace {

// Rows that share a read of each key, in a tile of kIndexTileBytes: beyond a few dozen scoring is bound by arithmetic
// alone. Larger tiles have as many times more, and all that they hold where no row needs a second round: a GPU's calls
// gain by it.
constexpr int64_t kMostRows = 64;
// Positions a tile are a multiple of what one task of index_score takes.
constexpr int64_t kGrain = 1024;

}  // namespace

IndexTiles index_tiles(int64_t rows, int64_t longest, int64_t topk, size_t most_bytes) {
  if (topk < 1 || topk > kMostTopk)
    throw ShapeError("index topk is " + std::to_string(topk) + ", allowed 1 to " + std::to_string(kMostTopk));
  if (rows < 0) throw ShapeError("index rows is " + std::to_string(rows) + ", must not be negative");
  if (longest < 0) throw ShapeError("index longest is " + std::to_string(longest) + ", must not be negative");
  const size_t state = topk_state_bytes(topk), least = state + kGrain * sizeof(float);
  if (most_bytes < least)
    throw ShapeError("index tile is " + std::to_string(most_bytes) + " bytes, at least " + std::to_string(least) +
                     " are needed at topk " + std::to_string(topk));
  if (rows == 0 || longest == 0) return {};
  const auto times = static_cast<int64_t>(most_bytes / kIndexTileBytes);
  // Half for the selections, unless one row needs more; what they leave is for scores.
  const int64_t halved = std::min<int64_t>(static_cast<int64_t>(most_bytes / 2 / least),
                                           kMostRows * std::max<int64_t>(1, times)),
                whole = static_cast<int64_t>(
                    most_bytes / (state + sizeof(float) * static_cast<size_t>(planning::round_up(longest, kGrain))));
  IndexTiles t;
  t.rows = std::clamp<int64_t>(times > 1 ? std::max(halved, whole / kMostRows * kMostRows) : halved, 1, rows);
  t.state_bytes = static_cast<size_t>(t.rows) * state;
  const int64_t room = static_cast<int64_t>((most_bytes - t.state_bytes) / sizeof(float)) / t.rows;
  t.keys = std::min(room / kGrain * kGrain, planning::round_up(longest, kGrain));
  t.score_bytes = static_cast<size_t>(t.rows * t.keys) * sizeof(float);
  return t;
}

int64_t IndexTile::rounds(int64_t keys) const {
  int64_t end = 0;
  for (const IndexItem& row : rows) end = std::max<int64_t>(end, row.kv_end);
  // Where a rank holds nothing, selections begin all the same.
  return std::max<int64_t>(joined.empty() ? 0 : 1, planning::ceil_div(end, keys));
}

namespace {

// Requests' rows that are scored; those that are not go to `all`.
struct Scored {
  std::vector<IndexItem> items;
  int64_t rows = 0, longest = 0;
};
Scored scored_of(std::span<const RequestPlan> requests, int64_t topk, std::vector<IndexItem>& all) {
  Scored scored;
  for (size_t r = 0; r < requests.size(); ++r) {
    const RequestPlan& q = requests[r];
    IndexItem item{.request = static_cast<int32_t>(r),
                   .q_begin = q.q_begin,
                   .q_count = static_cast<int32_t>(std::clamp<int64_t>(topk - q.context, 0, q.query_len)),
                   .kv_end = q.context + q.query_len,
                   .visible = q.context};
    if (item.q_count > 0) all.push_back(item);
    item.q_begin += item.q_count;
    item.visible += item.q_count;
    item.q_count = q.query_len - item.q_count;
    if (item.q_count == 0) continue;
    scored.items.push_back(item);
    scored.rows += item.q_count;
    scored.longest = std::max<int64_t>(scored.longest, item.kv_end);
  }
  return scored;
}

// The same rows over the keys that a rank of a split cache holds.
void hold(const ContextParallel& c, std::vector<IndexItem>& items) {
  std::vector<IndexItem> held;
  for (const IndexItem& whole : items)
    planning::each_held_run(c, whole.visible, whole.q_count, [&](int64_t i, int64_t count, int64_t sees, bool own) {
      IndexItem item = whole;
      item.q_begin += static_cast<int32_t>(i);
      item.q_count = static_cast<int32_t>(count);
      item.visible = static_cast<int32_t>(sees - 1);
      item.kv_end = static_cast<int32_t>(own ? sees + count - 1 : sees);
      held.push_back(item);
    });
  items = std::move(held);
}

void fill_tiles(IndexSchedule& s, const std::vector<IndexItem>& scored) {
  int64_t used = s.tiles.rows;  // no tile is open
  for (IndexItem item : scored)
    for (int32_t left = item.q_count, end = item.kv_end; left > 0;) {
      if (used == s.tiles.rows) {
        s.selected.emplace_back();
        used = 0;
      }
      item.q_count = static_cast<int32_t>(std::min<int64_t>(left, s.tiles.rows - used));
      item.kv_end = std::min(end, item.visible + item.q_count);
      item.row = static_cast<int32_t>(used);
      s.selected.back().rows.push_back(item);
      used += item.q_count;
      item.q_begin += item.q_count;
      item.visible += item.q_count;
      left -= item.q_count;
    }
}

}  // namespace

IndexSchedule schedule_index(std::span<const RequestPlan> requests, int64_t topk, size_t most_bytes) {
  IndexSchedule s;
  const Scored scored = scored_of(requests, topk, s.all);
  s.tiles = index_tiles(scored.rows, scored.longest, topk, most_bytes);
  fill_tiles(s, scored.items);
  return s;
}

IndexTiles planning::index_tiles_of(const Plan& plan, int64_t rows, int64_t longest) {
  return index_tiles(rows, plan.options.context_parallel.longest(longest), plan.topk, index_tile_bytes(plan));
}

int64_t planning::index_candidates(const Plan& plan, int64_t longest) {
  const ContextParallel& c = plan.options.context_parallel;
  return c.shared() ? std::min(plan.topk, c.longest(longest)) : 0;
}

IndexSchedule planning::schedule_index(const Plan& plan, std::span<const RequestPlan> requests) {
  const ContextParallel& c = plan.options.context_parallel;
  IndexSchedule s;
  Scored scored = scored_of(requests, plan.topk, s.all);
  const auto& m = plan.options.maxima;
  const int64_t rows = m ? m->tokens : scored.rows, longest = m ? m->seq_len : scored.longest;
  s.tiles = index_tiles_of(plan, rows, longest);
  if (c.shared()) hold(c, scored.items);
  fill_tiles(s, scored.items);
  s.candidates = index_candidates(plan, longest);
  for (IndexTile& tile : s.selected) join_tile(plan, s.candidates, tile);
  return s;
}

void planning::join_tile(const Plan& plan, int64_t candidates, IndexTile& tile) {
  const ContextParallel& c = plan.options.context_parallel;
  if (!c.shared()) return;
  const auto columns = static_cast<int32_t>(c.sharding.ranks() * candidates);
  const int32_t rows = tile.rows.empty() ? 0 : tile.rows.back().row + tile.rows.back().q_count;
  tile.joined = {{.q_count = rows, .kv_end = columns, .visible = columns - 1}};
}

}  // namespace mla
