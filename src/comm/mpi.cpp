// A transport over MPI's point-to-point messages.
//
// Bytes are copied into memory of the transport's own before they are sent, and out of it once they have come: what MPI
// still holds when a round fails is then nobody else's. A round that fails leaves its memory and its requests behind,
// with the group, which is of no more use.
#include "mla/mpi.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

namespace mla {
namespace {

enum Tag : int { kData = 1, kAbort = 2, kLeft = 3, kWaits = 4 };
// A rank whose deadline has passed says so (kWaits) and looks this long for who else does: those are themselves waiting
// for somebody, in a round before, and are not whom the group fails by.
constexpr std::chrono::milliseconds kGrace(250);
constexpr size_t kMostBytes = size_t{1} << 30;  // of one of MPI's messages, which count in int
constexpr size_t kReason = 512;

void require(int status, const char* call) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(status, text, &length);
  throw DeviceError(std::string("mpi: ") + call + ": " + text);
}

/// What ends a group: who and why.
struct Notice {
  int rank;
  char reason[kReason];
};

class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(MPI_Comm comm) {
    int initialised = 0, provided = MPI_THREAD_SINGLE;
    require(MPI_Initialized(&initialised), "MPI_Initialized");
    if (!initialised) throw InputError("mpi_communicator: MPI is not initialised");
    require(MPI_Query_thread(&provided), "MPI_Query_thread");
    if (provided != MPI_THREAD_MULTIPLE)
      throw InputError("mpi_communicator: MPI was initialised with thread level " + std::to_string(provided) +
                       ", MPI_THREAD_MULTIPLE (" + std::to_string(MPI_THREAD_MULTIPLE) + ") is needed");
    require(MPI_Comm_dup(comm, &comm_), "MPI_Comm_dup");
    require(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    require(MPI_Comm_size(comm_, &ranks_), "MPI_Comm_size");
    left_.resize(static_cast<size_t>(ranks_));
    waits_.resize(static_cast<size_t>(ranks_));
  }
  // Others that wait for this rank learn that it has left. The duplicate stays: freeing it would wait for them.
  ~MpiTransport() override { tell_all(kLeft, rank_, "has left the group"); }

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  void exchange(const Exchange& messages) override {
    auto round = std::make_unique<Round>();
    const size_t n = static_cast<size_t>(ranks_);
    round->out.resize(n), round->in.resize(n);
    const auto request = [&](size_t of) {
      round->partners.push_back(static_cast<int>(of));
      return &round->requests.emplace_back(MPI_REQUEST_NULL);
    };
    for (size_t r = 0; r < n; ++r) {
      round->in[r].resize(messages.receive[r].bytes);
      for (size_t at = 0; at < round->in[r].size(); at += kMostBytes)
        require(MPI_Irecv(round->in[r].data() + at, count(round->in[r].size() - at), MPI_BYTE, static_cast<int>(r),
                          kData, comm_, request(r)),
                "MPI_Irecv");
    }
    const size_t receives = round->requests.size();
    for (size_t r = 0; r < n; ++r) {
      const auto* from = static_cast<const std::byte*>(messages.send[r].data);
      round->out[r].assign(from, from + messages.send[r].bytes);
      for (size_t at = 0; at < round->out[r].size(); at += kMostBytes)
        require(MPI_Isend(round->out[r].data() + at, count(round->out[r].size() - at), MPI_BYTE, static_cast<int>(r),
                          kData, comm_, request(r)),
                "MPI_Isend");
    }
    try {
      wait(*round, receives, messages);
    } catch (...) {
      (void)round.release();  // MPI may still write there
      throw;
    }
    for (size_t r = 0; r < n; ++r)
      if (!round->in[r].empty()) std::memcpy(messages.receive[r].data, round->in[r].data(), round->in[r].size());
  }

  void abort(int rank, std::string_view reason) noexcept override { tell_all(kAbort, rank, reason); }

 private:
  struct Round {
    std::vector<std::vector<std::byte>> out, in;  // by rank
    std::vector<MPI_Request> requests;            // receives, then sends
    std::vector<int> partners;                    // of each request
  };
  static int count(size_t left) { return static_cast<int>(std::min(left, kMostBytes)); }

