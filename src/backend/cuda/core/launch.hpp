// Kernel launches with the attributes that kernels here use, and what a launch needs to know of the device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "backend/cuda/core/check.hpp"

namespace mla::cuda {

/// Threads of a block of kernels that ask for no number of their own.
constexpr int kBlockThreads = 256;

struct LaunchConfig {
  dim3 grid, block;
  size_t shared_bytes = 0;
  int cluster = 1;  ///< CTAs of a cluster, along x
  /// May start while earlier kernels of the stream end: the kernel calls wait_for_previous_grids() before it touches
  /// memory that a kernel writes.
  bool overlap = false;
};

/// Of a kernel whose threads stride over `count` elements, one or more, in `most` blocks at most.
inline LaunchConfig strided(int64_t count, int threads, int64_t most) {
  const int64_t blocks = std::min((count + threads - 1) / threads, most);
  return {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(static_cast<unsigned>(threads))};
}

/// Launches kernel(args...) on stream; raises the kernel's limit of dynamic shared memory when first needed. Does not
/// synchronise. DeviceError names op, kernel and shape.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const LaunchConfig& config, cudaStream_t stream, std::string_view op,
            std::string_view name, std::string_view shape, Args&&... args) {
  if (config.shared_bytes > 48 * 1024) {
    static std::mutex mutex;
    static std::unordered_map<const void*, size_t> raised[64];  // per device
    int device = 0;
    check(cudaGetDevice(&device), op, "current device", shape);
    const std::lock_guard lock(mutex);
    size_t& limit = raised[device & 63][reinterpret_cast<const void*>(kernel)];
    if (limit < config.shared_bytes) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(config.shared_bytes)),
            op, name, shape);
      limit = config.shared_bytes;
    }
  }
  if (config.cluster > 8) {  // more than every device promises
    static std::mutex mutex;
    static std::unordered_map<const void*, bool> allowed[64];  // per device
    int device = 0;
    check(cudaGetDevice(&device), op, "current device", shape);
    const std::lock_guard lock(mutex);
    bool& may = allowed[device & 63][reinterpret_cast<const void*>(kernel)];
    if (!may) check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), op, name, shape);
    may = true;
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t launch{};
  launch.gridDim = config.grid;
  launch.blockDim = config.block;
  launch.dynamicSmemBytes = config.shared_bytes;
  launch.stream = stream;
  launch.attrs = attributes;
  if (config.cluster > 1) {
    attributes[launch.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[launch.numAttrs++].val.clusterDim = {static_cast<unsigned>(config.cluster), 1, 1};
  }
  if (config.overlap) {
    attributes[launch.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[launch.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  check(cudaLaunchKernelEx(&launch, kernel, static_cast<Params>(args)...), op, name, shape);
}

/// Multiprocessors of the current device.
inline int multiprocessors(std::string_view op) {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), op, "current device");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), op, "multiprocessor count");
  return count;
}

}  // namespace mla::cuda
