// Ranks' messages by NCCL's sends and receives; sums are made here, so that their order is the ranks'.
//
// The library is looked for when a group is connected: nothing is linked. nccl.h gives its types, where the toolkit has
// it.
#include "backend/cuda/comm/group.hpp"
#include "backend/cuda/core/check.hpp"
#include "backend/cuda/core/queue.hpp"
#include "core/gpu.hpp"

#if __has_include(<nccl.h>)
#include <dlfcn.h>
#include <nccl.h>

#include <algorithm>
#include <mutex>
#include <type_traits>

namespace mla::cuda {
namespace {

struct Nccl {
  decltype(&::ncclGetErrorString) error = nullptr;
  decltype(&::ncclGetUniqueId) unique_id = nullptr;
  decltype(&::ncclCommInitRank) init = nullptr;
  decltype(&::ncclCommDestroy) destroy = nullptr;
  decltype(&::ncclCommAbort) abort = nullptr;
  decltype(&::ncclCommGetAsyncError) async_error = nullptr;
  decltype(&::ncclGroupStart) group_start = nullptr;
  decltype(&::ncclGroupEnd) group_end = nullptr;
  decltype(&::ncclSend) send = nullptr;
  decltype(&::ncclRecv) receive = nullptr;

  // Loaded once, kept: what it has started does not end with a group.
  static const Nccl& library() {
    static const Nccl loaded;
    return loaded;
  }

 private:
  Nccl() {
    void* const at = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!at) {
      const char* why = dlerror();
      throw DeviceError(std::string("communicator: NCCL is not there: ") + (why ? why : "libnccl.so.2"));
    }
    const auto find = [&](auto& f, const char* name) {
      f = reinterpret_cast<std::remove_reference_t<decltype(f)>>(dlsym(at, name));
      if (!f) throw DeviceError(std::string("communicator: libnccl.so.2 has no ") + name);
    };
    find(error, "ncclGetErrorString"), find(unique_id, "ncclGetUniqueId"), find(init, "ncclCommInitRank");
    find(destroy, "ncclCommDestroy"), find(abort, "ncclCommAbort"), find(async_error, "ncclCommGetAsyncError");
    find(group_start, "ncclGroupStart"), find(group_end, "ncclGroupEnd"), find(send, "ncclSend");
    find(receive, "ncclRecv");
  }
};

class NcclCarrier final : public DeviceCarrier {
 public:
  explicit NcclCarrier(const DeviceGroup& g)
      : rank_(g.host.rank()),
        ranks_(g.host.ranks()),
        device_(g.device),
        terms_bytes_(static_cast<int64_t>(g.staging_bytes / static_cast<size_t>(ranks_) / 256 * 256)),
        terms_(shared_memory(static_cast<size_t>(std::max<int64_t>(terms_bytes_, 256)) * static_cast<size_t>(ranks_),
                             device_, "staging of ranks' messages")),
        watch_(std::make_shared<Watch>(g)) {
    terms_bytes_ = std::max<int64_t>(terms_bytes_, 256);
    ncclUniqueId id{};
    if (rank_ == 0) require(nccl_.unique_id(&id), "ncclGetUniqueId");
    g.host.broadcast({"NCCL's group", g.deadline}, 0, &id, sizeof id);
    // NCCL waits for all without a deadline: they come from here together.
    g.host.barrier({"NCCL", g.deadline});
    require(nccl_.init(&watch_->comm, ranks_, id, rank_), "ncclCommInitRank");
    // Ranks are connected by their first messages: now, not while a stream is held or captured.
    const std::vector<Exchange::Send> send(static_cast<size_t>(ranks_), {terms_.get(), 1});
    std::vector<Exchange::Receive> receive;
    for (int r = 0; r < ranks_; ++r) receive.push_back({terms_.get() + r * terms_bytes_ + 1, 1});
    Queue first(device_, nullptr);
    begin(first, "NCCL's first messages", g.deadline);
    messages(first, send, receive);
    gpu::synchronize(first);
  }
  ~NcclCarrier() override { watch_->close(); }
  Device device() const override { return {DeviceKind::cuda, device_}; }
  bool meets_first() const override { return watch_->meets; }

