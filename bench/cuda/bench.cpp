#include "cuda/bench.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "backend/cuda/core/check.hpp"
#include "mla/error.hpp"

namespace mla::cuda::bench {
namespace {

// A field as the table shows it.
std::string shown(const Row& row, const std::string& field) {
  if (!row.contains(field) || row[field].is_null()) return "-";
  const Row& value = row[field];
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_number()) return value.dump();
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value.get<double>());
  return text;
}

int width_of(const std::string& column) { return std::max(9, static_cast<int>(column.size())); }

bool have_gpu(bool hopper) {
  int count = 0, major = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return false;
  return !hopper || (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && major == 9);
}

}  // namespace

int calls_for(int sets) { return std::max(20, sets); }

double rounded(double x, int decimals) {
  const double unit = std::pow(10.0, decimals);
  return std::round(x * unit) / unit;
}

Times time_launches(cudaStream_t stream, int calls, int replays, const std::function<void()>& launch) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "bench", "event");
  check(cudaEventCreate(&end), "bench", "event");
  Times times;
  std::vector<double> us;
  double warm = 0;  // ms: a card that has been idle needs a while to reach its clocks
  while (us.size() < static_cast<size_t>(replays)) {
    const bool counts = times.launches++ >= 2 && warm >= 30;
    check(cudaEventRecord(begin, stream), "bench", "event");
    launch();
    check(cudaEventRecord(end, stream), "bench", "event");
    check(cudaEventSynchronize(end), "bench", "replay");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "bench", "event");
    if (counts) us.push_back(1e3 * static_cast<double>(ms) / calls);
    else warm += static_cast<double>(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::ranges::sort(us);
  times.median = us[us.size() / 2];
  times.p90 = us[us.size() * 9 / 10];
  return times;
}

Times time_calls(cudaStream_t stream, int calls, int replays, const std::function<void(int)>& call) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "bench", "capture");
  for (int i = 0; i < calls; ++i) call(i);
  check(cudaStreamEndCapture(stream, &graph), "bench", "capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "bench", "instantiate");
  const Times times =
      time_launches(stream, calls, replays, [&] { check(cudaGraphLaunch(exec, stream), "bench", "replay"); });
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  return times;
}

Report::Report(int argc, char** argv, Bench bench) : bench_(std::move(bench)), command_(argv[0]) {
  command_.erase(0, command_.rfind('/') + 1);
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i], key = arg.substr(0, arg.find('=')),
                      value = arg.substr(std::min(key.size() + 1, arg.size()));
    const bool known = key == "json" || key == "only" || key == "replays" || bench_.arguments.contains(key);
    if (!known || value.empty()) {
      std::string own;
      for (const std::string& a : bench_.arguments) own += " " + a + "=VALUE";
      throw Error("argument " + std::to_string(i) + " is " + arg + ", known are json=FILE only=SUBSTRING replays=N" +
                  own);
    }
    if (key != "json") command_ += value.find(' ') == std::string::npos ? " " + arg : " '" + arg + "'";
    values_[key].push_back(value);
  }
  if (values_.contains("replays")) {
    const std::string& n = values_["replays"].back();
    const auto [end, error] = std::from_chars(n.data(), n.data() + n.size(), replays_);
    if (error != std::errc() || end != n.data() + n.size() || replays_ < 1 || replays_ > 10000)
      throw Error("replays is " + n + ", allowed 1 to 10000");
  }
}

bool Report::wants(std::string_view shape) {
  const std::vector<std::string>& only = values_["only"];
  const bool wanted = only.empty() || std::ranges::any_of(only, [&](const std::string& o) {
                        return shape.find(o) != std::string_view::npos;
                      });
  wanted_ |= wanted;
  return wanted;
}

void Report::add(Row row, const Times& times, bool right) {
  row["us_median"] = rounded(times.median, 2);
  row["us_p90"] = rounded(times.p90, 2);
  row["right"] = right;
  wrong_ += !right;
  if (rows_.empty()) {
    std::printf("%s, whole calls, median of %d replays\n%-14s %-48s %10s %10s", device_.c_str(), replays_, "op",
                "shape", "us", "p90");
    for (const std::string& c : bench_.columns) std::printf(" %*s", width_of(c), c.c_str());
    std::printf("\n");
  }
  std::printf("%-14s %-48s %10.2f %10.2f", shown(row, "op").c_str(), shown(row, "shape").c_str(), times.median,
              times.p90);
  for (const std::string& c : bench_.columns) std::printf(" %*s", width_of(c), shown(row, c).c_str());
  std::printf("%s\n", right ? "" : " WRONG");
  std::fflush(stdout);
  rows_.push_back(std::move(row));
}

int Report::finish() {
  if (!wanted_) throw Error("no shape contains what only= asks for");
  if (!values_["json"].empty()) {
    const char* commit = std::getenv("MLA_COMMIT");
    Row head{{"device", device_}, {"commit", commit ? commit : "unknown"}, {"command", command_}};
    head["method"] = "CUDA graph of whole calls, rotating inputs larger than the last-level cache, " +
                     std::to_string(replays_) + " replays";
    head.update(bench_.head);
    std::string text = head.dump(2);
    text.erase(text.rfind("\n}"));
    text += ",\n  \"results\": [";
    for (size_t i = 0; i < rows_.size(); ++i) text += (i == 0 ? "\n    " : ",\n    ") + rows_[i].dump();
    const std::string& file = values_["json"].back();
    std::ofstream out(file);
    out << text << "\n  ]\n}\n";
    if (!out.flush()) throw Error("cannot write " + file);
  }
  return wrong_ > 0 ? 1 : 0;
}

int run(int argc, char** argv, Bench bench, const std::function<void(Report&)>& measure) try {
  Report report(argc, argv, std::move(bench));
  if (!have_gpu(report.bench_.hopper)) {
    std::printf("no %s: skipped\n", report.bench_.hopper ? "Hopper GPU" : "GPU");
    return 0;
  }
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "bench", "device");
  report.device_ = device.name;
  measure(report);
  return report.finish();
} catch (const std::exception& e) {
  std::fprintf(stderr, "bench: %s\n", e.what());
  return 1;
}

}  // namespace mla::cuda::bench
