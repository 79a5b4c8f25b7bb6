#include "core/gpu.hpp"

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "backend/cuda/core/check.hpp"
#include "backend/cuda/core/queue.hpp"
#include "core/counted.hpp"
#include "core/driver_text.hpp"

namespace mla::gpu {

using cuda::check;

namespace {
/// The queue's device is the thread's for a scope: events, graphs and copies belong to the current one.
struct OnQueue : OnDevice {
  explicit OnQueue(const cuda::Queue& queue) : OnDevice({DeviceKind::cuda, queue.device()}) {}
};

void require_gpu(const std::string& name) {
  int n = 0, driver = 0;
  const cudaError_t status = cudaGetDeviceCount(&n);
  if (status == cudaSuccess && n > 0) return;
  cudaGetLastError();
  if (status != cudaSuccess && status != cudaErrorNoDevice && status != cudaErrorInsufficientDriver)
    check(status, name, "looking for GPUs");
  cudaDriverGetVersion(&driver);  // 0 without one
  throw DeviceError(name + ": " + driver_text(driver, CUDART_VERSION) + "; the CPU serves everything");
}
}  // namespace

int count() {
  int n = 0;
  if (cudaGetDeviceCount(&n) == cudaSuccess) return n;
  cudaGetLastError();
  return 0;
}

std::string describe(int index) {
  require_gpu("cuda:" + std::to_string(index));
  cudaDeviceProp p{};
  check(cudaGetDeviceProperties(&p, index), "cuda:" + std::to_string(index), "properties");
  return std::string(p.name) + ", sm_" + std::to_string(p.major) + std::to_string(p.minor) + ", " +
         std::to_string(p.multiProcessorCount) + " multiprocessors, " + std::to_string(p.totalGlobalMem >> 20) + " MiB";
}

std::byte* allocate(size_t bytes, int index) {
  const std::string name = "cuda:" + std::to_string(index);
  require_gpu(name);
  const OnDevice on({DeviceKind::cuda, index});
  void* p = nullptr;
  const cudaError_t status = cudaMalloc(&p, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    throw DeviceError(name + " has no " + std::to_string(bytes) + " bytes to give (" + readable_bytes(bytes) +
                      "): " + std::to_string(free) + " of " + std::to_string(total) + " are free");
  }
  check(status, name, "allocation", std::to_string(bytes) + " bytes");
  return static_cast<std::byte*>(p);
}

void release(std::byte* data, int) noexcept { cudaFree(data); }

void upload(std::byte* to, const void* from, size_t bytes, int index) {
  const OnDevice on({DeviceKind::cuda, index});
  const std::string name = "cuda:" + std::to_string(index);
  check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), name, "upload", std::to_string(bytes) + " bytes");
  // Pageable memory may be on its way from the driver's own copy when that returns; streams here do not wait for it.
  check(cudaStreamSynchronize(cudaStreamLegacy), name, "upload", std::to_string(bytes) + " bytes");
}

std::byte* allocate_pinned(size_t bytes) {
  void* p = nullptr;
  check(cudaHostAlloc(&p, bytes, cudaHostAllocPortable), "cuda", "pinned host memory",
        std::to_string(bytes) + " bytes");
  return static_cast<std::byte*>(p);
}
void release_pinned(std::byte* data) noexcept { cudaFreeHost(data); }

int current() {
  int index = 0;
  check(cudaGetDevice(&index), "device", "current device");
  return index;
}
void make_current(int index) { check(cudaSetDevice(index), "device", "cuda:" + std::to_string(index)); }

std::shared_ptr<cuda::Queue> open(int index, void* native) {
  require_gpu("cuda:" + std::to_string(index));
  return std::make_shared<cuda::Queue>(index, native);
}

std::shared_ptr<cuda::Queue> lane(const std::shared_ptr<cuda::Queue>& queue, int number) {
  return std::shared_ptr<cuda::Queue>(queue, &queue->lane(number));
}
void wait(cuda::Queue& queue, cuda::Queue& other) {
  const OnQueue on(queue);
  queue.wait(other);
}

void* native(const cuda::Queue& queue) { return queue.stream(); }

