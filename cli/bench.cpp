// mla bench: ops, the plan and the layer, each answer verified, each time set against the machine's measured roof.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "backend/backend.hpp"
#include "backend/cpu/core/target.hpp"
#include "bench/harness.hpp"
#include "bench/layer.hpp"
#include "bench/machine.hpp"
#include "bench/plan.hpp"
#include "cli/bench_comm.hpp"
#include "cli/bench_fit.hpp"
#include "cli/commands.hpp"
#include "cli/output.hpp"
#include "cli/params.hpp"
#include "cli/signals.hpp"
#include "core/counted.hpp"
#include "mla/error.hpp"
#include "model/json.hpp"
#include "report/report.hpp"

namespace mla::cli {
namespace {

using nlohmann::json;

// What is not an op of the list of cases, but is measured beside them.
constexpr std::string_view kPlan = "plan", kLayer = "layer";

struct Row {
  std::string name;
  std::string_view op;
  cases::Params params;
  bool cold = false;
};

std::string time_text(double seconds) {
  char s[32];
  if (seconds >= 1e-3) std::snprintf(s, sizeof s, "%.3f ms", 1e3 * seconds);
  else std::snprintf(s, sizeof s, "%.2f us", 1e6 * seconds);
  return s;
}

std::string one_digit(double x) {
  char s[32];
  std::snprintf(s, sizeof s, "%.1f", x);
  return s;
}

json params_json(const cases::Params& p) {
  return {{"requests", p.requests},
          {"query_len", p.query_len},
          {"context", p.context},
          {"ragged", p.ragged},
          {"heads", p.heads},
          {"latent", p.latent},
          {"rope", p.rope},
          {"nope", p.nope},
          {"value", p.value},
          {"in", p.in},
          {"out", p.out},
          {"format", to_string(p.format)},
          {"page_size", p.page_size},
          {"dtype", to_string(p.dtype)},
          {"neox", p.neox},
          {"yarn_factor", p.yarn_factor},
          {"causal", p.causal},
          {"batch_invariant", p.batch_invariant},
          {"splits", p.splits},
          {"output", to_string(p.output)},
          {"weights", to_string(p.weights)},
          {"weight_block", p.weight_block},
          {"topk", p.topk},
          {"sources", p.sources},
          {"sinks", p.sinks},
          {"index_dim", p.index_dim},
          {"index_format", to_string(p.index_format)},
          {"index_arithmetic", to_string(p.index_arithmetic)},
          {"seed", p.seed}};
}

// Attention over a cache of `tokens`, the new ones included, split as a plan would.
cases::Params decode(int64_t heads, int64_t tokens, CacheFormat format, Dtype dtype, int64_t query_len = 1) {
  cases::Params p{
      .query_len = query_len, .context = tokens - query_len, .heads = heads, .format = format, .dtype = dtype};
  p.splits = bench::planned_splits(p);
  return p;
}

// The same over `topk` positions selected from them.
cases::Params sparse(int64_t heads, int64_t tokens, int64_t topk, CacheFormat format, Dtype dtype,
                     int64_t query_len = 1) {
  cases::Params p{.query_len = query_len,
                  .context = tokens - query_len,
                  .heads = heads,
                  .format = format,
                  .dtype = dtype,
                  .topk = topk};
  p.splits = bench::planned_sparse_splits(p, topk);
  return p;
}

cases::Params project(int64_t rows, int64_t heads, int64_t in, int64_t out, Dtype dtype) {
  return {.requests = rows, .heads = heads, .in = in, .out = out, .dtype = dtype};
}

// The shapes that every release is measured by. Projections are deepseek-v2-lite's. Ops that only move memory run cold,
// on more of it than the caches next to a core hold.
std::vector<Row> standing_rows() {
  std::vector<Row> rows;
  std::vector<Dtype> arithmetic{Dtype::f32};
  if (cpu::bf16_products() != cpu::Bf16Products::widened) arithmetic.push_back(Dtype::bf16);
  auto each = [&](const std::string& name, std::string_view op, auto&& make) {
    for (Dtype t : arithmetic) rows.push_back({name + ", " + std::string(to_string(t)) + " arithmetic", op, make(t)});
  };
  auto decode_row = [&](const std::string& what, int64_t heads, int64_t tokens, CacheFormat f, int64_t query_len = 1) {
    each(what, "attend_latent", [&](Dtype t) { return decode(heads, tokens, f, t, query_len); });
  };
  decode_row("decode bf16, 16 heads, 4K", 16, 4096, CacheFormat::bf16);
  decode_row("decode bf16, 16 heads, 64K", 16, 65536, CacheFormat::bf16);
  decode_row("decode bf16, 128 heads, 4K", 128, 4096, CacheFormat::bf16);
  decode_row("decode fp8_ds_mla, 16 heads, 4K", 16, 4096, CacheFormat::fp8_ds_mla);
  decode_row("decode fp8, 16 heads, 4K", 16, 4096, CacheFormat::fp8);
  decode_row("4 query tokens bf16, 16 heads, 4K", 16, 4096, CacheFormat::bf16, 4);
  each("prefill 192/128, 16 heads, 2048 causal", "attend_expanded",
       [](Dtype t) { return cases::Params{.query_len = 2048, .dtype = t}; });

  for (int64_t tokens : {1, 32, 512})
    for (Dtype t : {Dtype::f32, Dtype::bf16}) {
      const std::string with = ", " + std::string(to_string(t)) + ", " + counted(tokens, "token");
      rows.push_back({"project query 2048 -> 3072" + with, "project", project(tokens, 1, 2048, 3072, t)});
      rows.push_back({"project absorb 16 x 128 -> 512" + with, "project", project(tokens, 16, 128, 512, t)});
    }
  // The latent path's maps as they may be held; W_UV W_O of full absorption, a decode step's largest product.
  for (int64_t tokens : {1, 32})
    for (WeightFormat f : {WeightFormat::plain, WeightFormat::fp8, WeightFormat::mxfp4}) {
      const std::string with = ", " + std::string(to_string(f)) + ", bf16, " + counted(tokens, "token") + ", cold";
      cases::Params absorb = project(tokens, 16, 128, 512, Dtype::bf16);
      absorb.weights = f;
      rows.push_back({"project absorb 16 x 128 -> 512" + with, "project", absorb, true});
      cases::Params full = project(tokens, 1, 8192, 2048, Dtype::bf16);
      full.weights = f;
      full.weight_block = f == WeightFormat::fp8 ? 128 : 0;
      if (f != WeightFormat::mxfp4)
        rows.push_back({"project absorbed output 8192 -> 2048" + with, "project", full, true});
    }
  for (CacheFormat f : {CacheFormat::bf16, CacheFormat::fp8_ds_mla}) {
    const std::string name(to_string(f));
    rows.push_back({"append " + name + ", 4096 tokens, cold", "append", {.query_len = 4096, .format = f}, true});
    rows.push_back({"gather " + name + ", 8192 tokens, cold", "gather", {.context = 8192, .format = f}, true});
  }
  // The sparse indexer at deepseek-v3.2's 64 heads of 128. bf16 queries and fp8 codes meet in products of bf16.
  auto index_row = [&](const std::string& what, int64_t query_len, int64_t tokens) {
    for (auto [format, dtype] : {std::pair{IndexCacheFormat::f32, Dtype::f32},
                                 {IndexCacheFormat::bf16, Dtype::bf16},
                                 {IndexCacheFormat::fp8, Dtype::fp8_e4m3}})
      rows.push_back({"index_score " + what + ", " + std::string(to_string(format)),
                      "index_score",
                      {.query_len = query_len,
                       .context = tokens - query_len,
                       .heads = 64,
                       .dtype = dtype,
                       .index_format = format}});
    rows.push_back({"select_topk " + what + ", best 2048",
                    "select_topk",
                    {.query_len = query_len, .context = tokens - query_len, .topk = 2048}});
  };
  index_row("1 query x 64K", 1, 65536);
  index_row("64 queries x 16K", 64, 16384);
  index_row("128 queries x 16K", 128, 16384);
  rows.push_back({"index_append fp8, 16384 tokens, cold", "index_append", {.query_len = 16384}, true});
  rows.push_back({"index_gather fp8 to f32, 16384 tokens, cold", "index_gather", {.context = 16384}, true});
  rows.push_back({"index_query 512 tokens x 64 heads, cold", "index_query", {.query_len = 512, .heads = 64}, true});
  rows.push_back({"hadamard 512 tokens x 64 heads, cold", "hadamard", {.query_len = 512, .heads = 64}, true});
  rows.push_back({"merge 4096 tokens x 16 heads, cold", "merge", {.query_len = 4096}, true});
  rows.push_back({"norm 8192 x 2048, cold", "norm", {.query_len = 8192, .in = 2048}, true});
  rows.push_back({"layer_norm 65536 x 128, cold", "layer_norm", {.query_len = 65536, .in = 128}, true});
  rows.push_back({"rope 8192 tokens x 16 heads, cold", "rope", {.query_len = 8192}, true});
  rows.push_back(
      {"cast 8192 tokens x 16 heads to bf16, cold", "cast", {.query_len = 8192, .in = 64, .dtype = Dtype::bf16}, true});
  for (const OutputSpec& spec : output_specs())
    if (spec.kind != OutputKind::none)
      rows.push_back({"quantize 8192 tokens x 16 heads to " + to_string(spec) + ", cold",
                      "quantize",
                      {.query_len = 8192, .output = spec},
                      true});
  rows.push_back({"map_indices 512 rows x 2048 of 32K", "map_indices", {.query_len = 512, .context = 32768}});
  for (CacheFormat f : {CacheFormat::bf16, CacheFormat::fp8_ds_mla})
    each("sparse prefill " + std::string(to_string(f)) + ", 512 rows, 16 heads, 2048 of 32K", "attend_sparse",
         [&](Dtype t) { return sparse(16, 32768, 2048, f, t, 512); });
  return rows;
}

// Another implementation's time for a row.
struct Peer {
  std::string row, name;
  double microseconds = 0;
};

std::vector<Peer> read_peers(const std::string& file) {
  const JsonDocument document =
      parse_strict(read_text(file), [&](const std::string& why) { throw InputError(file + ": " + why); });
  const json& all = document.root;
  if (!all.is_array()) throw InputError(file + ": a JSON array of {\"row\", \"peer\", \"us\"} is needed");
  std::vector<Peer> peers;
  for (const json& p : all) {
    const std::string where = file + ": entry " + std::to_string(peers.size());
    auto text = [&](const char* key) {
      if (!p.is_object() || !p.contains(key) || !p[key].is_string())
        throw InputError(where + " has no text \"" + key + "\"");
      return p[key].get<std::string>();
    };
    Peer peer{.row = text("row"), .name = text("peer")};
    require_keys(p, {"row", "peer", "us"}, where);
    if (!p.contains("us") || !p["us"].is_number()) throw InputError(where + " has no number \"us\"");
    peer.microseconds = p["us"].get<double>();
    if (!(peer.microseconds > 0)) throw InputError(where + ": \"us\" is " + p["us"].dump() + ", above 0 is needed");
    peers.push_back(std::move(peer));
  }
  return peers;
}

struct Interrupted {};

class Bench {
 public:
  explicit Bench(CLI::App& command) : command_(command), shape_(command) {
    command.add_option("op", ops_, "Ops to measure, or plan, or layer; all by default");
    add_threads(command, threads_);
    add_target(command, target_);
    command.add_flag("--fit", fit_,
                     "Instead: measure this CPU's instructions and both paths of a request (8 contexts, 8 query\n"
                     "lengths, 16 and 128 heads; minutes), fit the cost model's rates, and say what its choices cost.\n"
                     "--dtype: attention's operands, by default f32 and bf16, with --device cuda bf16");
    device_ = std::make_unique<DeviceFlag>(command);
    add_number(command, "--rounds", options_.rounds, "Rounds, each between two probes of the peaks; at least 4", 4,
               10000);
    add_number(command, "--min-time", options_.min_time, "Seconds of calls a row, over all rounds", 0.0, 600.0);
    command.add_flag("--cold", options_.cold, "Empty the caches before each call, in every row");
    add_file(command, "--json", json_file_, "Also write machine, roof, options and rows to this file");
    add_file(command, "--report", report_file_,
             "Also write the rows as tables and charts to this file: one HTML page that needs no network");
    add_file(command, "--peers", peers_file_,
             "Times of other implementations, for --json and --report: a JSON file of\n"
             "[{\"row\": name of a row, \"peer\": name, \"us\": microseconds}, ...]");
    std::string names;
    for (const cases::CaseType& c : cases::all()) names += " " + std::string(c.op);
    command.footer(
        "Without shape flags: the standing list. With them: the ops named, at that shape.\n% of roof is max(bytes / "
        "read, "
        "flops / peak) / time by the rates probed around each round; the peak is the f32 multiply-add rate,\nfor bf16 "
        "operands the fastest bf16 rate of the CPU. % of f32 always takes the f32 rate.\nOps:" +
        names +
        " plan layer\n\nExamples:\n"
        "  mla bench\n"
        "  mla bench attend_latent --heads 128 --context 16384 --format fp8_ds_mla --dtype bf16\n"
        "  mla bench attend_latent attend_expanded --target avx2 --json avx2.json\n"
        "  mla bench layer plan --rounds 9\n"
        "  mla bench attend_latent --report bench.html --peers peers.json");
  }

