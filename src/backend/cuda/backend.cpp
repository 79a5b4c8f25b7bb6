#include "backend/cuda/backend.hpp"

namespace mla::cuda {

std::string_view target() { return "sm_80 and newer, sm_90a kernels on Hopper"; }
size_t scratch_per_worker(const backend::ScratchShape&) { return kScratch; }

}  // namespace mla::cuda
