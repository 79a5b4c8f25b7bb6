// The GPU's ops, one function an op; registered in backend/registry.cpp. Each sits in generic/<op>/, for compute
// capability 8.0 and newer; where sm90/<op>/ has a Hopper kernel, the generic function hands it what that kernel
// serves.
//
// Numbers (views of floats, caches, weights, tables, sinks, selections) lie in the device's memory. What a plan or a
// batch decides (items, rows, positions, slots, block tables) are lists (ops/list.hpp): launch shapes follow from what
// the host knows of them, kernels read what the device has, so that a captured call serves what is there when it is
// launched again. What the host knew when it was captured must bound that.
#pragma once

#include "backend/backend.hpp"

namespace mla::cuda {

std::string_view target();
extern const backend::KernelNames kernel_names;
size_t scratch_per_worker(const backend::ScratchShape& shape);
CostModel cost_model(Dtype compute, int64_t heads);
inline int64_t split_keys() { return kSplitKeys; }  // kernels cut requests themselves
std::shared_ptr<const Linear> pack(std::span<const float> w, int64_t heads, int64_t out, int64_t in, Dtype dtype,
                                   Device device);
std::shared_ptr<const Linear> pack_quantised(const QuantisedWeights& w, Dtype dtype, Device device);

#define MLA_FUNCTION(call, Args) void call(Stream& stream, const ops::Args& a);
MLA_OPS(MLA_FUNCTION)
#undef MLA_FUNCTION

/// Names of kernels: see backend::KernelNames.
std::string project_kernel(const backend::GpuModel& gpu, const ops::ProjectArgs& a);
std::string index_score_kernel(const backend::GpuModel& gpu, const ops::IndexScoreArgs& a);
std::string select_topk_kernel(const backend::GpuModel& gpu, const ops::SelectTopkArgs& a);

namespace generic {
void attend_latent(Stream& stream, const ops::AttendLatentArgs& a);
void attend_expanded(Stream& stream, const ops::AttendExpandedArgs& a);
void expand(Stream& stream, const ops::ExpandArgs& a);
}  // namespace generic

/// Working memory of a stream's ops, whatever the shape: they cut large calls into parts that fit it.
constexpr size_t kScratch = size_t{128} << 20;

}  // namespace mla::cuda
