// A stream's own things on its GPU, all made when it is opened: nothing is allocated afterwards.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "mla/device.hpp"
#include "mla/step.hpp"
#include "ops/list.hpp"

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
  /// A queue for lane `number`, from 1 on, of this one's, which has them unless it is bare or a lane's itself. Where
  /// there is room for one of two kernels, lanes' go first: others wait for what they make.
  Queue& lane(int number) const { return *lanes_[static_cast<size_t>(number - 1)]; }
  /// For what the other one, a lane or one with lanes, was given so far.
  void wait(const Queue& other) const;
  int device() const { return device_; }
  int multiprocessors() const { return multiprocessors_; }
  bool hopper() const { return major_ == 9; }
  /// Matrix products by cuBLASLt.
  Blas& blas() const { return *blas_; }
  /// kCounters numbers that are 0 between kernels: each that uses some leaves them 0.
  unsigned* counters() const { return counters_; }
  static constexpr size_t kCounters = 16384;
  static constexpr size_t kSpare = kCounters;  ///< 64 more, for kernels that need a few beside those

  /// Where kernels read a list: ShapeError naming op and list when it has no copy on the device and lies in memory that
  /// the device does not read. Null for an empty one.
  template <class T>
  const T* reads(const ops::List<T>& list, std::string_view op, std::string_view name) const {
    if (list.empty()) return nullptr;
    if (list.device()) return list.device();
    return static_cast<const T*>(readable(list.data(), op, name));
  }
  const int32_t* reads(const ops::BlockTable& table, std::string_view op) const {
    if (table.size() == 0) return nullptr;
    if (table.device()) return table.device();
    return static_cast<const int32_t*>(readable(table.data(), op, "block_table"));
  }

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
  enum class Lane { own, further };
  Queue(int device, void* native, Lane);
  const void* readable(const void* host, std::string_view op, std::string_view name) const;

  int device_ = 0, major_ = 0, multiprocessors_ = 0;
  cudaStream_t stream_ = nullptr;
  bool own_stream_ = false, own_counters_ = false;
  unsigned* counters_ = nullptr;
  std::unique_ptr<Blas> blas_;
  std::array<std::unique_ptr<Queue>, kLanes - 1> lanes_;
  cudaEvent_t here_ = nullptr;  // where others wait for this one
  int gates_ = 0;
  std::vector<std::weak_ptr<Watched>> watched_, captured_;
};

}  // namespace mla::cuda
