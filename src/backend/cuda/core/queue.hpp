// A stream's own things on its GPU, all made when it is opened: nothing is allocated afterwards.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/captured_schedule.hpp"
#include "mla/device.hpp"
#include "mla/view.hpp"

namespace mla::cuda {

class Blas;

/// What may fail on a device where the stream does not know of it: messages of ranks.
class Watched {
 public:
  virtual ~Watched() = default;
  /// Throws what has failed. `waiting`: work is still under way.
  virtual void check(bool waiting) = 0;
  /// Calls that were captured are about to be queued.
  virtual void launching() = 0;
};

class Queue {
 public:
  /// native: a cudaStream_t to borrow, or null for a stream of its own. DeviceError when the GPU cannot serve.
  Queue(int device, void* native);
  /// For a call or two on a caller's stream, also one that is being captured: nothing is made on the GPU. Without
  /// counters and matrix products.
  enum class Bare { queue };
  Queue(int device, void* native, Bare);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  cudaStream_t stream() const { return stream_; }
  int device() const { return device_; }
  int multiprocessors() const { return multiprocessors_; }
  bool hopper() const { return major_ == 9; }
  /// Matrix products by cuBLASLt.
  Blas& blas() const { return *blas_; }
  /// kCounters numbers that are 0 between kernels: each that uses some leaves them 0.
  unsigned* counters() const { return counters_; }
  static constexpr size_t kCounters = 16384;
  static constexpr size_t kSpare = kCounters;  ///< 64 more, for kernels that need a few beside those

  /// Without data where nothing can be shared. Gone when staged arrays change.
  CapturedSchedule& schedule() const { return *schedule_; }
  /// A caller's, until the queue is gone.
  void use(CapturedSchedule& s) { schedule_ = &s; }

  /// Where the device reads a host array: its staged copy, or, where the host memory itself is the device's to read
  /// (pinned, managed), that. ShapeError naming op and array when neither. Null for an empty array.
  template <class T>
  const T* staged(std::span<const T> host, std::string_view op, std::string_view name) const {
    return host.empty() ? nullptr : static_cast<const T*>(find(host.data(), host.size_bytes(), op, name));
  }
  template <class... Dims>
  View<const int32_t, Dims...> staged(View<const int32_t, Dims...> host, std::string_view op,
                                      std::string_view name) const {
    if (host.size() == 0) return host;
    int64_t last = 0;
    for (size_t i = 0; i < sizeof...(Dims); ++i) last += (host.extents()[i] - 1) * host.strides()[i];
    return {static_cast<const int32_t*>(find(host.data(), static_cast<size_t>(last + 1) * sizeof(int32_t), op, name)),
            host.extents(), host.strides()};
  }

  /// Host bytes [host, host + bytes) have a copy at `device`, until withdrawn by the same owner.
  struct Range {
    const void* owner;
    const std::byte* host;
    size_t bytes;
    const std::byte* device;
  };
  void publish(const Range& range);
  void withdraw(const void* owner) noexcept;
  /// Staged copies were written anew.
  void changed() noexcept { own_schedule_.capture = 0; }

  /// Looked at while the stream is waited for, until it is gone.
  void watch(const std::shared_ptr<Watched>& w);
  std::vector<std::weak_ptr<Watched>>& watched() { return watched_; }
  /// A call of it is being captured; what was since asked last.
  void capture(const std::shared_ptr<Watched>& w);
  std::vector<std::weak_ptr<Watched>> take_captured() { return std::exchange(captured_, {}); }

  /// Gates that hold the stream back.
  void hold() noexcept { ++gates_; }
  void let_go() noexcept { --gates_; }
  bool held() const noexcept { return gates_ > 0; }

 private:
  const void* find(const void* host, size_t bytes, std::string_view op, std::string_view name) const;

  int device_ = 0, major_ = 0, multiprocessors_ = 0;
  cudaStream_t stream_ = nullptr;
  bool own_stream_ = false, own_counters_ = false;
  unsigned* counters_ = nullptr;
  std::unique_ptr<Blas> blas_;
  std::vector<Range> ranges_;      // by host address
  CapturedSchedule own_schedule_;  // with data on a Hopper GPU
  CapturedSchedule* schedule_ = &own_schedule_;
  int gates_ = 0;
  std::vector<std::weak_ptr<Watched>> watched_, captured_;
};

}  // namespace mla::cuda
