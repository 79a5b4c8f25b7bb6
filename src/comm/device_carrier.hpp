// Below the calls on a GPU's stream: messages between ranks' device memories, queued.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "mla/communicator.hpp"

namespace mla {

class Carrier;

/// One queued round: this rank to each, itself too, and each to it.
struct DeviceExchange {
  std::string_view step;
  std::chrono::nanoseconds deadline;
  std::span<const SendRows> send;  ///< [parts, ranks], one or two parts; to itself as many bytes as from itself
  std::span<const ReceiveRows> receive;
  int64_t most_bytes = 0;  ///< of any message of any rank, its parts together: the same on all ranks; 0: unknown
};

/// Each rank's terms of a sum: send[r] to rank r; out[i] = terms of rank 0 + ... in f32, rounded once, i < count.
struct DeviceSum {
  std::string_view step;
  std::chrono::nanoseconds deadline;
  Dtype dtype;
  std::span<const Exchange::Send> send;  ///< [ranks]; send[rank()] are this rank's own terms
  void* out = nullptr;                   ///< may be this rank's own terms, or all that it sends
  int64_t count = 0;                     ///< of elements that come from every rank
  int64_t most = 0;                      ///< count of the rank with most
};

/// Queues on streams of one device, one stream at a time; may be captured. What goes wrong on the device is thrown when
/// the stream is waited for, as RankError, or by the next call.
class DeviceCarrier {
 public:
  virtual ~DeviceCarrier() = default;
  virtual Device device() const = 0;
  /// Must all ranks have come before one of them queues a call? So where ranks share a process: freeing memory, and
  /// what else waits for devices there, waits for the kernels of all, those too that wait for the rank itself.
  virtual bool meets_first() const = 0;
  virtual void exchange(cuda::Queue& queue, const DeviceExchange& messages) = 0;
  virtual void sum(cuda::Queue& queue, const DeviceSum& terms) = 0;
};

/// Made by all ranks of a group together.
struct DeviceGroup {
  Communicator& host;  ///< what they tell each other to begin with; not afterwards: it may be moved
  Carrier& carrier;    ///< whether the group has failed meanwhile; outlives the device's carrier, as what follows
  std::function<void(const Collective&)> barrier;
  int device = 0;
  GpuLink link = GpuLink::peer;
  std::chrono::nanoseconds deadline;
  size_t staging_bytes = 0;
  bool one_process = false;  ///< of two ranks or more
};

}  // namespace mla
