// Where calls of FlashMLA's interface run, and the memory that they work in.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

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

/// Where a call runs: a Stream of the CPU, or on a GPU a cudaStream_t, with memory that `allocate(bytes)` gives for the
/// call.
struct Place {
  std::string_view op;
  nb::handle stream;
  nb::handle allocate;

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
    constexpr size_t kAlignment = 256;
    const size_t bytes = gpu::workspace_bytes(a) + kAlignment;
    const Tensor workspace(allocate(bytes), "workspace", Access::write);
    workspace.require_device(device);
    ops::require_range(op, "workspace bytes", workspace.extent(0) * workspace.element_bytes(),
                       static_cast<int64_t>(bytes), std::numeric_limits<int64_t>::max());
    std::byte* const at = workspace.data() + (-reinterpret_cast<uintptr_t>(workspace.data()) & (kAlignment - 1));
    const nb::gil_scoped_release released;
    gpu::attend(a, {device.index, reinterpret_cast<void*>(native), at});
  }
};

}  // namespace mla::python
