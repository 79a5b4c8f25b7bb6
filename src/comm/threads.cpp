// Ranks that are threads of one process.
//
// A round has one meeting. Each rank copies what it sends into its seat, then arrives; the last to arrive compares the
// records and lets all go on; then each copies what is for it out of the others' seats. A rank has two seats and takes
// them in turn: who arrives at round k + 1 has read all of round k, so a seat is free again when round k + 2 fills it.
// Copies are what makes faults harmless: a rank that gives up and frees its memory takes nothing from under a slow one.
//
//     what            written by                     read by                        lies still
//     seat[k % 2]     its rank, before it arrives    all, once the round is open    from arrival to the rank's round k
//     + 2 round, fault    under the lock                 spinning ranks, too (atomic)   fault: once there is one, for
//     ever
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <utility>

#include "comm/carrier.hpp"
#include "core/topology.hpp"

namespace mla {
namespace {

struct Seat {
  struct Part {
    size_t at, bytes;  // what goes to a rank
    size_t expected;   // what comes from it
  };
  Record record;
  std::vector<Part> parts;  // [ranks]; at: in memory
  std::vector<std::byte> memory;

  // What is sent to several ranks lies here once.
  void fill(const Record& r, std::span<const Exchange::Send> send, std::span<const Exchange::Receive> receive) {
    record = r;
    parts.assign(send.size(), {0, 0, 0});
    size_t bytes = 0, last = send.size();
    for (size_t i = 0; i < send.size(); ++i) {
      parts[i].expected = receive[i].bytes;
      if (send[i].bytes == 0) continue;
      if (last < send.size() && send[i].data == send[last].data && send[i].bytes == send[last].bytes) {
        parts[i].at = parts[last].at, parts[i].bytes = parts[last].bytes;
        continue;
      }
      parts[i].at = bytes, parts[i].bytes = send[i].bytes;
      bytes += send[i].bytes;
      last = i;
    }
    if (memory.size() < bytes) memory.resize(bytes);
    for (size_t i = 0, filled = 0; i < send.size(); ++i) {
      if (parts[i].bytes == 0 || parts[i].at < filled) continue;
      std::memcpy(memory.data() + parts[i].at, send[i].data, send[i].bytes);
      filled = parts[i].at + parts[i].bytes;
    }
  }
};

struct Group {
  struct Rank {
    Seat seats[2];
    Record last;  // of the newest round that it arrived at
    bool here = false, gone = false;
  };
  std::vector<Rank> ranks;
  std::mutex mutex;
  std::condition_variable wake;
  int arrived = 0;
  std::atomic<uint64_t> round{0};  // the newest that is open
  std::atomic<bool> failed{false};
  Fault fault{-1, "", "aborted"};

  const bool may_spin;  // has each rank a processor?

  explicit Group(int n) : ranks(n), may_spin(n <= usable_processors()) {}

  std::string last_seen(int rank) const {
    const Record& last = ranks[rank].last;
    return last.round == 0 ? "it has made no call yet" : "the last it made was " + to_string(last);
  }

  // Under the lock, as the next two.
  void fail(Fault why) {
    if (failed) return;
    fault = std::move(why);
    failed = true;
    wake.notify_all();
  }
  int first(bool Rank::*is, bool value) const {
    for (size_t r = 0; r < ranks.size(); ++r)
      if (ranks[r].*is == value) return static_cast<int>(r);
    return -1;
  }
  // Someone waits for a rank that will not come.
  void fail_if_one_is_gone() {
    const int waiting = first(&Rank::here, true), gone = first(&Rank::gone, true);
    if (waiting < 0 || gone < 0) return;
    const Record& at = ranks[waiting].last;
    fail({gone, at.step, to_string(at) + ": rank " + std::to_string(gone) + " has left the group, " + last_seen(gone)});
  }

