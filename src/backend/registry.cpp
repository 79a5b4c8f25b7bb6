#include <array>

#include "backend/cpu/backend.hpp"
#if MLA_HAVE_CUDA
#include "backend/cuda/backend.hpp"
#endif
#include "mla/error.hpp"

namespace mla::backend {
namespace {

// Backends mirror each other name for name.
#define MLA_BACKEND(label, kind, space)                                                                                \
  {                                                                                                                    \
    .name = label, .device = DeviceKind::kind, .target = space::target, .kernel_names = &space::kernel_names,          \
    .scratch_per_worker = space::scratch_per_worker, .cost_model = space::cost_model, .split_keys = space::split_keys, \
    .pack = space::pack, .pack_quantised = space::pack_quantised, .norm = space::norm,                                 \
    .layer_norm = space::layer_norm, .rope = space::rope, .project = space::project, .append = space::append,          \
    .rope_append = space::rope_append, .norm_rope_append = space::norm_rope_append, .copy_pages = space::copy_pages,   \
    .gather = space::gather, .cast = space::cast, .attend_expanded = space::attend_expanded,                           \
    .attend_latent = space::attend_latent, .merge = space::merge, .merge_splits = space::merge_splits,                 \
    .quantize = space::quantize, .quantize_padding = space::quantize_padding, .map_to_slots = space::map_to_slots,     \
    .map_to_workspace = space::map_to_workspace, .pick_rows = space::pick_rows, .attend_sparse = space::attend_sparse, \
    .merge_sparse = space::merge_sparse, .index_append = space::index_append, .index_gather = space::index_gather,     \
    .index_query = space::index_query, .index_score = space::index_score, .select_topk = space::select_topk,           \
    .finish_topk = space::finish_topk, .fill_topk = space::fill_topk, .hadamard = space::hadamard,                     \
  }

constexpr Backend kCpu = MLA_BACKEND("cpu", cpu, cpu);
#if MLA_HAVE_CUDA
constexpr Backend kCuda = MLA_BACKEND("cuda", cuda, cuda);
constexpr std::array<const Backend*, 2> kBackends{&kCpu, &kCuda};
#else
constexpr std::array<const Backend*, 1> kBackends{&kCpu};
#endif
#undef MLA_BACKEND

}  // namespace

std::span<const Backend* const> backends() { return kBackends; }

const Backend& backend(Device device) {
  for (const Backend* b : kBackends)
    if (b->device == device.kind) return *b;
  throw UnsupportedError("no backend in this build serves device " + to_string(device) +
                         (device.kind == DeviceKind::cuda ? ": it was not built with CUDA" : ""));
}

}  // namespace mla::backend
