// Commands whose ranks are the processes of an MPI job.
#pragma once

#include <functional>

#include "mla/communicator.hpp"

namespace mla::cli {

/// This process among those of its job. One speaks for all: rank 0 prints and writes, the others are silent unless rank
/// 0 is gone.
class Job {
 public:
  /// Initialises MPI; UnsupportedError where this program was built without it.
  Job();
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  /// Of the job's processes, those on this machine, and this one's number among them.
  int neighbours() const { return neighbours_; }
  int local_rank() const { return local_rank_; }

  /// Does this process's part of the command's work, which leaves its exit code in `status`; then waits for the others,
  /// and leaves the largest of all exit codes there. What is thrown ends the other ranks' work too, by a RankError that
  /// names this one; it is printed here, and becomes the exit code. Where not all ranks come to their end within a
  /// second after that, the job is ended.
  void run(int& status, const std::function<void(Communicator&)>& work);

 private:
  bool meet(int& status, bool patient);
  int rank_ = 0, ranks_ = 1, neighbours_ = 1, local_rank_ = 0;
  int comm_ = 0;  // what the ranks tell each other beside their work, as Fortran's handle: here MPI need not be known
};

}  // namespace mla::cli
