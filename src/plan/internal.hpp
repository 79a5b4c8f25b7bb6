// The steps of making a plan, in the order they run; each fills its part.
#pragma once

#include "mla/plan.hpp"

namespace mla::planning {

/// Ranges of keys are multiples of this, so that kernels' blocks of positions start alike.
constexpr int64_t kGrain = 64;

/// What fp8 queries are held in: codes, or, for GPUs, whose kernels take 16-bit queries, what the codes stand for.
inline Dtype query_codes(const Plan& plan) {
  return plan.device.device.kind == DeviceKind::cpu ? Dtype::fp8_e4m3 : Dtype::bf16;
}

/// Where e4m3 keys of the expanded path begin: at multiples of these rows, for their values lie with rows innermost and
/// GPUs copy them from addresses of 16 bytes (ops::AttendExpandedArgs::kTurnedKeys).
constexpr size_t kCodeRows = 16;

/// Keys of a range when `total` of them are to keep `units` workers busy: never so few that what a range pays for its
/// queries and outputs tells, `least` of them where there are few.
int64_t range_length(int64_t total, int64_t units, int64_t least);
/// The least of a plan's device and operands.
int64_t split_keys(const Plan& plan);
/// Of a batch whose block table and slots are not looked at: its query starts and lengths. BatchError.
void validate_lengths(const Batch& batch);
/// The same of one without a cache: no request has context.
void validate_new(const Batch& batch);
/// A batch of one of the ranks that a cache is split over.
void validate_held(const Batch& batch, int64_t pages, int64_t page_size, const ContextParallel& ranks);
/// latent_items, splits, partial_rows: for requests on the latent path.
void split_kv(Plan& plan);
/// sparse_groups and the rows they stand for: for requests on the sparse path.
void plan_selection(Plan& plan);
/// chunks, context_rows: for cached context on the expanded path.
void chunk_context(Plan& plan);
/// fused_output, head_rows: where the attention's result is made.
void place_output(Plan& plan);
/// Why a quantised output takes a call of its own; empty when heads are quantised where they are finished.
std::string why_not_fused(const Plan& plan);
/// regions, workspace_bytes.
void lay_out_workspace(Plan& plan);
/// steps, lists.
void append_steps(Plan& plan);

}  // namespace mla::planning
