// mla bench comm: what calls between ranks take by the bytes that a rank sends, the --link of `mla plan` that this
// makes, and how far the times that a plan expects by it are from measured ones.
#include "cli/bench_comm.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "bench/machine.hpp"
#include "cli/batch_file.hpp"
#include "cli/job.hpp"
#include "cli/output.hpp"
#include "cli/params.hpp"
#include "cli/signals.hpp"
#include "core/counted.hpp"
#include "layer/kernels.hpp"
#include "mla/mla.hpp"
#include "serve/shares.hpp"

namespace mla::cli {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr int kMostRanks = 128;
constexpr int64_t kMostBytes = int64_t{1} << 30;

struct Flags {
  std::string comm = "threads", json;
  int ranks = 2;
  double min_time = 0.05, patience = 60;
  std::vector<std::string> bytes;
  std::unique_ptr<DeviceFlag> device;
};

enum class Kind { all_reduce, all_gather, all_to_all };
const char* name(Kind k) {
  return k == Kind::all_reduce ? "all_reduce" : k == Kind::all_gather ? "all_gather" : "all_to_all";
}

/// Of a call: bytes that a rank sends as `mla plan` counts them, and the slowest rank's seconds.
struct Row {
  Kind kind;
  int64_t bytes = 0;
  double median = 0, p90 = 0;
  int64_t calls = 0;
};

struct Self {
  Communicator& group;
  Stream& stream;
  const std::atomic<bool>& stop;
  double min_time;
  std::chrono::nanoseconds patience;
};

// One call on memory of its own, of which every rank sends `bytes` or a little less, whole messages.
class Call {
 public:
  Call(Self& self, Kind kind, int64_t bytes) : self_(self), kind_(kind), ranks_(self.group.ranks()) {
    const Device device = self.stream.device();
    count_ = std::max<int64_t>(bytes / 4, 1);
    message_ = std::max<int64_t>(bytes / (ranks_ - 1), 1);
    sizes_.assign(static_cast<size_t>(ranks_), message_);
    const bool sum = kind == Kind::all_reduce;
    const auto in = static_cast<size_t>(sum ? 4 * count_ : kind == Kind::all_gather ? message_ : message_ * ranks_);
    std::vector<std::byte> filled(in);
    for (size_t i = 0; i < in / 4 && sum; ++i) {
      const float x = term(self.group.rank(), static_cast<int64_t>(i));
      std::memcpy(filled.data() + 4 * i, &x, 4);
    }
    for (size_t i = 0; i < in && !sum; ++i) {
      const auto to = kind == Kind::all_gather ? 0 : static_cast<int64_t>(i) / message_;
      filled[i] = code(self.group.rank(), static_cast<int>(to), static_cast<int64_t>(i) % message_);
    }
    in_ = Buffer::copy_of(filled.data(), in, device);
    out_ = Buffer(sum ? in : static_cast<size_t>(message_ * ranks_), device);
  }
  int64_t sent() const { return kind_ == Kind::all_reduce ? 4 * count_ : message_ * (ranks_ - 1); }

  void operator()() {
    const Collective call{.step = name(kind_), .deadline = self_.patience, .most_bytes = message_};
    switch (kind_) {
      case Kind::all_reduce:
        return self_.group.all_reduce(self_.stream, call, Dtype::f32, in_.data(), out_.data(), count_);
      case Kind::all_gather: return self_.group.all_gather(self_.stream, call, in_.data(), out_.data(), sizes_);
      case Kind::all_to_all: return self_.group.all_to_all(self_.stream, call, in_.data(), sizes_, out_.data(), sizes_);
    }
  }

  // Once, before it is timed.
  void check() {
    (*this)();
    std::vector<std::byte> out(out_.size());
    copy(self_.stream, out.data(), out_.data(), out.size());
    self_.stream.synchronize();
    bool right = true;
    if (kind_ == Kind::all_reduce) {
      for (int64_t i = 0; i < count_ && right; ++i) {
        float sum = 0, found = 0;
        for (int r = 0; r < ranks_; ++r) sum += term(r, i);
        std::memcpy(&found, out.data() + 4 * i, 4);
        right = found == sum;
      }
    } else {
      const int to = kind_ == Kind::all_gather ? 0 : self_.group.rank();
      for (int r = 0; r < ranks_; ++r)
        for (int64_t i = 0; i < message_ && right; ++i)
          right = out[static_cast<size_t>(r * message_ + i)] == code(r, to, i);
    }
    if (!right) throw DeviceError(std::string(name(kind_)) + " of " + std::to_string(sent()) + " bytes: wrong values");
  }

