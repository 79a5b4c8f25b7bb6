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
  if constexpr (std::is_same_v<Args, ExpandArgs>) entry = names.expand;
  if constexpr (std::is_same_v<Args, AttendExpandedArgs>) entry = names.attend_expanded;
  if constexpr (std::is_same_v<Args, AttendLatentArgs>) entry = names.attend_latent;
  if constexpr (std::is_same_v<Args, AttendSparseArgs>) entry = names.attend_sparse;
  if constexpr (std::is_same_v<Args, IndexScoreArgs>) entry = names.index_score;
  if constexpr (std::is_same_v<Args, SelectTopkArgs>) entry = names.select_topk;
  return entry ? entry(gpu, args) : std::string(names.usual);
}

/// Whether a call writes nothing, whatever its other extents: rows of no elements may be many and have no memory. Ops
/// of which that is asked say so beside their contract.
template <class Args>
bool writes_nothing(const Args&) {
  return false;
}

#define MLA_RUN(call, Args)                                                      \
  inline void run(Stream& stream, const Args& args) {                            \
    check(args);                                                                 \
    if (writes_nothing(args)) return;                                            \
    const backend::Backend& b = backend::backend(stream.device());               \
    if (!b.call) throw UnsupportedError(std::string(b.name) + " has no " #call); \
    const gpu::OnDevice on(stream.device());                                     \
    b.call(stream, args);                                                        \
  }
MLA_OPS(MLA_RUN)
#undef MLA_RUN

}  // namespace mla::ops
