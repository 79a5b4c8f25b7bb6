// Ranks that work on one model together: what they send each other, in six calls with a deadline each.
//
// A rank is one of a group of threads (thread_communicators) or of whatever the caller connects (Transport). Transports
// carry bytes alone. Sums are made here, from rank 0's values on in the order of the ranks, in f32 with one rounding at
// the end: the same bits over every transport, on every rank and in every run.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mla/device.hpp"
#include "mla/dtype.hpp"
#include "mla/error.hpp"
#include "mla/plan_digest.hpp"

namespace mla {

/// The group cannot go on: a rank is late, has left, has aborted, has failed, or makes another call than the others.
/// Every rank gets one, at once or with its next call; a group that has failed stays so.
class RankError : public DeviceError {
 public:
  RankError(int rank, std::string step, const std::string& what);
  int rank() const { return rank_; }                 ///< the one that the group failed by
  const std::string& step() const { return step_; }  ///< Collective::step of the call that could not be made

 private:
  int rank_;
  std::string step_;
};

/// What every call says of itself.
struct Collective {
  std::string_view step;  ///< what it is for, in messages; the same on all ranks; at most 63 bytes
  std::chrono::nanoseconds deadline = std::chrono::minutes(1);  ///< how long this rank waits for the others; <= 1 day
  /// Of all_to_all and exchange on a GPU: the most bytes of any message of any rank, a message's parts together; the same
  /// number on all ranks. 0: they fit into the group's staging, whatever they are.
  int64_t most_bytes = 0;
  /// Of the plan that the call belongs to: ranks with another one are named by the RankError. Costs no message on the
  /// CPU; on a GPU the ranks of several processes meet on the host for the first call of each plan.
  PlanDigest plan = {};
};

/// A message that lies in memory as rows: `rows` times `bytes`, each `apart` bytes behind the one before.
struct SendRows {
  const void* data = nullptr;  ///< null where nothing is sent
  int64_t rows = 0, bytes = 0, apart = 0;
};
struct ReceiveRows {
  void* data = nullptr;
  int64_t rows = 0, bytes = 0, apart = 0;
};

/// One round of messages: this rank to each, each to this rank.
struct Exchange {
  struct Send {
    const void* data = nullptr;  ///< null where bytes is 0
    size_t bytes = 0;
  };
  struct Receive {
    void* data = nullptr;
    size_t bytes = 0;
  };
  std::string_view step;
  std::chrono::steady_clock::time_point deadline;
  std::span<const Send> send;        ///< [ranks]; nothing to oneself
  std::span<const Receive> receive;  ///< [ranks]; what rank r sends to this one has receive[r].bytes
};

/// A rank's connections, where the caller has them already: an engine's own functions, MPI, sockets. It ends with its
/// communicator; how the others then learn that the rank has left is the transport's matter.
class Transport {
 public:
  virtual ~Transport() = default;
  /// Brings every message to its place and returns by the deadline; messages of two ranks come in the order in which
  /// they were sent. Called by one thread at a time. May read what is sent until it returns. Where it cannot: throws,
  /// a RankError if it knows whose fault it is; any other exception counts as this rank's.
  virtual void exchange(const Exchange& messages) = 0;
  /// Makes the exchanges of all ranks fail, those under way too, as far as it can: by a RankError that names `rank`,
  /// whose fault it is, and the reason. Any thread, at any time; once.
  virtual void abort(int rank, std::string_view reason) noexcept = 0;
};

/// How ranks on GPUs reach each other.
enum class GpuLink : uint8_t {
  peer,  ///< stores into each other's memory, by the ranks' own kernels: GPUs of one machine, at most 16 ranks
  nccl,  ///< NVIDIA's library, looked for when the group is connected (libnccl.so.2)
};
std::string_view to_string(GpuLink link);
GpuLink parse_gpu_link(std::string_view name);  ///< InputError naming the choices

class Carrier;

/// A rank's place in its group. All ranks make the same calls in the same order, one at a time. Memory is the host's.
///
/// Each call has a form that takes a stream. On the CPU's it is the same call. On a GPU's, for which connect() is
/// needed once, memory is the device's, the call is queued and can be captured, and sums have the same bits. Such a
/// rank does not tell the others which call it makes, only of which plan (Collective::plan): ranks that make other
/// calls than the others are found by the deadline at the latest, or, in one process, at once; messages whose two ends
/// expect other sizes are not found. What fails on the device is thrown by Stream::synchronize(), or by the next call.
///
/// Arguments that this rank alone can judge are refused before anybody is told, by ShapeError or InputError; the others
/// then wait for a call that is right. RankError (naming rank and step) when the group fails; output is unspecified
/// then. A call that returns has been made by all ranks. Bytes and counts may differ from rank to rank, and be 0.
class Communicator {
 public:
  /// Rank `rank` of `ranks` over the caller's transport. Before its messages each round exchanges records of some 100
  /// bytes, by which ranks that make another call are found. InputError for a rank outside the group or no transport.
  Communicator(int rank, int ranks, std::unique_ptr<Transport> transport);
  explicit Communicator(std::unique_ptr<Carrier> carrier);
  /// Leaves the group: other threads that wait for this rank, or will, fail at once.
  ~Communicator();
  Communicator(Communicator&&) noexcept;
  Communicator& operator=(Communicator&&) noexcept;

