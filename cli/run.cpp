// mla run: replays a request trace through the attention of a model, and reports what it cost.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/gpu_roof.hpp"
#include "bench/machine.hpp"
#include "bench/roof.hpp"
#include "cli/commands.hpp"
#include "cli/output.hpp"
#include "cli/params.hpp"
#include "report/report.hpp"
#include "serve/chrome_trace.hpp"
#include "serve/replay.hpp"
#include "serve/series.hpp"

namespace mla::cli {
namespace {

constexpr int kInterrupted = 130;  // as a shell reports a program that SIGINT ended
// As many as a chart shows; longer runs are summed up by neighbours.
constexpr int64_t kSeriesBuckets = 600;
// Op calls in a Chrome trace, some 150 bytes each: browsers open files of this size.
constexpr int64_t kSpans = 400000;

struct Flags {
  std::string model = "deepseek-v2-lite", trace, cache = "bf16", path = "automatic", split = "fast", compute,
              weights = "bf16", sparse = "automatic", index_cache = "fp8", absorption = "runtime", up = "plain",
              products = "plain", activations = "plain", json, report, chrome_trace;
  ReadOptions read;
  int64_t layers = 0, page_size = 0, pages = 0, token_budget = 512, max_requests = 0, verify = 0, context_rows = 0;
  int64_t reorder_threshold = 1, heads = 0, topk = 0;
  double cache_gib = 4, scale_lengths = 1;
  uint64_t seed = 1;
  int threads = 1;
  bool no_prefix_reuse = false, hadamard = false;
  serve::Generated generated;
  std::unique_ptr<DeviceFlag> device;
};

std::atomic<bool> stop{false};

// Ends the replay after the step in progress; a second signal ends the program at once.
class StopOnInterrupt {
 public:
  StopOnInterrupt() {
    stop = false;
    struct sigaction action {};
    action.sa_handler = [](int) { stop = true; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    sigaction(SIGINT, &action, &before_);
  }
  ~StopOnInterrupt() { sigaction(SIGINT, &before_, nullptr); }
  StopOnInterrupt(const StopOnInterrupt&) = delete;
  StopOnInterrupt& operator=(const StopOnInterrupt&) = delete;

 private:
  struct sigaction before_ {};
};

class ProgressPrinter {
 public:
  void operator()(const serve::Progress& p) {
    const double interval = terminal_ ? 0.2 : 5.0;
    if (p.elapsed - last_ < interval) return;
    last_ = p.elapsed;
    const double rate = static_cast<double>(p.prefill_tokens + p.decode_tokens) / p.elapsed;
    const double left = p.share > 0 ? p.elapsed * (1 - std::min(1.0, p.share)) / p.share : 0;
    std::fprintf(stderr, "%s%lld/%lld requests  %.0f tokens/s  cache %.0f%%  step %lld  ETA %.0f s%s",
                 terminal_ ? "\r" : "", static_cast<long long>(p.finished + p.refused),
                 static_cast<long long>(p.requests), rate,
                 100.0 * static_cast<double>(p.pages_used) / static_cast<double>(p.pages),
                 static_cast<long long>(p.steps), left, terminal_ ? "\x1b[K" : "\n");
    std::fflush(stderr);
    drawn_ = terminal_;
  }
  void end() {
    if (drawn_) std::fputs("\r\x1b[K", stderr);
  }