  void wait(Round& round, size_t receives, const Exchange& messages) {
    std::vector<int> indices;
    bool told = false;
    for (int i = 0;; ++i) {
      // Those that are done become null.
      int done = 0;
      indices.resize(round.requests.size());
      require(MPI_Testsome(static_cast<int>(round.requests.size()), round.requests.data(), &done, indices.data(),
                           MPI_STATUSES_IGNORE),
              "MPI_Testsome");
      if (std::all_of(round.requests.begin(), round.requests.end(),
                      [](const MPI_Request& r) { return r == MPI_REQUEST_NULL; }))
        return;
      // Of ranks in the order of their number: the first that has not sent everything, or not taken it.
      const auto waits_for = [&](size_t begin, size_t end, auto&& but) {
        for (size_t k = begin; k < end; ++k)
          if (round.requests[k] != MPI_REQUEST_NULL && !but(round.partners[k])) return round.partners[k];
        return -1;
      };
      const auto nobody = [](int) { return false; };
      if (i % 64 == 63) {
        look_for_notices(messages);
        // A rank that has left sent all that it had to before: what has not come two looks later never does.
        if (const int r = waits_for(0, receives, nobody);
            r >= 0 && left_[static_cast<size_t>(r)] && ++left_[static_cast<size_t>(r)] > 3)
          throw RankError(r, std::string(messages.step), "rank " + std::to_string(r) + " has left the group");
        const auto now = std::chrono::steady_clock::now();
        if (now >= messages.deadline && !told) {
          tell_all(kWaits, rank_, "");
          told = true;
        }
        if (now >= messages.deadline + kGrace) {
          const size_t all = round.requests.size();
          const auto waiting = [&](int r) { return now - waits_[static_cast<size_t>(r)] < 4 * kGrace; };
          int late = waits_for(0, receives, waiting), taker = waits_for(receives, all, waiting);
          if (late < 0 && taker < 0) late = waits_for(0, receives, nobody), taker = waits_for(receives, all, nobody);
          const std::string before = " before rank " + std::to_string(rank_) + "'s deadline";
          if (late >= 0)
            throw RankError(late, std::string(messages.step),
                            "rank " + std::to_string(late) + " did not come" + before);
          throw RankError(taker, std::string(messages.step),
                          "rank " + std::to_string(taker) + " did not take what was sent to it" + before);
        }
      }
      if (i > 256) std::this_thread::yield();  // others may need this processor to come
    }
  }

  void look_for_notices(const Exchange& messages) {
    for (const Tag tag : {kAbort, kLeft, kWaits}) {
      for (;;) {
        int there = 0;
        MPI_Status status;
        require(MPI_Iprobe(MPI_ANY_SOURCE, tag, comm_, &there, &status), "MPI_Iprobe");
        if (!there) break;
        Notice notice{};
        require(MPI_Recv(&notice, sizeof notice, MPI_BYTE, status.MPI_SOURCE, tag, comm_, MPI_STATUS_IGNORE),
                "MPI_Recv");
        notice.reason[kReason - 1] = 0;
        if (tag == kAbort) throw RankError(notice.rank, std::string(messages.step), notice.reason);
        const auto of = static_cast<size_t>(status.MPI_SOURCE);
        if (tag == kLeft) left_[of] = 1;
        else waits_[of] = std::chrono::steady_clock::now();
      }
    }
  }

  // Does not wait: the notice is left to MPI.
  void tell_all(Tag tag, int rank, std::string_view reason) noexcept {
    auto* notice = new (std::nothrow) Notice{rank, {}};
    if (!notice) return;
    std::memcpy(notice->reason, reason.data(), std::min(reason.size(), kReason - 1));
    for (int r = 0; r < ranks_; ++r) {
      if (r == rank_) continue;
      MPI_Request request = MPI_REQUEST_NULL;
      if (MPI_Isend(notice, sizeof *notice, MPI_BYTE, r, tag, comm_, &request) == MPI_SUCCESS)
        MPI_Request_free(&request);
    }
    keep(notice);
  }
  // MPI reads them at any later time.
  static void keep(const Notice* notice) noexcept {
    static std::mutex mutex;
    static auto* const all = new std::vector<const Notice*>;
    const std::lock_guard lock(mutex);
    try {
      all->push_back(notice);
    } catch (const std::bad_alloc&) {  // kept all the same, only found by nobody
    }
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, ranks_ = 1;
  std::vector<int> left_;                                     // 0, or looks since it was known
  std::vector<std::chrono::steady_clock::time_point> waits_;  // when each rank last said that it waits
};

}  // namespace

Communicator mpi_communicator(MPI_Comm comm) {
  auto transport = std::make_unique<MpiTransport>(comm);
  const int rank = transport->rank(), ranks = transport->ranks();
  return Communicator(rank, ranks, std::move(transport));
}

}  // namespace mla
