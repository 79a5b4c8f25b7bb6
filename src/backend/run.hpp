// Runs an op: its contract is checked, then the stream's backend does the work, on the stream's device.
#pragma once

#include <string>
#include <type_traits>

#include "backend/backend.hpp"
#include "core/gpu.hpp"
#include "mla/error.hpp"
#include "ops/require.hpp"

namespace mla::ops {

/// The name of the kernel that run() would call: see backend::KernelNames.
template <class Args>
std::string kernel(const backend::Backend& b, const backend::GpuModel& gpu, const Args& args) {
  const backend::KernelNames& names = *b.kernel_names;
  std::string (*entry)(const backend::GpuModel&, const Args&) = nullptr;
  if constexpr (std::is_same_v<Args, ProjectArgs>) entry = names.project;
  if constexpr (std::is_same_v<Args, AttendExpandedArgs>) entry = names.attend_expanded;
  if constexpr (std::is_same_v<Args, AttendLatentArgs>) entry = names.attend_latent;
  if constexpr (std::is_same_v<Args, AttendSparseArgs>) entry = names.attend_sparse;
  if constexpr (std::is_same_v<Args, IndexScoreArgs>) entry = names.index_score;
  return entry ? entry(gpu, args) : std::string(names.usual);
}

/// Whether a call writes nothing, whatever its other extents: rows of no elements may be many and have no memory.
template <class Args>
bool writes_nothing(const Args&) {
  return false;
}
inline bool writes_nothing(const NormArgs& a) { return is_empty(a.y); }
inline bool writes_nothing(const LayerNormArgs& a) { return is_empty(a.y); }
inline bool writes_nothing(const CastArgs& a) { return is_empty(a.y); }
inline bool writes_nothing(const RopeArgs& a) { return is_empty(a.q) && is_empty(a.k); }
inline bool writes_nothing(const MergeArgs& a) { return is_empty(a.other_lse); }
inline bool writes_nothing(const HadamardArgs& a) { return is_empty(a.q) && is_empty(a.k); }
inline bool writes_nothing(const IndexQueryArgs& a) { return is_empty(a.scaled_weights); }
inline bool writes_nothing(const QuantizeArgs& a) { return a.y.tokens == 0 || a.y.width == 0; }
inline bool writes_nothing(const QuantizePaddingArgs& a) { return a.y.tokens == 0 || a.y.width == 0; }

#define MLA_RUN(Args, entry)                                                       \
  inline void run(Stream& stream, const Args& args) {                              \
    check(args);                                                                   \
    if (writes_nothing(args)) return;                                              \
    const backend::Backend& b = backend::backend(stream.device());                 \
    if (!b.entry) throw UnsupportedError(std::string(b.name) + " has no " #entry); \
    const gpu::OnDevice on(stream.device());                                       \
    b.entry(stream, args);                                                         \
  }
MLA_RUN(NormArgs, norm)
MLA_RUN(LayerNormArgs, layer_norm)
MLA_RUN(RopeArgs, rope)
MLA_RUN(ProjectArgs, project)
MLA_RUN(AppendArgs, append)
MLA_RUN(RopeAppendArgs, rope_append)
MLA_RUN(NormRopeAppendArgs, norm_rope_append)
MLA_RUN(CopyPagesArgs, copy_pages)
MLA_RUN(GatherArgs, gather)
MLA_RUN(CastArgs, cast)
MLA_RUN(AttendExpandedArgs, attend_expanded)
MLA_RUN(AttendLatentArgs, attend_latent)
MLA_RUN(MergeArgs, merge)
MLA_RUN(MergeSplitsArgs, merge_splits)
MLA_RUN(QuantizeArgs, quantize)
MLA_RUN(QuantizePaddingArgs, quantize_padding)
MLA_RUN(MapToSlotsArgs, map_to_slots)
MLA_RUN(MapToWorkspaceArgs, map_to_workspace)
MLA_RUN(PickRowsArgs, pick_rows)
MLA_RUN(AttendSparseArgs, attend_sparse)
MLA_RUN(MergeSparseArgs, merge_sparse)
MLA_RUN(IndexAppendArgs, index_append)
MLA_RUN(IndexGatherArgs, index_gather)
MLA_RUN(IndexQueryArgs, index_query)
MLA_RUN(IndexScoreArgs, index_score)
MLA_RUN(SelectTopkArgs, select_topk)
MLA_RUN(FinishTopkArgs, finish_topk)
MLA_RUN(FillTopkArgs, fill_topk)
MLA_RUN(HadamardArgs, hadamard)
#undef MLA_RUN

}  // namespace mla::ops
