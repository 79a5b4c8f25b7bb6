// Ranks that the caller connects. A round of records comes first: what it says makes the sizes of the second one known
// to be right at both ends, so that a transport never waits for bytes that nobody sends.
#include "comm/transport.hpp"

#include <exception>
#include <mutex>
#include <utility>

#include "comm/carrier.hpp"

namespace mla {
namespace {

// A rank's record, and what it is about to send to the one that reads it.
struct Announcement {
  Record record;
  uint64_t bytes = 0;
};

class TransportCarrier final : public Carrier {
 public:
  TransportCarrier(int rank, int ranks, std::unique_ptr<Transport> transport)
      : rank_(rank), ranks_(ranks), transport_(std::move(transport)), mine_(ranks), theirs_(ranks) {}
  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }

  void carry(const Record& record, const Exchange& messages) override {
    {
      const std::lock_guard lock(mutex_);
      if (fault_) throw RankError(fault_->rank, fault_->step, fault_->what);
      last_ = record;
    }
    std::vector<Exchange::Send> send(ranks_);
    std::vector<Exchange::Receive> receive(ranks_);
    for (int r = 0; r < ranks_; ++r) {
      mine_[r] = {record, messages.send[r].bytes};
      if (r == rank_) theirs_[r] = mine_[r];
      else send[r] = {&mine_[r], sizeof(Announcement)}, receive[r] = {&theirs_[r], sizeof(Announcement)};
    }
    exchange(record, {messages.step, messages.deadline, send, receive});

    std::vector<Record> records;
    for (Announcement& a : theirs_) {
      a.record.step[sizeof a.record.step - 1] = 0;
      records.push_back(a.record);
    }
    if (std::optional<Fault> why = disagreement(records)) fail(*std::move(why));
    for (int r = 0; r < ranks_; ++r)
      if (r != rank_ && theirs_[r].bytes != messages.receive[r].bytes)
        fail(size_disagreement(record, r, rank_, theirs_[r].bytes, messages.receive[r].bytes));
    if (record.operation != Operation::barrier) exchange(record, messages);
  }

  void check() const override {
    const std::lock_guard lock(mutex_);
    if (fault_) throw RankError(fault_->rank, fault_->step, fault_->what);
  }

  void abort(std::string_view reason) noexcept override {
    try {
      const std::lock_guard lock(mutex_);
      if (fault_) return;
      fault_ = Fault{rank_, last_.step, "rank " + std::to_string(rank_) + " aborted: " + std::string(reason)};
    } catch (...) {  // no memory for a message; the others are told
    }
    transport_->abort(rank_, reason);
  }

 private:
  void exchange(const Record& record, const Exchange& messages) {
    try {
      transport_->exchange(messages);
    } catch (const RankError& e) {
      // What another rank's abort says of the same call begins with it already.
      const std::string at = to_string(record) + ": ", what = e.what();
      fail({e.rank(), std::string(messages.step), what.starts_with(at) ? what : at + what});
    } catch (const std::exception& e) {
      fail(
          {rank_, std::string(messages.step), to_string(record) + ": rank " + std::to_string(rank_) + ": " + e.what()});
    } catch (...) {
      fail({rank_, std::string(messages.step),
            to_string(record) + ": rank " + std::to_string(rank_) + "'s transport threw what is no std::exception"});
    }
  }

  // The first fault stays, also one that abort() left while a round was under way.
  [[noreturn]] void fail(Fault why) {
    bool first = false;
    {
      const std::lock_guard lock(mutex_);
      if (!fault_) fault_ = std::move(why), first = true;
    }
    if (first) transport_->abort(fault_->rank, fault_->what);
    throw RankError(fault_->rank, fault_->step, fault_->what);
  }

  const int rank_, ranks_;
  const std::unique_ptr<Transport> transport_;
  std::vector<Announcement> mine_, theirs_;
  mutable std::mutex mutex_;
  std::optional<Fault> fault_;  // once set it stays as it is
  Record last_;
};

}  // namespace

std::unique_ptr<Carrier> carry_by(int rank, int ranks, std::unique_ptr<Transport> transport) {
  constexpr int kMost = 65536;
  if (ranks < 1 || ranks > kMost)
    throw InputError("Communicator: ranks is " + std::to_string(ranks) + ", allowed 1 to " + std::to_string(kMost));
  if (rank < 0 || rank >= ranks)
    throw InputError("Communicator: rank is " + std::to_string(rank) + ", allowed 0 to " + std::to_string(ranks - 1));
  if (!transport) throw InputError("Communicator: no transport");
  return std::make_unique<TransportCarrier>(rank, ranks, std::move(transport));
}

}  // namespace mla