 private:
  static float term(int rank, int64_t i) { return static_cast<float>((rank + 1) * (i % 13)); }  // sums are exact
  static std::byte code(int from, int to, int64_t i) { return static_cast<std::byte>(from * 31 + to * 7 + i * 3); }

  Self& self_;
  Kind kind_;
  int ranks_;
  int64_t count_ = 0, message_ = 0;
  std::vector<int64_t> sizes_;
  Buffer in_, out_;
};

// Each rank's value, by rank.
std::vector<double> gathered(Self& s, double x) {
  std::vector<double> all(static_cast<size_t>(s.group.ranks()));
  s.group.all_gather({"measured times", s.patience}, &x, all.data(), std::vector<int64_t>(all.size(), sizeof x));
  return all;
}
double largest(const std::vector<double>& x) { return *std::max_element(x.begin(), x.end()); }

// Seconds of a call, of rounds of calls that ranks begin together. On a GPU a round is one graph.
Row measured(Self& s, Kind kind, int64_t bytes) {
  constexpr int kLeastRounds = 7, kCaptured = 20;
  Call call(s, kind, bytes);
  call.check();
  const bool gpu = s.stream.device().kind == DeviceKind::cuda;
  Graph graph;
  if (gpu)
    graph = Graph(s.stream, [&] {
      for (int i = 0; i < kCaptured; ++i) call();
    });
  int calls = gpu ? kCaptured : 1;
  const auto round = [&] {
    s.group.barrier({"begin of a round", s.patience});
    const auto start = Clock::now();
    if (gpu) {
      graph.launch(s.stream);
      s.stream.synchronize();
    } else {
      for (int i = 0; i < calls; ++i) call();
    }
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  round();  // what is there from then on: memory of the group, algorithms
  const double once = largest(gathered(s, round())) / calls;
  if (!gpu) calls = static_cast<int>(std::clamp(1e-3 / once, 1.0, 1000.0));
  const int rounds = static_cast<int>(std::clamp(s.min_time / (once * calls), double{kLeastRounds}, 1000.0));
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) times.push_back(round() / calls);
  std::sort(times.begin(), times.end());
  Row row{.kind = kind, .bytes = call.sent(), .calls = int64_t{calls} * rounds};
  row.median = largest(gathered(s, times[times.size() / 2]));
  row.p90 = largest(gathered(s, times[times.size() * 9 / 10]));
  return row;
}

// The line t = seconds + bytes / rate with the least squares of relative errors. Both are above 0: a slope that noise
// makes none becomes the fastest call's.
LinkRates fitted(const std::vector<Row>& rows) {
  double w = 0, wx = 0, wxx = 0, wy = 0, wxy = 0, fastest = 0;
  for (const Row& r : rows) {
    const double weight = 1 / (r.median * r.median), x = static_cast<double>(r.bytes);
    w += weight, wx += weight * x, wxx += weight * x * x, wy += weight * r.median, wxy += weight * x * r.median;
    fastest = std::max(fastest, x / r.median);
  }
  const double det = w * wxx - wx * wx;
  double slope = det > 0 ? (w * wxy - wx * wy) / det : 0, seconds = w > 0 ? (wy - slope * wx) / w : 0;
  if (seconds < 0) seconds = 0, slope = wxy / wxx;
  if (!(slope > 0)) slope = fastest > 0 ? 1 / fastest : 0;
  return {.seconds = seconds, .bytes = slope > 0 ? 1 / slope : 0};
}

/// A collective of a layer's decode step: what a plan expects of it, and what a call of as many bytes took.
struct Expected {
  std::string what;
  Row row;
  double expected = 0;
};

struct Use {
  std::string what;
  Kind kind;
  int64_t bytes;
  double expected;
};
// Of rank 0 of deepseek-v3, heads and cached tokens over the ranks.
std::vector<Use> planned(int ranks, Device device, const LinkRates& link) {
  const ModelConfig model = preset("deepseek-v3"), own = part_of(model, head_share(model.heads, 0, ranks));
  const CacheSpec spec = cache_spec(own, CacheFormat::bf16, 64);
  std::vector<Use> all;
  for (const int64_t requests : {1, 8, 64}) {
    const std::vector<int64_t> one(static_cast<size_t>(requests), 1), contexts(static_cast<size_t>(requests), 4096);
    const BatchOfLengths lengths({one, contexts}, 64);
    PlanOptions o{.tensor_parallel = ranks, .link = link, .compute = Dtype::bf16};
    o.context_parallel = serve::context_share(model.heads, 0, ranks, ranks, 64, ContextExchange::latents);
    const Plan p = plan(own, spec, lengths.pages(), lengths.batch(), device_info(device, 1, own), o);
    for (const layer::KernelUse& u : layer::kernels(p, lengths.batch(), {.dtype = Dtype::bf16})) {
      const Kind kind = u.op.starts_with("gather_") ? Kind::all_gather
                        : u.op == "exchange_found"  ? Kind::all_to_all
                                                    : Kind::all_reduce;
      if (kind == Kind::all_reduce && u.op != "all_reduce") continue;
      all.push_back({std::string(u.op) + ", " + counted(requests, "token"), kind, static_cast<int64_t>(u.bytes),
                     u.seconds / static_cast<double>(u.calls)});
    }
  }
  return all;
}

struct Result {
  std::vector<Row> rows;
  LinkRates link;
  std::vector<Expected> expected;
  bool interrupted = false;
};

// By every rank, with the same sizes in the same order.
Result measure_all(Self& s, const std::vector<int64_t>& sizes, const std::function<void(const Row&)>& show) {
  Result r;
  const auto stopped = [&] { return r.interrupted = largest(gathered(s, s.stop ? 1 : 0)) > 0; };
  for (const Kind kind : {Kind::all_reduce, Kind::all_gather, Kind::all_to_all})
    for (const int64_t bytes : sizes) {
      if (stopped()) return r;
      r.rows.push_back(measured(s, kind, bytes));
      show(r.rows.back());
    }
  r.link = fitted(r.rows);
  for (const Use& u : planned(s.group.ranks(), s.stream.device(), r.link)) {
    if (stopped()) return r;
    r.expected.push_back({u.what, measured(s, u.kind, u.bytes), u.expected});
  }
  return r;
}

double error_of(const Expected& e) { return e.expected / e.row.median - 1; }

std::string link_text(const LinkRates& link) {
  char text[64];
  std::snprintf(text, sizeof text, "%.4g,%.3g", 1e-9 * link.bytes, 1e6 * link.seconds);
  return text;
}

void print_head(const std::string& how, int ranks) {
  std::printf("%s, %s by %s; medians of the slowest rank\n", bench::this_machine().cpu.c_str(),
              counted(ranks, "rank").c_str(), how.c_str());
  std::printf("%-12s %12s %12s %12s %10s\n", "call", "a rank sends", "median us", "p90 us", "GB/s");
}
void print(const Row& r) {
  std::printf("%-12s %12s %12.2f %12.2f %10.3f\n", name(r.kind), readable_bytes(static_cast<uint64_t>(r.bytes)).c_str(),
              1e6 * r.median, 1e6 * r.p90, 1e-9 * static_cast<double>(r.bytes) / r.median);
  std::fflush(stdout);
}
void print_link(const Result& r) {
  std::vector<double> errors;
  for (const Row& row : r.rows)
    errors.push_back(std::abs((r.link.seconds + static_cast<double>(row.bytes) / r.link.bytes) / row.median - 1));
  std::sort(errors.begin(), errors.end());
  std::printf(
      "--link %s: GB/s that a rank sends, and microseconds of a call; off by %.0f%% in the median, %.0f%% at worst\n",
      link_text(r.link).c_str(), 100 * errors[errors.size() / 2], 100 * errors.back());
  std::printf("what mla plan expects by it of a layer of deepseek-v3, heads and cache over the ranks:\n");
  std::printf("  %-28s %12s %12s %12s %8s\n", "", "a rank sends", "expected us", "measured us", "error");
  for (const Expected& e : r.expected)
    std::printf("  %-28s %12s %12.2f %12.2f %+7.0f%%\n", e.what.c_str(),
                readable_bytes(static_cast<uint64_t>(e.row.bytes)).c_str(), 1e6 * e.expected, 1e6 * e.row.median,
                100 * error_of(e));
}

json json_of(const CLI::App& command, const std::string& how, Device device, int ranks, const Result& r) {
  const bench::Machine machine = bench::this_machine();
  json all = provenance(command);
  all.update({{"machine",
               {{"cpu", machine.cpu},
                {"cores", machine.cores},
                {"device", device.kind == DeviceKind::cpu ? "cpu" : describe(device)}}},
              {"ranks", ranks},
              {"comm", how},
              {"interrupted", r.interrupted},
              {"rows", json::array()},
              {"expected", json::array()}});
  const auto of = [](const Row& row) {
    return json{{"call", name(row.kind)}, {"bytes", row.bytes},
                {"median_s", row.median}, {"p90_s", row.p90},
                {"calls", row.calls},     {"bytes_per_second", static_cast<double>(row.bytes) / row.median}};
  };
  for (const Row& row : r.rows) all["rows"].push_back(of(row));
  for (const Expected& e : r.expected) {
    json row = of(e.row);
    row.update({{"step", e.what}, {"expected_s", e.expected}, {"error", error_of(e)}});
    all["expected"].push_back(std::move(row));
  }
  if (r.link.bytes > 0)
    all["link"] = {{"bytes_per_second", r.link.bytes}, {"seconds", r.link.seconds}, {"flag", link_text(r.link)}};
  return all;
}

class Bench {
 public:
  Bench(const CLI::App& command, const Flags& f) : command_(command), f_(f) {
    sizes_ = parse_numbers("--bytes", f.bytes, 64, kMostBytes);
    if (sizes_.empty())
      for (int64_t bytes = 1024; bytes <= int64_t{4} << 20; bytes *= 4) sizes_.push_back(bytes);
  }

