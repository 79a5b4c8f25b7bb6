// What the GPU's benches share: their arguments, the timing of captured calls, and their report, a table and JSON.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace mla::cuda::bench {

using Row = nlohmann::ordered_json;

/// Calls of a graph over `sets` sets of inputs: every set at least once, 20 at least.
int calls_for(int sets);

double rounded(double x, int decimals);

/// Microseconds a call.
struct Times {
  double median = 0, p90 = 0;
  int launches = 0;  ///< of the graph, warming up included
};

/// Times what `launch` queues, which is `calls` calls: `replays` times after a warm-up of 30 ms and two launches.
Times time_launches(cudaStream_t stream, int calls, int replays, const std::function<void()>& launch);

/// Captures call(0) ... call(calls - 1) in one graph and times its replays.
Times time_calls(cudaStream_t stream, int calls, int replays, const std::function<void(int)>& call);

struct Bench {
  std::vector<std::string> columns;      ///< fields of its rows that the table shows beside op, shape and time
  std::set<std::string> arguments = {};  ///< its own, beside json, only and replays
  Row head = Row::object();              ///< JSON fields ahead of the rows: roofs, the model
  bool hopper = true;                    ///< needs compute capability 9.x, not just any GPU
};

/// What a bench was asked for and what it found: each row is printed as it comes.
class Report {
 public:
  /// Error naming the argument when it is none of the bench's.
  Report(int argc, char** argv, Bench bench);

  int replays() const { return replays_; }
  /// Was `shape` asked for? With only=TEXT, once or more, what contains one of the texts.
  bool wants(std::string_view shape);
  /// Values given to an argument of the bench's own.
  const std::vector<std::string>& values(const std::string& argument) { return values_[argument]; }
  Row& head() { return bench_.head; }

  /// `row`: op and shape first. us_median and us_p90 are put after what `row` has, `right` last.
  void add(Row row, const Times& times, bool right);
  /// Writes the JSON. Exit code: 1 when a row was wrong. Error when no shape was wanted or the file cannot be written.
  int finish();

 private:
  friend int run(int, char**, Bench, const std::function<void(Report&)>&);

  Bench bench_;
  std::string command_, device_;
  std::map<std::string, std::vector<std::string>> values_;
  int replays_ = 15, wrong_ = 0;
  bool wanted_ = false;
  std::vector<Row> rows_;
};

/// A bench's main: reads the arguments, measures, writes. Without a GPU it says so and returns 0.
int run(int argc, char** argv, Bench bench, const std::function<void(Report&)>& measure);

}  // namespace mla::cuda::bench
