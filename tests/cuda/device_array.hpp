// Arrays in device memory for tests and benches.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "backend/cuda/core/check.hpp"

namespace mla::cuda {

template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(int64_t count) : count_(count) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), static_cast<size_t>(count > 0 ? count : 1) * sizeof(T)), "test",
          "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(static_cast<int64_t>(host.size())) { set(host); }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  int64_t size() const { return count_; }
  void set(const std::vector<T>& host) {
    check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "test",
          "copy to the device");
  }
  std::vector<T> get(int64_t begin, int64_t count) const {
    std::vector<T> host(static_cast<size_t>(count));
    check(cudaMemcpy(host.data(), data_ + begin, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "test",
          "copy from the device");
    return host;
  }
  std::vector<T> get() const { return get(0, count_); }

 private:
  T* data_ = nullptr;
  int64_t count_ = 0;
};

/// Is the first device of compute capability 9.x?
inline bool have_hopper() {
  int count = 0, major = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return false;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && major == 9;
}

}  // namespace mla::cuda
