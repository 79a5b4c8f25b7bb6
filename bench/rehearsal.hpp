// What more threads than this machine has would make of a layer's step.
#pragma once

#include <string>
#include <vector>

#include "mla/batch.hpp"
#include "mla/plan.hpp"
#include "mla/weights.hpp"

namespace mla::bench {

struct RehearsedStep {
  std::string op;
  int64_t tasks = 0;   ///< of one call of the layer
  double alone = 0;    ///< seconds on one thread
  double longest = 0;  ///< of a task
  double shared = 0;   ///< seconds as the threads would share the tasks, each as fast as this one alone
};

/// Runs a layer of random weights over a cache of arbitrary rows, on one thread that stands for `threads`, and takes
/// each task's time: the steps in their order, each its best of a few repeats. The batch lies in a cache of `pages`
/// pages. Errors as forward(), which takes the block form with plain outputs.
std::vector<RehearsedStep> rehearse(const ModelConfig& model, const PrepareOptions& prepared, const CacheSpec& spec,
                                    int64_t pages, const Batch& batch, const PlanOptions& options, int threads);

}  // namespace mla::bench
