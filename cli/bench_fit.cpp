// mla bench --fit: rates of this CPU's instructions and of a request's two paths, as src/backend/cpu/core/rates.cpp
// wants them, or of a GPU's (default_cost_model), and what the choice between the paths costs by the rates in use and
// by the fitted ones.
#include "cli/bench_fit.hpp"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "backend/backend.hpp"
#include "backend/cpu/core/rates.hpp"
#include "backend/cpu/core/target.hpp"
#include "bench/fit.hpp"
#include "bench/machine.hpp"
#include "cli/output.hpp"
#include "cli/rates_file.hpp"
#include "cli/signals.hpp"
#include "core/counted.hpp"
#include "model/json.hpp"

namespace mla::cli {
namespace {

using nlohmann::json;

void print(const char* what, const CostModel& r) {
  std::printf(
      "  %-8s {.latent_flops = %.0fe9, .expanded_flops = %.0fe9, .projection_flops = %.0fe9, .bytes = %.1fe9}\n", what,
      1e-9 * r.latent_flops, 1e-9 * r.expanded_flops, 1e-9 * r.projection_flops, 1e-9 * r.bytes);
}

// What the choices by some rates cost: the worst, the mean, and how many cost more than 5%.
struct Choices {
  double worst = 0, mean = 0;
  int64_t above = 0;

  Choices(std::span<const bench::PathTimes> times, const CostModel& rates) {
    for (const bench::PathTimes& t : times) {
      const double cost = bench::cost_of_choice(t, rates);
      worst = std::max(worst, cost);
      mean += cost / static_cast<double>(times.size());
      above += cost > 0.05;
    }
  }
  void print(const char* by, size_t of) const {
    std::printf(
        "  by %s rates: at worst %.1f%% more time than the faster path, %.2f%% in the mean; above 5%%: %lld of %zu\n",
        by, 100 * worst, 100 * mean, static_cast<long long>(above), of);
  }
};

// The CPU's instructions, printed; what --json has of the machine.
json measure_cpu(const ThreadPool& pool) {
  const bench::Machine machine = bench::this_machine();
  const cpu::CpuId id = cpu::this_cpu();
  const cpu::Bf16Rates measured = cpu::measure_bf16_rates(), used = cpu::bf16_rates();
  std::printf("%s, %s, target %s\n", machine.cpu.c_str(), text_of(pool).c_str(),
              std::string(backend::backend({}).target()).c_str());
  std::printf(
      "bf16 products, of an f32 multiply-add's arithmetic: dot %.2f, AMX %.1f; in use: dot %.2f, AMX %.1f (%s)\n",
      measured.dot, measured.amx, used.dot, used.amx, cpu::known_cpu() ? "a known CPU" : "measured");
  std::printf("  {\"%s\", %d, %d, {.dot = %.1f, .amx = %.0f}},\n", id.vendor.c_str(), id.family, id.model, measured.dot,
              measured.amx);
  return {{"machine",
           {{"cpu", machine.cpu},
            {"cores", machine.cores},
            {"vendor", id.vendor},
            {"family", id.family},
            {"model", id.model},
            {"memory_bytes", machine.memory_bytes},
            {"target", backend::backend({}).target()}}},
          {"bf16_rates", {{"dot", measured.dot}, {"amx", measured.amx}}}};
}

// The measured times of both paths, by what rates they were chosen, printed; what --json has of them.
json tell(Dtype compute, std::span<const bench::PathTimes> times, const CostModel& in_use, const CostModel& fitted) {
  const std::string name(to_string(compute));
  std::printf(
      "both paths of a request, %s operands, bf16 cache, milliseconds; *: the rates in use take the slower one\n",
      name.c_str());
  std::printf("  %5s %8s %8s %10s %10s %8s\n", "heads", "new", "context", "latent", "expanded", "cost");
  json rows = json::array();
  for (const bench::PathTimes& t : times) {
    const double cost = bench::cost_of_choice(t, in_use);
    std::printf("  %5lld %8lld %8lld %10.3f %10.3f", static_cast<long long>(t.shape.heads),
                static_cast<long long>(t.shape.query_len), static_cast<long long>(t.shape.context), 1e3 * t.latent,
                1e3 * t.expanded);
    if (cost > 0) std::printf(" %7.1f%%*", 100 * cost);
    std::printf("\n");
    rows.push_back({{"heads", t.shape.heads},
                    {"new_tokens", t.shape.query_len},
                    {"context", t.shape.context},
                    {"latent_s", t.latent},
                    {"expanded_s", t.expanded},
                    {"cost_in_use", cost},
                    {"cost_fitted", bench::cost_of_choice(t, fitted)}});
  }
  const Choices now(times, in_use), then(times, fitted);
  print("in use", in_use);
  print("fitted", fitted);
  now.print("the", times.size());
  then.print("the fitted", times.size());
  return {{"compute", name},           {"rates_in_use", rates_json(in_use)}, {"rates_fitted", rates_json(fitted)},
          {"worst_in_use", now.worst}, {"worst_fitted", then.worst},         {"times", std::move(rows)}};
}

}  // namespace

int fit_paths(const FitFlags& f) {
  const StopOnSignal signals;
  Outputs files({{"--json", f.json}}, {});
  const bool on_gpu = f.device.kind == DeviceKind::cuda;
  cpu::restrict_target(f.target);
  ThreadPool pool(f.threads.count, f.threads.pinning());
  Stream stream = on_gpu ? Stream(f.device) : Stream(pool);

  json all = provenance(f.command);
  if (on_gpu) {
    std::printf("%s\n", describe(f.device).c_str());
    all["machine"] = {{"gpu", describe(f.device)}};
  } else {
    all.update(measure_cpu(pool));
  }
  all["paths"] = json::array();
  const std::vector<bench::PathShape> grid = bench::path_grid();
  for (Dtype compute : f.computes) {
    const auto times = bench::measure_paths(stream, compute, grid, [&](size_t done) {
      std::fprintf(stderr, "\r%s operands: %zu of %zu shapes", std::string(to_string(compute)).c_str(), done,
                   grid.size());
      return !signals.stop();
    });
    std::fprintf(stderr, "\n");
    if (times.size() < grid.size()) break;
    const CostModel in_use = backend::backend(f.device).cost_model(compute, 0);
    all["paths"].push_back(tell(compute, times, in_use, bench::fit_rates(times, on_gpu ? 1 : f.threads.count, in_use)));
  }
  files.write("--json", [&](std::ostream& out) { out << dump(all) << '\n'; });
  files.finish();
  std::fflush(stdout);
  return signals.exit_code();
}

}  // namespace mla::cli