 private:
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
}

serve::Options options_of(const CLI::App& command, const Flags& f) {
  serve::Options o;
  o.device = f.device->device();
  if (std::filesystem::is_directory(f.model)) {
    o.checkpoint.emplace(f.model, f.read);
    o.model = o.checkpoint->config();
  } else if (f.model.ends_with(".json")) {
    o.model = read_config(f.model, f.read);
  } else {
    o.model = preset(f.model);
  }
  require_indexer(command, o.model);
  reduce(f, o);
  o.layers = f.layers;
  o.weights = parse_dtype(f.weights);
  o.absorption = parse_absorption(f.absorption);
  o.up = parse_weight_format(f.up);
  o.products = parse_weight_format(f.products);
  o.plan.activations = parse_activations(f.activations);
  o.format = parse_cache_format(f.cache);
  o.plan.path = parse_path_policy(f.path);
  o.plan.split = parse_split_policy(f.split);
  o.plan.reorder_batch_threshold = f.reorder_threshold;
  o.plan.compute = f.compute.empty() ? o.weights : parse_dtype(f.compute);
  o.plan.context_rows = f.context_rows;
  o.plan.sparse = parse_sparse_policy(f.sparse);
  o.plan.index_format = parse_index_cache_format(f.index_cache);
  o.plan.index_hadamard = f.hadamard;
  // Pages shrink with the lengths: a page stays as large a part of a prefix block as it would be, so that reuse keeps
  // its shape.
  const int64_t page_size = f.page_size != 0 ? f.page_size : std::max<int64_t>(1, std::llround(64 * f.scale_lengths));
  o.limits = {
      .pages = f.pages, .page_size = page_size, .token_budget = f.token_budget, .prefix_reuse = !f.no_prefix_reuse};
  if (!(f.cache_gib > 0 && f.cache_gib <= 1e6))
    throw InputError("--cache-gib is " + std::to_string(f.cache_gib) + ", above 0 is needed");
  o.cache_bytes = static_cast<size_t>(f.cache_gib * 1073741824.0);
  o.threads = f.threads;
  o.seed = f.seed;
  if (f.verify < 0) throw InputError("--verify is " + std::to_string(f.verify) + ", must not be negative");
  o.verify = f.verify;
  return o;
}

serve::Trace trace_of(const Flags& f) {
  if (f.max_requests < 0)
    throw InputError("--max-requests is " + std::to_string(f.max_requests) + ", must not be negative");
  serve::Trace t;
  if (!f.trace.empty()) {
    t = serve::read_trace(std::filesystem::path(f.trace), f.max_requests);
  } else {
    serve::Generated g = f.generated;
    g.seed = f.seed;
    if (f.max_requests > 0) g.requests = std::min(g.requests, f.max_requests);
    t = serve::generate_trace(g);
  }
  return serve::scale_lengths(std::move(t), f.scale_lengths);
}

double gib(size_t bytes) { return static_cast<double>(bytes) / 1073741824.0; }

/// The rate that bounds an op: products run in the weights' dtype, attention in the compute dtype.
double peak_of(std::string_view op, const serve::Options& o, const bench::Roof& roof) {
  const bool attention = op.starts_with("attend") || op == "index_score";
  const bool bf16_operands = (attention ? o.plan.compute : o.weights) == Dtype::bf16;
  return bf16_operands && roof.bf16_gflops > 0 ? roof.bf16_gflops : roof.fma_gflops;
}

double roof_share(const Profile::Row& row, const serve::Options& o, const bench::Roof& roof) {
  const double floor = std::max(row.bytes / (roof.read_gbps * 1e9), row.flops / (peak_of(row.op, o, roof) * 1e9));
  return row.seconds > 0 ? 100 * floor / row.seconds : 0;
}

std::vector<Profile::Row> by_time(const Profile& profile) {
  std::vector<Profile::Row> rows = profile.rows();
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
  return rows;
}

// Of all ops. A GPU's are sampled one by one, which may take longer than the steps that they stand for.
double op_seconds(const serve::Result& r) {
  double seconds = 0;
  for (const Profile::Row& row : r.profile.rows()) seconds += row.seconds;
  return seconds;
}

// Where a sparse model's time goes.
enum class Part { indexer, sparse, dense, products };
Part part_of(std::string_view op) {
  if (op.starts_with("index_") || op == "hadamard" || op == "select_topk" || op == "map_indices") return Part::indexer;
  if (op == "attend_sparse" || op == "merge_sparse" || op == "gather_sparse") return Part::sparse;
  if (op.starts_with("attend") || op.starts_with("merge") || op == "gather" || op == "kv_up") return Part::dense;
  return Part::products;
}

void print_sparse(const serve::Options& o, const serve::Result& r) {
  double seconds[4] = {};
  for (const Profile::Row& row : r.profile.rows()) seconds[static_cast<int>(part_of(row.op))] += row.seconds;
  const double spent = std::max(op_seconds(r), r.step_seconds);
  auto share = [&](Part p) { return 100 * seconds[static_cast<int>(p)] / std::max(spent, 1e-9); };
  auto of = [](int64_t part, int64_t whole) {
    return 100.0 * static_cast<double>(part) / static_cast<double>(std::max<int64_t>(whole, 1));
  };
  const int64_t rows = r.sparse_rows + r.unscored_rows;
  if (o.plan.sparse == SparsePolicy::dense) std::printf("sparse     off: every row attends to all it sees\n");
  else
    std::printf(
        "sparse     topk %lld, %s, index cache %s%s; %lld rows selected (%.1f%%), %lld skipped scoring: all they see "
        "fits\n"
        "           selected rows attend to %lld of the %lld keys they see (%.1f%%)\n",
        static_cast<long long>(o.model.indexer->topk), std::string(to_string(o.plan.sparse)).c_str(),
        std::string(to_string(o.plan.index_format)).c_str(), o.plan.index_hadamard ? " rotated" : "",
        static_cast<long long>(r.sparse_rows), of(r.sparse_rows, rows), static_cast<long long>(r.unscored_rows),
        static_cast<long long>(r.selected_keys), static_cast<long long>(r.seen_keys), of(r.selected_keys, r.seen_keys));
  std::printf(
      "time split indexer %.1f%%, sparse attention %.1f%%, dense attention %.1f%%, projections and rest %.1f%%\n",
      share(Part::indexer), share(Part::sparse), share(Part::dense),
      100 - share(Part::indexer) - share(Part::sparse) - share(Part::dense));
}

double rate(double amount, double seconds) { return seconds > 0 ? amount / seconds : 0; }

double percent(double part, double whole) { return whole > 0 ? 100 * part / whole : 0; }

void print_report(const Flags& f, const serve::Trace& t, const serve::Options& o, const serve::Result& r,
                  const bench::Machine& machine, const bench::Roof& roof) {
  auto ms = [](const std::vector<double>& v, double p) { return 1e3 * serve::percentile(v, p); };
  auto n = [](int64_t x) { return static_cast<long long>(x); };
  const std::string heads = std::to_string(o.model.heads) + (f.heads != 0 ? " (--heads)" : "");
  if (r.interrupted) std::printf("interrupted: what follows covers the run so far\n");
  std::printf("model      %s, %lld of %lld layers, %s heads, weights %s%s (%.2f GiB)\n", o.model.name.c_str(),
              n(r.layers), n(o.model.layers), heads.c_str(), std::string(to_string(o.weights)).c_str(),
              o.checkpoint ? "" : " random", gib(r.weight_bytes));
  std::string held = o.products == WeightFormat::plain ? "" : ", product weights " + std::string(to_string(o.products));
  if (o.plan.activations != Activations::plain) held += ", activations " + std::string(to_string(o.plan.activations));
  const bool gpu = o.device.kind == DeviceKind::cuda;
  if (gpu)
    std::printf("machine    %s; copy %.0f GB/s, products f32 %.1f TFLOP/s, bf16 %.0f TFLOP/s\n",
                describe(o.device).c_str(), roof.read_gbps, 1e-3 * roof.fma_gflops, 1e-3 * roof.bf16_gflops);
  else
    std::printf("machine    %s, %lld threads; read %.1f GB/s, f32 %.0f GFLOP/s, bf16 %.0f GFLOP/s\n",
                machine.cpu.c_str(), n(r.threads), roof.read_gbps, roof.fma_gflops, roof.bf16_gflops);
  std::printf("trace      %s (%s), %lld requests, %lld finished, %lld refused\n", t.source.c_str(), t.format.c_str(),
              n(r.requests), n(r.finished), n(r.refused));
  std::printf("cache      %s, %lld pages of %lld (%.2f GiB); occupancy mean %.1f%%, peak %.1f%%\n",
              std::string(to_string(o.format)).c_str(), n(r.pages), n(r.page_size), gib(r.cache_bytes),
              percent(r.mean_pages, static_cast<double>(r.pages)),
              percent(static_cast<double>(r.peak_pages), static_cast<double>(r.pages)));
  std::printf(
      "prefix     %.1f%% of prompt tokens found in the cache (%lld of %lld); %lld evictions, %lld preemptions\n",
      percent(static_cast<double>(r.hit_tokens), static_cast<double>(r.prompt_tokens)), n(r.hit_tokens),
      n(r.prompt_tokens), n(r.evictions), n(r.preemptions));
  std::printf("plan       path %s, split %s, compute %s, absorption %s, up weights %s%s, at most %lld tokens a step\n",
              std::string(to_string(o.plan.path)).c_str(), std::string(to_string(o.plan.split)).c_str(),
              std::string(to_string(o.plan.compute)).c_str(), std::string(to_string(o.absorption)).c_str(),
              std::string(to_string(o.up)).c_str(), held.c_str(), n(o.limits.token_budget));
  if (o.model.indexer) print_sparse(o, r);
  std::printf("throughput prefill %.1f tokens/s (%lld), decode %.1f tokens/s (%lld), together %.1f tokens/s\n",
              rate(static_cast<double>(r.prefill_tokens), r.prefill_seconds), n(r.prefill_tokens),
              rate(static_cast<double>(r.decode_tokens), r.decode_seconds), n(r.decode_tokens),
              rate(static_cast<double>(r.prefill_tokens + r.decode_tokens), r.step_seconds));
  std::printf("%-10s %10s %10s %10s\n", "latency ms", "p50", "p90", "p99");
  const std::pair<const char*, const std::vector<double>*> latencies[] = {
      {"  step", &r.step_latencies}, {"  TTFT", &r.ttft}, {"  TPOT", &r.tpot}};
  for (const auto& [name, v] : latencies)
    std::printf("%-10s %10.2f %10.2f %10.2f\n", name, ms(*v, 50), ms(*v, 90), ms(*v, 99));
  const double in_ops = op_seconds(r), whole = std::max(in_ops, r.step_seconds);
  std::printf("%-16s %9s %7s %9s %10s %8s %7s\n", "time by op", "seconds", "share", "calls", "GFLOP/s", "GB/s",
              "% roof");
  for (const Profile::Row& row : by_time(r.profile))
    std::printf("  %-14s %9.3f %6.1f%% %9lld %10.1f %8.1f %6.1f%%\n", std::string(row.op).c_str(), row.seconds,
                percent(row.seconds, whole), n(row.calls), rate(row.flops * 1e-9, row.seconds),
                rate(row.bytes * 1e-9, row.seconds), roof_share(row, o, roof));
  if (in_ops <= r.step_seconds)
    std::printf("  %-14s %9.3f %6.1f%%\n", "plan and rest", r.step_seconds - in_ops,
                percent(r.step_seconds - in_ops, whole));
  if (gpu)
    std::printf(
        "           of one layer in %lld of %lld steps, launched op by op and scaled: %.0f%% of the steps' time;\n"
        "           steps of decodes alone run as one graph\n",
        n(r.profiled_steps), n(r.steps), percent(in_ops, r.step_seconds));
  std::printf("memory     peak %.2f GiB (workspace %.2f)\n", gib(r.peak_memory), gib(r.workspace_bytes));
  std::printf("time       %.1f s setup, %.1f s replay in %lld steps, %.1f s simulated\n", r.setup_seconds,
              r.wall_seconds, n(r.steps), r.simulated_seconds);
}

// By column: a number for each bucket of consecutive steps.
nlohmann::json series_json(const serve::Result& r) {
  const std::vector<serve::StepBucket> all = serve::buckets(r.series, kSeriesBuckets);
  nlohmann::json j = nlohmann::json::object();
  auto column = [&](const char* name, auto serve::StepBucket::*member) {
    nlohmann::json& values = j[name] = nlohmann::json::array();
    for (const serve::StepBucket& b : all) values.push_back(b.*member);
  };
  column("start_s", &serve::StepBucket::start);
  column("end_s", &serve::StepBucket::end);
  column("steps", &serve::StepBucket::steps);
  column("seconds", &serve::StepBucket::seconds);
  column("step_median_s", &serve::StepBucket::median_seconds);
  column("step_max_s", &serve::StepBucket::max_seconds);
  column("requests", &serve::StepBucket::requests);
  column("prefill_tokens", &serve::StepBucket::prefill_tokens);
  column("decode_tokens", &serve::StepBucket::decode_tokens);
  column("context_tokens", &serve::StepBucket::context_tokens);
  column("pages", &serve::StepBucket::pages);
  column("prompt_tokens", &serve::StepBucket::prompt_tokens);
  column("hit_tokens", &serve::StepBucket::hit_tokens);
  column("finished", &serve::StepBucket::finished);
  return j;
}

nlohmann::json json_of(const Flags& f, const serve::Trace& t, const serve::Options& o, const serve::Result& r,
                       const bench::Machine& machine, const bench::Roof& roof, const serve::Verification* v) {
  auto percentiles = [](const std::vector<double>& values) {
    nlohmann::json j{{"count", values.size()}};
    for (int p : {50, 90, 99}) j["p" + std::to_string(p)] = serve::percentile(values, p);
    return j;
  };
  nlohmann::json ops = nlohmann::json::array();
  for (const Profile::Row& row : by_time(r.profile))
    ops.push_back({{"op", std::string(row.op)},
                   {"seconds", row.seconds},
                   {"calls", row.calls},
                   {"bytes", row.bytes},
                   {"flops", row.flops},
                   {"peak_gflops", peak_of(row.op, o, roof)},
                   {"percent_of_roof", roof_share(row, o, roof)}});
  nlohmann::json j{
      {"command", "run"},
      {"version", MLA_VERSION},
      {"date", utc_now()},
      {"model",
       {{"name", o.model.name},
        {"layers", r.layers},
        {"heads", o.model.heads},
        {"weights", to_string(o.weights)},
        {"absorption", to_string(o.absorption)},
        {"up_weights", to_string(o.up)},
        {"product_weights", to_string(o.products)},
        {"activations", to_string(o.plan.activations)},
        {"weight_bytes", r.weight_bytes}}},
      {"machine",
       {{"device", o.device.kind == DeviceKind::cpu ? "cpu" : describe(o.device)},
        {"cpu", machine.cpu},
        {"threads", r.threads},
        {"read_gbps", roof.read_gbps},
        {"fma_gflops", roof.fma_gflops},
        {"bf16_gflops", roof.bf16_gflops}}},
      {"options",
       {{"model", f.model},
        {"path", to_string(o.plan.path)},
        {"split", to_string(o.plan.split)},
        {"compute", to_string(o.plan.compute)},
        {"sparse", to_string(o.plan.sparse)},
        {"topk", o.model.indexer ? o.model.indexer->topk : 0},
        {"index_cache", o.model.indexer ? std::string(to_string(o.plan.index_format)) : "none"},
        {"hadamard", o.plan.index_hadamard},
        {"token_budget", o.limits.token_budget},
        {"max_requests", f.max_requests},
        {"scale_lengths", f.scale_lengths},
        {"seed", f.seed},
        {"verify", f.verify}}},
      {"trace",
       {{"source", t.source},
        {"format", t.format},
        {"requests", r.requests},
        {"finished", r.finished},
        {"refused", r.refused}}},
      {"cache",
       {{"format", to_string(o.format)},
        {"pages", r.pages},
        {"page_size", r.page_size},
        {"bytes", r.cache_bytes},
        {"index_bytes", r.index_cache_bytes},
        {"mean_pages", r.mean_pages},
        {"peak_pages", r.peak_pages},
        {"evictions", r.evictions}}},
      {"prefix",
       {{"prompt_tokens", r.prompt_tokens},
        {"hit_tokens", r.hit_tokens},
        {"hit_rate", percent(static_cast<double>(r.hit_tokens), static_cast<double>(r.prompt_tokens)) / 100}}},
      {"preemptions", r.preemptions},
      {"sparse",
       {{"selected_rows", r.sparse_rows},
        {"unscored_rows", r.unscored_rows},
        {"seen_keys", r.seen_keys},
        {"selected_keys", r.selected_keys}}},
      {"throughput",
       {{"prefill_tokens", r.prefill_tokens},
        {"decode_tokens", r.decode_tokens},
        {"prefill_tokens_per_second", rate(static_cast<double>(r.prefill_tokens), r.prefill_seconds)},
        {"decode_tokens_per_second", rate(static_cast<double>(r.decode_tokens), r.decode_seconds)}}},
      {"latency_seconds",
       {{"step", percentiles(r.step_latencies)}, {"ttft", percentiles(r.ttft)}, {"tpot", percentiles(r.tpot)}}},
      {"ops", ops},
      {"steps", r.steps},
      {"profiled_steps", r.profiled_steps},
      {"steps_series", series_json(r)},
      {"seconds",
       {{"setup", r.setup_seconds},
        {"replay", r.wall_seconds},
        {"steps", r.step_seconds},
        {"simulated", r.simulated_seconds}}},
      {"memory", {{"peak_bytes", r.peak_memory}, {"workspace_bytes", r.workspace_bytes}}},
      {"interrupted", r.interrupted}};
  if (v)
    j["verification"] = {{"rows", v->rows},
                         {"selections", v->selections},
                         {"failed", v->failed},
                         {"worst_error", v->worst_error},
                         {"worst_bound", v->worst_bound},
                         {"worst", v->worst}};
  return j;
}

bench::Roof roof_of(const serve::Options& o, ThreadPool& pool) {
  if (o.device.kind == DeviceKind::cpu) return bench::measure_roof(pool);
  Stream stream(o.device);
  return bench::measure_roof(stream);
}

void run(const CLI::App& command, const Flags& f, int& status) {
  serve::Options o = options_of(command, f);
  if (!f.chrome_trace.empty()) o.spans = kSpans;
  const serve::Trace t = trace_of(f);
  // Files are opened first: a run must not end in a path that cannot be written.
  OutputFile json(f.json), report(f.report), trace(f.chrome_trace);
  ThreadPool pool(o.threads);
  const bench::Roof roof = roof_of(o, pool);
  const StopOnInterrupt interrupt;
  ProgressPrinter progress;
  const serve::Result r = serve::replay(t, o, pool, stop, [&](const serve::Progress& p) { progress(p); });
  progress.end();
  const bench::Machine machine = bench::this_machine();
  print_report(f, t, o, r, machine, roof);
  std::fflush(stdout);

  serve::Verification v;
  const bool verifies = o.verify > 0 && !r.interrupted;
  if (verifies) {
    v = serve::verify(t, o, r.samples, pool);
    std::printf("verified   %lld rows against float64, %lld failed; nearest its bound: error %.3g of %.3g at %s\n",
                static_cast<long long>(v.rows), static_cast<long long>(v.failed), v.worst_error, v.worst_bound,
                v.rows ? v.worst.c_str() : "no row");
    if (v.selections > 0)
      std::printf("           %lld of them with their selection of keys\n", static_cast<long long>(v.selections));
    if (v.failed > 0 || v.rows == 0) status = 1;
  }
  if (json || report) {
    const nlohmann::json all = json_of(f, t, o, r, machine, roof, verifies ? &v : nullptr);
    json.write([&](std::ostream& out) { out << dump(all) << '\n'; });
    report.write([&](std::ostream& out) { out << report::html(all); });
  }
  trace.write([&](std::ostream& out) { serve::write_chrome_trace(out, "mla run " + o.model.name, o, r); });
  if (r.spans_left_out > 0)
    std::printf("trace      holds the first %lld op calls of the run, %lld more are left out\n",
                static_cast<long long>(kSpans), static_cast<long long>(r.spans_left_out));
  if (r.interrupted) status = kInterrupted;
}

}  // namespace

void add_run(CLI::App& app, int& status) {
  auto f = std::make_shared<Flags>();
  CLI::App* c = app.add_subcommand(
      "run", "Replay a request trace through a model's attention: continuous batching, paged cache, every layer");
  c->add_option("--trace", f->trace, "Mooncake jsonl, Azure csv or BurstGPT csv; without it a trace is generated");
  c->add_option("--requests", f->generated.requests, "generated trace: requests")->capture_default_str();
  c->add_option("--input-len", f->generated.input, "generated trace: mean prompt tokens")->capture_default_str();
  c->add_option("--output-len", f->generated.output, "generated trace: mean generated tokens")->capture_default_str();
  c->add_option("--rate", f->generated.rate, "generated trace: arrivals a second, 0 for all at once")
      ->capture_default_str();
  c->add_option("--max-requests", f->max_requests, "stop reading the trace after this many; 0: all")
      ->capture_default_str();
  c->add_option("--scale-lengths", f->scale_lengths, "multiply lengths and prefix blocks, above 0 and at most 1")
      ->capture_default_str();
  c->add_option("--model", f->model, "preset, config.json or checkpoint folder")->capture_default_str();
  add_allow_unknown(*c, f->read);
  c->add_option("--layers", f->layers, "layers to run; 0: all")->capture_default_str();
  c->add_option("--weights", f->weights, "dtype of prepared weights: f32 or bf16")->capture_default_str();
  c->add_option("--absorption", f->absorption,
                "runtime; full or full_fp8: W_Q W_UK^T and W_UV W_O multiplied out, latent path alone")
      ->capture_default_str();
  c->add_option("--up-weights", f->up, "W_UK and W_UV of the latent path: plain, fp8 or mxfp4")->capture_default_str();
  c->add_option("--product-weights", f->products,
                "the other maps: plain, or fp8 by blocks, an fp8 checkpoint's codes and scales as they are")
      ->capture_default_str();
  c->add_option("--activations", f->activations, "inputs of products with fp8 weights: plain or fp8_128")
      ->capture_default_str();
  c->add_option("--compute", f->compute, "operands of attention: f32 or bf16; by default the weights' dtype");
  c->add_option("--cache", f->cache, "cache format")->capture_default_str();
  c->add_option("--page-size", f->page_size, "tokens a page; 0: 64, scaled with --scale-lengths")
      ->capture_default_str();
  c->add_option("--pages", f->pages, "page budget; 0: all the trace can use, within --cache-gib")
      ->capture_default_str();
  c->add_option("--cache-gib", f->cache_gib, "bound on the default page budget, all layers together")
      ->capture_default_str();
  c->add_option("--token-budget", f->token_budget, "new tokens a step, prefill and decode together")
      ->capture_default_str();
  c->add_option("--path", f->path, "automatic, latent, expanded or by_length")->capture_default_str();
  c->add_option("--decode-length", f->reorder_threshold,
                "by_length: longest query that takes the latent path; sparse: longest decode")
      ->capture_default_str();
  c->add_option("--split", f->split, "fast or batch_invariant")->capture_default_str();
  c->add_option("--heads", f->heads, "run with fewer heads than the model has, when memory is short; 0: all of them")
      ->capture_default_str();
  c->add_option("--topk", f->topk, "positions the indexer selects; 0: the model's number")->capture_default_str();
  c->add_option("--sparse", f->sparse, "automatic, mixed, direct, upconvert or dense")->capture_default_str();
  c->add_option("--index-cache", f->index_cache, "format of the indexer's keys: f32, bf16 or fp8")
      ->capture_default_str();
  c->add_flag("--hadamard", f->hadamard, "rotate the indexer's queries and keys");
  c->add_option("--context-rows", f->context_rows, "rows of the context workspace; 0: by the default rule")
      ->capture_default_str();
  c->add_flag("--no-prefix-reuse", f->no_prefix_reuse, "compute every prompt from its start");
  c->add_option("--seed", f->seed, "of weights, hidden states and generated traces")->capture_default_str();
  c->add_option("--verify", f->verify, "recompute this many sampled output rows in float64")->capture_default_str();
  c->add_option("--json", f->json, "write everything measured to this file");
  c->add_option("--report", f->report,
                "write charts and tables of the run to this file: one HTML page that needs no network");
  c->add_option("--chrome-trace", f->chrome_trace,
                "write steps and op calls as trace events to this file, for ui.perfetto.dev or chrome://tracing");
  f->device = std::make_unique<DeviceFlag>(*c);
  add_threads(*c, f->threads);
  c->footer(
      "Examples:\n"
      "  mla run\n"
      "  mla run --trace mooncake.jsonl --layers 2 --max-requests 40 --scale-lengths 0.05 --verify 50\n"
      "  mla run --model deepseek-v3 --layers 1 --cache fp8_ds_mla --requests 8 --json run.json\n"
      "  mla run --requests 200 --rate 4 --report run.html --chrome-trace run.trace.json\n"
      "  mla run --model deepseek-v3 --device cuda --cache-gib 32 --token-budget 8192\n"
      "Ctrl-C ends the run after the step in progress and reports what was measured; the exit code is then 130.");
  c->callback([c, f, &status] { run(*c, *f, status); });
}

}  // namespace mla::cli
