// The CPU's ops, one function an op; registered in backend/registry.cpp. Each sits in the folder of its name.
#pragma once

#include "backend/backend.hpp"

namespace mla::cpu {

std::string_view target();
inline constexpr backend::KernelNames kernel_names{.usual = "cpu"};
size_t scratch_per_worker(const backend::ScratchShape& shape);
CostModel cost_model(Dtype compute, int64_t heads);
int64_t split_keys();
std::shared_ptr<const Linear> pack(std::span<const float> w, int64_t heads, int64_t out, int64_t in, Dtype dtype,
                                   Device device);
std::shared_ptr<const Linear> pack_quantised(const QuantisedWeights& w, Dtype dtype, Device device);

#define MLA_FUNCTION(call, Args) void call(Stream& stream, const ops::Args& a);
MLA_OPS(MLA_FUNCTION)
#undef MLA_FUNCTION

// Scratch each op wants at these dimensions; scratch_per_worker is the largest.
size_t project_scratch(const backend::ScratchShape& shape);
size_t packed_scratch(const backend::ScratchShape& shape);
size_t quantised_scratch();
size_t attend_expanded_scratch(const backend::ScratchShape& shape);
size_t attend_latent_scratch(const backend::ScratchShape& shape);
size_t attend_sparse_scratch(const backend::ScratchShape& shape);
size_t index_score_scratch(const backend::ScratchShape& shape);
size_t select_topk_scratch(const backend::ScratchShape& shape);

}  // namespace mla::cpu
