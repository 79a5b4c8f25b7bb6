#include "backend/cuda/comm/group.hpp"

#include <algorithm>

#include "backend/cuda/core/check.hpp"
#include "core/gpu.hpp"

namespace mla {
namespace cuda {

std::shared_ptr<std::byte> shared_memory(size_t bytes, int device, std::string_view what) {
  const gpu::OnDevice on({DeviceKind::cuda, device});
  std::byte* data = nullptr;
  check(cudaMalloc(reinterpret_cast<void**>(&data), bytes), "communicator", what, std::to_string(bytes) + " bytes");
  return {data, [](std::byte* p) { cudaFree(p); }};
}

int Steps::number_of(std::string_view name) {
  const auto at = std::find(names_.begin(), names_.end(), name);
  if (at != names_.end()) return static_cast<int>(at - names_.begin());
  names_.emplace_back(name);
  return static_cast<int>(names_.size()) - 1;
}
std::string Steps::name(int number) const {
  return number >= 0 && number < static_cast<int>(names_.size()) ? names_[static_cast<size_t>(number)] : "";
}

}  // namespace cuda

std::unique_ptr<DeviceCarrier> gpu::connect(const DeviceGroup& g) {
  const OnDevice on({DeviceKind::cuda, g.device});
  try {
    return g.link == GpuLink::peer ? cuda::connect_peers(g) : cuda::connect_nccl(g);
  } catch (const RankError&) {
    throw;
  } catch (const std::exception& e) {
    g.host.abort(e.what());
    throw;
  }
}

}  // namespace mla
