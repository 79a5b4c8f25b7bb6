#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "cli/run.hpp"
#include "core/counted.hpp"

namespace mla::cli {
namespace {

long long n(int64_t x) { return static_cast<long long>(x); }

double gib(size_t bytes) { return static_cast<double>(bytes) / 1073741824.0; }

template <class Enum>
std::string name(Enum e) {
  return std::string(to_string(e));
}

// A figure, or a dash where there is none.
std::string figure(double x, int digits, bool known = true) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, x);
  return known ? text : "-";
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
        "sparse     topk %lld, %s, index cache %s%s%s; %s selected (%.1f%%), %lld skipped scoring: all they see fits\n"
        "           selected rows attend to %lld of the %lld keys they see (%.1f%%)\n",
        n(o.model.indexer->topk), name(o.plan.sparse).c_str(), name(o.plan.index_format).c_str(),
        o.plan.index_hadamard ? " rotated" : "",
        o.plan.index_arithmetic == IndexArithmetic::fp8 ? " by fp8 products" : "",
        counted(r.sparse_rows, "row").c_str(), of(r.sparse_rows, rows), n(r.unscored_rows), n(r.selected_keys),
        n(r.seen_keys), of(r.selected_keys, r.seen_keys));
  std::printf(
      "time split indexer %.1f%%, sparse attention %.1f%%, dense attention %.1f%%, projections and rest %.1f%%\n",
      share(Part::indexer), share(Part::sparse), share(Part::dense),
      100 - share(Part::indexer) - share(Part::sparse) - share(Part::dense));
}

void print_trace(const RunReport& report) {
  const serve::Trace& t = report.trace;
  const serve::Result& r = report.result;
  const std::string scaled =
      report.scale_lengths == 1 ? "" : ", lengths times " + std::string(figure(report.scale_lengths, 6));
  std::printf("trace      %s (%s)%s, %s, %lld finished, %lld refused\n", t.source.c_str(), t.format.c_str(),
              scaled.substr(0, scaled.find_last_not_of('0') + 1).c_str(), counted(r.requests, "request").c_str(),
              n(r.finished), n(r.refused));
  if (t.descending > 0)
    std::printf("           %s an earlier time than the line above, the first is line %lld: sorted by time\n",
                t.descending == 1 ? "1 line has" : (counted(t.descending, "line") + " have").c_str(),
                n(t.first_descending));
  if (r.refused > 0)
    std::printf("           the smallest refused request needs %s, the cache has %lld (--pages, --cache-gib)\n",
                counted(r.refused_pages, "page").c_str(), n(r.pages));
}

// Of an fp8 cache whose scales are not all 1.
void print_scales(const RunReport& report) {
  const std::vector<float>& k = report.result.k_scales;
  if (std::all_of(k.begin(), k.end(), [](float x) { return x == 1; })) return;
  const auto [least, most] = std::minmax_element(k.begin(), k.end());
  const std::string found =
      report.calibrated == 0
          ? ""
          : ", " + std::string(report.calibrated == std::ssize(k) ? "all" : std::to_string(report.calibrated)) +
                " found on the trace's first tokens";
  std::printf("           k_scale %.6g to %.6g%s; at most %.3g%% of a layer's codes at e4m3's largest\n", *least, *most,
              found.c_str(), 100 * *std::max_element(report.result.saturated.begin(), report.result.saturated.end()));
}

void print_throughput(const serve::Result& r) {
  const Throughput t = throughput(r);
  const bool known = r.simulated_seconds > 0;
  std::printf("throughput output %s tokens/s, prompt %s tokens/s, together %s tokens/s; %s requests/s\n",
              figure(t.output, 1, known && r.output_tokens > 0).c_str(),
              figure(t.prompt, 1, known && r.prefill_tokens > 0).c_str(),
              figure(t.total, 1, known && r.output_tokens + r.prefill_tokens > 0).c_str(),
              figure(t.requests, 2, known && r.finished > 0).c_str());
  std::printf(
      "           %lld generated and %lld computed prompt tokens over %.3g s, from the first arrival to the last "
      "step's end\n"
      "           while steps ran: %s computed tokens/s\n",
      n(r.output_tokens), n(r.prefill_tokens), r.simulated_seconds, figure(t.step, 1, r.steps > 0).c_str());
}

void print_latencies(const serve::Result& r) {
  std::printf("%-10s %10s %10s %10s\n", "latency ms", "p50", "p90", "p99");
  const std::pair<const char*, const std::vector<double>*> latencies[] = {
      {"  step", &r.step_latencies}, {"  TTFT", &r.ttft}, {"  TPOT", &r.tpot}};
  for (const auto& [what, v] : latencies) {
    auto ms = [&values = *v](double p) { return figure(1e3 * serve::percentile(values, p), 2, !values.empty()); };
    std::printf("%-10s %10s %10s %10s\n", what, ms(50).c_str(), ms(90).c_str(), ms(99).c_str());
  }
}

