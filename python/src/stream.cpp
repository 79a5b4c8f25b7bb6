#include "stream.hpp"

#include <nanobind/stl/string.h>

#include "step.hpp"
#include "tensor.hpp"

namespace mla::python {

PyStream::PyStream(int threads, Pinning pinning)
    : pool_(std::make_unique<ThreadPool>(threads, pinning)), stream(*pool_) {}
PyStream::PyStream(Device device, void* native) : stream(device, native) {}

std::span<std::byte> PyStream::memory(size_t bytes) {
  if (memory_.size() < bytes) {
    // A GPU's queued calls may still use what is about to be freed.
    if (device().kind == DeviceKind::cuda) stream.synchronize();
    memory_ = Buffer();
    memory_ = Buffer(bytes, device());
  }
  return {memory_.data(), memory_.size()};
}

const StagedStep* PyStream::stage(const std::shared_ptr<Step>& step) {
  if (device().kind == DeviceKind::cpu) return nullptr;
  if (!staging_) staging_ = std::make_unique<StagedStep>(stream);
  if (staged_ != step) {
    staged_.reset();  // after an error nothing is staged
    staging_->stage(step->plan, step->batch->view());
    staged_ = step;
  }
  return staging_.get();
}

void require_device(const char* what, Device found, Device needed) {
  if (found != needed)
    throw ShapeError(std::string(what) + " lies on " + to_string(found) + ", the stream is on " + to_string(needed));
}

void bind_stream(nb::module_& m) {
  nb::class_<PyStream>(
      m, "Stream",
      "An order of execution on a device, with the memory that calls work in.\n\n"
      "On the CPU calls run at once on `threads` threads; results do not depend on their number. On a\n"
      "GPU they are queued. Calls from several Python threads take turns.")
      .def(
          "__init__",
          [](PyStream* self, int threads, bool pinned, const std::string& device, uintptr_t native) {
            const Device d = parse_device(device);
            if (pinned && d.kind == DeviceKind::cuda)
              throw InputError("stream: pinned is of the CPU's threads, device is " + to_string(d));
            if (d.kind == DeviceKind::cpu) new (self) PyStream(threads, pinned ? Pinning::cores : Pinning::none);
            else new (self) PyStream(d, reinterpret_cast<void*>(native));
          },
          nb::arg("threads") = 1, nb::kw_only(), nb::arg("pinned") = false, nb::arg("device") = "cpu",
          nb::arg("native") = 0,
          "threads: of the CPU. pinned: each but the caller's stays on a processor of its own, a core each first,\n"
          "one NUMA node after another; LayerWeights.place() and Cache.place() bring memory near them. device: \"cpu\" "
          "or \"cuda:N\". native: a cudaStream_t to borrow, as torch's\n"
          "`current_stream().cuda_stream`; 0: a stream of its own.")
      .def_prop_ro("device", [](const PyStream& s) { return to_string(s.device()); })
      .def_prop_ro("threads", &PyStream::threads)
      .def_prop_ro("pinned", &PyStream::pinned)
      .def(
          "synchronize",
          [](PyStream& s) {
            const Turn turn(s);
            s.stream.synchronize();
          },
          "Waits for everything queued so far.")
      .def("__repr__", [](const PyStream& s) {
        return "mla.Stream(device='" + to_string(s.device()) + "', threads=" + std::to_string(s.threads()) +
               (s.pinned() ? ", pinned=True)" : ")");
      });
  m.def("gpu_count", &gpu_count, "GPUs that this build can use.");
}

}  // namespace mla::python