  // Rank 0's part: it speaks.
  void lead(Self self) {
    Outputs files({{"--json", f_.json}}, {});
    print_head(f_.comm, self.group.ranks());
    const Result r = measure_all(self, sizes_, print);
    if (r.interrupted) std::printf("interrupted: rows that were whole are above\n");
    else print_link(r);
    files.write("--json", [&](std::ostream& out) {
      out << dump(json_of(command_, f_.comm, self.stream.device(), self.group.ranks(), r)) << '\n';
    });
    std::fflush(stdout);
    files.finish();
  }
  void follow(Self self) {
    (void)measure_all(self, sizes_, [](const Row&) {});
  }

  void threads(const StopOnSignal& signals, Device first, bool gpu) {
    std::vector<Communicator> group = thread_communicators(f_.ranks);
    std::vector<std::exception_ptr> errors(group.size());
    {
      std::vector<std::jthread> all;
      for (int r = 0; r < f_.ranks; ++r)
        all.emplace_back([&, r] {
          Communicator& mine = group[static_cast<size_t>(r)];
          try {
            ThreadPool pool(1);
            const Device device{DeviceKind::cuda, first.index + r};
            Stream stream = gpu ? Stream(device) : Stream(pool);
            if (gpu) mine.connect(device, parse_gpu_link(f_.comm));
            const Self self{mine, stream, signals.stop(), f_.min_time, patience()};
            r == 0 ? lead(self) : follow(self);
          } catch (const std::exception& e) {
            errors[static_cast<size_t>(r)] = std::current_exception();
            mine.abort(e.what());
          }
        });
    }
    // The error that the others' are about.
    for (const bool of_ranks : {false, true})
      for (const std::exception_ptr& error : errors) try {
          if (error) std::rethrow_exception(error);
        } catch (const RankError&) {
          if (of_ranks) throw;
        }
  }

