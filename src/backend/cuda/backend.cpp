#include "backend/cuda/backend.hpp"

#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/generic/attention/cache_attention.hpp"
#include "backend/cuda/gpu_model.hpp"
#include "backend/cuda/sm90/ops.hpp"

namespace mla::cuda {

std::string_view target() { return "sm_80 and newer, sm_90a kernels on Hopper"; }

backend::GpuModel model_of(const Queue& queue) {
  return {.hopper = queue.hopper(), .multiprocessors = queue.multiprocessors()};
}

// Hopper's kernels where they serve the call, the generic ones everywhere else.
void attend_latent(Stream& stream, const ops::AttendLatentArgs& a) {
  if (sm90::serves(model_of(stream.queue()), a)) sm90::attend_latent(stream.queue(), a);
  else generic::attend_latent(stream, a);
}
void attend_expanded(Stream& stream, const ops::AttendExpandedArgs& a) {
  if (sm90::serves(model_of(stream.queue()), a)) sm90::attend_expanded(stream, a);
  else generic::attend_expanded(stream, a);
}
void attend_sparse(Stream& stream, const ops::AttendSparseArgs& a) {
  if (sm90::serves(model_of(stream.queue()), a)) sm90::attend_sparse(stream.queue(), a);
  else generic::attend_lists(stream.queue(), a);
}

namespace {
constexpr std::string_view kGeneric = "cuda/generic";

template <class Args>
std::string name_of(const backend::GpuModel& gpu, const Args& a) {
  return sm90::serves(gpu, a) ? "cuda/sm90, " + sm90::kernel(gpu, a) : std::string(kGeneric);
}
}  // namespace

const backend::KernelNames kernel_names{.usual = kGeneric,
                                        .project = project_kernel,
                                        .attend_expanded = name_of<ops::AttendExpandedArgs>,
                                        .attend_latent = name_of<ops::AttendLatentArgs>,
                                        .attend_sparse = name_of<ops::AttendSparseArgs>,
                                        .index_score = index_score_kernel};

size_t scratch_per_worker(const backend::ScratchShape&) { return kScratch; }

CostModel cost_model(Dtype) { return default_cost_model({DeviceKind::cuda}); }

}  // namespace mla::cuda
