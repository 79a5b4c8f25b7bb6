// The commands of `mla`, one file each. add_*() registers a subcommand; its callback does the work when it is chosen.
#pragma once

#include <CLI/CLI.hpp>

namespace mla::cli {

// A callback leaves 0 in `status`, or 1 when a check failed; bad input leaves it as an mla::Error.
void add_run(CLI::App& app, int& status);
void add_bench(CLI::App& app, int& status);
void add_check(CLI::App& app, int& status);
void add_plan(CLI::App& app, int& status);
void add_info(CLI::App& app, int& status);

}  // namespace mla::cli