  std::chrono::nanoseconds patience() const {
    return std::chrono::nanoseconds(static_cast<int64_t>(f_.patience * 1e9));
  }

 private:
  const CLI::App& command_;
  const Flags& f_;
  std::vector<int64_t> sizes_;
};

void run(const CLI::App& command, const Flags& f, int& status) {
  const Device device = f.device->named();
  const bool gpu = f.comm == "peer" || f.comm == "nccl";
  if (!gpu && f.comm != "threads" && f.comm != "mpi")
    throw InputError("--comm is '" + f.comm + "'; threads, mpi, peer and nccl are known");
  if (gpu != (device.kind == DeviceKind::cuda))
    throw InputError(
        "--comm " + f.comm +
        (gpu ? " is between GPUs, --device is cpu" : " is between ranks on the CPU, --device is " + to_string(device)));
  Bench bench(command, f);
  if (f.comm == "mpi") {
    Job job;
    const StopOnSignal signals;
    job.run(status, [&](Communicator& group) {
      if (command.get_option("--ranks")->count() > 0 && f.ranks != group.ranks())
        throw InputError("--ranks is " + std::to_string(f.ranks) + ", the MPI job has " +
                         std::to_string(group.ranks()) + (group.ranks() == 1 ? " process" : " processes"));
      if (group.ranks() < 2 || group.ranks() > kMostRanks)
        throw InputError("--comm mpi: the MPI job has " + std::to_string(group.ranks()) +
                         (group.ranks() == 1 ? " process" : " processes") + ", 2 to " + std::to_string(kMostRanks) +
                         " are measured: start it as mpirun -n 2 mla bench comm --comm mpi");
      ThreadPool pool(1);
      Stream stream(pool);
      const Self self{group, stream, signals.stop(), f.min_time, bench.patience()};
      job.rank() == 0 ? bench.lead(self) : bench.follow(self);
      status = signals.exit_code();
    });
    return;
  }
  if (gpu && device.index + f.ranks > gpu_count())
    throw DeviceError(std::to_string(f.ranks) + " ranks on GPUs from " + to_string(device) + " on, this machine has " +
                      std::to_string(gpu_count()));
  const StopOnSignal signals;
  bench.threads(signals, device, gpu);
  status = signals.exit_code();
}

}  // namespace