  void exchange(Queue& queue, const DeviceExchange& e) override {
    begin(queue, e.step, e.deadline);
    // NCCL's messages are dense: rows that are apart go through the staging. Whatever the rows, both ends cut a message
    // alike, into pieces for which all messages between ranks have room there.
    const size_t ranks = static_cast<size_t>(ranks_), self = static_cast<size_t>(rank_), count = e.send.size();
    const auto between = static_cast<int64_t>(count - count / ranks);
    const int64_t room = terms_bytes_ * ranks_ / (2 * std::max<int64_t>(between, 1)) / 16 * 16;
    const auto rows_of = [](const auto& m) {
      return Rows<std::remove_pointer_t<decltype(m.data)>>{m.data, m.rows, m.bytes, m.apart};
    };
    for (size_t i = self; i < count; i += ranks) copy_own(queue, e.step, rows_of(e.send[i]), rows_of(e.receive[i]));
    std::vector<Exchange::Send> send(count);
    std::vector<Exchange::Receive> receive(count);
    bool more = true;
    for (int64_t first = 0; more; first += room) {
      more = false;
      const auto piece = [&](const auto& rows) {
        more |= rows.size() > first + room;
        return std::clamp<int64_t>(rows.size() - first, 0, room);
      };
      std::byte* staged = terms_.get();
      for (size_t i = 0; i < count; ++i) {
        if (i % ranks == self) continue;
        const auto from = rows_of(e.send[i]);
        const auto to = rows_of(e.receive[i]);
        const int64_t sent = piece(from), got = piece(to);
        send[i] = {staged, static_cast<size_t>(sent)}, receive[i] = {staged + room, static_cast<size_t>(got)};
        if (!from.dense()) copy(queue, e.step, staged, from, first, sent);
        else if (sent > 0) send[i].data = static_cast<const std::byte*>(from.data) + first;
        if (to.dense() && got > 0) receive[i].data = static_cast<std::byte*>(to.data) + first;
        staged += 2 * room;
      }
      messages(queue, send, receive);
      for (size_t i = 0; i < count; ++i)
        if (const auto to = rows_of(e.receive[i]); i % ranks != self && !to.dense())
          copy(queue, e.step, receive[i].data, to, first, static_cast<int64_t>(receive[i].bytes));
    }
  }

  void sum(Queue& queue, const DeviceSum& s) override {
    begin(queue, s.step, s.deadline);
    const auto size = static_cast<int64_t>(size_of(s.dtype));
    const int64_t room = terms_bytes_ / size;
    std::vector<Exchange::Send> send(static_cast<size_t>(ranks_));
    std::vector<Exchange::Receive> receive(static_cast<size_t>(ranks_));
    for (int64_t first = 0; first < s.most; first += room) {
      const auto part = [&](int64_t elements) {
        return static_cast<size_t>(std::clamp<int64_t>(elements - first, 0, room) * size);
      };
      for (size_t r = 0; r < send.size(); ++r) {
        const auto& of = s.send[r];
        send[r] = {static_cast<const std::byte*>(of.data) + first * size, part(static_cast<int64_t>(of.bytes) / size)};
        receive[r] = {terms_.get() + static_cast<int64_t>(r) * terms_bytes_, part(s.count)};
      }
      messages(queue, send, receive);
      if (first < s.count)
        sum_terms(queue.stream(), s.dtype, send[static_cast<size_t>(rank_)].data, terms_.get(), terms_bytes_, rank_,
                  ranks_, static_cast<std::byte*>(s.out) + first * size, std::min(room, s.count - first));
    }
  }

 private:
  // Of a message: `bytes` each, `apart` bytes from one to the next.
  template <class Data>
  struct Rows {
    Data* data;
    int64_t rows, bytes, apart;
    int64_t size() const { return rows * bytes; }
    bool dense() const { return rows <= 1 || apart == bytes; }
  };
  // What a rank sends itself: in one copy, but for rows of two widths.
  void copy_own(Queue& queue, std::string_view step, const Rows<const void>& from, const Rows<void>& to) const {
    if (from.data == to.data) return;
    if (from.dense()) return copy(queue, step, from.data, to, 0, from.size());
    if (to.dense()) return copy(queue, step, static_cast<std::byte*>(to.data), from, 0, from.size());
    if (from.bytes == to.bytes)
      return copy(queue, step, to.data, to.apart, from.data, from.apart, from.bytes, from.rows);
    const int64_t room = terms_bytes_ * ranks_;
    for (int64_t first = 0; first < from.size(); first += room) {
      const int64_t bytes = std::min(room, from.size() - first);
      copy(queue, step, terms_.get(), from, first, bytes);
      copy(queue, step, terms_.get(), to, first, bytes);
    }
  }
  // Bytes [first, first + count) of what lies in rows, from them to a dense place or from there to them.
  static void copy(Queue& queue, std::string_view step, std::byte* to, const Rows<const void>& from, int64_t first,
                   int64_t count) {
    each_run(from, first, count, [&](int64_t at, int64_t offset, int64_t bytes, int64_t rows) {
      copy(queue, step, to + at, bytes, static_cast<const std::byte*>(from.data) + offset, from.apart, bytes, rows);
    });
  }
  static void copy(Queue& queue, std::string_view step, const void* from, const Rows<void>& to, int64_t first,
                   int64_t count) {
    each_run(to, first, count, [&](int64_t at, int64_t offset, int64_t bytes, int64_t rows) {
      copy(queue, step, static_cast<std::byte*>(to.data) + offset, to.apart, static_cast<const std::byte*>(from) + at,
           bytes, bytes, rows);
    });
  }
  static void copy(Queue& queue, std::string_view step, void* to, int64_t to_apart, const void* from,
                   int64_t from_apart, int64_t bytes, int64_t rows) {
    check(cudaMemcpy2DAsync(to, static_cast<size_t>(std::max(to_apart, bytes)), from,
                            static_cast<size_t>(std::max(from_apart, bytes)), static_cast<size_t>(bytes),
                            static_cast<size_t>(rows), cudaMemcpyDeviceToDevice, queue.stream()),
          step, "rows of a message");
  }
  // run(bytes before it, its offset in the rows' memory, bytes of a row, rows): the rest of a row, whole rows, and the
  // beginning of one.
  template <class Data, class F>
  static void each_run(const Rows<Data>& m, int64_t first, int64_t count, F&& run) {
    if (m.dense()) {
      if (count > 0) run(0, first, count, 1);
      return;
    }
    for (int64_t at = 0; at < count;) {
      const int64_t row = (first + at) / m.bytes, column = (first + at) % m.bytes, left = count - at;
      const bool whole = column == 0 && left >= m.bytes;
      const int64_t bytes = whole ? m.bytes : std::min(m.bytes - column, left), rows = whole ? left / m.bytes : 1;
      run(at, row * m.apart + column, bytes, rows);
      at += bytes * rows;
    }
  }