  /// The exit code.
  int run() {
    const StopOnSignal signals;
    options_.stop = &signals.stop();
    for (const std::string& op : ops_)
      if (op != kPlan && op != kLayer) cases_find(op);
    const cases::Params params = shape_.params();
    if (fit_) {
      if (!ops_.empty()) throw InputError("--fit measures no op: '" + ops_[0] + "'");
      refuse_beside(command_, "--fit", {"--cold", "--report", "--peers", "--rounds", "--min-time"});
      const Device device = device_->device();
      if (device.kind == DeviceKind::cuda) refuse_beside(command_, "--device", {"--threads", "--pin", "--target"});
      std::vector<Dtype> computes{Dtype::f32, Dtype::bf16};
      if (device.kind == DeviceKind::cuda) computes = {Dtype::bf16};
      if (command_.get_option("--dtype")->count() > 0) computes = {params.dtype};
      return fit_paths({command_, std::move(computes), threads_, target_, json_file_, device});
    }
    if (device_->named().kind == DeviceKind::cuda)
      throw InputError("--device " + to_string(device_->named()) +
                       " goes with --fit: other rows are of the CPU; the GPU's are of scripts/gpu-check.sh");
    if (shape_.any() && ops_.empty())
      throw InputError("a shape needs an op, for instance: mla bench attend_latent --heads 128");
    Outputs files({{"--json", json_file_}, {"--report", report_file_}}, {{"--peers", peers_file_}});
    if (!peers_file_.empty()) peers_ = read_option("--peers", peers_file_, read_peers);
    if (!peers_file_.empty() && !files.wants_any()) throw InputError("--peers goes with --report or --json");
    cpu::restrict_target(target_);

    ThreadPool pool(threads_.count, threads_.pinning());
    Stream stream(pool);
    const bench::Roof roof = bench::measure_roof(pool);
    const bench::Probe probe(pool);
    print_head(pool, roof);
    try {
      if (shape_.any()) {
        for (const std::string& op : ops_) one_shape(stream, probe, op, params);
      } else {
        standing(stream, probe);
        if (wanted("attend_sparse")) sparse_decode(stream, probe);
        if (wanted(kPlan)) plan(stream, probe);
        if (wanted(kLayer)) layer(stream, probe);
      }
    } catch (const Interrupted&) {
      interrupted_ = true;
      std::printf("interrupted: rows that were whole are above\n");
    }
    if (!all_right_) std::printf("FAILED: a row's error is above its bound\n");
    add_peers();
    if (interrupted_ && rows_.empty()) files.keep_old();
    if (files.wants_any()) {
      const json all = everything(pool, roof);
      files.write("--json", [&](std::ostream& out) { out << dump(all) << '\n'; });
      files.write("--report", [&](std::ostream& out) { out << report::html(all); });
    }
    files.finish();
    std::fflush(stdout);
    if (signals.exit_code() != 0) return signals.exit_code();
    return all_right_ ? 0 : 1;
  }

