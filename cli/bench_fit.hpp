// mla bench --fit.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cli/params.hpp"
#include "mla/device.hpp"
#include "mla/dtype.hpp"

namespace mla::cli {

struct FitFlags {
  const CLI::App& command;
  std::vector<Dtype> computes;  ///< operands of attention
  Threads threads;
  std::string target, json;
  Device device = {};
};

/// Measures, fits and prints. The exit code.
int fit_paths(const FitFlags& flags);

}  // namespace mla::cli
