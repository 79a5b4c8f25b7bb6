// Ranks of a replay that are processes: each schedules every step itself, by the same trace, and runs its own heads.
// What a clock or a signal decides is decided once, by rank 0's clock and by whoever got the signal.
#pragma once

#include <cstdint>
#include <vector>

#include "serve/replay.hpp"

namespace mla::serve {

class Processes {
 public:
  /// Without a group (Options::group) there is one process, and each call gives back what it was given.
  explicit Processes(const Options& options) : group_(options.group), patience_(options.patience) {}

  /// RankError naming a rank that was given another trace, or other options.
  void agree_on(const Trace& trace, const Options& options);

  struct Decision {
    double seconds = 0;  ///< of the step, by rank 0's clock
    bool stop = false;   ///< on any rank
  };
  Decision decide(Decision own);
  /// Rank 0's, on all ranks.
  std::vector<float> first(std::vector<float> values);
  /// Over the ranks; the same on all of them.
  void add_up(std::vector<size_t*> amounts);

 private:
  Communicator* group_;
  std::chrono::nanoseconds patience_;
};

}  // namespace mla::serve