void synchronize(cuda::Queue& queue) {
  const auto done = [&](cudaError_t status) {
    check(status, "cuda:" + std::to_string(queue.device()), "waiting for the stream");
  };
  const auto look = [&](bool waiting) {
    for (const std::weak_ptr<cuda::Watched>& w : queue.watched())
      if (const std::shared_ptr<cuda::Watched> watched = w.lock()) watched->check(waiting);
  };
  if (queue.watched().empty()) return done(cudaStreamSynchronize(queue.stream()));
  // Steps are milliseconds: looked at often at first, then ten times a millisecond.
  for (int i = 0;; ++i) {
    const cudaError_t status = cudaStreamQuery(queue.stream());
    if (status != cudaErrorNotReady) {
      look(false);
      return done(status);
    }
    cudaGetLastError();
    if (i % 256 == 255) {
      look(true);
      if (i > 4096) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

void copy(cuda::Queue& queue, void* to, const void* from, size_t bytes) {
  const OnQueue on(queue);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, queue.stream()), "copy", "copy",
        std::to_string(bytes) + " bytes");
}

void clear(cuda::Queue& queue, void* to, size_t bytes, int64_t rows, size_t apart) {
  const OnQueue on(queue);
  check(cudaMemset2DAsync(to, apart, 0, bytes, static_cast<size_t>(rows), queue.stream()), "clear", "clear",
        std::to_string(rows) + " rows of " + std::to_string(bytes) + " bytes");
}

void begin_capture(cuda::Queue& queue) {
  const OnQueue on(queue);
  check(cudaStreamBeginCapture(queue.stream(), cudaStreamCaptureModeThreadLocal), "graph", "begin of capture");
}

void abandon_capture(cuda::Queue& queue) noexcept {
  queue.take_captured();
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(queue.stream(), &graph);
  if (graph) cudaGraphDestroy(graph);
  cudaGetLastError();
}

namespace {
struct Captured {
  cudaGraphExec_t graph;
  std::vector<std::weak_ptr<cuda::Watched>> groups;  // of ranks, whose calls are in it
  ~Captured() { cudaGraphExecDestroy(graph); }
};
}  // namespace

std::shared_ptr<void> end_capture(cuda::Queue& queue) {
  const OnQueue on(queue);
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(queue.stream(), &graph), "graph", "end of capture");
  cudaGraphExec_t exec = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&exec, graph, 0);
  cudaGraphDestroy(graph);
  check(status, "graph", "instantiation");
  const std::shared_ptr<Captured> captured(new Captured{exec, {}});
  captured->groups = queue.take_captured();
  return captured;
}

void launch(cuda::Queue& queue, void* graph) {
  const OnQueue on(queue);
  const auto& captured = *static_cast<const Captured*>(graph);
  for (const std::weak_ptr<cuda::Watched>& w : captured.groups)
    if (const std::shared_ptr<cuda::Watched> group = w.lock()) {
      group->launching();
      queue.watch(group);
    }
  check(cudaGraphLaunch(captured.graph, queue.stream()), "graph", "launch");
}

bool capturing(const cuda::Queue& queue) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(queue.stream(), &status), "graph", "asking whether a stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

Mark::~Mark() {
  if (event_) cudaEventDestroy(static_cast<cudaEvent_t>(event_));
}
void Mark::set(cuda::Queue& queue) {
  const OnQueue on(queue);
  cudaEvent_t event = static_cast<cudaEvent_t>(event_);
  if (!event) {
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cuda", "an event");
    event_ = event;
  }
  check(cudaEventRecord(event, queue.stream()), "cuda", "marking the stream");
}
void Mark::wait() const {
  if (event_) check(cudaEventSynchronize(static_cast<cudaEvent_t>(event_)), "cuda", "waiting for a mark");
}

namespace {
struct Gate {
  cuda::Queue& queue;
  std::mutex mutex;
  std::condition_variable opened;
  bool open = false;
};
// The driver keeps some 1,000 commands of a stream: whoever queues more waits for the stream, and cannot open its gate.
constexpr std::chrono::seconds kPatience{1};
}  // namespace

std::shared_ptr<void> hold(cuda::Queue& queue) {
  const OnQueue on(queue);
  const std::shared_ptr<Gate> gate(new Gate{queue});
  auto* kept = new std::shared_ptr<Gate>(gate);  // the waiting callback's own
  const cudaError_t status = cudaLaunchHostFunc(
      queue.stream(),
      [](void* p) {
        const std::unique_ptr<std::shared_ptr<Gate>> g(static_cast<std::shared_ptr<Gate>*>(p));
        std::unique_lock lock((*g)->mutex);
        (*g)->opened.wait_for(lock, kPatience, [&] { return (*g)->open; });
      },
      kept);
  if (status != cudaSuccess) delete kept;
  check(status, "cuda", "holding a stream");
  queue.hold();
  return gate;
}
void open_gate(void* gate) noexcept {
  Gate& g = *static_cast<Gate*>(gate);
  g.queue.let_go();
  {
    const std::lock_guard lock(g.mutex);
    g.open = true;
  }
  g.opened.notify_all();
}
bool held(const cuda::Queue& queue) { return queue.held(); }

Stopwatch::Stopwatch() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreate(&event), "cuda", "an event");
  start_ = event;
  check(cudaEventCreate(&event), "cuda", "an event");
  stop_ = event;
}
Stopwatch::~Stopwatch() {
  cudaEventDestroy(static_cast<cudaEvent_t>(start_));
  if (stop_) cudaEventDestroy(static_cast<cudaEvent_t>(stop_));
}
void Stopwatch::start(cuda::Queue& queue) {
  check(cudaEventRecord(static_cast<cudaEvent_t>(start_), queue.stream()), "cuda", "starting a stopwatch");
}
void Stopwatch::stop(cuda::Queue& queue) {
  check(cudaEventRecord(static_cast<cudaEvent_t>(stop_), queue.stream()), "cuda", "stopping a stopwatch");
}
double Stopwatch::seconds() const {
  check(cudaEventSynchronize(static_cast<cudaEvent_t>(stop_)), "cuda", "waiting for a stopwatch");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(start_), static_cast<cudaEvent_t>(stop_)), "cuda",
        "reading a stopwatch");
  return 1e-3 * static_cast<double>(ms);
}

}  // namespace mla::gpu