void print_ops(const RunReport& report, bool gpu) {
  const serve::Result& r = report.result;
  const double in_ops = op_seconds(r), whole = std::max(in_ops, r.step_seconds);
  int width = 14;
  for (const Profile::Row& row : r.profile.rows()) width = std::max(width, static_cast<int>(row.op.size()) + 2);
  std::printf("%-*s %9s %7s %9s %10s %8s %7s\n", width, "time by op", "seconds", "share", "calls", "GFLOP/s", "GB/s",
              "% roof");
  for (const Profile::Row& row : by_time(r.profile)) {
    const double share = roof_share(row, report);
    std::printf("%-*s %9.3f %6.1f%% %9lld %10.1f %8.1f %7s\n", width, ("  " + std::string(row.op)).c_str(), row.seconds,
                percent(row.seconds, whole), n(row.calls), rate(row.flops * 1e-9, row.seconds),
                rate(row.bytes * 1e-9, row.seconds), share > 0 ? (figure(share, 1) + "%").c_str() : "unknown");
  }
  if (in_ops <= r.step_seconds)
    std::printf("%-*s %9.3f %6.1f%%\n", width, "  plan and rest", r.step_seconds - in_ops,
                percent(r.step_seconds - in_ops, whole));
  if (gpu)
    std::printf(
        "           of one layer in %lld of %lld steps, launched op by op and scaled: %.0f%% of the steps' time;\n"
        "           steps of decodes alone run as one graph\n",
        n(r.profiled_steps), n(r.steps), percent(in_ops, r.step_seconds));
}

}  // namespace

double rate(double amount, double seconds) { return seconds > 0 ? amount / seconds : 0; }

double percent(double part, double whole) { return whole > 0 ? 100 * part / whole : 0; }

double op_seconds(const serve::Result& r) {
  double seconds = 0;
  for (const Profile::Row& row : r.profile.rows()) seconds += row.seconds;
  return seconds;
}

std::vector<Profile::Row> by_time(const Profile& profile) {
  std::vector<Profile::Row> rows(profile.rows().begin(), profile.rows().end());
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
  return rows;
}

double peak_of(std::string_view op, const RunReport& report) {
  const bool attention = op.starts_with("attend") || op == "index_score";
  const serve::Options& o = report.options;
  const bool bf16_operands = (attention ? o.plan.compute : o.weights) == Dtype::bf16;
  // Those may be multiplied as f32 where that is faster.
  return bf16_operands ? std::max(report.roof.bf16_gflops, report.roof.fma_gflops) : report.roof.fma_gflops;
}

double roof_share(const Profile::Row& row, const RunReport& report) {
  const double floor = std::max(row.bytes / (report.roof.read_gbps * 1e9), row.flops / (peak_of(row.op, report) * 1e9));
  const double share = row.seconds > 0 ? 100 * floor / row.seconds : 0;
  return share <= 100 ? share : 0;
}

Throughput throughput(const serve::Result& r) {
  const double output = static_cast<double>(r.output_tokens), prompt = static_cast<double>(r.prefill_tokens);
  const double seconds = r.simulated_seconds;
  return {.output = rate(output, seconds),
          .prompt = rate(prompt, seconds),
          .total = rate(output + prompt, seconds),
          .requests = rate(static_cast<double>(r.finished), seconds),
          .step = rate(prompt + static_cast<double>(r.decode_tokens), r.step_seconds)};
}

