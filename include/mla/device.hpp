// Where work runs: devices, streams, the CPU's thread pool, and buffers that own memory on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
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

/// A fixed set of threads; the caller of run() is worker 0. One pool serves a whole engine.
///
/// run() hands out tasks 0..tasks-1 in order, each to whichever worker is free, and returns when all are done. It
/// allocates nothing. A task that throws: the first exception is rethrown by run() after the others have ended. run()
/// is not reentrant: one caller at a time, and a task must not call run() on its own pool.
class ThreadPool {
 public:
  /// threads >= 1; otherwise InputError. DeviceError when the system refuses a thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  /// f(task, worker): task in [0, tasks), worker in [0, threads()).
  template <class F>
  void run(int64_t tasks, F&& f) {
    using Fn = std::remove_reference_t<F>;
    run_erased(
        tasks, [](void* fn, int64_t task, int worker) { (*static_cast<Fn*>(fn))(task, worker); },
        const_cast<void*>(static_cast<const void*>(&f)));
  }

 private:
  using Task = void (*)(void* fn, int64_t task, int worker);
  void run_erased(int64_t tasks, Task task, void* fn);
  struct State;
  std::unique_ptr<State> state_;
};

/// An order of execution on a device. On the CPU calls run at once, on the pool's threads.
class Stream {
 public:
  explicit Stream(ThreadPool& pool) : pool_(&pool) {}
  Device device() const { return {}; }
  ThreadPool& pool() const { return *pool_; }

 private:
  ThreadPool* pool_;
};

/// Memory on a device, 64-byte aligned, freed with the object. Fresh CPU memory is zero.
class Buffer {
 public:
  Buffer() = default;
  /// DeviceError naming the size when the device has no such memory.
  explicit Buffer(size_t bytes, Device device = {});

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
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
  Device device_;
};

}  // namespace mla
