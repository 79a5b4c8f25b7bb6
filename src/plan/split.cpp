// Split-KV: cached positions of a request cut into ranges that are attended independently and merged.
#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "mla/error.hpp"
#include "plan/internal.hpp"

namespace mla {
namespace planning {
namespace {

// Query tokens that share an item: enough rows to reuse each converted cache row, few enough that long prefills stay
// parallel.
constexpr int64_t kTileTokens = 64;
// fast: enough units for many threads to share evenly, counted over the whole batch. Never from the number of threads:
// results must not depend on it.
constexpr int64_t kUnits = 64;
// A split's queries are laid out and its outputs merged for every row, about 10% of the work at 512 positions (16
// heads, bf16) and half that at 1024. Shorter ones are for batches with so few positions that parallelism is worth
// more: where the shortest have 512, for those of fewer than 8 of 1024.
constexpr int64_t kShortest = 1024, kFewKeys = 8 * 512;
// A range's weights are summed in f32, one after another: with more, those that come last would round away
// (docs/numerics.md).
constexpr int64_t kLongest = 1 << 18;

// So that no thread starts a long range last; equally long ones stay in their order. Keys are sorted, then items moved
// once: items are several words.
void sort_longest_first(std::vector<LatentItem>& items) {
  std::vector<std::pair<int64_t, uint32_t>> order(items.size());
  for (size_t i = 0; i < items.size(); ++i)
    order[i] = {-static_cast<int64_t>(items[i].kv_end - items[i].kv_begin) * items[i].q_count,
                static_cast<uint32_t>(i)};
  if (std::is_sorted(order.begin(), order.end())) return;
  std::sort(order.begin(), order.end());
  std::vector<LatentItem> sorted(items.size());
  for (size_t i = 0; i < items.size(); ++i) sorted[i] = items[order[i].second];
  items = std::move(sorted);
}

void add_held_rows(const ContextParallel& c, int32_t request, const RequestPlan& q, int32_t row,
                   std::vector<LatentRows>& rows) {
  each_held_run(c, q.context, q.query_len, [&](int64_t i, int64_t count, int64_t sees, bool held) {
    rows.push_back({.request = request,
                    .q_begin = row + static_cast<int32_t>(i),
                    .q_count = static_cast<int32_t>(count),
                    .visible = sees - 1,
                    .length = held ? sees + count - 1 : sees});
  });
}

// A GPU's kernels cut requests' positions themselves, by the lengths they find when they run. Under batch_invariant
// rows of an item have equally many pieces, for a row of one piece is not merged; no launch has more than scratch
// holds.
void add_items(Plan& plan, const LatentRows& r) {
  const auto& maxima = plan.options.maxima;
  const int64_t most = item_tokens(plan, maxima ? maxima->seq_len : r.length);
  for (int32_t q = 0; q < r.q_count;) {
    const int64_t seen = std::max<int64_t>(r.visible + q + 1, 1), border = round_up(seen, kInvariantKeys);
    int64_t count = std::min<int64_t>(r.q_count - q, most), end = r.length;
    if (invariant(plan) && border < r.length) count = std::min(count, border - seen + 1), end = border;
    plan.latent_items.push_back({.request = r.request,
                                 .q_begin = r.q_begin + q,
                                 .q_count = static_cast<int32_t>(count),
                                 .kv_begin = 0,
                                 .kv_end = static_cast<int32_t>(end),
                                 .visible = static_cast<int32_t>(std::min(r.visible + q, r.length - 1))});
    q += static_cast<int32_t>(count);
  }
}

}  // namespace

int64_t item_tokens(const Plan& plan, int64_t positions) {
  if (!invariant(plan)) return std::numeric_limits<int32_t>::max();
  // A tile's rows that no token fills have partial rows, too.
  constexpr int64_t kTileRows = 128;
  const auto row = static_cast<int64_t>(sizeof(float)) * (plan.cache.value_width() + 2),
             rows = static_cast<int64_t>(plan.device.scratch_per_worker) / row;
  return std::max<int64_t>(
      1, (rows / std::max<int64_t>(1, ceil_div(positions, kInvariantKeys)) - kTileRows) / attended_heads(plan));
}

int64_t split_keys(const Plan& plan) {
  return plan.options.compute == Dtype::bf16 ? plan.device.split_keys : kSplitKeys;
}

int64_t range_length(int64_t total, int64_t units, int64_t least) {
  int64_t shortest = kShortest;
  while (shortest > least && total / shortest < kFewKeys / least) shortest /= 2;
  return std::max(shortest, round_up(ceil_div(total, units), kGrain));
}

// Why these hold, under fast: ranges have at least total / kUnits positions, so that tiles longer than one, at most
// kUnits of them, have at most kUnits ranges and one more each; where that would be longer than kLongest, ranges of
// kLongest.
MostLatent most_latent(const Plan& plan, const StepMaxima& m) {
  const bool shares = plan.options.context_parallel.shared();
  const auto ranges_of = [&](int64_t length) { return ceil_div(m.seq_len, length); };
  MostLatent most;
  if (m.tokens == 0) return most;
  if (plan.device.device.kind == DeviceKind::cuda) {
    // Each border that a request's tokens pass cuts one of its items in two.
    const int64_t borders = invariant(plan) ? ceil_div(m.query_len - 1, kInvariantKeys) : 0;
    most.items = shares ? m.tokens : m.requests * (ceil_div(m.query_len, item_tokens(plan, m.seq_len)) + borders);
    return most;
  }
  // Runs of one owner's tokens are tiles of their own.
  const int64_t tile = std::min(kTileTokens, m.query_len),
                tiles = shares ? m.tokens : std::min(m.tokens, m.requests * ceil_div(m.query_len, kTileTokens));
  if (invariant(plan)) {
    const int64_t ranges = ranges_of(kInvariantKeys);
    most.items = tiles * ranges;
    if (ranges > 1) most.splits = tiles, most.partial_rows = m.tokens * ranges;
    return most;
  }
  int64_t shortest = kShortest;
  while (shortest > split_keys(plan)) shortest /= 2;
  const int64_t ranges = ranges_of(shortest), of_longest = ranges_of(kLongest);
  most.items = tiles;
  if (ranges <= 1) return most;
  const int64_t split_tiles = std::min(tiles, kUnits), split_rows = std::min(m.tokens, kUnits * tile);
  most.splits = of_longest > 1 ? tiles : split_tiles;
  most.items = std::min(tiles * ranges, std::max(tiles + kUnits + split_tiles, tiles * of_longest));
  most.partial_rows =
      std::min(m.tokens * ranges, std::max(kUnits * tile + split_rows, of_longest > 1 ? m.tokens * of_longest : 0));
  return most;
}

void split_kv(Plan& plan) {
  std::vector<LatentRows> rows;
  rows.reserve(plan.requests.size());
  int32_t row = 0;
  for (size_t r = 0; r < plan.requests.size(); ++r) {
    const RequestPlan& q = plan.requests[r];
    if (q.path != Path::latent) continue;
    if (const ContextParallel& c = plan.options.context_parallel; c.shared())
      add_held_rows(c, static_cast<int32_t>(r), q, row, rows);
    else rows.push_back({static_cast<int32_t>(r), row, q.query_len, q.context, int64_t{q.context} + q.query_len});
    row += q.query_len;
  }
  if (plan.device.device.kind == DeviceKind::cuda) {
    for (const LatentRows& r : rows) add_items(plan, r);
    return;
  }
  LatentWork work = plan_latent(rows, plan.options.split, split_keys(plan));
  plan.latent_items = std::move(work.items);
  plan.splits = std::move(work.splits);
  plan.partial_rows = work.partial_rows;
}

}  // namespace planning

LatentWork plan_latent(std::span<const LatentRows> rows, SplitPolicy split, int64_t split_keys) {
  using namespace planning;
  const bool invariant = split == SplitPolicy::batch_invariant;
  // Positions that the tile of a request's rows from q on sees.
  const auto end_of = [](const LatentRows& r, int32_t q, int32_t count) {
    return std::clamp<int64_t>(r.visible + q + count, 0, r.length);
  };
  const auto each_tile = [&](auto&& visit) {
    for (const LatentRows& r : rows)
      for (int32_t q = 0; q < r.q_count; q += kTileTokens) visit(r, q, std::min<int32_t>(kTileTokens, r.q_count - q));
  };
  int64_t total = 0, tiles = 0, partial_rows = 0;
  each_tile([&](const LatentRows& r, int32_t q, int32_t count) {
    const int64_t length = end_of(r, q, count);
    total += length;
    partial_rows += count * ceil_div(length, kInvariantKeys);
    ++tiles;
  });
  // fast splits at most kUnits tiles into at most kUnits ranges each.
  if (constexpr int64_t kMost = std::numeric_limits<int32_t>::max(); invariant && partial_rows > kMost)
    throw UnsupportedError("plan: the latent path needs " + std::to_string(partial_rows) +
                           " partial rows under batch_invariant, at most " + std::to_string(kMost) + " are possible");
  const int64_t longest = invariant ? kInvariantKeys : std::min(range_length(total, kUnits, split_keys), kLongest);

  LatentWork work;
  work.items.reserve(static_cast<size_t>(tiles + (invariant ? total / kInvariantKeys + 1 : kUnits)));
  int32_t partial = 0;
  each_tile([&](const LatentRows& r, int32_t q, int32_t count) {
    const int64_t length = end_of(r, q, count), splits = std::max<int64_t>(1, ceil_div(length, longest));
    const int64_t step = invariant ? longest : round_up(ceil_div(length, splits), kGrain);
    LatentItem item{.request = r.request,
                    .q_begin = r.q_begin + q,
                    .q_count = count,
                    .visible = static_cast<int32_t>(std::min(r.visible + q, r.length - 1))};
    int32_t written = 0;
    int64_t begin = 0;
    do {  // rows that see nothing have an item, too: it writes that
      item.kv_begin = static_cast<int32_t>(begin);
      item.kv_end = static_cast<int32_t>(std::min(length, begin + step));
      item.partial = length > step ? partial + written * count : -1;
      work.items.push_back(item);
      ++written;
      begin += step;
    } while (begin < length);
    if (written > 1) {
      work.splits.push_back({item.q_begin, count, partial, written});
      partial += written * count;
    }
  });
  work.partial_rows = partial;
  sort_longest_first(work.items);
  return work;
}

}  // namespace mla
