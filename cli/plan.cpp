// mla plan: what a batch would do, and which kernels would do it, without a cache, weights or the device.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "bench/machine.hpp"
#include "bench/rehearsal.hpp"
#include "cli/batch_file.hpp"
#include "cli/commands.hpp"
#include "cli/output.hpp"
#include "cli/params.hpp"
#include "cli/plan_flags.hpp"
#include "cli/rates_file.hpp"
#include "core/counted.hpp"
#include "layer/kernels.hpp"
#include "mla/mla.hpp"
#include "model/json.hpp"
#include "serve/shares.hpp"

namespace mla::cli {
namespace {

struct Flags {
  std::string model = "deepseek-v2-lite", output = "none", form = "block", batch, json;
  int64_t page_size = 64, topk = 0, interleave = 1;
  int threads = 1, capability = 90, tp = 1, dcp = 1;
  std::string link, exchange = "latents";
  bool absorbed = false, rehearse = false;
  ReadOptions read;
  std::vector<std::string> queries, contexts;
  std::unique_ptr<DeviceFlag> device;
  std::unique_ptr<PlanFlags> plan;
};

// Kernels in the order of their first call, each with the ops that it serves.
std::vector<std::pair<std::string, std::string>> by_kernel(const std::vector<layer::KernelUse>& uses) {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const layer::KernelUse& u : uses) {
    const auto same = [&](const auto& row) { return row.first == u.kernel; };
    auto at = std::find_if(rows.begin(), rows.end(), same);
    if (at == rows.end()) at = rows.insert(rows.end(), {u.kernel, ""});
    at->second +=
        (at->second.empty() ? "" : ", ") + std::string(u.op) + (u.calls > 1 ? " x" + std::to_string(u.calls) : "");
  }
  return rows;
}

void print_rates(const Plan& p) {
  const CostModel& r = *p.options.rates;
  const bool gpu = p.device.device.kind == DeviceKind::cuda;
  const double tera = gpu ? 1e-12 : 1e-9;
  std::printf("  rates of %s: latent %.4g, expanded %.4g, products %.4g %s, %.4g %s", gpu ? "the GPU" : "a core",
              tera * r.latent_flops, tera * r.expanded_flops, tera * r.projection_flops, gpu ? "TFLOP/s" : "GFLOP/s",
              tera * r.bytes, gpu ? "TB/s" : "GB/s");
  if (r.expanded_tiles > 0) std::printf("; expanded from %.4g tiles of 128 rows on", r.expanded_tiles);
  if (r.context_seconds > 0) std::printf("; its context %.4g us of launches", 1e6 * r.context_seconds);
  std::printf("\n");
}

void print_steps(const std::vector<layer::KernelUse>& uses, const std::string& target) {
  std::printf("  steps of a layer, times as the rates give them for a %s:\n", target.c_str());
  std::printf("    %-18s %5s %12s %10s %12s\n", "op", "calls", "bytes", "GFLOP", "expected");
  double seconds = 0;
  for (const layer::KernelUse& u : uses) {
    seconds += u.seconds;
    std::printf("    %-18s %5lld %12s %10.3f %9.1f us\n", std::string(u.op).c_str(), static_cast<long long>(u.calls),
                readable_bytes(static_cast<uint64_t>(u.bytes)).c_str(), u.flops / 1e9, u.seconds * 1e6);
  }
  std::printf("    %-18s %5s %12s %10s %9.1f us\n", "all", "", "", "", seconds * 1e6);
}

std::string target_of(Device device, int capability) {
  if (device.kind == DeviceKind::cpu) return "CPU (" + std::string(backend::backend(device).target()) + ")";
  return "GPU of compute capability " + std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

double seconds_of(const std::vector<layer::KernelUse>& uses) {
  double sum = 0;
  for (const layer::KernelUse& u : uses) sum += u.seconds;
  return sum;
}

void print_rehearsal(const std::vector<bench::RehearsedStep>& steps, int threads) {
  std::printf(
      "  rehearsed on one thread of this machine, as %d threads would share the tasks, each as fast as this one:\n",
      threads);
  std::printf("    %-18s %7s %12s %12s %14s %8s\n", "op", "tasks", "one thread", "longest task",
              (std::to_string(threads) + " threads").c_str(), "faster");
  const auto print = [](const bench::RehearsedStep& s) {
    std::printf("    %-18s %7lld %9.1f us %9.1f us %11.1f us %7.1fx\n", s.op.c_str(), static_cast<long long>(s.tasks),
                s.alone * 1e6, s.longest * 1e6, s.shared * 1e6, s.shared > 0 ? s.alone / s.shared : 1.0);
  };
  bench::RehearsedStep all{.op = "all"};
  for (const bench::RehearsedStep& s : steps) {
    print(s);
    all.tasks += s.tasks;
    all.alone += s.alone;
    all.longest = std::max(all.longest, s.longest);
    all.shared += s.shared;
  }
  print(all);
}

// "GB/s,us" of a link.
LinkRates parse_link(const std::string& text) {
  LinkRates link;
  if (text.empty()) return link;
  char end = 0;
  double gigabytes = 0, microseconds = 0;
  if (std::sscanf(text.c_str(), "%lf,%lf%c", &gigabytes, &microseconds, &end) != 2 || !(gigabytes > 0) ||
      !(microseconds >= 0) || gigabytes > 1e6 || microseconds > 1e9)
    throw InputError("--link is '" + text + "', two numbers are meant: GB/s above 0, and microseconds, as in 200,7");
  return {.seconds = 1e-6 * microseconds, .bytes = 1e9 * gigabytes};
}

// What rank 0 of the ranks plans, and what that takes.
struct RankStep {
  Plan plan;
  std::vector<layer::KernelUse> uses;
};

using DividedStep = std::function<RankStep(const BatchLengths&, int dcp)>;

// From which context on a split cache is faster, by the number of requests and ranks of a group.
void print_break_even(const DividedStep& step, int64_t query, const std::vector<int>& groups) {
  constexpr int kRequests[] = {1, 8, 64, 256};
  std::printf("  tokens of every request from which on a split cache is faster than heads alone:\n    %10s",
              "requests");
  for (const int dcp : groups)
    if (dcp > 1) std::printf(" %14s", ("--dcp " + std::to_string(dcp)).c_str());
  for (const int requests : kRequests) {
    std::printf("\n    %10d", requests);
    std::vector<int64_t> even(groups.size(), 0);
    for (int64_t context = 512; context <= int64_t{1} << 20; context *= 2) {
      const BatchLengths of{std::vector<int64_t>(static_cast<size_t>(requests), query),
                            std::vector<int64_t>(static_cast<size_t>(requests), context)};
      const double whole = seconds_of(step(of, 1).uses);
      for (size_t i = 0; i < groups.size(); ++i) {
        if (groups[i] == 1) continue;
        if (seconds_of(step(of, groups[i]).uses) >= whole) even[i] = 0;  // only what holds for all longer ones is said
        else if (even[i] == 0) even[i] = context;
      }
    }
    for (size_t i = 0; i < groups.size(); ++i)
      if (groups[i] > 1) std::printf(" %14s", even[i] > 0 ? std::to_string(even[i]).c_str() : "-");
  }
  std::printf("\n");
}

// A layer's step of one rank, by the context of its requests: heads over the ranks, and the cache over groups of them.
void print_divisions(const DividedStep& step, const BatchLengths& lengths, int ranks) {
  std::printf("  a layer's step over %d ranks, by the context of every request, expected:\n", ranks);
  std::vector<int> groups;
  for (int dcp = 1; dcp <= ranks; ++dcp)
    if (ranks % dcp == 0) groups.push_back(dcp);
  std::printf("    %10s", "context");
  for (const int dcp : groups) std::printf(" %14s", ("--dcp " + std::to_string(dcp)).c_str());
  for (int64_t context = 1024; context <= int64_t{1} << 20; context *= 4) {
    const BatchLengths of{lengths.queries, std::vector<int64_t>(lengths.queries.size(), context)};
    std::printf("\n    %10lld", static_cast<long long>(context));
    for (const int dcp : groups) std::printf(" %11.1f us", seconds_of(step(of, dcp).uses) * 1e6);
  }
  std::printf("\n");
  if (groups.size() > 1) print_break_even(step, std::max<int64_t>(1, lengths.queries[0]), groups);
}

nlohmann::json json_of(const CLI::App& command, const Plan& p, const std::string& target,
                       const std::vector<layer::KernelUse>& uses, const std::vector<bench::RehearsedStep>& rehearsed) {
  nlohmann::json j = provenance(command);
  j.update({{"model", p.model.name},
            {"device", to_string(p.device.device)},
            {"target", target},
            {"tokens", p.tokens},
            {"workspace_bytes", p.workspace_bytes},
            {"context_chunks", p.chunks.size()},
            {"requests", nlohmann::json::array()},
            {"regions", nlohmann::json::object()},
            {"kernels", nlohmann::json::array()},
            {"rates", rates_json(*p.options.rates)},
            {"text", p.describe()}});
  for (const RequestPlan& r : p.requests)
    j["requests"].push_back({{"path", to_string(r.path)}, {"new_tokens", r.query_len}, {"context_tokens", r.context}});
  for (const Region& r : p.regions) j["regions"][std::string(r.name)] = r.bytes;
  for (const layer::KernelUse& u : uses)
    j["kernels"].push_back({{"op", u.op},
                            {"kernel", u.kernel},
                            {"calls", u.calls},
                            {"bytes", u.bytes},
                            {"flops", u.flops},
                            {"expected_seconds", u.seconds}});
  for (const bench::RehearsedStep& s : rehearsed)
    j["rehearsed"].push_back({{"op", s.op},
                              {"tasks", s.tasks},
                              {"one_thread_seconds", s.alone},
                              {"longest_task_seconds", s.longest},
                              {"seconds", s.shared}});
  return j;
}

void run(const CLI::App& command, Flags& f) {
  Outputs files({{"--json", f.json}}, {{"--batch", f.batch}, {"--model", f.model}});
  const Device device = f.device->named();
  if (device.kind == DeviceKind::cpu && command.get_option("--compute-capability")->count() > 0)
    throw InputError("--compute-capability is a GPU's, --device is cpu");
  refuse_beside(command, "--batch", {"--queries", "--contexts"});
  if (f.rehearse && (device.kind != DeviceKind::cpu || f.tp > 1 || f.form != "block" || f.output != "none"))
    throw InputError("--rehearse is of --device cpu, --tp 1, --form block and --output none");
  BatchLengths lengths{parse_numbers("--queries", f.queries, 0, kMostTokens),
                       parse_numbers("--contexts", f.contexts, 0, kMostTokens)};
  if (!f.batch.empty())
    lengths =
        read_option("--batch", f.batch, [](const std::string& file) { return parse_batch(read_text(file), file); });
  else if (lengths.queries.empty()) lengths.queries = {1};
  if (lengths.contexts.empty()) lengths.contexts.assign(lengths.queries.size(), 0);
  if (lengths.contexts.size() == 1) lengths.contexts.assign(lengths.queries.size(), lengths.contexts[0]);
  ModelConfig model = read_model(f.model, f.read);
  require_indexer(command, model);
  if (f.topk != 0) model.indexer->topk = f.topk;
  const CacheSpec spec = cache_spec(model, f.plan->cache(), f.page_size);
  spec.validate();

  PlanOptions options;
  options.form = read_option("--form", f.form, parse_layer_form);
  f.plan->read(options);
  options.output = read_option("--output", f.output, parse_output_spec);
  options.absorbed = f.absorbed;
  options.tensor_parallel = f.tp;
  options.link = parse_link(f.link);
  require_dcp(f.dcp, f.tp);
  const ContextExchange exchange = read_option("--dcp-exchange", f.exchange, parse_context_exchange);
  const bool gpu = device.kind == DeviceKind::cuda;
  const Dtype weights = f.plan->weights();
  const PrepareOptions prepared{.dtype = weights,
                                .absorption = f.absorbed ? Absorption::full : Absorption::runtime,
                                .up = options.up,
                                .products = f.plan->products()};
  const ModelConfig own = part_of(model, head_share(model.heads, 0, f.tp));
  const auto step = [&](const BatchLengths& of, int dcp) {
    PlanOptions o = options;
    o.context_parallel = serve::context_share(model.heads, 0, f.tp, dcp, f.interleave, exchange);
    const BatchOfLengths made(of, f.page_size);
    RankStep s{plan(own, spec, made.pages(), made.batch(), device_info(device, gpu ? 1 : f.threads, own), o), {}};
    s.uses = layer::kernels(s.plan, made.batch(), prepared, {.hopper = f.capability / 10 == 9});
    return s;
  };
  const RankStep rank = step(lengths, f.dcp);
  const Plan& p = rank.plan;
  const std::vector<layer::KernelUse>& uses = rank.uses;
  const std::string target = target_of(device, f.capability);
  std::vector<bench::RehearsedStep> rehearsed;
  if (f.rehearse) {
    const BatchOfLengths made(lengths, f.page_size);
    rehearsed = bench::rehearse(model, prepared, spec, made.pages(), made.batch(), options, f.threads);
  }
  files.write("--json", [&](std::ostream& out) { out << dump(json_of(command, p, target, uses, rehearsed)) << '\n'; });
  std::fputs(p.describe().c_str(), stdout);
  print_rates(p);
  print_steps(uses, target);
  std::printf("  kernels on a %s, weights %s, by op:\n", target.c_str(), std::string(to_string(weights)).c_str());
  for (const auto& [kernel, served] : by_kernel(uses)) std::printf("    %s: %s\n", kernel.c_str(), served.c_str());
  if (f.rehearse) print_rehearsal(rehearsed, f.threads);
  if (f.tp > 1) {
    std::printf(
        "  rank 0 of %d: %s of %lld, %s of cache a token and layer\n", f.tp, counted(own.heads, "head").c_str(),
        static_cast<long long>(model.heads),
        readable_bytes(spec.page_bytes() / static_cast<size_t>(spec.page_size) / static_cast<size_t>(f.dcp)).c_str());
    if (options.link.bytes > 0) print_divisions(step, lengths, f.tp);
  }
  files.finish();
}

}  // namespace

void add_plan(CLI::App& app, int&) {
  auto f = std::make_shared<Flags>();
  CLI::App* c =
      app.add_subcommand("plan", "Print the plan of a batch: paths, context chunks, splits, workspace, kernels");
  c->add_option("--model", f->model, "preset, config.json or checkpoint folder")->capture_default_str();
  add_allow_unknown(*c, f->read);
  c->add_option("--queries", f->queries, "new tokens of each request, separated by commas (default 1)");
  c->add_option("--contexts", f->contexts, "cached tokens of each request, or one number for all (default 0)");
  add_file(*c, "--batch", f->batch, "JSON file with arrays query_lens and contexts, instead of the two flags");
  add_number<int64_t>(*c, "--page-size", f->page_size, "tokens a page", 1, kMostTokens);
  f->plan = std::make_unique<PlanFlags>(*c);
  c->add_flag("--absorbed", f->absorbed, "for fully absorbed weights, which serve the latent path alone");
  c->add_option("--output", f->output, "format of a quantised output, for instance fp8_128_tma or nvfp4")
      ->capture_default_str();
  c->add_option("--form", f->form,
                "block: hidden states in and out; attention: queries in, heads out, nothing reserved for the indexer")
      ->capture_default_str();
  add_number<int64_t>(*c, "--topk", f->topk, "positions the indexer selects; 0: the model's number", 0, kMostTopk);
  f->device = std::make_unique<DeviceFlag>(*c);
  add_number(*c, "--compute-capability", f->capability, "of the GPU that kernels are named for, times ten", 80, 129);
  add_number(*c, "--tp", f->tp, "ranks that split the heads; the plan is rank 0's", 1, 1024);
  add_number(*c, "--dcp", f->dcp, "ranks of a group that splits every sequence's cached tokens; divides --tp", 1, 1024);
  add_number<int64_t>(*c, "--dcp-interleave", f->interleave, "tokens in turn on a rank", 1, kMostTokens);
  add_dcp_exchange(*c, f->exchange);
  c->add_option("--link", f->link,
                "GB/s that a rank sends and microseconds of a call, as in 200,7: for expected times of what ranks "
                "exchange");
  add_file(*c, "--json", f->json, "write the plan and its kernels to this file");
  f->threads = bench::this_machine().cores;
  add_number(*c, "--threads", f->threads, "Threads, whatever this machine has", 1, 4096);
  c->add_flag(
      "--rehearse", f->rehearse,
      "also run a layer of random weights once, on one thread, and say what --threads would make of its tasks: the "
      "CPU's, of form block");
  c->footer("Example: mla plan --model deepseek-v3 --queries 1,1,512,2048 --contexts 4096,60000,1000,0");
  c->callback([c, f] { run(*c, *f); });
}

}  // namespace mla::cli