  int rank() const;
  int ranks() const;

  /// Makes calls on streams of this GPU possible; made by all ranks, each for a GPU of its own, with the same link and
  /// staging_bytes. staging_bytes of the device's memory: what a call of more bytes is cut by. DeviceError where the
  /// GPUs do not reach each other, or there is no NCCL.
  void connect(Device device, GpuLink link, size_t staging_bytes = size_t{64} << 20,
               std::chrono::nanoseconds deadline = std::chrono::minutes(1));

  /// out[i] = sum over ranks of in[i], i < count. dtype: f32, bf16 or f16. `out` is `in`, or they lie apart.
  void all_reduce(const Collective& call, Dtype dtype, const void* in, void* out, int64_t count);
  /// out: bytes[0] of rank 0, then bytes[1] of rank 1, ...; the same list on all ranks. `in`: this rank's
  /// bytes[rank()], its own place in `out` or apart from it.
  void all_gather(const Collective& call, const void* in, void* out, std::span<const int64_t> bytes);
  /// out[i] = sum over ranks of in[start + i], i < counts[rank()], where start is the sum of the counts before it; the
  /// same list on all ranks. `out` is in + start, or apart from `in`.
  void reduce_scatter(const Collective& call, Dtype dtype, const void* in, void* out, std::span<const int64_t> counts);
  /// send_bytes[r] to rank r, those to rank 0 first in `in`; receive_bytes[r] from rank r, those of rank 0 first in
  /// `out`. What one rank sends another must be what that one receives of it. in and out lie apart.
  void all_to_all(const Collective& call, const void* in, std::span<const int64_t> send_bytes, void* out,
                  std::span<const int64_t> receive_bytes);
  /// root's bytes to everyone's `data`.
  void broadcast(const Collective& call, int root, void* data, int64_t bytes);
  /// Returns once all ranks are here.
  void barrier(const Collective& call);

  void all_reduce(Stream& stream, const Collective& call, Dtype dtype, const void* in, void* out, int64_t count);
  void all_gather(Stream& stream, const Collective& call, const void* in, void* out, std::span<const int64_t> bytes);
  void reduce_scatter(Stream& stream, const Collective& call, Dtype dtype, const void* in, void* out,
                      std::span<const int64_t> counts);
  void all_to_all(Stream& stream, const Collective& call, const void* in, std::span<const int64_t> send_bytes,
                  void* out, std::span<const int64_t> receive_bytes);
  void broadcast(Stream& stream, const Collective& call, int root, void* data, int64_t bytes);
  /// all_to_all of one or two parts in one round, of which each message has a place of its own: send[part * ranks + r]
  /// goes to rank r, receive[part * ranks + r] comes from it. What is sent and its place may be cut into other rows;
  /// bytes are the same. What is sent and received does not overlap, but for a message to this rank itself that stays
  /// where it is.
  void exchange(Stream& stream, const Collective& call, std::span<const SendRows> send,
                std::span<const ReceiveRows> receive);

  /// The group ends: the others' calls, those that wait too, fail with this rank and the reason. Any thread, at any
  /// time.
  void abort(std::string_view reason) noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A group of threads of this process: [ranks], one for each thread. ranks from 1 to 1024, else InputError. What a rank
/// sends is copied once into memory of the group, so that no rank ever reads another's.
std::vector<Communicator> thread_communicators(int ranks);

}  // namespace mla
