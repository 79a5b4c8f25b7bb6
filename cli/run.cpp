// mla run: replays a request trace through the attention of a model, and reports what it cost.
#include "cli/run.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>

#include "bench/gpu_roof.hpp"
#include "cli/commands.hpp"
#include "cli/job.hpp"
#include "cli/output.hpp"
#include "cli/params.hpp"
#include "cli/plan_flags.hpp"
#include "cli/signals.hpp"
#include "core/counted.hpp"
#include "mla/index_plan.hpp"
#include "report/report.hpp"
#include "serve/chrome_trace.hpp"
#include "serve/kv_scales.hpp"

namespace mla::cli {
namespace {

// Op calls in a Chrome trace, some 150 bytes each: browsers open files of this size.
constexpr int64_t kSpans = 400000;
constexpr int64_t kMost = int64_t{1} << 31, kMostSamples = 1'000'000;

struct Flags {
  std::string model = "deepseek-v2-lite", trace, kv_scales = "1", absorption = "runtime", json, report, chrome_trace;
  ReadOptions read;
  int64_t layers = 0, page_size = 64, pages = 0, token_budget = 512, max_requests = 0, verify = 0;
  int64_t heads = 0, topk = 0;
  double cache_gib = 4, scale_lengths = 1;
  uint64_t seed = 1;
  Threads threads;
  int tp = 1, dcp = 1;
  int64_t interleave = 1;
  std::string comm = "peer", exchange = "latents";
  double patience = 600;
  bool no_prefix_reuse = false, hadamard = false;
  serve::Generated generated;
  std::unique_ptr<DeviceFlag> device;
  std::unique_ptr<PlanFlags> plan;
};

// A line on stderr that is drawn anew on a terminal, and now and then elsewhere.
class ProgressPrinter {
 public:
  ~ProgressPrinter() { end(); }
  void operator()(const serve::Progress& p) {
    if (!due(p.elapsed)) return;
    const double tokens = static_cast<double>(p.prefill_tokens + p.decode_tokens) / p.elapsed;
    std::fprintf(stderr, "%s%lld/%lld requests  %.0f tokens/s  cache %.0f%%  step %lld  ETA %.0f s%s", begin(),
                 static_cast<long long>(p.finished + p.refused), static_cast<long long>(p.requests), tokens,
                 100.0 * static_cast<double>(p.pages_used) / static_cast<double>(p.pages),
                 static_cast<long long>(p.steps), left(p.elapsed, p.share), close());
    std::fflush(stderr);
  }
  void operator()(const serve::VerificationProgress& p) {
    if (!due(p.elapsed)) return;
    std::fprintf(stderr, "%sverified %lld/%lld rows  ETA %.0f s%s", begin(), static_cast<long long>(p.rows),
                 static_cast<long long>(p.of), left(p.elapsed, p.share), close());
    std::fflush(stderr);
  }
  void end() {
    if (drawn_) std::fputs("\r\x1b[K", stderr);
    drawn_ = false;
  }

