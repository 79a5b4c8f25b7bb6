// Which kernels a step would run and what they would cost: its calls noted instead of made. Needs neither the device
// nor weights nor memory.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "mla/layer.hpp"

namespace mla::layer {

struct KernelUse {
  std::string_view op;  ///< as Profile names it: a literal
  std::string kernel;   ///< "cpu", "cuda/generic", "cuda/sm90, narrow, 16 rows"
  // Of a layer.
  int64_t calls = 0;
  double bytes = 0, flops = 0;  ///< rows that are selected when the step runs count as if all were there
  double seconds = 0;  ///< by the plan's rates, the longer of its bytes and its FLOPs; launches are not counted
};

/// Of one layer of the step, in the order of first use: the block form, or, for a plan of the attention form or with a
/// quantised output, the attention form. weights: as they would be prepared; they must fit the plan's options. gpu: of
/// a plan for a GPU. UnsupportedError when this build has no backend for the plan's device, DeviceError when there are
/// not as many addresses as the step's cache and workspace take.
std::vector<KernelUse> kernels(const Plan& plan, const Batch& batch, const PrepareOptions& weights,
                               const backend::GpuModel& gpu = {});

/// Where a walk notes its calls.
class Survey {
 public:
  Survey(const Plan& plan, const backend::GpuModel& gpu)
      : backend_(backend::backend(plan.device.device)), gpu_(gpu), rates_(*plan.options.rates), plan_(plan) {}
  template <class Args>
  void note(std::string_view op, const Args& args) {
    add(op, ops::kernel(backend_, gpu_, args), cost_of(args), flops_rate(args));
  }
  /// cost: of what a rank sends, and adds.
  void note_collective(std::string_view op, int ranks, const ops::Cost& cost);
  std::vector<KernelUse> uses;

 private:
  // Of a split cache, a rank holds its share of what is selected.
  template <class Args>
  ops::Cost cost_of(const Args& args) const {
    if constexpr (std::is_same_v<Args, ops::AttendSparseArgs>)
      return ops::cost_of_full_lists(args, 1.0 / static_cast<double>(plan_.options.context_parallel.sharding.ranks()));
    else return ops::cost(args);
  }
  template <class Args>
  double flops_rate(const Args&) const {
    return 0;  // memory bound
  }
  double flops_rate(const ops::ProjectArgs&) const { return rates_.projection_flops; }
  double flops_rate(const ops::ExpandArgs&) const { return rates_.projection_flops; }
  double flops_rate(const ops::AttendExpandedArgs&) const { return rates_.expanded_flops; }
  double flops_rate(const ops::AttendLatentArgs&) const { return rates_.latent_flops; }
  double flops_rate(const ops::AttendSparseArgs&) const { return rates_.latent_flops; }
  double flops_rate(const ops::IndexScoreArgs&) const { return rates_.latent_flops; }
  void add(std::string_view op, std::string kernel, const ops::Cost& cost, double flops_rate);
  void add_seconds(std::string_view op, std::string kernel, const ops::Cost& cost, double seconds);

  const backend::Backend& backend_;
  backend::GpuModel gpu_;
  CostModel rates_;
  const Plan& plan_;
};

/// A call's inputs and outputs: addresses alone, apart from plan and batch.
void survey(Survey& survey, const LayerContext& context, std::byte* rows);
/// Bytes that the largest of them takes.
size_t survey_bytes(const Plan& plan);

}  // namespace mla::layer