 private:
  std::vector<bench::Measurement> measure(Stream& stream, const bench::Probe& probe,
                                          std::span<const bench::Entry> entries, const bench::Options& options) const {
    std::vector<bench::Measurement> measured = bench::measure(stream, probe, entries, options);
    if (measured.empty()) throw Interrupted{};
    return measured;
  }

  // Like cases::find, but its message knows what else may be asked for.
  static const cases::CaseType& cases_find(const std::string& op) {
    for (const cases::CaseType& c : cases::all())
      if (c.op == op) return c;
    throw cases::unknown_op(op, {kPlan, kLayer});
  }
  bool wanted(std::string_view op) const {
    return ops_.empty() || std::find(ops_.begin(), ops_.end(), op) != ops_.end();
  }

  void print_head(const ThreadPool& pool, const bench::Roof& roof) const {
    std::printf("%s, %s, target %s: %s", bench::this_machine().cpu.c_str(), text_of(pool).c_str(),
                std::string(backend::backend({}).target()).c_str(), text_of(roof).c_str());
    std::printf("\n%-56s %11s %11s %9s %8s %10s %9s %10s %10s\n", "", "median", "p90", "GFLOP/s", "GB/s", "% of roof",
                "% of f32", "error", "bound");
  }

  void add(const std::string& name, std::string_view op, const bench::Measurement& m, const cases::Params* p,
           bool cold) {
    std::printf("%-56s %11s %11s", name.c_str(), time_text(m.median).c_str(), time_text(m.p90).c_str());
    // What passes the roof was set against one that leaves out units, or memory near the core, that the op used.
    const bool known = m.of_roof <= 1;
    if (m.of_roof > 0)
      std::printf(" %9.1f %8.1f %10s %9.1f", 1e-9 * m.cost.flops / m.median, 1e-9 * m.cost.bytes / m.median,
                  known ? one_digit(100 * m.of_roof).c_str() : "unknown", 100 * m.of_fma);
    else std::printf(" %9s %8s %10s %9s", "-", "-", "-", "-");
    std::printf(" %10.2g %10.2g%s\n", m.verdict.error, m.verdict.bound,
                m.verdict.ok ? "" : ("  FAILED: " + m.verdict.detail).c_str());
    std::fflush(stdout);
    all_right_ = all_right_ && m.verdict.ok;
    json row{{"name", name},
             {"op", op},
             {"median_s", m.median},
             {"p90_s", m.p90},
             {"calls", m.calls},
             {"cold", cold},
             {"bytes", m.cost.bytes},
             {"flops", m.cost.flops},
             {"of_roof", known ? json(m.of_roof) : json()},
             {"of_f32", m.of_fma},
             {"error", m.verdict.error},
             {"bound", m.verdict.bound},
             {"ok", m.verdict.ok}};
    if (p) row["params"] = params_json(*p);
    rows_.push_back(std::move(row));
  }

