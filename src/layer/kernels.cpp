#include "layer/kernels.hpp"

#include <algorithm>

#include "model/outline.hpp"

namespace mla::layer {
namespace {

// Where memory would lie. Nothing there is read or written; what counts is that it is as aligned as real memory.
std::byte* nowhere() { return reinterpret_cast<std::byte*>(uintptr_t{1} << 40); }

}  // namespace

void Survey::add(std::string_view op, std::string kernel) {
  const auto same = [&](const KernelUse& u) { return u.op == op && u.kernel == kernel; };
  const auto at = std::find_if(uses.begin(), uses.end(), same);
  if (at == uses.end()) uses.push_back({op, std::move(kernel), 1});
  else ++at->calls;
}

std::vector<KernelUse> kernels(const Plan& plan, const Batch& batch, const PrepareOptions& weights,
                               const backend::GpuModel& gpu) {
  const LayerWeights outlined = outline(plan.model, plan.model.indexer.has_value(), weights, plan.device.device);
  const RotaryTable rotary, index_rotary;
  const int64_t pages = int64_t{1} << 20;
  Survey survey(backend::backend(plan.device.device), gpu);
  layer::survey(survey,
                {.plan = plan,
                 .batch = batch,
                 .weights = outlined,
                 .rotary = rotary,
                 .cache = {plan.cache, nowhere(), pages, plan.cache.page_bytes()},
                 .workspace = {nowhere(), plan.workspace_bytes},
                 .index_cache = {plan.index_cache, nowhere(), pages, plan.index_cache.page_bytes()},
                 .index_rotary = &index_rotary,
                 .selection = {nowhere(), plan.selection_bytes}},
                nowhere());
  return std::move(survey.uses);
}

}  // namespace mla::layer
