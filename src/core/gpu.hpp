// What the core asks of a GPU. core/gpu_none.cpp answers in builds without CUDA, backend/cuda/core/gpu.cpp in others.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "mla/device.hpp"
#include "mla/error.hpp"

namespace mla {
class DeviceCarrier;
struct DeviceGroup;
}  // namespace mla

namespace mla::gpu {

int count();
std::string describe(int index);
std::byte* allocate(size_t bytes, int index);
void release(std::byte* data, int index) noexcept;
void upload(std::byte* to, const void* from, size_t bytes, int index);
std::byte* allocate_pinned(size_t bytes);
void release_pinned(std::byte* data) noexcept;
int current();
void make_current(int index);

/// Makes a GPU the calling thread's for a scope; nothing for the CPU.
class OnDevice {
 public:
  explicit OnDevice(Device device) {
    if (device.kind != DeviceKind::cuda) return;
    const int now = current();
    if (now == device.index) return;
    make_current(device.index);
    previous_ = now;
  }
  ~OnDevice() {
    try {
      if (previous_ >= 0) make_current(previous_);
    } catch (const DeviceError&) {  // a device that fails says so at the next call
    }
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int previous_ = -1;
};
std::shared_ptr<cuda::Queue> open(int index, void* native);
/// One of the queue's own for lanes 1, 2, ..., made with it; it lives as long.
std::shared_ptr<cuda::Queue> lane(const std::shared_ptr<cuda::Queue>& queue, int number);
/// What the queue is given from here on begins when the other has done what it was given so far.
void wait(cuda::Queue& queue, cuda::Queue& other);
void* native(const cuda::Queue& queue);
void synchronize(cuda::Queue& queue);
void copy(cuda::Queue& queue, void* to, const void* from, size_t bytes);
void clear(cuda::Queue& queue, void* to, size_t bytes, int64_t rows, size_t apart);
void begin_capture(cuda::Queue& queue);
void abandon_capture(cuda::Queue& queue) noexcept;
std::shared_ptr<void> end_capture(cuda::Queue& queue);
void launch(cuda::Queue& queue, void* graph);
/// Whether what is queued now is being captured, by whomever.
bool capturing(const cuda::Queue& queue);

/// Marks a point of a queue, to be waited for by the host.
class Mark {
 public:
  Mark() = default;
  ~Mark();
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  void set(cuda::Queue& queue);
  void wait() const;  ///< at once when nothing was marked

 private:
  void* event_ = nullptr;
};

/// A queue does nothing more until the gate, a host object, is opened, or a second has passed.
std::shared_ptr<void> hold(cuda::Queue& queue);
void open_gate(void* gate) noexcept;
/// Has a gate of the queue not been opened? Whoever waits for the queue then waits for the gate's second.
bool held(const cuda::Queue& queue);

/// The device's time between two points of a queue.
class Stopwatch {
 public:
  Stopwatch();
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  void start(cuda::Queue& queue);
  void stop(cuda::Queue& queue);
  double seconds() const;  ///< waits for stop's point

 private:
  void *start_ = nullptr, *stop_ = nullptr;
};

/// Ranks on GPUs: see comm/device_carrier.hpp.
std::unique_ptr<DeviceCarrier> connect(const DeviceGroup& group);

}  // namespace mla::gpu
