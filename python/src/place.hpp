// Where calls of FlashMLA's interface run, and the memory that they work in.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string_view>
#include <utility>

#include "core/captured_schedule.hpp"
#include "core/device_attention.hpp"
#include "stream.hpp"
#include "tensor.hpp"

namespace mla::python {

/// A part of a call's memory, cut off the front: the first pass, without memory, counts.
class Cut {
 public:
  explicit Cut(std::byte* memory) : memory_(memory) {}
  template <class T>
  T* take(int64_t count) {
    T* at = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return at;
  }
  size_t used() const { return used_; }

 private:
  std::byte* memory_;
  size_t used_ = 0;
};

/// What get_mla_metadata() gives: calls that are captured together and given it share a schedule.
class Schedule {
 public:
  /// For a call on a stream that is being captured, its memory allocated where the capture is a new one; null outside.
  CapturedSchedule* of(const Device& device, void* native, nb::handle allocate);
  std::mutex& mutex() { return mutex_; }  ///< held during a call that has it, never with the GIL

 private:
  CapturedSchedule captured_;
  unsigned long long capture_ = 0;  // whose memory it is
  nb::object memory_;
  std::mutex mutex_;
};

/// Where a call runs: a Stream of the CPU, or on a GPU a cudaStream_t, with memory that `allocate(bytes)` gives for the
/// call.
struct Place {
  std::string_view op;
  nb::handle stream;
  nb::handle allocate;
  Schedule* schedule = nullptr;

  PyStream& cpu(const Tensor& q) const {
    if (!nb::isinstance<PyStream>(stream))
      throw ShapeError("q lies on " + to_string(q.device()) + ", a mla.Stream is needed as its stream");
    PyStream& found = nb::cast<PyStream&>(stream);
    q.require_device(found.device());
    return found;
  }

  template <class Attention>
  void run(const Attention& a, Device device) const {
    uintptr_t native = 0;
    if (!nb::try_cast(stream, native) || allocate.is_none())
      throw ShapeError("q lies on " + to_string(device) + ", a cudaStream_t and an allocator are needed");
    const size_t bytes = gpu::workspace_bytes(a);
    const nb::object memory = allocate(bytes + kAlignment);
    gpu::CallerStream at{.device = device.index, .native = reinterpret_cast<void*>(native)};
    at.workspace = aligned(op, memory, bytes, device);
    if (schedule) at.schedule = schedule->of(device, at.native, allocate);
    const nb::gil_scoped_release released;
    std::unique_lock<std::mutex> turn;
    if (at.schedule) turn = std::unique_lock(schedule->mutex());
    gpu::attend(a, at);
  }

  static constexpr size_t kAlignment = 256;
  /// The first address of that alignment in an array of so many bytes and as many more.
  static std::byte* aligned(std::string_view op, nb::handle array, size_t bytes, const Device& device) {
    const Tensor memory(array, "workspace", Access::write);
    memory.require_device(device);
    ops::require_range(op, "workspace bytes", memory.extent(0) * memory.element_bytes(),
                       static_cast<int64_t>(bytes + kAlignment), std::numeric_limits<int64_t>::max());
    return memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & (kAlignment - 1));
  }
};

inline CapturedSchedule* Schedule::of(const Device& device, void* native, nb::handle allocate) {
  const unsigned long long capture = gpu::capture_of(device.index, native);
  if (capture == 0) return nullptr;
  if (capture != capture_) {
    nb::object memory = allocate(CapturedSchedule::kBytes + Place::kAlignment);
    CapturedSchedule fresh{.data = Place::aligned("flash_mla", memory, CapturedSchedule::kBytes, device)};
    {
      const nb::gil_scoped_release released;
      const std::lock_guard turn(mutex_);
      std::swap(captured_, fresh);
    }
    std::swap(memory_, memory);
    capture_ = capture;
  }
  return &captured_;
}

}  // namespace mla::python