  void open_or_fail(uint64_t k) {
    std::vector<Record> records;
    for (const Rank& r : ranks) records.push_back(r.seats[k % 2].record);
    if (std::optional<Fault> why = disagreement(records)) return fail(*std::move(why));
    for (size_t from = 0; from < ranks.size(); ++from) {
      for (size_t to = 0; to < ranks.size(); ++to) {
        const size_t sent = ranks[from].seats[k % 2].parts[to].bytes;
        const size_t expected = ranks[to].seats[k % 2].parts[from].expected;
        if (sent != expected)
          return fail(size_disagreement(records[0], static_cast<int>(from), static_cast<int>(to), sent, expected));
      }
    }
    round.store(k, std::memory_order_release);
    arrived = 0;
    for (Rank& r : ranks) r.here = false;
    wake.notify_all();
  }
};

class ThreadCarrier final : public Carrier {
 public:
  ThreadCarrier(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}
  ~ThreadCarrier() override {
    or_silently([this] {
      const std::lock_guard lock(group_->mutex);
      group_->ranks[rank_].gone = true;
      group_->fail_if_one_is_gone();
    });
  }
  int rank() const override { return rank_; }
  int ranks() const override { return static_cast<int>(group_->ranks.size()); }

  void carry(const Record& record, const Exchange& messages) override {
    Group& g = *group_;
    const uint64_t k = record.round;
    Group::Rank& self = g.ranks[rank_];
    if (!g.failed) self.seats[k % 2].fill(record, messages.send, messages.receive);
    meet(k, record, messages.deadline);
    for (int r = 0; r < ranks(); ++r) {
      if (r == rank_) continue;
      const Seat& seat = g.ranks[r].seats[k % 2];
      const Exchange::Receive& to = messages.receive[r];
      const Seat::Part& part = seat.parts[rank_];
      if (to.bytes > 0) std::memcpy(to.data, seat.memory.data() + part.at, to.bytes);
    }
  }

  void check() const override {
    if (!group_->failed) return;
    const std::lock_guard lock(group_->mutex);
    throw error();
  }

  void abort(std::string_view reason) noexcept override {
    or_silently([&] {
      Group& g = *group_;
      const std::lock_guard lock(g.mutex);
      g.fail({rank_, g.ranks[rank_].last.step,
              "rank " + std::to_string(rank_) + " aborted: " + std::string(reason) + "; " + g.last_seen(rank_)});
    });
  }

 private:
  // Where there is no memory for a message the group ends without one.
  template <class F>
  void or_silently(F&& f) noexcept {
    try {
      f();
    } catch (...) {
      const std::lock_guard lock(group_->mutex);
      group_->failed = true;
      group_->wake.notify_all();
    }
  }
  RankError error() const { return {group_->fault.rank, group_->fault.step, group_->fault.what}; }

  void meet(uint64_t k, const Record& record, std::chrono::steady_clock::time_point deadline) {
    Group& g = *group_;
    std::unique_lock lock(g.mutex);
    if (g.failed) throw error();
    g.ranks[rank_].last = record;
    g.ranks[rank_].here = true;
    if (++g.arrived == ranks()) g.open_or_fail(k);
    else g.fail_if_one_is_gone();

    const auto over = [&] { return g.round.load(std::memory_order_acquire) >= k || g.failed; };
    if (!over()) {
      // Others are often a few microseconds away, and waking a sleeping thread costs more. Not where they need this
      // core.
      lock.unlock();
      if (g.may_spin) {
        for (int i = 0; i < 4000 && !over(); ++i) {
#if defined(__x86_64__)
          __builtin_ia32_pause();
#endif
        }
      }
      lock.lock();
      if (!g.wake.wait_until(lock, deadline, over)) {
        const int late = g.first(&Group::Rank::here, false);
        g.fail({late, record.step,
                to_string(record) + ": rank " + std::to_string(late) + " did not come before rank " +
                    std::to_string(rank_) + "'s deadline, " + g.last_seen(late)});
      }
    }
    if (g.round.load(std::memory_order_acquire) < k) throw error();
  }

  std::shared_ptr<Group> group_;
  int rank_;
};

}  // namespace

std::vector<Communicator> thread_communicators(int ranks) {
  constexpr int kMost = 1024;
  if (ranks < 1 || ranks > kMost)
    throw InputError("thread_communicators: ranks is " + std::to_string(ranks) + ", allowed 1 to " +
                     std::to_string(kMost));
  const auto group = std::make_shared<Group>(ranks);
  std::vector<Communicator> all;
  for (int r = 0; r < ranks; ++r) all.emplace_back(std::make_unique<ThreadCarrier>(group, r));
  return all;
}

}  // namespace mla
