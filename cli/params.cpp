#include "cli/params.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>

#include "backend/cpu/core/target.hpp"
#include "bench/machine.hpp"
#include "core/counted.hpp"
#include "core/threads.hpp"
#include "mla/error.hpp"
#include "mla/index_plan.hpp"

namespace mla::cli {
namespace {

constexpr int64_t kMostOfADimension = 1 << 16, kMostTokens = int64_t{1} << 24, kMostElements = int64_t{1} << 32;

void require(const char* flag, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    throw InputError(std::string(flag) + " is " + std::to_string(value) + ", it must be in [" + std::to_string(least) +
                     ", " + std::to_string(most) + "]");
}

}  // namespace

std::string number_text(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.15g", x);
  return text;
}

Dtype parse_operands(const char* flag, const std::string& text) {
  const Dtype dtype = read_option(flag, text, parse_dtype);
  if (dtype != Dtype::f32 && dtype != Dtype::bf16)
    throw InputError(std::string(flag) + " is " + text + ", it must be f32 or bf16");
  return dtype;
}

std::vector<int64_t> parse_numbers(const std::string& flag, const std::vector<std::string>& texts, int64_t least,
                                   int64_t most) {
  std::vector<int64_t> numbers;
  for (const std::string& text : texts)
    for (size_t at = 0; at <= text.size();) {
      const size_t end = std::min(text.find(',', at), text.size());
      numbers.push_back(
          parse_number(flag + "[" + std::to_string(numbers.size()) + "]", text.substr(at, end - at), least, most));
      at = end + 1;
    }
  return numbers;
}

ModelConfig read_model(const std::string& name, const ReadOptions& options) {
  namespace fs = std::filesystem;
  return read_option("--model", name, [&](const std::string& text) {
    const fs::path path(text);
    std::error_code error;
    if (fs::is_directory(path, error)) return read_config(path / "config.json", options);
    if (text.ends_with(".json")) return read_config(path, options);
    const auto names = preset_names();
    if (fs::exists(path, error) && std::find(names.begin(), names.end(), text) == names.end())
      throw InputError(text + " is neither a folder nor a file whose name ends in .json");
    return preset(text);
  });
}

void refuse_beside(const CLI::App& command, const char* other, std::initializer_list<const char*> flags) {
  if (command.get_option(other)->count() == 0) return;
  for (const char* flag : flags)
    if (command.get_option(flag)->count() > 0)
      throw InputError(std::string(flag) + " is not read beside " + other + ": give one of them");
}

ShapeFlags::ShapeFlags(CLI::App& command)
    : format_(to_string(p_.format)),
      dtype_(to_string(p_.dtype)),
      output_(to_string(p_.output)),
      weights_(to_string(p_.weights)),
      inputs_(to_string(p_.inputs)),
      index_format_(to_string(p_.index_format)),
      index_arithmetic_(to_string(p_.index_arithmetic)) {
  const std::string group = "Shape (an op reads those it knows)";
  auto text = [&](const char* flag, std::string& value, const char* what) {
    options_.push_back(command.add_option(flag, value, what)->capture_default_str()->group(group));
  };
  auto number = [&](const char* flag, auto& value, const char* what) {
    CLI::Option* option = add_number(command, flag, value, what)->group(group);
    options_.push_back(option);
    return option;
  };
  auto flag = [&](const char* name, bool& value, const char* what) {
    options_.push_back(command.add_flag(name, value, what)->group(group));
  };
  number("--requests", p_.requests, "Requests in the batch");
  number("--query-len", p_.query_len, "New tokens a request");
  number("--context", p_.context, "Cached tokens a request before them");
  flag("--ragged", p_.ragged, "Lengths vary by request, up to the numbers above");
  number("--heads", p_.heads, "Attention heads");
  number("--latent", p_.latent, "Latent width (kv_lora_rank)");
  number("--rope", p_.rope, "Rotated width");
  number("--nope", p_.nope, "Unrotated width of a head's key");
  number("--value", p_.value, "Width of a head's value");
  number("--in", p_.in, "project, norm, layer_norm: input features");
  number("--out", p_.out, "project: output features");
  text("--format", format_, "Cache format");
  number("--page-size", p_.page_size, "Tokens a page");
  text("--weights", weights_, "project: how weights are held: plain fp8 mxfp4");
  text("--activations", inputs_, "project, of fp8 weights: plain or fp8_128");
  number("--weight-block", p_.weight_block, "project: side of the fp8 weights under one scale; 0: one scale for all");
  text("--dtype", dtype_, "Main operands: f32 bf16 f16 fp8_e4m3");
  flag("--neox", p_.neox, "rope: NeoX halves instead of interleaved pairs");
  number("--yarn-factor", p_.yarn_factor, "rope: above 1, YaRN with this factor");
  flag("--full", full_, "attend_expanded: not causal");
  flag("--masked", p_.masked, "attend_expanded: a row sees only --topk of the keys, by a mask");
  flag("--batch-invariant", p_.batch_invariant, "Bits of a request do not depend on its neighbours");
  splits_ = number("--splits", p_.splits, "Parts a request's context is cut into");
  text("--output", output_,
       "quantize: fp8 fp8_128 fp8_64 nvfp4 mxfp4, with _ue8m0, _column, _tma, _packed after a group");
  topk_ = number("--topk", p_.topk, "Positions a query row selects");
  number("--sources", p_.sources, "attend_sparse: caches");
  flag("--sinks", p_.sinks, "attend_sparse: a sink a head");
  number("--index-dim", p_.index_dim, "Sparse indexer: width of a key");
  text("--index-format", index_format_, "Sparse indexer: f32 bf16 fp8");
  text("--index-arithmetic", index_arithmetic_, "index_score, of fp8: exact or fp8 products");
  add_number(command, "--seed", p_.seed, "Seed of the random inputs")->group(group);
}

bool ShapeFlags::any() const {
  for (const CLI::Option* o : options_)
    if (o->count() > 0) return true;
  return false;
}

cases::Params ShapeFlags::params() const {
  cases::Params p = p_;
  p.format = read_option("--format", format_, parse_cache_format);
  p.dtype = read_option("--dtype", dtype_, parse_dtype);
  p.weights = read_option("--weights", weights_, parse_weight_format);
  p.inputs = read_option("--activations", inputs_, parse_activations);
  p.index_format = read_option("--index-format", index_format_, parse_index_cache_format);
  p.index_arithmetic = read_option("--index-arithmetic", index_arithmetic_, parse_index_arithmetic);
  p.causal = !full_;
  p.output = read_option("--output", output_, parse_output_spec);
  require("--requests", p.requests, 0, kMostTokens);
  require("--query-len", p.query_len, 0, kMostTokens);
  require("--context", p.context, 0, kMostTokens);
  require("--heads", p.heads, 1, kMostOfADimension);
  require("--latent", p.latent, 1, kMostOfADimension);
  require("--rope", p.rope, 0, kMostOfADimension);
  require("--nope", p.nope, 0, kMostOfADimension);
  require("--value", p.value, 1, kMostOfADimension);
  require("--in", p.in, 1, kMostOfADimension);
  require("--out", p.out, 1, kMostOfADimension);
  require("--weight-block", p.weight_block, 0, kMostOfADimension);
  require("--page-size", p.page_size, 1, kMostTokens);
  require("--splits", p.splits, 1, kMostTokens);
  require("--topk", p.topk, 0, kMostTokens);
  require("--sources", p.sources, 1, 64);
  require("--index-dim", p.index_dim, 1, kMostOfADimension);
  if (p.rope % 2 != 0) throw InputError("--rope is " + std::to_string(p.rope) + ", it must be even");
  if (!(p.yarn_factor >= 1))
    throw InputError("--yarn-factor is " + number_text(p.yarn_factor) + ", at least 1 is needed");
  require("--requests times (--query-len + --context)", p.requests * (p.query_len + p.context), 0, kMostTokens);
  const int64_t widest = std::max({p.latent + p.rope, p.nope + p.rope, p.value, p.in, p.out, p.index_dim});
  require("new tokens times heads times the widest dimension", p.requests * p.query_len * p.heads * widest, 0,
          kMostElements);
  if (topk_->count() > 0)
    require("new tokens times --sources times --topk", p.requests * p.query_len * p.sources * p.topk, 0, kMostElements);
  return p;
}

void add_threads(CLI::App& command, Threads& threads) {
  threads.count = bench::this_machine().cores;
  add_number(command, "--threads", threads.count, "Threads", 1, most_threads());
  command.add_flag("--pin", threads.pinned,
                   "Each thread but the first stays on a processor of its own, a core each first; over several NUMA "
                   "nodes weights and caches are placed near the threads that read them");
}

std::string text_of(const ThreadPool& pool) {
  std::string text = counted(pool.threads(), "thread");
  if (pool.pinning() == Pinning::cores) text += " pinned on " + counted(pool.nodes(), "node");
  return text;
}

DeviceFlag::DeviceFlag(CLI::App& command) {
  command.add_option("--device", name_, "cpu, cuda or cuda:N")->capture_default_str();
}

Device DeviceFlag::named() const {
  if (name_ == "cpu") return {};
  const std::string prefix = "cuda";
  int index = 0;
  bool known = name_ == prefix;
  if (!known && name_.starts_with(prefix + ":")) {
    const char *begin = name_.data() + prefix.size() + 1, *end = name_.data() + name_.size();
    const auto [at, error] = std::from_chars(begin, end, index);
    known = error == std::errc() && at == end && index >= 0;
  }
  if (!known) throw InputError("--device is '" + name_ + "', it must be cpu, cuda or cuda:N");
  return {DeviceKind::cuda, index};
}

Device DeviceFlag::device() const {
  const Device device = named();
  if (device.kind == DeviceKind::cuda) describe(device);  // throws when it is not there
  return device;
}

void require_indexer(const CLI::App& command, const ModelConfig& model) {
  if (model.indexer) return;
  // CLI11's own look-up by name ends the process when it finds no memory.
  for (const CLI::Option* o : command.get_options(nullptr))
    for (const char* flag : {"--sparse", "--topk", "--index-cache", "--index-arithmetic", "--hadamard"})
      if (o->count() > 0 && o->check_name(flag))
        throw InputError(std::string(flag) + " needs a model with an indexer, " + model.name + " has none");
}

void add_allow_unknown(CLI::App& command, ReadOptions& options) {
  command.add_flag("--allow-unknown", options.allow_unknown,
                   "Go on past keys of a config and tensors of a layer that are not understood; results may be another "
                   "model's");
}

void add_target(CLI::App& command, std::string& target) {
  std::string known = "Instruction set at most:";
  for (const std::string_view name : cpu::targets()) known += " " + std::string(name);
  command.add_option("--target", target, known);
}

void add_dcp_exchange(CLI::App& command, std::string& exchange) {
  command
      .add_option(
          "--dcp-exchange", exchange,
          "what the ranks of a group send: latents, or heads, a quarter of the bytes, for which each holds W_UK "
          "and W_UV of all the group's heads")
      ->capture_default_str();
}

void require_dcp(int dcp, int tp) {
  if (tp % dcp != 0)
    throw InputError("--dcp is " + std::to_string(dcp) + ", it must divide --tp, " + std::to_string(tp));
}

}  // namespace mla::cli
