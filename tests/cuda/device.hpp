// Device memory and float64 references for the tests and benches of CUDA kernels.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "backend/cuda/core/check.hpp"
#include "mla/dtype.hpp"

namespace mla::cuda::test {

/// Is the first device of compute capability 9.x?
inline bool have_hopper() {
  int count = 0, major = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return false;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && major == 9;
}

/// Device memory, filled with bytes 0xff: NaN in every float type here.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t n, int fill = 0xff) : n_(n) {
    check(cudaMalloc(&data_, std::max<size_t>(n * sizeof(T), 16)), "test", "allocation");
    check(cudaMemset(data_, fill, std::max<size_t>(n * sizeof(T), 16)), "test", "fill");
  }
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(from.size()) { upload(from); }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), n_(std::exchange(other.n_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(n_, other.n_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  size_t size() const { return n_; }
  void upload(const std::vector<T>& from, size_t at = 0) {
    check(cudaMemcpy(data_ + at, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "test", "upload");
  }
  std::vector<T> download(size_t at, size_t n) const {
    std::vector<T> v(n);
    check(cudaMemcpy(v.data(), data_ + at, n * sizeof(T), cudaMemcpyDeviceToHost), "test", "download");
    return v;
  }
  std::vector<T> download() const { return download(0, n_); }
  void poison() { check(cudaMemset(data_, 0xff, n_ * sizeof(T)), "test", "fill"); }

 private:
  T* data_ = nullptr;
  size_t n_ = 0;
};

/// task(i) for i in [0, n), on all cores.
template <class F>
void parallel(int64_t n, F task) {
  std::atomic<int64_t> next{0};
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < std::max(1u, std::thread::hardware_concurrency()); ++t)
    threads.emplace_back([&] {
      for (int64_t i; (i = next++) < n;) task(i);
    });
}

/// One row of latent attention: in float64, and as a plain computation with probabilities of 16 or 8 bits makes it.
struct LatentRow {
  std::vector<double> out, size;  // size: sums of p |v| where out has sums of p v
  std::vector<float> plain;
  double lse = -std::numeric_limits<double>::infinity();
};

/// q: 576 values; row(j): pointer to cached row j as f32, of `visible` rows.
template <class Row>
LatentRow attend_row(const float* q, int visible, double scale, Dtype probabilities, Row row) {
  LatentRow r{std::vector<double>(512), std::vector<double>(512), std::vector<float>(512)};
  if (visible <= 0) return r;
  std::vector<double> s(visible);
  double top = -std::numeric_limits<double>::infinity();
  for (int j = 0; j < visible; ++j) {
    const float* k = row(j);
    double sum = 0;
    for (int i = 0; i < 576; ++i) sum += static_cast<double>(q[i]) * k[i];
    s[j] = sum * scale;
    top = std::max(top, s[j]);
  }
  // An online softmax rounds probabilities relative to an earlier maximum, so that none of them need be exactly 1.
  double reference = *std::max_element(s.begin(), s.begin() + std::min(visible, 64));
  const bool e4m3 = probabilities == Dtype::fp8_e4m3;  // 2^7 at the reference, 2^8 at most
  reference = top - std::fmod(top - reference, e4m3 ? 0.69 : 5.5);
  double total = 0;
  float plain_total = 0;
  for (int j = 0; j < visible; ++j) {
    const float* k = row(j);
    const double p = std::exp(s[j] - top);
    const float e = std::exp(static_cast<float>(s[j]) - static_cast<float>(reference));
    const float rounded = e4m3                           ? to_float(to_fp8_e4m3(e * 0x1p7f)) * 0x1p-7f
                          : probabilities == Dtype::bf16 ? to_float(to_bf16(e))
                                                         : to_float(to_f16(e));
    total += p;
    plain_total += e;
    for (int i = 0; i < 512; ++i) {
      r.out[i] += p * k[i];
      r.size[i] += p * std::abs(k[i]);
      r.plain[i] += rounded * k[i];
    }
  }
  for (int i = 0; i < 512; ++i) r.out[i] /= total, r.size[i] /= total, r.plain[i] /= plain_total;
  r.lse = top + std::log(total);
  return r;
}

}  // namespace mla::cuda::test
