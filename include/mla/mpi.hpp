// Ranks that are processes of an MPI job. In a library of its own (mla::mpi), built where CMake finds MPI.
#pragma once

#include <mpi.h>

#include "mla/communicator.hpp"

namespace mla {

/// This process's place in a duplicate of `comm`; made by all of its processes together. MPI is initialised with
/// MPI_THREAD_MULTIPLE, else InputError; it is finalised by the caller, after the communicator has ended. What MPI
/// itself reports as an error ends the job unless the caller's error handler of `comm` says otherwise.
Communicator mpi_communicator(MPI_Comm comm = MPI_COMM_WORLD);

}  // namespace mla