  std::vector<bench::Measurement> measure_rows(Stream& stream, const bench::Probe& probe, std::span<const Row> rows) {
    if (*options_.stop) throw Interrupted{};
    std::vector<std::unique_ptr<cases::Case>> made;
    std::vector<bench::Entry> entries;
    for (const Row& r : rows) {
      made.push_back(cases::find(r.op).make(r.params));
      made.back()->place(stream.pool());
      // Index scores of e4m3 codes are products of bf16, where the CPU has fast ones.
      const bool codes = r.params.dtype == Dtype::fp8_e4m3 && r.op == "index_score";
      entries.push_back({r.name, made.back().get(), codes ? Dtype::bf16 : r.params.dtype});
    }
    bench::Options options = options_;
    options.cold = options.cold || rows[0].cold;
    auto measured = measure(stream, probe, entries, options);
    for (size_t i = 0; i < rows.size(); ++i) add(rows[i].name, rows[i].op, measured[i], &rows[i].params, options.cold);
    return measured;
  }

  void one_shape(Stream& stream, const bench::Probe& probe, const std::string& op, cases::Params p) {
    if (op == kPlan || op == kLayer) throw InputError("shape flags do not apply to '" + op + "'");
    if (op == "attend_latent" && !shape_.splits()) p.splits = bench::planned_splits(p);
    if (op == "attend_sparse" && !shape_.splits())
      p.splits = bench::planned_sparse_splits(p, p.topk + (p.sources - 1) * (p.topk / 2 + 1));
    const Row row{cases::describe(p, op), op, p};
    measure_rows(stream, probe, {&row, 1});
  }

