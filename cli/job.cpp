#include "cli/job.hpp"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>
#include <thread>

#include "cli/output.hpp"
#include "core/one_line.hpp"
#include "mla/error.hpp"

#ifdef MLA_HAVE_MPI
#include "mla/mpi.hpp"
#endif

namespace mla::cli {

#ifdef MLA_HAVE_MPI

namespace {

constexpr int kFailed = 1, kBadUsage = 2;  // as main() has them
int spoken = 0;                            // what rank 0 sends when it has said why the job fails; sent at any time

}  // namespace

Job::Job() {
  int provided = MPI_THREAD_SINGLE;
  if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided) != MPI_SUCCESS)
    throw DeviceError("mpi: MPI_Init_thread failed");
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
  MPI_Comm here = MPI_COMM_NULL;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here);
  MPI_Comm_size(here, &neighbours_);
  MPI_Comm_rank(here, &local_rank_);
  MPI_Comm_free(&here);
  MPI_Comm own = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &own);
  comm_ = MPI_Comm_c2f(own);
}

Job::~Job() { MPI_Finalize(); }

// All exit codes become the largest. False when not all are there after a second, unless there is patience for those
// that still work: rank 0 may verify for minutes, and needs the processors meanwhile.
bool Job::meet(int& status, bool patient) {
  int mine = status, all = status, done = 0;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Iallreduce(&mine, &all, 1, MPI_INT, MPI_MAX, MPI_Comm_f2c(comm_), &request);
  const auto last = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  for (;;) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done) break;
    if (!patient && std::chrono::steady_clock::now() >= last) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  status = all;
  return true;
}

void Job::run(int& status, const std::function<void(Communicator&)>& work) {
  std::string error;
  {
    Communicator group = mpi_communicator();
    const auto failed = [&](const char* what, int code) {
      group.abort(what);
      error = one_line(what);
      status = code;
    };
    try {
      work(group);
    } catch (const OutputError& e) {
      failed(e.what(), kFailed);
    } catch (const std::bad_alloc&) {
      failed("out of memory", kBadUsage);
    } catch (const std::exception& e) {
      failed(e.what(), kBadUsage);
    }
    const auto print = [&] {
      std::cout.flush();
      std::fflush(stdout);
      std::cerr << "mla: " << (rank_ == 0 ? "" : "rank " + std::to_string(rank_) + ": ") << error << std::endl;
    };
    if (!error.empty() && rank_ == 0) {
      print();
      for (int r = 1; r < ranks_; ++r) {
        MPI_Request request = MPI_REQUEST_NULL;
        MPI_Isend(&spoken, 1, MPI_INT, r, 0, MPI_Comm_f2c(comm_), &request);
        MPI_Request_free(&request);
      }
    }
    if (meet(status, error.empty())) return;
    int told = rank_ == 0;
    if (rank_ != 0) MPI_Iprobe(0, 0, MPI_Comm_f2c(comm_), &told, MPI_STATUS_IGNORE);
    if (!told) print();
  }
  std::fflush(stdout);
  MPI_Abort(MPI_COMM_WORLD, status);
  _exit(status);
}

#else

Job::Job() {
  throw UnsupportedError(
      "--comm mpi: this mla was built without MPI; it has it when it is built where CMake finds MPI (Debian: "
      "libopenmpi-dev openmpi-bin), with -DMLA_MPI=ON");
}
Job::~Job() = default;
bool Job::meet(int&, bool) { return true; }
void Job::run(int&, const std::function<void(Communicator&)>&) {}

#endif

}  // namespace mla::cli
