// The CPU's ops, one function an op; registered in backend/registry.cpp. Each sits in the folder of its name.
#pragma once

#include "backend/backend.hpp"

namespace mla::cpu {

std::string_view target();
inline constexpr backend::KernelNames kernel_names{.usual = "cpu"};
size_t scratch_per_worker(const backend::ScratchShape& shape);
CostModel cost_model(Dtype compute);
int64_t split_keys();
std::shared_ptr<const Linear> pack(std::span<const float> w, int64_t heads, int64_t out, int64_t in, Dtype dtype,
                                   Device device);
std::shared_ptr<const Linear> pack_quantised(const QuantisedWeights& w, Dtype dtype, Device device);

void norm(Stream& stream, const ops::NormArgs& a);
void layer_norm(Stream& stream, const ops::LayerNormArgs& a);
void rope(Stream& stream, const ops::RopeArgs& a);
void project(Stream& stream, const ops::ProjectArgs& a);
void append(Stream& stream, const ops::AppendArgs& a);
void rope_append(Stream& stream, const ops::RopeAppendArgs& a);
void norm_rope_append(Stream& stream, const ops::NormRopeAppendArgs& a);
void copy_pages(Stream& stream, const ops::CopyPagesArgs& a);
void gather(Stream& stream, const ops::GatherArgs& a);
void cast(Stream& stream, const ops::CastArgs& a);
void attend_expanded(Stream& stream, const ops::AttendExpandedArgs& a);
void attend_latent(Stream& stream, const ops::AttendLatentArgs& a);
void merge(Stream& stream, const ops::MergeArgs& a);
void merge_splits(Stream& stream, const ops::MergeSplitsArgs& a);
void quantize(Stream& stream, const ops::QuantizeArgs& a);
void quantize_padding(Stream& stream, const ops::QuantizePaddingArgs& a);
void map_to_slots(Stream& stream, const ops::MapToSlotsArgs& a);
void map_to_workspace(Stream& stream, const ops::MapToWorkspaceArgs& a);
void pick_rows(Stream& stream, const ops::PickRowsArgs& a);
void attend_sparse(Stream& stream, const ops::AttendSparseArgs& a);
void merge_sparse(Stream& stream, const ops::MergeSparseArgs& a);
void index_append(Stream& stream, const ops::IndexAppendArgs& a);
void index_gather(Stream& stream, const ops::IndexGatherArgs& a);
void index_query(Stream& stream, const ops::IndexQueryArgs& a);
void index_score(Stream& stream, const ops::IndexScoreArgs& a);
void select_topk(Stream& stream, const ops::SelectTopkArgs& a);
void finish_topk(Stream& stream, const ops::FinishTopkArgs& a);
void fill_topk(Stream& stream, const ops::FillTopkArgs& a);
void hadamard(Stream& stream, const ops::HadamardArgs& a);

// Scratch each op wants at these dimensions; scratch_per_worker is the largest.
size_t project_scratch(const backend::ScratchShape& shape);
size_t packed_scratch(const backend::ScratchShape& shape);
size_t quantised_scratch();
size_t attend_expanded_scratch(const backend::ScratchShape& shape);
size_t attend_latent_scratch(const backend::ScratchShape& shape);
size_t attend_sparse_scratch(const backend::ScratchShape& shape);
size_t index_score_scratch(const backend::ScratchShape& shape);

}  // namespace mla::cpu