  void standing(Stream& stream, const bench::Probe& probe) {
    for (const Row& row : standing_rows())
      if (wanted(row.op)) measure_rows(stream, probe, {&row, 1});
  }

  // Beside dense attention over a context as long as the selection, in the same rounds: what selecting costs.
  void sparse_decode(Stream& stream, const bench::Probe& probe) {
    constexpr int64_t kSelected = 2048, kContext = 32768;
    for (int64_t heads : {16, 128})
      for (CacheFormat f : {CacheFormat::bf16, CacheFormat::fp8_ds_mla})
        for (Dtype t : {Dtype::f32, Dtype::bf16}) {
          if (t == Dtype::bf16 && cpu::bf16_products() == cpu::Bf16Products::widened) continue;
          const std::string what = std::string(to_string(f)) + ", " + counted(heads, "head") + ", 2048",
                            with = ", " + std::string(to_string(t)) + " arithmetic";
          const Row rows[] = {
              {"dense decode " + what + with, "attend_latent", decode(heads, kSelected, f, t)},
              {"sparse decode " + what + " of 32K" + with, "attend_sparse", sparse(heads, kContext, kSelected, f, t)}};
          const auto m = measure_rows(stream, probe, rows);
          std::vector<double> ratios;
          for (size_t r = 0; r < m[0].round_medians.size(); ++r)
            ratios.push_back(m[1].round_medians[r] / m[0].round_medians[r]);
          const double cost = bench::quantile(ratios, 0.5) - 1;
          std::printf("  selecting costs %+.1f%%\n", 100 * cost);
          rows_.back()["selecting_cost"] = cost;
        }
  }

