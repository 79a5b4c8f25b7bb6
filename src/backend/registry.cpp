#include <array>

#include "backend/cpu/backend.hpp"
#if MLA_HAVE_CUDA
#include "backend/cuda/backend.hpp"
#endif
#include "mla/error.hpp"

namespace mla::backend {
namespace {

// Backends mirror each other name for name.
#define MLA_BACKEND(label, kind, entries)                                                                           \
  {                                                                                                                 \
    .name = label, .device = DeviceKind::kind, .target = kind::target, .kernel_names = &kind::kernel_names,         \
    .scratch_per_worker = kind::scratch_per_worker, .cost_model = kind::cost_model, .split_keys = kind::split_keys, \
    .pack = kind::pack, .pack_quantised = kind::pack_quantised, entries                                             \
  }
#define MLA_CPU(call, Args) .call = cpu::call,
#define MLA_CUDA(call, Args) .call = cuda::call,

constexpr Backend kCpu = MLA_BACKEND("cpu", cpu, MLA_OPS(MLA_CPU));
#if MLA_HAVE_CUDA
constexpr Backend kCuda = MLA_BACKEND("cuda", cuda, MLA_OPS(MLA_CUDA));
constexpr std::array<const Backend*, 2> kBackends{&kCpu, &kCuda};
#else
constexpr std::array<const Backend*, 1> kBackends{&kCpu};
#endif
#undef MLA_BACKEND
#undef MLA_CPU
#undef MLA_CUDA

}  // namespace

std::span<const Backend* const> backends() { return kBackends; }

const Backend& backend(Device device) {
  for (const Backend* b : kBackends)
    if (b->device == device.kind) return *b;
  throw UnsupportedError("no backend in this build serves device " + to_string(device) +
                         (device.kind == DeviceKind::cuda ? ": it was not built with CUDA" : ""));
}

}  // namespace mla::backend
