// Which of a request's two paths is faster, measured, and the rates with which the cost model says the same.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "mla/plan.hpp"

namespace mla::bench {

/// One request of the attention form.
struct PathShape {
  int64_t heads = 16, query_len = 1, context = 0;
};

struct PathTimes {
  PathShape shape;
  double latent = 0, expanded = 0;  ///< seconds a call
};

/// deepseek-v2-lite's dimensions, but for the heads; a small hidden size, for the attention form has none.
ModelConfig path_model(int64_t heads);

/// Contexts x new tokens x heads. The shapes with most work are left out: 8 contexts from 0 to 64K, 8 query lengths
/// from 1 to 512, 16 and 128 heads.
std::vector<PathShape> path_grid();

/// Both paths of each shape, bf16 cache, operands of `compute`, on a GPU with cold caches and captured (Graph). done(i)
/// is called behind each; false ends it.
std::vector<PathTimes> measure_paths(Stream& stream, Dtype compute, std::span<const PathShape> shapes,
                                     const std::function<bool(size_t)>& done);

/// Rates of one thread, or with threads 1 of a whole GPU, that come nearest to the times, by relative squared error;
/// none is negative, and what does not show in them is infinitely fast. What is no rate is as in_use has it.
CostModel fit_rates(std::span<const PathTimes> times, int threads, const CostModel& in_use);

/// What the choice by `rates` costs over the faster path: 0.05 is 5% more time. One new token takes the latent path.
double cost_of_choice(const PathTimes& times, const CostModel& rates);

}  // namespace mla::bench