  void plan(Stream& stream, const bench::Probe& probe) {
    const DeviceInfo device = device_info(stream, preset("deepseek-v2-lite"));
    for (SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
      const auto c = bench::make_plan_case(device, split);
      const bench::Entry entry{"plan of a mixed batch of 256 requests, " + std::string(to_string(split)), c.get()};
      add(entry.name, kPlan, measure(stream, probe, {&entry, 1}, options_)[0], nullptr, options_.cold);
    }
  }

  // Cold: in a model of many layers a layer's weights have left the caches by its next step. Split policies in the same
  // rounds, so that their difference is theirs; of a long prompt the latter on both paths, for its paths are not those
  // of `fast`.
  void layer(Stream& stream, const bench::Probe& probe) {
    struct Step {
      std::string name;
      int64_t requests, query_len, context;
    };
    bench::Options options = options_;
    options.cold = true;
    const Dtype dtype = cpu::native_bf16_dot() ? Dtype::bf16 : Dtype::f32;
    const bench::LayerModel model(preset("deepseek-v2-lite"), dtype, 4096);
    model.weights.place(stream.pool());
    for (const Step& s :
         {Step{"layer decode, batch 1 at 1K", 1, 1, 1023}, Step{"layer decode, batch 8 at 1K", 8, 1, 1023},
          Step{"layer decode, batch 32 at 1K", 32, 1, 1023}, Step{"layer prefill, 512 tokens", 1, 512, 0},
          Step{"layer prefill, 2048 tokens", 1, 2048, 0}}) {
      std::vector<std::unique_ptr<cases::Case>> made;
      std::vector<bench::Entry> entries;
      const auto enter = [&](SplitPolicy split, PathPolicy path) {
        bench::LayerStep step{.requests = s.requests, .query_len = s.query_len, .context = s.context};
        step.plan.path = path;
        step.plan.split = split;
        step.plan.compute = dtype;
        made.push_back(bench::make_layer_case(model, step, stream.pool()));
        entries.push_back({s.name + ", cold, " + std::string(to_string(dtype)) + ", " + std::string(to_string(split)) +
                               (path == PathPolicy::automatic ? "" : ", " + std::string(to_string(path))),
                           made.back().get(), dtype});
      };
      enter(SplitPolicy::fast, PathPolicy::automatic);
      enter(SplitPolicy::batch_invariant, PathPolicy::automatic);
      if (s.query_len > 512) enter(SplitPolicy::batch_invariant, PathPolicy::expanded);
      const auto m = measure(stream, probe, entries, options);
      for (size_t i = 0; i < m.size(); ++i) {
        add(entries[i].name, kLayer, m[i], nullptr, true);
        if (i == 0) continue;
        std::vector<double> ratios;
        for (size_t r = 0; r < m[0].round_medians.size(); ++r)
          ratios.push_back(m[i].round_medians[r] / m[0].round_medians[r]);
        const double cost = bench::quantile(ratios, 0.5) - 1;
        std::printf("  batch_invariant costs %+.1f%%\n", 100 * cost);
        rows_.back()["batch_invariant_cost"] = cost;
      }
    }
  }

