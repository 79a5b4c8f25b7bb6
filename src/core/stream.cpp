#include <cstring>

#include "core/clear.hpp"
#include "core/gpu.hpp"
#include "core/selection_log.hpp"
#include "mla/error.hpp"

namespace mla {

std::string to_string(const Device& d) { return d.kind == DeviceKind::cpu ? "cpu" : "cuda:" + std::to_string(d.index); }

int gpu_count() { return gpu::count(); }

std::string describe(Device device) { return device.kind == DeviceKind::cpu ? "cpu" : gpu::describe(device.index); }

Stream::Stream(Device device, void* native) : device_(device) {
  if (device.kind == DeviceKind::cpu) throw InputError("stream: the cpu's streams are made of a ThreadPool");
  queue_ = gpu::open(device.index, native);
  selections_ = std::make_shared<SelectionLog>();
}

Stream Stream::lane(int number) const {
  Stream s(*this);
  s.queue_ = gpu::lane(queue_, number);
  return s;
}

ThreadPool& Stream::pool() const {
  if (!pool_) throw UnsupportedError("stream: " + to_string(device_) + " has no thread pool");
  return *pool_;
}

void* Stream::native() const { return queue_ ? gpu::native(*queue_) : nullptr; }

void Stream::synchronize() const {
  if (queue_) gpu::synchronize(*queue_);
}

void copy(Stream& stream, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  if (stream.device().kind == DeviceKind::cpu) std::memcpy(to, from, bytes);
  else gpu::copy(stream.queue(), to, from, bytes);
}

void clear(Stream& stream, void* to, size_t bytes, int64_t rows, size_t apart) {
  if (bytes == 0 || rows == 0) return;
  if (stream.device().kind == DeviceKind::cuda) return gpu::clear(stream.queue(), to, bytes, rows, apart);
  for (int64_t r = 0; r < rows; ++r)
    std::memset(static_cast<std::byte*>(to) + static_cast<size_t>(r) * apart, 0, bytes);
}

HeldStream::HeldStream(Stream& stream) {
  if (stream.device().kind == DeviceKind::cuda) gate_ = gpu::hold(stream.queue());
}
HeldStream::~HeldStream() {
  if (gate_) gpu::open_gate(gate_.get());
}

void Graph::begin(Stream& stream) {
  if (stream.device().kind == DeviceKind::cpu) throw UnsupportedError("graph: the cpu's calls cannot be captured");
  gpu::begin_capture(stream.queue());
}
void Graph::abandon(Stream& stream) noexcept { gpu::abandon_capture(stream.queue()); }
void Graph::end(Stream& stream) { graph_ = gpu::end_capture(stream.queue()); }
void Graph::launch(Stream& stream) const {
  if (!graph_) throw InputError("graph: nothing was captured");
  gpu::launch(stream.queue(), graph_.get());
}

}  // namespace mla