void print_summary(const RunReport& report) {
  const serve::Options& o = report.options;
  const serve::Result& r = report.result;
  const bench::Roof& roof = report.roof;
  if (r.interrupted) std::printf("interrupted: what follows covers the run so far\n");
  std::printf("model      %s, %lld of %lld layers, %lld%s heads, weights %s%s (%.2f GiB)\n", o.model.name.c_str(),
              n(r.layers), n(o.model.layers), n(o.model.heads), report.fewer_heads ? " (--heads)" : "",
              name(o.weights).c_str(), o.checkpoint ? "" : " random", gib(r.weight_bytes));
  const bool gpu = o.device.kind == DeviceKind::cuda;
  if (gpu)
    std::printf("machine    %s; copy %.0f GB/s, products f32 %.1f TFLOP/s, bf16 %.0f TFLOP/s\n",
                describe(o.device).c_str(), roof.read_gbps, 1e-3 * roof.fma_gflops, 1e-3 * roof.bf16_gflops);
  else
    std::printf("machine    %s, %s; read %.1f GB/s, f32 %.0f GFLOP/s, bf16 %.0f GFLOP/s\n", report.machine.cpu.c_str(),
                (counted(r.threads, "thread") + (report.nodes > 0 ? " pinned on " + counted(report.nodes, "node") : ""))
                    .c_str(),
                roof.read_gbps, roof.fma_gflops, roof.bf16_gflops);
  print_trace(report);
  std::printf("cache      %s, %s of %lld (%.2f GiB); occupancy mean %.1f%%, peak %.1f%%\n", name(o.format).c_str(),
              counted(r.pages, "page").c_str(), n(r.page_size), gib(r.cache_bytes),
              percent(r.mean_pages, static_cast<double>(r.pages)),
              percent(static_cast<double>(r.peak_pages), static_cast<double>(r.pages)));
  print_scales(report);
  std::printf("prefix     %.1f%% of prompt tokens found in the cache (%lld of %lld); %s, %s\n",
              percent(static_cast<double>(r.hit_tokens), static_cast<double>(r.prompt_tokens)), n(r.hit_tokens),
              n(r.prompt_tokens), counted(r.evictions, "eviction").c_str(),
              counted(r.preemptions, "preemption").c_str());
  if (r.hit_tokens == 0 && o.limits.prefix_reuse && report.trace.block_tokens < r.page_size)
    std::printf("           whole pages are found: prompts share blocks of %s, a page has %lld (--page-size)\n",
                counted(report.trace.block_tokens, "token").c_str(), n(r.page_size));
  std::string held = o.products == WeightFormat::plain ? "" : ", product weights " + name(o.products);
  if (o.plan.activations != Activations::plain) held += ", activations " + name(o.plan.activations);
  if (o.plan.activation_dtype != ActivationDtype::native) held += ", hidden states in " + name(o.plan.activation_dtype);
  if (o.plan.prefill != PrefillOperands::compute) held += ", prefill " + name(o.plan.prefill);
  if (o.plan.fp8_query) held += ", fp8 queries";
  if (o.plan.decode != DecodeOperands::compute) held += ", decode " + name(o.plan.decode);
  if (o.plan.tensor_parallel > 1)
    held += (o.context_parallel == o.plan.tensor_parallel ? ", heads and cached tokens over " : ", heads over ") +
            counted(o.plan.tensor_parallel, "rank") +
            (o.group                             ? ", processes of an MPI job"
             : o.device.kind == DeviceKind::cuda ? " by " + std::string(to_string(o.link))
                                                 : "") +
            (o.context_parallel > 1 && o.context_parallel < o.plan.tensor_parallel
                 ? ", cached tokens over groups of " + std::to_string(o.context_parallel)
                 : "") +
            (o.context_parallel > 1 && o.exchange == ContextExchange::heads ? ", which exchange heads" : "");
  std::printf("plan       path %s, split %s, compute %s, absorption %s, up weights %s%s, at most %s a step\n",
              name(o.plan.path).c_str(), name(o.plan.split).c_str(), name(o.plan.compute).c_str(),
              name(o.absorption).c_str(), name(o.up).c_str(), held.c_str(),
              counted(o.limits.token_budget, "token").c_str());
  if (o.model.indexer) print_sparse(o, r);
  std::printf("times      attention's alone, of %lld of %s: no embedding, MLP, experts or sampling\n", n(r.layers),
              counted(o.model.layers, "layer").c_str());
  print_throughput(r);
  print_latencies(r);
  print_ops(report, gpu);
  std::printf("memory     peak %.2f GiB (workspace %.2f)\n", gib(r.peak_memory), gib(r.workspace_bytes));
  if (o.checkpoint)
    std::printf("checkpoint %s of tensors read%s\n", readable_bytes(r.checkpoint_bytes).c_str(),
                o.plan.tensor_parallel > 1 ? ", by the ranks of this process together" : "");
  std::printf("time       %.1f s setup, %.1f s replay in %s, %.1f s simulated\n", r.setup_seconds, r.wall_seconds,
              counted(r.steps, "step").c_str(), r.simulated_seconds);
}

void warn_of_saturation(const serve::Result& r) {
  constexpr double kMost = 1e-3;
  constexpr int kLines = 8;
  int over = 0;
  for (size_t l = 0; l < r.saturated.size(); ++l) {
    if (r.saturated[l] <= kMost || ++over > kLines) continue;
    std::fprintf(
        stderr,
        "mla: layer %zu: %.3g%% of its cache's codes are at e4m3's largest, above 0.1%%: values past 448 times "
        "k_scale %.6g are cut (--kv-scales)\n",
        l, 100 * r.saturated[l], r.k_scales[l]);
  }
  if (over > kLines) std::fprintf(stderr, "mla: and so are %d more layers'\n", over - kLines);
}

void print_verification(const serve::Verification& v) {
  std::printf("verified   %s against float64 in %.1f s%s, %lld failed", counted(v.rows, "row").c_str(), v.seconds,
              v.interrupted ? ", then interrupted" : "", n(v.failed));
  if (v.rows > 0)
    std::printf("; nearest its bound: error %.3g of %.3g at %s", v.worst_error, v.worst_bound, v.worst.c_str());
  std::printf("\n");
  if (v.selections > 0) std::printf("           %lld of them with their selection of keys\n", n(v.selections));
}

}  // namespace mla::cli