 private:
  bool due(double elapsed) {
    if (elapsed - last_ < (terminal_ ? 0.2 : 5.0)) return false;
    last_ = elapsed;
    drawn_ = terminal_;
    return true;
  }
  static double left(double elapsed, double share) {
    return share > 0 ? elapsed * (1 - std::min(1.0, share)) / share : 0;
  }
  const char* begin() const { return terminal_ ? "\r" : ""; }
  const char* close() const { return terminal_ ? "\x1b[K" : "\n"; }
  bool terminal_ = isatty(STDERR_FILENO) == 1, drawn_ = false;
  double last_ = 0;
};

// Fewer heads, or another topk, than the model has.
void reduce(const Flags& f, serve::Options& o) {
  if (f.heads != 0) {
    if (o.checkpoint) throw InputError("--heads is " + std::to_string(f.heads) + ", a checkpoint has its own heads");
    if (f.heads < 1 || f.heads > o.model.heads)
      throw InputError("--heads is " + std::to_string(f.heads) + ", " + o.model.name + " has 1 to " +
                       std::to_string(o.model.heads));
    o.model.heads = f.heads;
  }
  if (f.topk != 0) o.model.indexer->topk = f.topk;  // checked with the model
  if (f.tp > o.model.heads)
    throw InputError("--tp is " + std::to_string(f.tp) + ", " + o.model.name + " has " +
                     counted(o.model.heads, "head") + " to split");
  require_dcp(f.dcp, f.tp);
}

// What would be read by nothing is refused.
void refuse_unread(const CLI::App& command, const Flags& f) {
  refuse_beside(command, "--trace", {"--requests", "--input-len", "--output-len", "--rate"});
  refuse_beside(command, "--pages", {"--cache-gib"});
  if (command.get_option("--comm")->count() > 0 && f.comm != "mpi" && f.device->device().kind == DeviceKind::cpu)
    throw InputError("--comm " + f.comm +
                     " is read with --device cuda: ranks on the CPU are threads, or processes (mpi)");
  if (command.get_option("--comm-seconds")->count() > 0 && f.tp == 1)
    throw InputError("--comm-seconds is read with --tp");
  if (command.get_option("--dcp-interleave")->count() > 0 && f.dcp == 1)
    throw InputError("--dcp-interleave is read with --dcp");
  if (command.get_option("--dcp-exchange")->count() > 0 && f.dcp == 1)
    throw InputError("--dcp-exchange is read with --dcp");
}

// Of a cache in fp8, once the layers are known.
void read_scales(const Flags& f, serve::Options& o) {
  if (f.kv_scales == "1") return;
  if (o.format != CacheFormat::fp8)
    throw InputError("--kv-scales is " + f.kv_scales + ", --cache is " + std::string(to_string(o.format)) +
                     ": fp8 has scales of its own");
  const int64_t layers = o.layers == 0 ? o.model.layers : std::min(o.layers, o.model.layers);
  if (f.kv_scales != "auto")
    o.k_scales = read_option("--kv-scales", f.kv_scales,
                             [&](const std::string& file) { return serve::read_k_scales(file, o.model, layers); });
  else if (o.checkpoint) o.k_scales = serve::checkpoint_k_scales(*o.checkpoint, layers);
  else o.k_scales.assign(static_cast<size_t>(layers), 0.0f);
}

// Of ranks that are processes: all are there; this one's GPU, and its threads.
void place_in_job(const CLI::App& command, const Flags& f, const Job& job, serve::Options& o) {
  if (f.tp != job.ranks())
    throw InputError("--tp is " + std::to_string(f.tp) + ", the MPI job has " + std::to_string(job.ranks()) +
                     (job.ranks() == 1 ? " process" : " processes") + ": start it as mpirun -n " +
                     std::to_string(f.tp) + " mla run --comm mpi --tp " + std::to_string(f.tp));
  if (o.device.kind == DeviceKind::cuda) {
    const Device first = o.device;
    // Launchers may show each process a GPU of its own alone.
    if (gpu_count() != 1) o.device.index += job.local_rank();
    if (o.device.index >= gpu_count())
      throw DeviceError(counted(job.neighbours(), "process") + " on this machine with GPUs from " + to_string(first) +
                        " on, it has " + std::to_string(gpu_count()));
    o.link = job.neighbours() == job.ranks() ? GpuLink::peer : GpuLink::nccl;
  }
  // Processes that were bound to processors of their own have those; others share the machine's.
  const bool bound = bench::this_machine().cores < sysconf(_SC_NPROCESSORS_ONLN);
  if (command.get_option("--threads")->count() == 0 && !bound)
    o.threads = std::max(1, f.threads.count / job.neighbours());
  if (f.threads.pinned && !bound && job.neighbours() > 1)
    throw InputError(
        "--pin: " + std::to_string(job.neighbours()) +
        " processes that may use all of this machine's processors would be pinned to the same ones: bind each to its "
        "own, as mpirun's --bind-to does");
  if (job.rank() != 0) o.verify = o.spans = 0;  // rank 0 has the rows and the trace of all
}

serve::Options options_of(const CLI::App& command, const Flags& f, const Job* job, Communicator* group) {
  serve::Options o;
  if (f.threads.pinned && f.device->named().kind == DeviceKind::cuda)
    throw InputError("--pin is of the CPU's threads, --device is " + to_string(f.device->named()) +
                     ": give one of them");
  o.device = f.device->device();
  if (std::filesystem::is_directory(f.model)) {
    o.checkpoint = read_option("--model", f.model, [&](const std::string& path) { return Checkpoint(path, f.read); });
    o.model = o.checkpoint->config();
  } else {
    o.model = read_model(f.model, f.read);
  }
  require_indexer(command, o.model);
  reduce(f, o);
  o.layers = f.layers;
  o.weights = f.plan->weights(), o.up = f.plan->up(), o.products = f.plan->products(), o.format = f.plan->cache();
  o.absorption = read_option("--absorption", f.absorption, parse_absorption);
  f.plan->read(o.plan);
  // A run knows its prompts: they need not take the latent path because what is behind them does.
  if (command.get_option("--path")->count() == 0 && o.plan.split == SplitPolicy::batch_invariant && !o.model.indexer &&
      o.absorption != Absorption::full)
    o.plan.path = PathPolicy::by_prompt;
  refuse_unread(command, f);
  if (command.get_option("--decode-length")->count() > 0 && o.plan.path != PathPolicy::by_length && !o.model.indexer)
    throw InputError("--decode-length is read with --path by_length, or of a sparse model");
  o.plan.index_hadamard = f.hadamard;
  o.limits = {.pages = f.pages,
              .page_size = f.page_size * f.dcp,
              .token_budget = f.token_budget,
              .prefix_reuse = !f.no_prefix_reuse};
  o.cache_bytes = static_cast<size_t>(f.cache_gib * 1073741824.0);
  o.threads = f.threads.count;
  o.pinning = f.threads.pinning();
  o.plan.tensor_parallel = f.tp;
  if (!job) o.link = read_option("--comm", f.comm, parse_gpu_link);
  o.group = group;
  o.patience = std::chrono::nanoseconds(static_cast<int64_t>(f.patience * 1e9));
  o.context_parallel = f.dcp;
  o.interleave = f.interleave;
  o.exchange = read_option("--dcp-exchange", f.exchange, parse_context_exchange);
  o.seed = f.seed;
  o.verify = f.verify;
  read_scales(f, o);
  if (!f.chrome_trace.empty()) o.spans = kSpans;
  if (job) place_in_job(command, f, *job, o);
  return o;
}

// Scales that came with the model and that its cache was not given.
void warn_of_unread_scales(const Flags& f, const serve::Options& o) {
  if (f.kv_scales != "1" || o.format != CacheFormat::fp8 || !o.checkpoint || o.checkpoint->scales(0).k.empty()) return;
  std::fprintf(stderr,
               "mla: the checkpoint has scales for an fp8 cache, --kv-scales 1 leaves them unread: auto takes them\n");
}

serve::Trace trace_of(const Flags& f) {
  serve::Trace t;
  if (f.trace == "-") throw InputError("--trace is -, standard input is not read: name a file");
  if (!f.trace.empty()) {
    t = read_option("--trace", f.trace, [&](const std::string& file) {
      return serve::read_trace(std::filesystem::path(file), f.max_requests);
    });
  } else {
    serve::Generated g = f.generated;
    g.seed = f.seed;
    if (f.max_requests > 0) g.requests = std::min(g.requests, f.max_requests);
    t = serve::generate_trace(g);
  }
  return serve::scale_lengths(std::move(t), f.scale_lengths);
}

bench::Roof roof_of(const serve::Options& o, ThreadPool& pool) {
  if (o.device.kind == DeviceKind::cpu) return bench::measure_roof(pool);
  Stream stream(o.device);
  return bench::measure_roof(stream);
}

// What a rank's flags, files and model are refused for, all know before the first of them works for long.
void all_read(Communicator& group, const serve::Options& o) { group.barrier({"options are read", o.patience}); }

// What one of several processes does beside rank 0, which has the figures.
void follow(const CLI::App& command, const Flags& f, const StopOnSignal& signals, const Job& job, Communicator& group,
            int& status) {
  serve::Options o = options_of(command, f, &job, &group);
  const serve::Trace t = trace_of(f);
  o = serve::resolved(t, std::move(o));
  all_read(group, o);
  ThreadPool pool(o.threads, o.pinning);
  (void)roof_of(o, pool);  // while rank 0 does: the ranks share the machine's memory in the run, too
  (void)serve::replay(t, o, pool, signals.stop());
  status = signals.exit_code();
}

void lead(const CLI::App& command, const Flags& f, const StopOnSignal& signals, const Job* job, Communicator* group,
          int& status) {
  Outputs files({{"--json", f.json}, {"--report", f.report}, {"--chrome-trace", f.chrome_trace}},
                {{"--trace", f.trace},
                 {"--model", f.model},
                 {"--kv-scales", f.kv_scales == "1" || f.kv_scales == "auto" ? "" : f.kv_scales}});
  serve::Options o = options_of(command, f, job, group);
  const serve::Trace t = trace_of(f);
  o = serve::resolved(t, std::move(o));
  if (group) all_read(*group, o);
  ThreadPool pool(o.threads, o.pinning);
  const bench::Roof roof = roof_of(o, pool);
  ProgressPrinter progress;
  const serve::Result r = serve::replay(t, o, pool, signals.stop(), [&](const serve::Progress& p) { progress(p); });
  progress.end();
  const std::vector<float> asked = std::exchange(o.k_scales, r.k_scales);  // what is verified and reported was used
  RunReport report{.trace = t,
                   .options = o,
                   .result = r,
                   .machine = bench::this_machine(),
                   .roof = roof,
                   .nodes = o.pinning == Pinning::cores ? pool.nodes() : 0,
                   .scale_lengths = f.scale_lengths,
                   .fewer_heads = f.heads != 0,
                   .calibrated = std::count(asked.begin(), asked.end(), 0.0f)};
  print_summary(report);
  std::fflush(stdout);
  warn_of_saturation(r);
  warn_of_unread_scales(f, o);

  if (r.interrupted && r.steps == 0) files.keep_old();
  const auto write = [&](auto&& to) {
    if (!files.wants("--json") && !files.wants("--report")) return;
    const nlohmann::json all = json_of(report, command);
    to("--json", [&](std::ostream& out) { out << dump(all) << '\n'; });
    to("--report", [&](std::ostream& out) { out << report::html(all); });
  };
  files.write("--chrome-trace",
              [&](std::ostream& out) { serve::write_chrome_trace(out, "mla run " + o.model.name, o, r); });
  serve::Verification v;
  if (o.verify > 0 && !r.interrupted) {
    // Verification may take longer than the run: what the run gave is safe by then.
    write([&](const char* flag, const Outputs::Fill& fill) { files.write_so_far(flag, fill); });
    ProgressPrinter rows;
    v = serve::verify(t, o, r.samples, pool, signals.stop(), [&](const serve::VerificationProgress& p) { rows(p); });
    rows.end();
    print_verification(v);
    report.verification = &v;
    if (v.failed > 0 || v.rows == 0) status = 1;
  }
  write([&](const char* flag, const Outputs::Fill& fill) { files.write(flag, fill); });
  if (r.spans_left_out > 0)
    std::printf("trace      holds the first %lld op calls of the run, %lld more are left out\n",
                static_cast<long long>(kSpans), static_cast<long long>(r.spans_left_out));
  std::fflush(stdout);
  if (signals.exit_code() != 0) status = signals.exit_code();
  files.finish();
  if (status == 0 && r.requests > 0 && r.refused == r.requests) {
    std::fflush(stdout);
    std::fprintf(stderr,
                 "mla: every request was refused: the smallest needs %s, the cache has %lld (--pages, --cache-gib)\n",
                 counted(r.refused_pages, "page").c_str(), static_cast<long long>(r.pages));
    status = 1;
  }
}

void run(const CLI::App& command, const Flags& f, int& status) {
  if (f.comm != "mpi") {
    const StopOnSignal signals;
    return lead(command, f, signals, nullptr, nullptr, status);
  }
  Job job;
  const StopOnSignal signals;  // until all have ended: a rank that has nothing left to do waits for rank 0
  job.run(status, [&](Communicator& group) {
    if (job.rank() == 0) lead(command, f, signals, &job, &group, status);
    else follow(command, f, signals, job, group, status);
  });
}

}  // namespace

void add_run(CLI::App& app, int& status) {
  auto f = std::make_shared<Flags>();
  CLI::App* c = app.add_subcommand(
      "run", "Replay a request trace through a model's attention: continuous batching, paged cache, every layer");
  const auto number = [c](const char* flag, auto& value, const char* help, auto least, auto most) {
    using T = std::remove_reference_t<decltype(value)>;
    add_number<T>(*c, flag, value, help, static_cast<T>(least), static_cast<T>(most));
  };
  add_file(*c, "--trace", f->trace, "Mooncake jsonl, Azure csv or BurstGPT csv; without it a trace is generated");
  number("--requests", f->generated.requests, "generated trace: requests", 1, kMost);
  number("--input-len", f->generated.input, "generated trace: mean prompt tokens", 1, kMost);
  number("--output-len", f->generated.output, "generated trace: mean generated tokens", 1, kMost);
  number("--rate", f->generated.rate, "generated trace: arrivals a second, 0 for all at once", 0, 1e9);
  number("--max-requests", f->max_requests, "stop reading the trace after this many; 0: all", 0, kMost);
  number("--scale-lengths", f->scale_lengths, "multiply lengths and prefix blocks, at most 1; pages stay as they are",
         1e-9, 1);
  c->add_option("--model", f->model, "preset, config.json or checkpoint folder")->capture_default_str();
  add_allow_unknown(*c, f->read);
  number("--layers", f->layers, "layers to run; 0: all", 0, kMost);
  f->plan = std::make_unique<PlanFlags>(*c);
  c->add_option("--absorption", f->absorption,
                "runtime; full or full_fp8: W_Q W_UK^T and W_UV W_O multiplied out, latent path alone")
      ->capture_default_str();
  c->add_option("--kv-scales", f->kv_scales,
                "scales of an fp8 cache: 1; auto: the checkpoint's, else found on the first tokens; or a file, JSON "
                "{\"k_scale\": number or one a layer} or safetensors")
      ->capture_default_str();
  number("--page-size", f->page_size, "tokens a page", 1, 1 << 24);
  number("--pages", f->pages, "page budget; 0: all the trace can use, within --cache-gib", 0, kMost);
  number("--cache-gib", f->cache_gib, "bound on the default page budget, all layers together", 1e-9, 1e6);
  number("--token-budget", f->token_budget, "new tokens a step, prefill and decode together", 1, kMost);
  number("--heads", f->heads, "run with fewer heads than the model has, when memory is short; 0: all of them", 0,
         kMost);
  number("--topk", f->topk, "positions the indexer selects; 0: the model's number", 0, kMostTopk);
  c->add_flag("--hadamard", f->hadamard, "rotate the indexer's queries and keys");
  c->add_flag("--no-prefix-reuse", f->no_prefix_reuse, "compute every prompt from its start");
  add_number(*c, "--seed", f->seed, "of weights, hidden states and generated traces");
  number("--verify", f->verify, "recompute this many sampled output rows in float64", 0, kMostSamples);
  add_file(*c, "--json", f->json, "write everything measured to this file");
  add_file(*c, "--report", f->report,
           "write charts and tables of the run to this file: one HTML page that needs no network");
  add_file(*c, "--chrome-trace", f->chrome_trace,
           "write steps and op calls as trace events to this file, for ui.perfetto.dev or chrome://tracing");
  f->device = std::make_unique<DeviceFlag>(*c);
  add_threads(*c, f->threads);
  number("--tp", f->tp, "ranks that split the heads among them, and the threads; on GPUs, one each from --device on", 1,
         1024);
  number("--dcp", f->dcp,
         "ranks of a group that splits every sequence's cached tokens; divides --tp. --page-size is a rank's", 1, 1024);
  number("--dcp-interleave", f->interleave, "tokens in turn on a rank; divides --page-size", 1, 1 << 24);
  add_dcp_exchange(*c, f->exchange);
  c->add_option(
       "--comm", f->comm,
       "how ranks on GPUs reach each other: peer, or nccl (libnccl.so.2); mpi: ranks are the processes of an MPI "
       "job, --threads is each one's; GPUs of one machine are then peers, others take NCCL")
      ->capture_default_str();
  number("--comm-seconds", f->patience, "that a rank waits for the others before the run fails", 1e-3, 86400);
  c->footer(
      "Examples:\n"
      "  mla run\n"
      "  mla run --trace mooncake.jsonl --layers 2 --max-requests 40 --scale-lengths 0.05 --page-size 16 --verify 50\n"
      "  mla run --model deepseek-v3 --layers 1 --cache fp8_ds_mla --requests 8 --json run.json\n"
      "  mla run --requests 200 --rate 4 --report run.html --chrome-trace run.trace.json\n"
      "  mla run --model deepseek-v3 --device cuda --cache-gib 32 --token-budget 8192\n"
      "  mla run --tp 4 --dcp 2 --threads 2 --verify 20\n"
      "  mpirun -n 4 mla run --comm mpi --tp 4 --dcp 4 --verify 20\n"
      "  mla run --cache fp8 --kv-scales auto --verify 20\n"
      "Ctrl-C, SIGTERM, SIGHUP or a closed pipe end the run after the step in progress, and its verification: what "
      "was\n"
      "measured is printed and written, the exit code is 128 + the signal's number. A second signal ends it at once.");
  c->callback([c, f, &status] { run(*c, *f, status); });
}

}  // namespace mla::cli
