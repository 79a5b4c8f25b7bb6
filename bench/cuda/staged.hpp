// A list and its copy on the device: reads of it cost what they cost a staged step.
#pragma once

#include <utility>
#include <vector>

#include "cuda/device.hpp"
#include "ops/list.hpp"

namespace mla::cuda::bench {

template <class T>
class Staged {
 public:
  explicit Staged(std::vector<T> from) : host_(std::move(from)), device_(host_) {}
  Staged(const Staged&) = delete;
  ops::List<T> list() const { return {host_, device_.data()}; }

 private:
  std::vector<T> host_;
  test::DeviceArray<T> device_;
};

}  // namespace mla::cuda::bench
