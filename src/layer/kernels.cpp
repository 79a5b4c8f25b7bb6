#include "layer/kernels.hpp"

#include <algorithm>

#include "core/address_space.hpp"
#include "model/outline.hpp"

namespace mla::layer {

void Survey::add_seconds(std::string_view op, std::string kernel, const ops::Cost& cost, double seconds) {
  const auto same = [&](const KernelUse& u) { return u.op == op && u.kernel == kernel; };
  auto at = std::find_if(uses.begin(), uses.end(), same);
  if (at == uses.end()) at = uses.insert(at, {op, std::move(kernel)});
  ++at->calls;
  at->bytes += cost.bytes;
  at->flops += cost.flops;
  at->seconds += seconds;
}

void Survey::add(std::string_view op, std::string kernel, const ops::Cost& cost, double flops_rate) {
  // Rates are a core's, or a whole GPU's.
  const double workers = plan_.device.device.kind == DeviceKind::cpu ? plan_.device.threads : 1;
  const auto over = [&](double work, double rate) { return rate > 0 ? work / (rate * workers) : 0.0; };
  add_seconds(op, std::move(kernel), cost, std::max(over(cost.bytes, rates_.bytes), over(cost.flops, flops_rate)));
}

void Survey::note_collective(std::string_view op, int ranks, const ops::Cost& cost) {
  const LinkRates& link = plan_.options.link;
  add_seconds(op, "of " + std::to_string(ranks) + " ranks" + (link.bytes > 0 ? "" : ", link unknown"), cost,
              link.bytes > 0 ? link.seconds + cost.bytes / link.bytes : 0);
}

std::vector<KernelUse> kernels(const Plan& plan, const Batch& batch, const PrepareOptions& weights,
                               const backend::GpuModel& gpu) {
  const LayerWeights outlined =
      outline(plan.model, plan.model.indexer.has_value(), weights, plan.device.device, plan.absorbed_heads());
  // Of one position: that and how it rotates is all that costs follow from.
  const auto table = [&](const RopeConfig& config) {
    return plan.model.rope > 0 ? RotaryTable(config, plan.model.rope, 1) : RotaryTable();
  };
  const RotaryTable rotary = table(plan.model.rotary), index_rotary = table(plan.model.index_rotary());
  const ContextParallel& held = plan.options.context_parallel;
  int64_t pages = 1;
  for (int64_t r = 0; plan.uses_cache() && r < batch.requests(); ++r) {
    const int64_t listed = held.sharding.pages(held.member(), batch.seq_lens[r], plan.cache.page_size);
    for (int64_t p = 0; p < listed; ++p) pages = std::max<int64_t>(pages, int64_t{batch.block_table(r, p)} + 1);
  }
  const size_t page_bytes = plan.cache.page_bytes(), index_bytes = plan.index_cache.page_bytes();
  const AddressSpace cache(static_cast<size_t>(pages) * page_bytes), workspace(plan.workspace_bytes),
      index_cache(plan.model.indexer ? static_cast<size_t>(pages) * index_bytes : 0), selection(plan.selection_bytes),
      rows(survey_bytes(plan));
  Survey survey(plan, gpu);
  layer::survey(survey,
                {.plan = plan,
                 .batch = batch,
                 .weights = outlined,
                 .rotary = rotary,
                 .cache = {plan.cache, cache.data(), pages, page_bytes},
                 .workspace = workspace.span(),
                 .index_cache = {plan.index_cache, index_cache.data(), pages, index_bytes},
                 .index_rotary = &index_rotary,
                 .selection = selection.span()},
                rows.data());
  return std::move(survey.uses);
}

}  // namespace mla::layer
