#include "bench/harness.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "mla/error.hpp"

namespace mla::bench {
namespace {

constexpr double kProbeSeconds = 0.002;

double time_of(cases::Case& c, Stream& stream) {
  const auto start = std::chrono::steady_clock::now();
  c.run(stream);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct State {
  int64_t calls_a_round = 1;
  std::vector<double> times, of_roof, of_fma;
};

struct Peaks {
  double read = 0, fma = 0, bf16 = 0;
};

Peaks peaks(const Probe& probe, Dtype operands) {
  return {.read = 1e9 * probe.read_gbps(kProbeSeconds),
          .fma = 1e9 * probe.fma_gflops(kProbeSeconds),
          .bf16 = operands == Dtype::bf16 ? 1e9 * probe.bf16_gflops(kProbeSeconds) : 0};
}

void one_round(Stream& stream, const Probe& probe, const Entry& entry, const Options& options, State& state,
               Measurement& m) {
  const Peaks before = peaks(probe, entry.operands);
  if (!options.cold) entry.run->run(stream);  // the probes took its place in the caches
  std::vector<double> times;
  for (int64_t i = 0; i < state.calls_a_round; ++i) {
    if (options.cold) probe.evict_caches();
    times.push_back(time_of(*entry.run, stream));
  }
  const Peaks after = peaks(probe, entry.operands);
  state.times.insert(state.times.end(), times.begin(), times.end());
  const double median = quantile(times, 0.5);
  m.round_medians.push_back(median);
  auto of = [&](double Peaks::*peak) {
    return std::max(m.cost.bytes / (before.read + after.read), m.cost.flops / (before.*peak + after.*peak)) * 2 /
           median;
  };
  state.of_fma.push_back(of(&Peaks::fma));
  // bf16 operands may be multiplied as f32 where that is faster.
  state.of_roof.push_back(of(before.bf16 > before.fma ? &Peaks::bf16 : &Peaks::fma));
}

}  // namespace

double quantile(std::vector<double> values, double fraction) {
  if (values.empty()) return 0;
  const auto at =
      values.begin() + static_cast<int64_t>(std::llround(fraction * static_cast<double>(values.size() - 1)));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

std::vector<Measurement> measure(Stream& stream, const Probe& probe, std::span<const Entry> entries,
                                 const Options& options) {
  if (options.rounds < 4) throw InputError("rounds is " + std::to_string(options.rounds) + ", at least 4 are needed");
  constexpr int64_t kMostCalls = 10000, kMostColdCalls = 10;
  std::vector<State> states(entries.size());
  std::vector<Measurement> measured(entries.size());
  const auto stopped = [&] { return options.stop && *options.stop; };
  for (size_t i = 0; i < entries.size(); ++i) {
    if (stopped()) return {};
    entries[i].run->run(stream);
    const double seconds = std::max(1e-7, time_of(*entries[i].run, stream));
    states[i].calls_a_round = std::clamp(static_cast<int64_t>(options.min_time / options.rounds / seconds), int64_t{1},
                                         options.cold ? kMostColdCalls : kMostCalls);
    measured[i].cost = entries[i].run->cost();
  }
  for (int round = 0; round < options.rounds; ++round)
    for (size_t i = 0; i < entries.size(); ++i) {
      if (stopped()) return {};
      one_round(stream, probe, entries[i], options, states[i], measured[i]);
    }
  for (size_t i = 0; i < entries.size(); ++i) {
    Measurement& m = measured[i];
    m.median = quantile(states[i].times, 0.5);
    m.p90 = quantile(states[i].times, 0.9);
    m.calls = static_cast<int64_t>(states[i].times.size());
    m.of_roof = quantile(states[i].of_roof, 0.5);
    m.of_fma = quantile(states[i].of_fma, 0.5);
    m.verdict = entries[i].run->verify();
  }
  return measured;
}

}  // namespace mla::bench
