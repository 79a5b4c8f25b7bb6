#include "backend/cuda/core/queue.hpp"

#include <algorithm>
#include <string>

#include "backend/cuda/core/blas.hpp"
#include "backend/cuda/core/check.hpp"
#include "core/gpu.hpp"

namespace mla::cuda {

Queue::Queue(int device, void* native, Bare) : device_(device), stream_(static_cast<cudaStream_t>(native)) {
  const std::string name = "cuda:" + std::to_string(device);
  int minor = 0;
  check(cudaDeviceGetAttribute(&major_, cudaDevAttrComputeCapabilityMajor, device), name, "compute capability");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), name, "compute capability");
  check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device), name, "multiprocessors");
  if (major_ < 8)
    throw DeviceError(name + ": compute capability is " + std::to_string(major_) + "." + std::to_string(minor) +
                      ", 8.0 is needed");
}

namespace {
int existing(int device) {
  const std::string name = "cuda:" + std::to_string(device);
  int count = 0;
  check(cudaGetDeviceCount(&count), name, "looking for GPUs");
  if (device < 0 || device >= count)
    throw DeviceError(name + ": no such GPU, this machine has " + std::to_string(count));
  return device;
}
}  // namespace

// A delegate has made a Queue: what fails behind it is undone by the destructor.
Queue::Queue(int device, void* native) : Queue(existing(device), native, Lane::own) {
  const std::string name = "cuda:" + std::to_string(device);
  const gpu::OnDevice on({DeviceKind::cuda, device});
  for (std::unique_ptr<Queue>& lane : lanes_) lane.reset(new Queue(device, nullptr, Lane::further));
}

Queue::Queue(int device, void* native, Lane lane) : Queue(device, native, Bare::queue) {
  const std::string name = "cuda:" + std::to_string(device);
  const gpu::OnDevice on({DeviceKind::cuda, device});
  if (!stream_) {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), name, "priorities of streams");
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, lane == Lane::own ? least : greatest), name,
          "a stream");
    own_stream_ = true;
  }
  check(cudaEventCreateWithFlags(&here_, cudaEventDisableTiming), name, "a stream's event");
  check(cudaMalloc(reinterpret_cast<void**>(&counters_), (kCounters + 64) * sizeof(unsigned)), name,
        "a stream's counters");
  own_counters_ = true;
  // On the stream: one of its own does not wait for the default stream's.
  check(cudaMemsetAsync(counters_, 0, (kCounters + 64) * sizeof(unsigned), stream_), name, "a stream's counters");
  blas_ = std::make_unique<Blas>(name);
}

Queue::~Queue() {
  for (std::unique_ptr<Queue>& lane : lanes_) lane.reset();
  if (here_) cudaEventDestroy(here_);
  blas_.reset();
  if (own_counters_) cudaFree(counters_);
  if (own_stream_) cudaStreamDestroy(stream_);
}

void Queue::wait(const Queue& other) const {
  const std::string name = "cuda:" + std::to_string(device_);
  check(cudaEventRecord(other.here_, other.stream_), name, "a stream's event");
  check(cudaStreamWaitEvent(stream_, other.here_), name, "waiting for a stream's event");
}

namespace {
void add_once(std::vector<std::weak_ptr<Watched>>& all, const std::shared_ptr<Watched>& w) {
  std::erase_if(all, [&](const auto& other) { return other.expired() || other.lock() == w; });
  all.push_back(w);
}
}  // namespace
void Queue::watch(const std::shared_ptr<Watched>& w) { add_once(watched_, w); }
void Queue::capture(const std::shared_ptr<Watched>& w) { add_once(captured_, w); }

const void* Queue::readable(const void* host, std::string_view op, std::string_view name) const {
  cudaPointerAttributes found{};
  const cudaError_t status = cudaPointerGetAttributes(&found, host);
  if (status == cudaSuccess && found.devicePointer) return found.devicePointer;
  cudaGetLastError();
  if (status != cudaErrorInvalidValue) check(status, op, "looking for a list's memory", name);
  throw ShapeError(std::string(op) + ": " + std::string(name) + " lies in host memory that cuda:" +
                   std::to_string(device_) + " does not read; stage the step first (StagedStep, LayerContext::staged)");
}

}  // namespace mla::cuda