  // NCCL's kernels wait for ever: whoever waits for the stream ends them when their time is over.
  struct Watch final : Watched {
    explicit Watch(const DeviceGroup& g)
        : carrier(&g.carrier), barrier(g.barrier), meets(g.one_process), deadline(g.deadline) {}
    ~Watch() override { close(); }
    void launching() override {
      if (carrier && meets) barrier({"captured step", deadline});
      since = std::chrono::steady_clock::now();
    }
    void check(bool waiting) override {
      if (!carrier) return;
      if (!failed.empty()) throw RankError(failed_rank, step, failed);
      try {
        carrier->check();
      } catch (const RankError& e) {
        fail(e.rank(), e.what());
      }
      ncclResult_t status = ncclSuccess;
      if (comm) nccl.async_error(comm, &status);
      if (status != ncclSuccess && status != ncclInProgress)
        fail(carrier->rank(), std::string("NCCL: ") + nccl.error(status));
      if (!waiting || std::chrono::steady_clock::now() < since + deadline) return;
      // Who else waits comes here, too; who does not is late.
      try {
        barrier({"who is late", std::chrono::seconds(1)});
      } catch (const RankError& e) {
        fail(e.rank(), "rank " + std::to_string(e.rank()) + " did not come before the deadline");
      }
      fail(carrier->rank(), "NCCL's messages were not done before the deadline, all ranks wait");
    }
    [[noreturn]] void fail(int rank, const std::string& why) {
      failed = step + ": " + why, failed_rank = rank;
      if (comm) nccl.abort(std::exchange(comm, nullptr));
      carrier->abort(failed);
      throw RankError(rank, step, failed);
    }
    void close() {
      carrier = nullptr;
      if (comm) nccl.destroy(std::exchange(comm, nullptr));
    }
    const Nccl& nccl = Nccl::library();
    ncclComm_t comm = nullptr;
    Carrier* carrier;  // null once the group has gone
    std::function<void(const Collective&)> barrier;
    const bool meets;
    std::chrono::nanoseconds deadline;
    std::chrono::steady_clock::time_point since;
    std::string step, failed;
    int failed_rank = -1;
  };

  void require(ncclResult_t status, const char* call) const {
    if (status != ncclSuccess && status != ncclInProgress)
      throw DeviceError(std::string("communicator: ") + call + ": " + nccl_.error(status));
  }
  void begin(Queue& queue, std::string_view step, std::chrono::nanoseconds deadline) {
    watch_->check(false);
    watch_->step = step, watch_->deadline = deadline;
    watch_->since = std::chrono::steady_clock::now();
    if (gpu::capturing(queue)) queue.capture(watch_);
    else queue.watch(watch_);
  }
  void messages(Queue& queue, std::span<const Exchange::Send> send, std::span<const Exchange::Receive> receive) {
    require(nccl_.group_start(), "ncclGroupStart");
    for (size_t i = 0; i < send.size(); ++i) {
      const int r = static_cast<int>(i % static_cast<size_t>(ranks_));
      if (r == rank_) continue;
      const auto& s = send[i];
      const auto& got = receive[i];
      if (s.bytes > 0) require(nccl_.send(s.data, s.bytes, ncclInt8, r, watch_->comm, queue.stream()), "ncclSend");
      if (got.bytes > 0)
        require(nccl_.receive(got.data, got.bytes, ncclInt8, r, watch_->comm, queue.stream()), "ncclRecv");
    }
    require(nccl_.group_end(), "ncclGroupEnd");
  }

  const Nccl& nccl_ = Nccl::library();
  const int rank_, ranks_, device_;
  int64_t terms_bytes_;
  std::shared_ptr<std::byte> terms_;
  std::shared_ptr<Watch> watch_;
};

}  // namespace

std::unique_ptr<DeviceCarrier> connect_nccl(const DeviceGroup& g) { return std::make_unique<NcclCarrier>(g); }

}  // namespace mla::cuda

#else

namespace mla::cuda {
std::unique_ptr<DeviceCarrier> connect_nccl(const DeviceGroup&) {
  throw UnsupportedError("communicator: link nccl, this build found no nccl.h; link peer serves GPUs of one machine");
}
}  // namespace mla::cuda

#endif
