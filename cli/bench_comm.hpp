// mla bench comm.
#pragma once

#include <CLI/CLI.hpp>

namespace mla::cli {

/// Registers it below `bench`; its callback leaves the exit code in `status`.
CLI::App* add_bench_comm(CLI::App& bench, int& status);

}  // namespace mla::cli
