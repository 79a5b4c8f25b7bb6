// The sparse path: which rows are selected for, in which tiles they are scored, and in which launches they attend.
#include <algorithm>
#include <numeric>

#include "plan/internal.hpp"

namespace mla::planning {
namespace {

bool is_decode(const Plan& plan, const RequestPlan& r) { return r.query_len <= plan.options.reorder_batch_threshold; }

double cost_of(const Plan& plan, SparseForm form, int64_t new_tokens, int64_t context) {
  return sparse_cost(plan.model, plan.cache, *plan.options.rates, form, new_tokens, context);
}

// Whether a request's cost decides if it is masked.
bool weighs_masks(const Plan& plan) {
  const PlanOptions& o = plan.options;
  return o.sparse == SparsePolicy::automatic && o.form == LayerForm::block && !o.maxima && !o.absorbed &&
         !invariant(plan) && !o.context_parallel.shared() && !plan.prefills_codes() && plan.topk > 0;
}

bool masks_pay(const Plan& plan, int64_t new_tokens, int64_t context) {
  return cost_of(plan, SparseForm::masked, new_tokens, context) <
         std::min(cost_of(plan, SparseForm::direct, new_tokens, context),
                  cost_of(plan, SparseForm::upconvert, new_tokens, context));
}

// A row is attended where it lies: whether its request's whole sequence is first gathered in 16 or 32 bits follows from
// the request alone, never from its neighbours.
bool upconverts(const Plan& plan, const RequestPlan& r) {
  if (plan.options.maxima || invariant(plan)) return false;
  // Ranks of a split cache must choose alike, whatever each measured.
  if (plan.options.context_parallel.shared() && plan.options.sparse == SparsePolicy::automatic) return false;
  switch (plan.options.sparse) {
    case SparsePolicy::upconvert: return !is_decode(plan, r);
    case SparsePolicy::automatic:
      return !is_decode(plan, r) && cost_of(plan, SparseForm::upconvert, r.query_len, r.context) <
                                        cost_of(plan, SparseForm::direct, r.query_len, r.context);
    default: return false;
  }
}

// A request's tokens follow the sparse rows there already.
void add_rows(Plan& plan, int32_t index) {
  const RequestPlan& r = plan.requests[static_cast<size_t>(index)];
  for (int32_t i = 0; i < r.query_len; ++i) {
    plan.sparse_tokens.push_back(r.q_begin + i);
    plan.sparse_requests.push_back(index);
    plan.sparse_positions.push_back(r.context + i);
  }
}

// Rows of `requests` follow those there already; they attend in one launch.
SparseGroup& add_group(Plan& plan, const std::vector<int32_t>& requests) {
  SparseGroup group{.begin = static_cast<int32_t>(plan.sparse_requests.size())};
  for (const int32_t index : requests) {
    const RequestPlan& r = plan.requests[static_cast<size_t>(index)];
    for (int32_t i = 0; i < r.query_len; ++i) plan.latent_tokens.push_back(r.q_begin + i);
    add_rows(plan, index);
    group.count += r.query_len;
  }
  group.work = plan_sparse(group.count, plan.topk, attended_heads(plan), plan.options.split, sparse_units(plan),
                           planning::split_keys(plan));
  plan.partial_rows = std::max(plan.partial_rows, group.work.partial_rows);
  plan.sparse_groups.push_back(std::move(group));
  return plan.sparse_groups.back();
}

void add_upconverted(Plan& plan, const std::vector<int32_t>& requests) {
  if (requests.empty()) return;
  std::vector<int32_t> lengths;
  int64_t longest = 0;
  for (const int32_t index : requests) {
    const RequestPlan& r = plan.requests[static_cast<size_t>(index)];
    lengths.push_back(static_cast<int32_t>(plan.options.context_parallel.longest(r.context + r.query_len)));
    longest = std::max<int64_t>(longest, lengths.back());
  }
  const int64_t rows = std::max(context_workspace_rows(plan, longest, std::ssize(requests)),
                                longest);  // a sequence is never cut
  plan.gathered_starts.resize(plan.requests.size());
  plan.gathered_counts.resize(plan.requests.size());
  for (const RequestRange& range : split_prefill_chunks(lengths, rows)) {
    SparseGroup& group = add_group(plan, {requests.begin() + range.begin, requests.begin() + range.end});
    for (int32_t i = range.begin; i < range.end; ++i) {
      const size_t index = static_cast<size_t>(requests[static_cast<size_t>(i)]);
      const RequestPlan& r = plan.requests[index];
      const ContextParallel& c = plan.options.context_parallel;
      const auto length = static_cast<int32_t>(c.sharding.length(c.member(), r.context + r.query_len));
      group.pieces.push_back({.request = static_cast<int32_t>(index),
                              .start = 0,
                              .count = length,
                              .row = static_cast<int32_t>(group.rows)});
      plan.gathered_starts[index] = static_cast<int32_t>(group.rows);
      plan.gathered_counts[index] = length;
      group.rows += length;
    }
  }
}

}  // namespace

size_t index_tile_bytes(const Plan& plan) {
  return plan.device.device.kind == DeviceKind::cuda ? kIndexTileBytesGpu : kIndexTileBytes;
}

int64_t attended_heads(const Plan& plan) {
  const ContextParallel& c = plan.options.context_parallel;
  if (!c.shared()) return plan.model.heads;
  const std::span<const int64_t> heads = c.group_heads();
  return std::accumulate(heads.begin(), heads.end(), int64_t{0});
}

bool masks(const Plan& plan, int64_t query_len, int64_t context) {
  const PlanOptions& o = plan.options;
  if (query_len <= o.reorder_batch_threshold || o.maxima || invariant(plan)) return false;
  return o.sparse == SparsePolicy::masked || (weighs_masks(plan) && masks_pay(plan, query_len, context));
}

int64_t most_masked_context(const Plan& plan, int64_t query_len, int64_t seq_len) {
  const PlanOptions& o = plan.options;
  const int64_t most = seq_len - 1;
  if (query_len <= o.reorder_batch_threshold || o.maxima || invariant(plan)) return -1;
  if (o.sparse == SparsePolicy::masked) return most;
  if (!weighs_masks(plan)) return -1;
  // However many its new tokens, each one's keys must cost less than topk of them in the latent form: what is paid for
  // cached rows besides is more where they are expanded.
  const ModelConfig& m = plan.model;
  const double selected = cost_of(plan, SparseForm::direct, 1, plan.topk),
               key = kMasking * static_cast<double>(m.heads * 2 * (m.query_key() + m.value)) / o.rates->expanded_flops;
  const double longest = selected / key;
  return longest >= 0 && longest < static_cast<double>(most) ? static_cast<int64_t>(longest) : most;
}

bool may_upconvert(const Plan& plan, int64_t query_len) {
  if (invariant(plan) || query_len <= plan.options.reorder_batch_threshold) return false;
  if (plan.options.sparse == SparsePolicy::upconvert) return true;
  // In place costs nothing where loads are not counted; a split cache's are never weighed (upconverts()).
  return plan.options.sparse == SparsePolicy::automatic && !plan.options.context_parallel.shared() &&
         (plan.options.rates->plain_elements > 0 || plan.options.rates->fp8_elements > 0);
}

void plan_selection(Plan& plan) {
  std::vector<int32_t> in_place, prefills, gathered;
  for (size_t index = 0; index < plan.requests.size(); ++index) {
    const RequestPlan& r = plan.requests[index];
    if (r.path != Path::sparse || r.masked) continue;
    if (upconverts(plan, r)) gathered.push_back(static_cast<int32_t>(index));
    else if (plan.options.sparse == SparsePolicy::direct && !plan.options.maxima && !is_decode(plan, r))
      prefills.push_back(static_cast<int32_t>(index));
    else in_place.push_back(static_cast<int32_t>(index));
  }
  plan.sparse_begin = static_cast<int64_t>(plan.latent_tokens.size());
  if (!in_place.empty()) add_group(plan, in_place);
  if (!prefills.empty()) add_group(plan, prefills);
  add_upconverted(plan, gathered);
  plan.masked_begin = plan.sparse_rows();
  for (size_t index = 0; index < plan.requests.size(); ++index) {
    const RequestPlan& r = plan.requests[index];
    if (!r.masked) continue;
    add_rows(plan, static_cast<int32_t>(index));
    plan.mask_words = std::max(plan.mask_words, ceil_div(int64_t{r.context} + r.query_len, 32));
  }
  if (plan.sparse_rows() == 0 || !plan.serves_block()) return;

  // The same requests with their rows counted as sparse rows are; all others have none.
  std::vector<RequestPlan> rows = plan.requests;
  for (RequestPlan& r : rows) r.query_len = 0;
  for (size_t i = plan.sparse_requests.size(); i-- > 0;) {
    RequestPlan& r = rows[static_cast<size_t>(plan.sparse_requests[i])];
    r.q_begin = static_cast<int32_t>(i);
    ++r.query_len;
  }
  plan.index_schedule = schedule_index(plan, rows);
}

}  // namespace mla::planning
