// Where work runs: devices, streams, the CPU's thread pool, and buffers that own memory on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

namespace mla {

enum class DeviceKind : uint8_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};
std::string to_string(const Device& d);

/// Where a pool's threads run.
enum class Pinning : uint8_t {
  none,  ///< wherever the system puts them
  /// Each on a processor of its own, of those that the constructor's thread may use: a thread a core, one node of
  /// memory (NUMA) after another, then the cores' further hardware threads. Worker 0 is not pinned, for its thread is
  /// the caller's: whatever that starts later would be bound to its processor, too. The first processor is left to it.
  cores,
};

struct Place;

/// A fixed set of threads; the caller of run() is worker 0. One pool serves a whole engine.
///
/// run() hands out tasks 0..tasks-1 in order, each to whichever worker is free, and returns when all are done. It
/// allocates nothing. A task that throws: the first exception is rethrown by run() after the others have ended. run()
/// is not reentrant: one caller at a time, and a task must not call run() on its own pool.
///
/// A pool over several nodes cuts the tasks into a range for each, in order, by its number of workers. A worker takes
/// the tasks of its node's range; those of another node only when none of its own is left.
///
/// Threads beyond the processors that the process may use sleep: such a pool is as fast as one of as many threads as
/// there are processors.
class ThreadPool {
 public:
  /// threads from 1 to four a processor, or 64; pinned, to one a processor that may be used: else InputError.
  /// DeviceError when the system refuses a thread or its place.
  explicit ThreadPool(int threads, Pinning pinning = Pinning::none);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;
  /// How many of them take tasks at a time: threads(), or as many as there were processors when the pool was made. As
  /// many tasks of one run may wait for each other.
  int concurrent() const;
  Pinning pinning() const;
  /// Nodes that its threads are pinned on; 1 where they are not.
  int nodes() const;
  /// Of a worker, 0 to nodes() - 1: ascending with the workers' numbers. Worker 0 counts as on the first.
  int node(int worker) const;

  /// f(task, worker): task in [0, tasks), worker in [0, threads()).
  template <class F>
  void run(int64_t tasks, F&& f) {
    using Fn = std::remove_reference_t<F>;
    run_erased(
        tasks, [](void* fn, int64_t task, int worker) { (*static_cast<Fn*>(fn))(task, worker); },
        const_cast<void*>(static_cast<const void*>(&f)));
  }

 private:
  friend class Rehearsal;  // core/threads.hpp
  friend ThreadPool pool_at(std::span<const Place> places);
  using Task = void (*)(void* fn, int64_t task, int worker);
  struct State;
  explicit ThreadPool(std::unique_ptr<State> state);
  void run_erased(int64_t tasks, Task task, void* fn);
  std::unique_ptr<State> state_;
};

namespace cuda {
class Queue;
}
class SelectionLog;

/// An order of execution on a device. On the CPU calls run at once, on the pool's threads; on a GPU they are queued and
/// return. Copies are the same stream.
class Stream {
 public:
  explicit Stream(ThreadPool& pool) : pool_(&pool) {}
  /// On a GPU. native: a cudaStream_t, borrowed, which must outlive this; null: a stream of its own. DeviceError when
  /// there is no such GPU, it is older than compute capability 8.0, or this build has no CUDA. Holds some 100 MiB of
  /// the GPU's memory: what matrix products work in, for itself and for its lanes (Step::lane).
  explicit Stream(Device device, void* native = nullptr);

  Device device() const { return device_; }
  /// The CPU's threads; UnsupportedError on a GPU.
  ThreadPool& pool() const;
  /// How many workers an op's scratch is cut for.
  int workers() const { return pool_ ? pool_->threads() : 1; }
  /// The cudaStream_t; null on the CPU.
  void* native() const;
  /// Waits for everything queued so far; DeviceError for what failed since the last wait.
  void synchronize() const;
  /// Of the CUDA backend.
  cuda::Queue& queue() const { return *queue_; }
  /// Of the layer, on a GPU.
  SelectionLog& selections() const { return *selections_; }
  /// Of the layer, on a GPU: a stream of this one's, for steps of lane 1, 2, ... (Step::lane).
  Stream lane(int number) const;

 private:
  ThreadPool* pool_ = nullptr;
  Device device_;
  std::shared_ptr<cuda::Queue> queue_;
  std::shared_ptr<SelectionLog> selections_;
};

/// Bytes from any memory to any other, in the stream's order. Host memory that a GPU's copy reads or writes must stay
/// as it is until the copy is done.
void copy(Stream& stream, void* to, const void* from, size_t bytes);

/// What `capture` queued on a GPU's stream, to be queued again as a whole by launch(). The calls see the same addresses
/// every time; what lies there may change.
class Graph {
 public:
  Graph() = default;
  /// UnsupportedError on the CPU; DeviceError when something cannot be captured.
  template <class F>
  Graph(Stream& stream, F&& record) {
    begin(stream);
    try {
      record();
    } catch (...) {
      abandon(stream);
      throw;
    }
    end(stream);
  }
  explicit operator bool() const { return graph_ != nullptr; }
  void launch(Stream& stream) const;

 private:
  static void begin(Stream& stream);
  static void abandon(Stream& stream) noexcept;
  void end(Stream& stream);
  std::shared_ptr<void> graph_;
};

/// Holds a GPU's stream back while it lives, for a second at most: calls made meanwhile are queued and begin together.
/// A driver keeps some 1,000 commands of a stream; who queues more waits until the second is over. Nothing on the CPU.
class HeldStream {
 public:
  explicit HeldStream(Stream& stream);
  ~HeldStream();
  HeldStream(const HeldStream&) = delete;
  HeldStream& operator=(const HeldStream&) = delete;

 private:
  std::shared_ptr<void> gate_;
};

/// GPUs that this build can use; 0 without CUDA or a driver.
int gpu_count();
/// Name, memory and architecture in one line; DeviceError when there is no such GPU.
std::string describe(Device device);

/// How memory lies over the nodes of a pool.
enum class Placement : uint8_t {
  in_ranges,  ///< a node has the part that its tasks are of all tasks: for what tasks read in their order
  in_turn,    ///< 2 MiB on each node in turn: for what any task may read
};

/// Memory on a device, 64-byte aligned, freed with the object. Fresh CPU memory is zero, a GPU's may hold anything.
class Buffer {
 public:
  Buffer() = default;
  /// DeviceError naming the size when the device has no such memory.
  explicit Buffer(size_t bytes, Device device = {});
  /// Host bytes on a device; they may go once this returns.
  static Buffer copy_of(const void* data, size_t bytes, Device device = {});

  /// Moves the pages of a CPU's memory to the pool's nodes, with what they hold: a worker of its node touches each
  /// first. Nothing moves where the pool has one node, or of less than 64 KiB. Nobody may use the memory meanwhile.
  /// UnsupportedError for a GPU's; DeviceError when the system keeps a page, as it does with locked memory: all bytes
  /// are then as they were.
  void place(ThreadPool& pool, Placement how) const;

  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }
  Device device() const { return device_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  struct Free {
    size_t bytes;
    Device device;
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
  Device device_;
};

}  // namespace mla
