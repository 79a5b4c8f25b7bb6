// Times cases, proves their answers, and sets them against the roof.
#pragma once

#include <atomic>
#include <span>
#include <string>
#include <vector>

#include "bench/roof.hpp"
#include "cases/case.hpp"

namespace mla::bench {

/// One thing to measure.
struct Entry {
  std::string name;
  cases::Case* run = nullptr;
  Dtype operands = Dtype::f32;  ///< of its products: bf16 is set against the fastest bf16 products of the CPU
};

struct Options {
  int rounds = 5;                           ///< at least 4
  double min_time = 0.2;                    ///< seconds of calls an entry, over all rounds
  bool cold = false;                        ///< caches emptied before each call
  const std::atomic<bool>* stop = nullptr;  ///< becomes true: nothing more is measured
};

struct Measurement {
  double median = 0, p90 = 0;  ///< seconds a call
  int64_t calls = 0;
  ops::Cost cost;
  /// max(bytes / read, flops / peak) / time, by the mean of the peaks probed before and after each round; median over
  /// rounds. 0 without counted work.
  double of_roof = 0;
  double of_fma = 0;  ///< the same with the f32 multiply-add rate as peak, whatever the operands
  std::vector<double> round_medians;
  cases::Verdict verdict;
};

/// Warms up, then takes the entries in turn, round by round, a probe of the peaks before each; verifies each at the
/// end. Nothing comes back when it was stopped. InputError when there are fewer than 4 rounds.
std::vector<Measurement> measure(Stream& stream, const Probe& probe, std::span<const Entry> entries,
                                 const Options& options);

/// The value below which a fraction of the values lies; 0 of none.
double quantile(std::vector<double> values, double fraction);

}  // namespace mla::bench
