// Sparse attention: items of rows and key ranges, and prefills packed into a gathering workspace.
#include <algorithm>
#include <limits>
#include <string>

#include "mla/error.hpp"
#include "plan/internal.hpp"

namespace mla {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

// Heads that share a gathered block in a task; a row of more heads is several units of work.
constexpr int64_t kHeadsOfUnit = 64;

using planning::ceil_div;
using planning::round_up;

void require(const char* what, int64_t found, int64_t least) {
  if (found < least || found > kMost)
    throw ShapeError(std::string(what) + " is " + std::to_string(found) + ", allowed " + std::to_string(least) +
                     " to " + std::to_string(kMost));
}

// Keys of an item.
int64_t item_keys(int64_t rows, int64_t keys, int64_t heads, bool invariant, int64_t units, int64_t split_keys) {
  const int64_t tasks = rows * ceil_div(heads, kHeadsOfUnit);
  if (tasks >= units) return keys;
  if (invariant) return std::min<int64_t>(keys, kInvariantKeys);
  // What an item pays for its queries and outputs does not depend on where its keys come from.
  const int64_t longest = planning::range_length(tasks * keys, units, split_keys);
  return keys <= longest ? keys : round_up(ceil_div(keys, ceil_div(keys, longest)), planning::kGrain);
}

}  // namespace

// A GPU's kernels cut lists themselves.
int64_t planning::sparse_units(const Plan& plan) {
  return plan.device.device.kind == DeviceKind::cuda ? 1 : kSparseUnits;
}

SparseWork plan_sparse(int64_t rows, int64_t keys, int64_t heads, SplitPolicy split, int64_t units,
                       int64_t split_keys) {
  require("sparse rows", rows, 0);
  require("sparse keys", keys, 0);
  require("sparse heads", heads, 0);
  require("sparse units", units, 1);
  const bool invariant = split == SplitPolicy::batch_invariant;
  SparseWork work{.items = {}, .splits = {}, .part_keys = invariant ? kInvariantKeys : 0};
  if (rows == 0 || heads == 0) return work;
  const int64_t step = item_keys(rows, keys, heads, invariant, units, split_keys),
                splits = step > 0 ? ceil_div(keys, step) : 1;
  if (splits > 1) {
    if (rows * splits > kMost)
      throw ShapeError("sparse partial rows is " + std::to_string(rows * splits) + ", allowed 0 to " +
                       std::to_string(kMost));
    work.splits.push_back({0, static_cast<int32_t>(rows), 0, static_cast<int32_t>(splits)});
    work.partial_rows = rows * splits;
  }
  for (int64_t s = 0; s < splits; ++s)
    work.items.push_back({.q_begin = 0,
                          .q_count = static_cast<int32_t>(rows),
                          .k_begin = static_cast<int32_t>(s * step),
                          .k_end = static_cast<int32_t>(std::min(keys, (s + 1) * step)),
                          .partial = splits > 1 ? static_cast<int32_t>(s * rows) : -1});
  return work;
}

planning::MostSparse planning::most_sparse(const Plan& plan, int64_t rows, int64_t keys) {
  const int64_t units = sparse_units(plan), heads = attended_heads(plan);
  MostSparse most;
  if (rows == 0 || keys == 0 || heads == 0) return most;
  most.items = 1;
  // As many rows as units make no splits.
  for (int64_t r = 1; r <= std::min(rows, units); ++r) {
    const int64_t splits = ceil_div(keys, item_keys(r, keys, heads, invariant(plan), units, split_keys(plan)));
    if (splits == 1) continue;
    most.items = std::max(most.items, splits);
    most.partial_rows = std::max(most.partial_rows, r * splits);
  }
  return most;
}

std::vector<RequestRange> split_prefill_chunks(std::span<const int32_t> lengths, int64_t rows) {
  require("prefill workspace rows", rows, 1);
  std::vector<RequestRange> chunks;
  int64_t used = 0;
  for (size_t r = 0; r < lengths.size(); ++r) {
    const int64_t length = lengths[r];
    if (length < 0 || length > rows)
      throw ShapeError("prefill length of request " + std::to_string(r) + " is " + std::to_string(length) +
                       ", allowed 0 to the workspace's " + std::to_string(rows) + " rows");
    const int32_t index = static_cast<int32_t>(r);
    if (chunks.empty() || used + length > rows) {
      chunks.push_back({index, index});
      used = 0;
    }
    used += length;
    chunks.back().end = index + 1;
  }
  return chunks;
}

}  // namespace mla
