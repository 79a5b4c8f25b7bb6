// Which kernels a step would run: the walk over a plan with every call noted instead of made. Needs neither the device
// nor weights nor memory.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.hpp"
#include "mla/layer.hpp"
#include "ops/run.hpp"

namespace mla::layer {

struct KernelUse {
  std::string_view op;  ///< as Profile names it: a literal
  std::string kernel;   ///< "cpu", "cuda/generic", "cuda/sm90, narrow, 16 rows"
  int64_t calls = 0;    ///< a layer
};

/// Of one layer of the step, in the order of first use: the block form, or, for a plan of the attention form or with a
/// quantised output, the attention form. weights: as they would be prepared; they must fit the plan's options. gpu: of
/// a plan for a GPU. UnsupportedError when this build has no backend for the plan's device.
std::vector<KernelUse> kernels(const Plan& plan, const Batch& batch, const PrepareOptions& weights,
                               const backend::GpuModel& gpu = {});

/// Where a walk notes its calls.
class Survey {
 public:
  Survey(const backend::Backend& backend, const backend::GpuModel& gpu) : backend_(backend), gpu_(gpu) {}
  template <class Args>
  void note(std::string_view op, const Args& args) {
    add(op, ops::kernel(backend_, gpu_, args));
  }
  std::vector<KernelUse> uses;

 private:
  void add(std::string_view op, std::string kernel);
  const backend::Backend& backend_;
  backend::GpuModel gpu_;
};

/// The walk of kernels(): nothing that the context or the inputs point to is read, other than plan and batch.
void survey(Survey& survey, const LayerContext& context, std::byte* anywhere);

}  // namespace mla::layer
