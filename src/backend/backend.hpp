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
#include "ops/ops.hpp"

namespace mla::backend {

/// Largest dimensions a plan will ask of an op: what its scratch is sized by.
struct ScratchShape {
  int64_t heads = 0, latent = 0, rope = 0, nope = 0, value = 0, hidden = 0, query_latent = 0;
  int64_t index_heads = 0, index_dim = 0, topk = 0;
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
  std::string (*expand)(const GpuModel&, const ops::ExpandArgs&) = nullptr;
  std::string (*attend_expanded)(const GpuModel&, const ops::AttendExpandedArgs&) = nullptr;
  std::string (*attend_latent)(const GpuModel&, const ops::AttendLatentArgs&) = nullptr;
  std::string (*attend_sparse)(const GpuModel&, const ops::AttendSparseArgs&) = nullptr;
  std::string (*index_score)(const GpuModel&, const ops::IndexScoreArgs&) = nullptr;
  std::string (*select_topk)(const GpuModel&, const ops::SelectTopkArgs&) = nullptr;
};

struct Backend {
  std::string_view name;
  DeviceKind device;
  /// Instruction set or architecture in use, for `mla info`.
  std::string_view (*target)();
  const KernelNames* kernel_names;
  /// Per-worker scratch that serves every op at these dimensions; a multiple of 64.
  size_t (*scratch_per_worker)(const ScratchShape& shape);
  /// What a core, or a GPU, was measured to do with operands of a dtype and queries of so many heads; 0: of any.
  CostModel (*cost_model)(Dtype compute, int64_t heads);
  /// Keys of a split at least (DeviceInfo::split_keys).
  int64_t (*split_keys)();
  /// Lays out heads matrices [out, in] given as row-major f32 [heads, out, in]; dtype f32 or bf16 (values rounded to
  /// it).
  std::shared_ptr<const Linear> (*pack)(std::span<const float> w, int64_t heads, int64_t out, int64_t in, Dtype dtype,
                                        Device device);
  /// Lays out quantised weights, which stay quantised; products take their values, and x, rounded to dtype (f32 or
  /// bf16). Null where a backend has no such products.
  std::shared_ptr<const Linear> (*pack_quantised)(const QuantisedWeights& w, Dtype dtype, Device device);

#define MLA_ENTRY(call, Args) void (*call)(Stream&, const ops::Args&);
  MLA_OPS(MLA_ENTRY)
#undef MLA_ENTRY
};

/// UnsupportedError when no backend serves the device.
const Backend& backend(Device device);
std::span<const Backend* const> backends();

}  // namespace mla::backend
