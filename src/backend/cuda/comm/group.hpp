// What carriers between GPUs share: the group's state as a stream's waiting sees it, and sums of terms.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/carrier.hpp"
#include "comm/device_carrier.hpp"

namespace mla::cuda {

std::unique_ptr<DeviceCarrier> connect_peers(const DeviceGroup& group);
std::unique_ptr<DeviceCarrier> connect_nccl(const DeviceGroup& group);

/// out[i] = terms of rank 0 + terms of rank 1 + ... in f32, rounded once. Terms of rank r lie at terms + r * apart
/// bytes, those of `rank` at own, which may be out.
void sum_terms(cudaStream_t stream, Dtype dtype, const void* own, const std::byte* terms, int64_t apart, int rank,
               int ranks, void* out, int64_t count);

/// Device memory that goes when its last owner does.
std::shared_ptr<std::byte> shared_memory(size_t bytes, int device, std::string_view what);

/// Steps' names by number, for kernels.
class Steps {
 public:
  int number_of(std::string_view name);
  std::string name(int number) const;

 private:
  std::vector<std::string> names_;
};

}  // namespace mla::cuda
