// A rank's place in its group as Python holds it.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "mla/communicator.hpp"
#include "mla/model.hpp"

namespace mla::python {

namespace nb = nanobind;

/// A caller's own, of a group over them: kept here, where Python's collector sees them, not by the transport.
struct RankFunctions {
  nb::object exchange, abort;
};

/// Calls of several Python threads on one rank take turns; abort() waits for none of them. A group that was left is
/// over for its rank, too.
class PyCommunicator {
 public:
  explicit PyCommunicator(Communicator made, std::unique_ptr<RankFunctions> functions = nullptr)
      : functions(std::move(functions)), group_(std::make_shared<Communicator>(std::move(made))) {
    rank_ = group_->rank(), ranks_ = group_->ranks();
  }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  /// f(the communicator), alone on it. Without Python's lock, which a caller's transport takes. InputError once the
  /// group was left.
  template <class F>
  void use(F&& f) {
    const std::lock_guard turn(calls_);
    const std::shared_ptr<Communicator> group = get();
    if (!group) throw InputError("Communicator: rank " + std::to_string(rank_) + " has left its group");
    f(*group);
  }
  void abort(std::string_view reason) {
    if (const std::shared_ptr<Communicator> group = get()) group->abort(reason);
  }
  /// Once calls under way, of other threads, have ended.
  void leave() {
    const std::lock_guard turn(calls_);
    std::shared_ptr<Communicator> gone;
    {
      const std::lock_guard lock(mutex_);
      gone.swap(group_);
    }
  }

  const std::unique_ptr<RankFunctions> functions;  ///< null: a group of threads. Outlives the group

 private:
  std::shared_ptr<Communicator> get() const {
    const std::lock_guard lock(mutex_);
    return group_;
  }
  int rank_ = 0, ranks_ = 1;
  std::mutex calls_;
  mutable std::mutex mutex_;  // of the pointer
  std::shared_ptr<Communicator> group_;
};

/// Of (first head, number of heads) each.
std::vector<HeadRange> head_ranges(const std::vector<std::pair<int64_t, int64_t>>& pairs);

/// InputError unless above 0 and at most a day.
std::chrono::nanoseconds deadline_of(double seconds);

/// RankError of `base`, DeviceError's class.
void bind_rank_error(nb::module_& m, nb::handle base);
void bind_ranks(nb::module_& m);

}  // namespace mla::python
