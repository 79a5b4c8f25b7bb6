// The steps of making a plan, in the order they run; each fills its part.
#pragma once

#include "mla/plan.hpp"

namespace mla::planning {

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
