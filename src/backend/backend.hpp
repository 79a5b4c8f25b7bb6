// The table of ops that a backend fills. One folder a backend, one line in registry.cpp.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/quantised_weights.hpp"
#include "mla/device.hpp"
#include "mla/model.hpp"
#include "mla/plan.hpp"
#include "mla/weights.hpp"
#include "ops/append/op.hpp"
#include "ops/attend_expanded/op.hpp"
#include "ops/attend_latent/op.hpp"
#include "ops/attend_sparse/op.hpp"
#include "ops/cast/op.hpp"
#include "ops/gather/op.hpp"
#include "ops/hadamard/op.hpp"
#include "ops/index_append/op.hpp"
#include "ops/index_gather/op.hpp"
#include "ops/index_query/op.hpp"
#include "ops/index_score/op.hpp"
#include "ops/layer_norm/op.hpp"
#include "ops/map_indices/op.hpp"
#include "ops/merge/op.hpp"
#include "ops/norm/op.hpp"
#include "ops/project/op.hpp"
#include "ops/quantize/op.hpp"
#include "ops/rope/op.hpp"
#include "ops/select_topk/op.hpp"

namespace mla::backend {

/// Largest dimensions a plan will ask of an op: what its scratch is sized by.
struct ScratchShape {
  int64_t heads = 0, latent = 0, rope = 0, nope = 0, value = 0, hidden = 0, query_latent = 0;
  int64_t index_heads = 0, index_dim = 0;
};

/// What the choice between a GPU's kernels depends on; by default an H200's.
struct GpuModel {
  bool hopper = true;
  int multiprocessors = 132;
};

/// Which kernel a call would run, by name. Shapes, dtypes, strides and alignment decide, by the functions that decide
/// when the call is made; no number is read through a pointer.
struct KernelNames {
  std::string_view usual;  ///< of every op without an entry below, and of what an entry leaves to it
  std::string (*project)(const GpuModel&, const ops::ProjectArgs&) = nullptr;
  std::string (*attend_expanded)(const GpuModel&, const ops::AttendExpandedArgs&) = nullptr;
  std::string (*attend_latent)(const GpuModel&, const ops::AttendLatentArgs&) = nullptr;
  std::string (*attend_sparse)(const GpuModel&, const ops::AttendSparseArgs&) = nullptr;
  std::string (*index_score)(const GpuModel&, const ops::IndexScoreArgs&) = nullptr;
};

struct Backend {
  std::string_view name;
  DeviceKind device;
  /// Instruction set or architecture in use, for `mla info`.
  std::string_view (*target)();
  const KernelNames* kernel_names;
  /// Per-worker scratch that serves every op at these dimensions; a multiple of 64.
  size_t (*scratch_per_worker)(const ScratchShape& shape);
  /// What a core, or a GPU, was measured to do with operands of a dtype.
  CostModel (*cost_model)(Dtype compute);
  /// Keys of a split at least (DeviceInfo::split_keys).
  int64_t (*split_keys)();
  /// Lays out heads matrices [out, in] given as row-major f32 [heads, out, in]; dtype f32 or bf16 (values rounded to
  /// it).
  std::shared_ptr<const Linear> (*pack)(std::span<const float> w, int64_t heads, int64_t out, int64_t in, Dtype dtype,
                                        Device device);
  /// Lays out quantised weights, which stay quantised; products take their values, and x, rounded to dtype (f32 or
  /// bf16). Null where a backend has no such products.
  std::shared_ptr<const Linear> (*pack_quantised)(const QuantisedWeights& w, Dtype dtype, Device device);

  void (*norm)(Stream&, const ops::NormArgs&);
  void (*layer_norm)(Stream&, const ops::LayerNormArgs&);
  void (*rope)(Stream&, const ops::RopeArgs&);
  void (*project)(Stream&, const ops::ProjectArgs&);
  void (*append)(Stream&, const ops::AppendArgs&);
  void (*rope_append)(Stream&, const ops::RopeAppendArgs&);
  void (*norm_rope_append)(Stream&, const ops::NormRopeAppendArgs&);
  void (*copy_pages)(Stream&, const ops::CopyPagesArgs&);
  void (*gather)(Stream&, const ops::GatherArgs&);
  void (*cast)(Stream&, const ops::CastArgs&);
  void (*attend_expanded)(Stream&, const ops::AttendExpandedArgs&);
  void (*attend_latent)(Stream&, const ops::AttendLatentArgs&);
  void (*merge)(Stream&, const ops::MergeArgs&);
  void (*merge_splits)(Stream&, const ops::MergeSplitsArgs&);
  void (*quantize)(Stream&, const ops::QuantizeArgs&);
  void (*quantize_padding)(Stream&, const ops::QuantizePaddingArgs&);
  void (*map_to_slots)(Stream&, const ops::MapToSlotsArgs&);
  void (*map_to_workspace)(Stream&, const ops::MapToWorkspaceArgs&);
  void (*pick_rows)(Stream&, const ops::PickRowsArgs&);
  void (*attend_sparse)(Stream&, const ops::AttendSparseArgs&);
  void (*merge_sparse)(Stream&, const ops::MergeSparseArgs&);
  void (*index_append)(Stream&, const ops::IndexAppendArgs&);
  void (*index_gather)(Stream&, const ops::IndexGatherArgs&);
  void (*index_query)(Stream&, const ops::IndexQueryArgs&);
  void (*index_score)(Stream&, const ops::IndexScoreArgs&);
  void (*select_topk)(Stream&, const ops::SelectTopkArgs&);
  void (*finish_topk)(Stream&, const ops::FinishTopkArgs&);
  void (*fill_topk)(Stream&, const ops::FillTopkArgs&);
  void (*hadamard)(Stream&, const ops::HadamardArgs&);
};

/// UnsupportedError when no backend serves the device.
const Backend& backend(Device device);
std::span<const Backend* const> backends();

}  // namespace mla::backend
