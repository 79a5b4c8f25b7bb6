// What `mla run` says of a run: as text, and as JSON for --json and --report.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "bench/machine.hpp"
#include "bench/roof.hpp"
#include "serve/replay.hpp"

namespace mla::cli {

struct RunReport {
  const serve::Trace& trace;
  const serve::Options& options;
  const serve::Result& result;
  bench::Machine machine;
  bench::Roof roof;
  int nodes = 0;  ///< that threads are pinned on; 0: they are not
  double scale_lengths = 1;
  bool fewer_heads = false;
  int64_t calibrated = 0;  ///< layers whose cache's scale was found on the trace's first tokens
  const serve::Verification* verification = nullptr;  ///< or there was none
};

void print_summary(const RunReport& report);
/// On stderr: layers more than a thousandth of whose fp8 cache's codes are at the largest magnitude.
void warn_of_saturation(const serve::Result& r);
void print_verification(const serve::Verification& v);
/// With what provenance() says of the command.
nlohmann::json json_of(const RunReport& report, const CLI::App& command);

// Figures that both give. A rate or a share of nothing is 0.
struct Throughput {
  double output = 0, prompt = 0, total = 0;  ///< tokens over the run's simulated seconds
  double requests = 0;                       ///< finished ones, likewise
  double step = 0;                           ///< computed tokens a second of steps' time
};
Throughput throughput(const serve::Result& r);
double rate(double amount, double seconds);
double percent(double part, double whole);
double op_seconds(const serve::Result& r);
std::vector<Profile::Row> by_time(const Profile& profile);
/// The rate that bounds an op: products run in the weights' dtype, attention in the compute dtype.
double peak_of(std::string_view op, const RunReport& report);
/// Percent of the roof; 0 where the roof is not known: what passes it was measured on less than the op uses.
double roof_share(const Profile::Row& row, const RunReport& report);

}  // namespace mla::cli
