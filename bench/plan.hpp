// The plan itself, as something to time and to check.
#pragma once

#include <memory>

#include "cases/case.hpp"
#include "mla/plan.hpp"

namespace mla::bench {

/// Planning a step of 256 requests, prefills of all sizes among decodes at all depths, for deepseek-v2-lite.
std::unique_ptr<cases::Case> make_plan_case(const DeviceInfo& device, SplitPolicy split);

/// How many splits a plan gives each of these requests on the latent path.
int64_t planned_splits(const cases::Params& p);
/// How many parts it gives each of their rows when they attend to `keys` selected rows.
int64_t planned_sparse_splits(const cases::Params& p, int64_t keys);

}  // namespace mla::bench