CLI::App* add_bench_comm(CLI::App& parent, int& status) {
  auto f = std::make_shared<Flags>();
  CLI::App* c = parent.add_subcommand("comm", "Measure calls between ranks, and fit the --link of mla plan to them");
  add_number(*c, "--ranks", f->ranks, "ranks; with --comm mpi those of the job", 2, kMostRanks);
  c->add_option("--comm", f->comm,
                "threads of this process; mpi: processes of an MPI job; peer or nccl: GPUs from --device on")
      ->capture_default_str();
  f->device = std::make_unique<DeviceFlag>(*c);
  c->add_option("--bytes", f->bytes,
                "what a rank sends in a call, separated by commas (default 1024 to 4 MiB, times 4)");
  add_number(*c, "--min-time", f->min_time, "Seconds of calls a row, at least 7 rounds", 0.0, 600.0);
  add_number(*c, "--comm-seconds", f->patience, "that a rank waits for the others before the run fails", 1e-3, 86400.0);
  add_file(*c, "--json", f->json, "Also write rows, link and expected times to this file");
  c->footer(
      "Examples:\n"
      "  mla bench comm --ranks 4\n"
      "  mpirun -n 4 mla bench comm --comm mpi --json link.json\n"
      "  mla bench comm --comm peer --device cuda --ranks 2\n"
      "  mla plan --model deepseek-v3 --tp 4 --dcp 4 --link 11.2,6.5       with what it printed");
  c->callback([c, f, &parent, &status] {
    for (const CLI::Option* o : std::as_const(parent).get_options())
      if (o->count() > 0)
        throw InputError("mla bench comm does not read " + o->get_name() +
                         ": it takes its own options alone, behind its name");
    run(*c, *f, status);
  });
  return c;
}

}  // namespace mla::cli
