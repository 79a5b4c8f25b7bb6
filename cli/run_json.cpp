#include <string>

#include "cli/output.hpp"
#include "cli/run.hpp"
#include "serve/series.hpp"

namespace mla::cli {
namespace {

// As many as a chart shows; longer runs are summed up by neighbours.
constexpr int64_t kSeriesBuckets = 600;

nlohmann::json percentiles(const std::vector<double>& values) {
  nlohmann::json j{{"count", values.size()}};
  for (int p : {50, 90, 99})
    j["p" + std::to_string(p)] = values.empty() ? nlohmann::json() : nlohmann::json(serve::percentile(values, p));
  return j;
}

nlohmann::json ops_json(const RunReport& report) {
  nlohmann::json ops = nlohmann::json::array();
  for (const Profile::Row& row : by_time(report.result.profile)) {
    const double share = roof_share(row, report);
    ops.push_back({{"op", std::string(row.op)},
                   {"seconds", row.seconds},
                   {"calls", row.calls},
                   {"bytes", row.bytes},
                   {"flops", row.flops},
                   {"peak_gflops", peak_of(row.op, report)},
                   {"percent_of_roof", share > 0 ? nlohmann::json(share) : nlohmann::json()}});
  }
  return ops;
}

// Each figure with what it is: tokens over which seconds.
nlohmann::json throughput_json(const serve::Result& r) {
  const Throughput t = throughput(r);
  const auto figure = [](double x, bool known) { return known ? nlohmann::json(x) : nlohmann::json(); };
  const bool known = r.simulated_seconds > 0;
  return {{"duration_s", r.simulated_seconds},
          {"output_tokens", r.output_tokens},
          {"prefill_tokens", r.prefill_tokens},
          {"decode_tokens", r.decode_tokens},
          {"output_tokens_per_second", figure(t.output, known && r.output_tokens > 0)},
          {"prompt_tokens_per_second", figure(t.prompt, known && r.prefill_tokens > 0)},
          {"total_tokens_per_second", figure(t.total, known)},
          {"requests_per_second", figure(t.requests, known && r.finished > 0)},
          {"computed_tokens_per_step_second", figure(t.step, r.steps > 0)},
          {"definition",
           "output: generated tokens; prompt: prompt tokens computed, without those found in the cache; total: both; "
           "each over duration_s, simulated, from the first arrival to the last step's end. "
           "computed_tokens_per_step_second: prefill and decode tokens over the steps' measured time."}};
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

std::string link_of(const serve::Options& o) {
  if (o.plan.tensor_parallel == 1) return "none";
  if (o.device.kind == DeviceKind::cpu) return o.group ? "mpi" : "threads";
  return (o.group ? "mpi, " : "") + std::string(to_string(o.link));
}

}  // namespace

nlohmann::json json_of(const RunReport& report, const CLI::App& command) {
  const serve::Options& o = report.options;
  const serve::Result& r = report.result;
  const serve::Trace& t = report.trace;
  const bench::Roof& roof = report.roof;
  nlohmann::json j = provenance(command);
  // What 0 or nothing stood for.
  j["options"].update({{"compute", to_string(o.plan.compute)},
                       {"topk", o.model.indexer ? o.model.indexer->topk : 0},
                       {"index_cache", o.model.indexer ? std::string(to_string(o.plan.index_format)) : "none"},
                       {"index_arithmetic", to_string(o.plan.index_arithmetic)}});
  j.update({{"model",
             {{"name", o.model.name},
              {"layers", r.layers},
              {"all_layers", o.model.layers},
              {"heads", o.model.heads},
              {"tensor_parallel", o.plan.tensor_parallel},
              {"context_parallel", o.context_parallel},
              {"context_parallel_interleave", o.context_parallel > 1 ? o.interleave : 0},
              {"context_parallel_exchange", o.context_parallel > 1 ? std::string(to_string(o.exchange)) : "none"},
              {"link", link_of(o)},
              {"weights", to_string(o.weights)},
              {"absorption", to_string(o.absorption)},
              {"up_weights", to_string(o.up)},
              {"product_weights", to_string(o.products)},
              {"activations", to_string(o.plan.activations)},
              {"activation_dtype", to_string(o.plan.activation_dtype)},
              {"prefill", to_string(o.plan.prefill)},
              {"q_scale", !o.plan.fp8_query     ? nlohmann::json()
                          : o.plan.q_scale == 0 ? nlohmann::json("auto")
                                                : nlohmann::json(o.plan.q_scale)},
              {"decode", to_string(o.plan.decode)},
              {"weight_bytes", r.weight_bytes}}},
            {"machine",
             {{"device", o.device.kind == DeviceKind::cpu ? "cpu" : describe(o.device)},
              {"cpu", report.machine.cpu},
              {"threads", r.threads},
              {"pinned", report.nodes > 0},
              {"nodes", std::max(1, report.nodes)},
              {"read_gbps", roof.read_gbps},
              {"fma_gflops", roof.fma_gflops},
              {"bf16_gflops", roof.bf16_gflops}}},
            {"trace",
             {{"source", t.source},
              {"format", t.format},
              {"scale_lengths", report.scale_lengths},
              {"descending_lines", t.descending},
              {"requests", r.requests},
              {"finished", r.finished},
              {"refused", r.refused},
              {"refused_pages", r.refused_pages}}},
            {"cache",
             {{"format", to_string(o.format)},
              {"pages", r.pages},
              {"page_size", r.page_size},
              {"bytes", r.cache_bytes},
              {"index_bytes", r.index_cache_bytes},
              {"mean_pages", r.mean_pages},
              {"peak_pages", r.peak_pages},
              {"evictions", r.evictions},
              {"k_scales", r.k_scales},
              {"saturated", r.saturated}}},
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
            {"throughput", throughput_json(r)},
            {"latency_seconds",
             {{"step", percentiles(r.step_latencies)}, {"ttft", percentiles(r.ttft)}, {"tpot", percentiles(r.tpot)}}},
            {"ops", ops_json(report)},
            {"steps", r.steps},
            {"profiled_steps", r.profiled_steps},
            {"steps_series", series_json(r)},
            {"seconds",
             {{"setup", r.setup_seconds},
              {"replay", r.wall_seconds},
              {"steps", r.step_seconds},
              {"simulated", r.simulated_seconds}}},
            {"memory", {{"peak_bytes", r.peak_memory}, {"workspace_bytes", r.workspace_bytes}}},
            {"checkpoint_bytes", o.checkpoint ? nlohmann::json(r.checkpoint_bytes) : nlohmann::json(nullptr)},
            {"interrupted", r.interrupted}});
  if (const serve::Verification* v = report.verification)
    j["verification"] = {{"rows", v->rows},
                         {"selections", v->selections},
                         {"failed", v->failed},
                         {"worst_error", v->worst_error},
                         {"worst_bound", v->worst_bound},
                         {"worst", v->worst},
                         {"largest_part_of_second_bound", v->tightest},
                         {"seconds", v->seconds},
                         {"interrupted", v->interrupted}};
  return j;
}

}  // namespace mla::cli
