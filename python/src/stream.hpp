// A stream as Python holds it: with the CPU's threads, and the memory that calls on it work in.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <span>

#include "mla/device.hpp"
#include "mla/staged_step.hpp"

namespace mla::python {

namespace nb = nanobind;

struct Step;

/// Calls from several Python threads take turns.
class PyStream {
 public:
  PyStream(int threads, Pinning pinning);
  PyStream(Device device, void* native);

  Device device() const { return stream.device(); }
  int threads() const { return stream.workers(); }
  bool pinned() const { return pool_ && pool_->pinning() == Pinning::cores; }
  /// At least that many bytes that the next call may use; they may hold anything.
  std::span<std::byte> memory(size_t bytes);
  /// A step's lists on a GPU; null on the CPU.
  const StagedStep* stage(const std::shared_ptr<Step>& step);

 private:
  std::unique_ptr<ThreadPool> pool_;

 public:
  Stream stream;
  std::mutex mutex;

 private:
  Buffer memory_;
  std::shared_ptr<Step> staged_;
  std::unique_ptr<StagedStep> staging_;
};

/// One call on a stream: other Python threads run meanwhile, other calls on the stream wait.
class Turn {
 public:
  explicit Turn(PyStream& stream) : lock_(stream.mutex) {}

 private:
  nb::gil_scoped_release released_;
  std::lock_guard<std::mutex> lock_;
};

void bind_stream(nb::module_& m);
void bind_model(nb::module_& m);
void bind_cache(nb::module_& m);
void bind_step(nb::module_& m);
void bind_flash_mla(nb::module_& m);
void bind_flash_attn(nb::module_& m);

/// Something on a device, as the C++ interface does not say of it.
template <class T>
struct Placed {
  T value;
  Device device;
};

/// ShapeError when a placed thing is elsewhere than the stream.
void require_device(const char* what, Device found, Device needed);

}  // namespace mla::python
