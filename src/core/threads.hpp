// How many threads a pool may have, and what more of them than there are would do.
#pragma once

#include <span>
#include <vector>

#include "core/topology.hpp"
#include "mla/device.hpp"

namespace mla {

/// Four for each processor, 64 at least: each has its own scratch in every workspace.
int most_threads();

/// A pinned pool with a worker for each place, at least one; those of a node follow one another. Worker 0's place is
/// its node alone. DeviceError naming a processor that the system refuses.
ThreadPool pool_at(std::span<const Place> places);

/// A pool that says it has `threads` threads and does every task on the caller's, with its time taken: work is cut as
/// it is for so many, on a machine that lacks them.
class Rehearsal {
 public:
  using Run = std::vector<double>;  ///< seconds of each task, in the order in which threads take them
  /// threads from 1 on: else InputError.
  explicit Rehearsal(int threads);
  ThreadPool& pool() { return pool_; }
  /// The runs since the last call.
  std::vector<Run> take();
  /// How long so many threads have to do with a run when each takes the next task as soon as it has done one, as a
  /// pool's do, in no time, and is as fast as one is alone.
  static double shared(const Run& run, int threads);

 private:
  ThreadPool pool_;
};

}  // namespace mla
