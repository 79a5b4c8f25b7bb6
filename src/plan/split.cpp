// Split-KV: cached positions of a request cut into ranges that are attended independently and merged.
#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "mla/error.hpp"
#include "plan/internal.hpp"

namespace mla::planning {
namespace {

// Query tokens that share an item: enough rows to reuse each converted cache row, few enough that long prefills stay
// parallel.
constexpr int64_t kTileTokens = 64;
// Splits are multiples of this, so that kernels' blocks of positions start alike.
constexpr int64_t kGrain = 64;
// fast: enough units for many threads to share evenly, counted over the whole batch. Never from the number of threads:
// results must not depend on it.
constexpr int64_t kUnits = 64;
// A split's queries are laid out and its outputs merged for every row, about 10% of the work at 512 positions (16
// heads, bf16) and half that at 1024. The shorter one is for batches with so few positions that parallelism is worth
// more.
constexpr int64_t kShortest = 1024, kShortestOfFew = 512, kFewUnits = 8;
// A range's weights are summed in f32, one after another: with more, those that come last would round away
// (docs/numerics.md).
constexpr int64_t kLongest = 1 << 18;
// batch_invariant: a fixed length. 1024 keeps two threads busy from 2K positions on; a partial row costs one pass over
// its output for 1024 cache rows read, about 1% of the work at 16 heads.
constexpr int64_t kInvariant = 1024;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// A GPU's kernels cut requests themselves, by the lengths they find when they run.
void whole_requests(Plan& plan) {
  int32_t row = 0;
  for (size_t index = 0; index < plan.requests.size(); ++index) {
    const RequestPlan& r = plan.requests[index];
    if (r.path != Path::latent) continue;
    plan.latent_items.push_back({.request = static_cast<int32_t>(index),
                                 .q_begin = row,
                                 .q_count = r.query_len,
                                 .kv_begin = 0,
                                 .kv_end = r.context + r.query_len,
                                 .visible = r.context});
    row += r.query_len;
  }
}

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

}  // namespace

void split_kv(Plan& plan) {
  if (plan.device.device.kind == DeviceKind::cuda) return whole_requests(plan);
  int64_t total = 0, items = 0, parts = 0;
  for (const RequestPlan& r : plan.requests)
    if (r.path == Path::latent)
      for (int64_t q = 0; q < r.query_len; q += kTileTokens, ++items) {
        const int64_t end = std::min<int64_t>(r.query_len, q + kTileTokens), length = r.context + end;
        total += length;
        parts += (end - q) * ((length + kInvariant - 1) / kInvariant);
      }
  const bool invariant = plan.options.split == SplitPolicy::batch_invariant;
  // fast splits at most kUnits tiles into at most kUnits ranges each.
  if (constexpr int64_t kMost = std::numeric_limits<int32_t>::max(); invariant && parts > kMost)
    throw UnsupportedError("plan: the latent path needs " + std::to_string(parts) +
                           " partial rows under batch_invariant, at most " + std::to_string(kMost) + " are possible");
  const int64_t shortest = total >= kFewUnits * kShortest ? kShortest : kShortestOfFew;
  const int64_t longest =
      invariant ? kInvariant : std::clamp(round_up((total + kUnits - 1) / kUnits, kGrain), shortest, kLongest);

  plan.latent_items.reserve(items + (invariant ? total / kInvariant + 1 : kUnits));
  int32_t row = 0, partial = 0;
  for (size_t index = 0; index < plan.requests.size(); ++index) {
    const RequestPlan& r = plan.requests[index];
    if (r.path != Path::latent) continue;
    for (int32_t q = 0; q < r.query_len; q += kTileTokens) {
      const int32_t count = std::min<int32_t>(kTileTokens, r.query_len - q);
      const int64_t length = static_cast<int64_t>(r.context) + q + count;
      const int64_t splits = (length + longest - 1) / longest;
      const int64_t step = invariant ? longest : round_up((length + splits - 1) / splits, kGrain);
      LatentItem item{
          .request = static_cast<int32_t>(index), .q_begin = row, .q_count = count, .visible = r.context + q};
      int32_t written = 0;
      for (int64_t begin = 0; begin < length; begin += step, ++written) {
        item.kv_begin = static_cast<int32_t>(begin);
        item.kv_end = static_cast<int32_t>(std::min(length, begin + step));
        item.partial = length > step ? partial + written * count : -1;
        plan.latent_items.push_back(item);
      }
      if (written > 1) {
        plan.splits.push_back({row, count, partial, written});
        partial += written * count;
      }
      row += count;
    }
  }
  plan.partial_rows = partial;
  sort_longest_first(plan.latent_items);
}

}  // namespace mla::planning