  // Each row takes its peers; what names no row of this bench is said, for it may be a slip.
  void add_peers() {
    size_t matched = 0;
    for (const Peer& p : peers_)
      for (json& row : rows_)
        if (row["name"] == p.row) {
          row["peers"].push_back({{"peer", p.name}, {"us", p.microseconds}});
          ++matched;
          break;
        }
    if (matched < peers_.size())
      std::fprintf(stderr, "mla: %zu of %zu peers name a row of this bench\n", matched, peers_.size());
  }

  json everything(const ThreadPool& pool, const bench::Roof& roof) const {
    const bench::Machine machine = bench::this_machine();
    json all = provenance(command_);
    all.update({{"machine",
                 {{"cpu", machine.cpu},
                  {"cores", machine.cores},
                  {"pinned", pool.pinning() == Pinning::cores},
                  {"nodes", pool.nodes()},
                  {"memory_bytes", machine.memory_bytes},
                  {"target", backend::backend({}).target()}}},
                {"roof",
                 {{"read_gbps", roof.read_gbps},
                  {"fma_gflops", roof.fma_gflops},
                  {"dot_gflops", roof.dot_gflops},
                  {"amx_gflops", roof.amx_gflops},
                  {"int8_gops", roof.int8_gops},
                  {"bf16_gflops", roof.bf16_gflops}}},
                {"interrupted", interrupted_},
                {"rows", rows_}});
    return all;
  }

  const CLI::App& command_;
  ShapeFlags shape_;
  std::vector<std::string> ops_;
  bool fit_ = false;
  std::unique_ptr<DeviceFlag> device_;
  std::string target_, json_file_, report_file_, peers_file_;
  std::vector<Peer> peers_;
  bench::Options options_;
  Threads threads_;
  bool all_right_ = true, interrupted_ = false;
  json rows_ = json::array();
};

}  // namespace

void add_bench(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("bench", "Measure ops, plan and layer against this machine's roof");
  auto bench = std::make_shared<Bench>(*command);
  CLI::App* comm = add_bench_comm(*command, status);
  command->callback([comm, bench, &status] {
    if (!comm->parsed()) status = bench->run();
  });
}

}  // namespace mla::cli
