#include <array>

#include "backend/cpu/backend.hpp"
#include "mla/error.hpp"

namespace mla::backend {
namespace {

constexpr Backend kCpu{
    .name = "cpu",
    .device = DeviceKind::cpu,
    .target = cpu::target,
    .scratch_per_worker = cpu::scratch_per_worker,
    .pack = cpu::pack,
    .pack_quantised = cpu::pack_quantised,
    .norm = cpu::norm,
    .layer_norm = cpu::layer_norm,
    .rope = cpu::rope,
    .project = cpu::project,
    .append = cpu::append,
    .rope_append = cpu::rope_append,
    .copy_pages = cpu::copy_pages,
    .gather = cpu::gather,
    .cast = cpu::cast,
    .attend_expanded = cpu::attend_expanded,
    .attend_latent = cpu::attend_latent,
    .merge = cpu::merge,
    .merge_splits = cpu::merge_splits,
    .quantize = cpu::quantize,
    .quantize_padding = cpu::quantize_padding,
    .map_to_slots = cpu::map_to_slots,
    .map_to_workspace = cpu::map_to_workspace,
    .attend_sparse = cpu::attend_sparse,
    .merge_sparse = cpu::merge_sparse,
    .index_append = cpu::index_append,
    .index_gather = cpu::index_gather,
    .index_query = cpu::index_query,
    .index_score = cpu::index_score,
    .select_topk = cpu::select_topk,
    .finish_topk = cpu::finish_topk,
    .fill_topk = cpu::fill_topk,
    .hadamard = cpu::hadamard,
};

constexpr std::array<const Backend*, 1> kBackends{&kCpu};

}  // namespace

std::span<const Backend* const> backends() { return kBackends; }

const Backend& backend(Device device) {
  for (const Backend* b : kBackends)
    if (b->device == device.kind) return *b;
  throw UnsupportedError("no backend in this build serves device " + to_string(device));
}

}  // namespace mla::backend
