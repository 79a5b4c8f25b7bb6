// The device that the layer's tests run on: the CPU, or, in the programs for it, the first GPU. A program says which by
// what it links, support/on_cpu.cpp or cuda/on_gpu.cpp, so that tests are compiled once for both.
#pragma once

#include <cstddef>
#include <vector>

#include "mla/device.hpp"

namespace mla::test {

extern const Device kDevice;
extern const bool kOnGpu;

inline Stream stream_on_device(ThreadPool& pool) { return kOnGpu ? Stream(kDevice) : Stream(pool); }

/// Bytes all of one value.
inline Buffer filled(size_t bytes, std::byte value) {
  const std::vector<std::byte> host(bytes, value);
  return Buffer::copy_of(host.data(), bytes, kDevice);
}
inline void fill(Stream& stream, std::byte* data, size_t bytes, std::byte value) {
  const std::vector<std::byte> host(bytes, value);
  copy(stream, data, host.data(), bytes);
  stream.synchronize();
}
/// A copy of what lies on the device.
inline std::vector<std::byte> read(Stream& stream, const std::byte* data, size_t bytes) {
  std::vector<std::byte> host(bytes);
  copy(stream, host.data(), data, bytes);
  stream.synchronize();
  return host;
}

}  // namespace mla::test
