// mla info: this machine and what the library knows; or what a checkpoint, a config.json or a safetensors file holds.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>

#include "backend/backend.hpp"
#include "backend/cpu/core/target.hpp"
#include "bench/machine.hpp"
#include "bench/roof.hpp"
#include "cache/format.hpp"
#include "cli/commands.hpp"
#include "cli/params.hpp"
#include "core/one_line.hpp"
#include "core/topology.hpp"
#include "mla/error.hpp"
#include "mla/index_cache.hpp"
#include "mla/rotary.hpp"
#include "mla/weights.hpp"

namespace mla::cli {
namespace {

std::string text(int64_t n) { return std::to_string(n); }

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string s;
  for (int64_t n : shape) s += (s.empty() ? "" : ", ") + text(n);
  return "[" + s + "]";
}

std::string rotary_text(const ModelConfig& m) {
  const RopeConfig& r = m.rotary;
  if (!r.rotate) return "none (NoPE)";
  char s[160];
  std::snprintf(s, sizeof s, "%s, theta %g", r.interleaved ? "interleaved" : "NeoX halves", r.theta);
  std::string all = s;
  const long long original = r.original_max_position;
  if (r.scaling == RopeConfig::Scaling::yarn) {
    const double score = r.mscale_all_dim != 0 ? yarn_mscale(r.factor, r.mscale_all_dim) : 1.0;
    std::snprintf(s, sizeof s, ", YaRN factor %g over %lld positions, magnitude %.9g, score factor %.9g", r.factor,
                  original, rotary_magnitude(r), score * score);
    all += s;
  }
  if (r.scaling == RopeConfig::Scaling::longrope) {
    const bool grown = r.max_position > original;
    std::snprintf(s, sizeof s, ", longrope over %lld positions, %s factors%s, magnitude %.9g", original,
                  grown ? "long" : "short", r.short_factors == r.long_factors ? " (both are the same)" : "",
                  rotary_magnitude(r));
    all += s;
  }
  return all;
}

// What the attention weights of layer 0 and of all layers take, by each way of preparing them.
void print_weights(const ModelConfig& m) {
  struct Choice {
    const char* name;
    Absorption absorption;
    WeightFormat up, products = WeightFormat::plain;
  };
  std::printf("%-34s %12s %12s %12s\n", "weights prepared", "f32, a layer", "bf16, a layer", "bf16, all");
  for (const Choice& c :
       {Choice{"runtime absorption", Absorption::runtime, WeightFormat::plain},
        Choice{"  W_UK, W_UV of its latent path fp8", Absorption::runtime, WeightFormat::fp8},
        Choice{"  the same mxfp4", Absorption::runtime, WeightFormat::mxfp4},
        Choice{"  its other products fp8", Absorption::runtime, WeightFormat::plain, WeightFormat::fp8},
        Choice{"full absorption, latent path alone", Absorption::full, WeightFormat::plain},
        Choice{"  its products fp8", Absorption::full_fp8, WeightFormat::plain}}) {
    auto bytes = [&](int64_t layer, Dtype t) {
      return prepared_bytes(m, layer, {.dtype = t, .absorption = c.absorption, .up = c.up, .products = c.products});
    };
    double all = 0;
    for (int64_t l = 0; l < m.layers; ++l) all += bytes(l, Dtype::bf16);
    std::printf("%-34s %8.1f MiB %8.1f MiB %8.2f GiB\n", c.name, bytes(0, Dtype::f32) / 1048576,
                bytes(0, Dtype::bf16) / 1048576, all / 1073741824);
  }
}

void print_config(const ModelConfig& m) {
  std::printf("model %s: hidden %s, layers %s, heads %s, query latent %s, latent %s, nope %s, rope %s, value %s\n",
              m.name.empty() ? "(unnamed)" : m.name.c_str(), text(m.hidden).c_str(), text(m.layers).c_str(),
              text(m.heads).c_str(), m.query_latent ? text(m.query_latent).c_str() : "none", text(m.latent).c_str(),
              text(m.nope).c_str(), text(m.rope).c_str(), text(m.value).c_str());
  std::printf("rotary %s\nsoftmax scale %.9g, rms eps %g\n", rotary_text(m).c_str(), m.softmax_scale(), m.rms_eps);
  if (m.query_scale != 1 || m.latent_scale != 1)
    std::printf("latents scaled: queries by %.9g, kv_c by %.9g\n", m.query_scale, m.latent_scale);
  if (m.query_growth_beta > 0)
    std::printf("queries grow with their position: 1 + %g ln(1 + floor(position / %lld))\n", m.query_growth_beta,
                static_cast<long long>(m.query_growth_length));
  if (m.attentions_per_layer > 1)
    std::printf("%s attentions in each of %s layers\n", text(m.attentions_per_layer).c_str(),
                text(m.layers / m.attentions_per_layer).c_str());
  if (!m.model_layers.empty()) {
    std::string numbers;
    for (int64_t l : m.model_layers) numbers += " " + text(l);
    std::printf("MLA layers of the model, counted from 0:%s\n", numbers.c_str());
  }
  for (const std::string& note : m.notes) std::printf("note: %s\n", note.c_str());
  if (m.indexer) {
    int64_t own = 0;
    for (int64_t l = 0; l < m.layers; ++l) own += m.layer_has_indexer(l);
    std::printf("indexer heads %s, dim %s, top %s, %s; %s\n", text(m.indexer->heads).c_str(),
                text(m.indexer->dim).c_str(), text(m.indexer->topk).c_str(),
                m.indexer->interleaved ? "interleaved" : "NeoX halves",
                own == m.layers
                    ? "every layer has its own"
                    : (text(own) + " of " + text(m.layers) + " layers have their own, the others share it").c_str());
  }
  if (!m.quantisation.method.empty()) std::printf("weights quantised by %s\n", one_line(m.quantisation.method).c_str());
  if (m.fp8_block_rows > 0)
    std::printf("fp8 weights with block scales of %s x %s\n", text(m.fp8_block_rows).c_str(),
                text(m.fp8_block_cols).c_str());
  for (CacheFormat f : cache_formats()) {
    const CacheSpec spec = cache_spec(m, f);
    try {
      spec.validate();
    } catch (const Error&) {
      continue;  // this format is made for other dimensions
    }
    std::printf("cache %-10s %8.1f bytes a token and layer, %10.1f a token\n", std::string(to_string(f)).c_str(),
                spec.token_bytes(), spec.token_bytes() * static_cast<double>(m.layers));
  }
  int64_t indexed = 0;
  for (int64_t l = 0; l < m.layers; ++l) indexed += m.layer_has_indexer(l);
  for (IndexCacheFormat f : m.indexer ? index_cache_formats() : std::span<const IndexCacheFormat>()) {
    const double bytes = index_cache_spec(m, cache_spec(m, CacheFormat::bf16), f).token_bytes();
    std::printf("index %-10s %8.1f bytes a token and layer, %10.1f a token\n", std::string(to_string(f)).c_str(), bytes,
                bytes * static_cast<double>(indexed));
  }
  print_weights(m);
}

void print_machine(const Threads& threads) {
  const bench::Machine machine = bench::this_machine();
  ThreadPool pool(threads.count, threads.pinning());
  const bench::Roof roof = bench::measure_roof(pool);
  std::printf("machine   %s, %d cores, %.1f GiB\n", machine.cpu.c_str(), machine.cores,
              static_cast<double>(machine.memory_bytes) / (1 << 30));
  std::printf("topology  %s\n", describe(this_topology()).c_str());
  for (const backend::Backend* b : backend::backends())
    std::printf("backend   %s, target %s\n", std::string(b->name).c_str(), std::string(b->target()).c_str());
  if (cpu::native_bf16_dot() && cpu::bf16_products() == cpu::Bf16Products::widened)
    std::printf("          attention multiplies in f32: bf16 dot products were measured to be no faster on this CPU\n");
  std::printf("roof      %s (measured on %s)\n", text_of(roof).c_str(), text_of(pool).c_str());
}

void print_models() {
  std::printf("\n%-18s %6s %6s %5s %8s %6s %4s %4s %5s  %s\n", "model", "hidden", "layers", "heads", "q latent",
              "latent", "nope", "rope", "value", "bf16 bytes a token");
  for (std::string_view name : preset_names()) {
    const ModelConfig m = preset(name);
    std::printf("%-18s %6s %6s %5s %8s %6s %4s %4s %5s  %.0f\n", std::string(name).c_str(), text(m.hidden).c_str(),
                text(m.layers).c_str(), text(m.heads).c_str(), m.query_latent ? text(m.query_latent).c_str() : "-",
                text(m.latent).c_str(), text(m.nope).c_str(), text(m.rope).c_str(), text(m.value).c_str(),
                cache_spec(m, CacheFormat::bf16).token_bytes() * static_cast<double>(m.layers));
  }
}

void print_formats() {
  std::printf("\n%-12s %15s %8s  %s\n", "cache format", "bytes a token", "at", "");
  for (CacheFormat f : cache_formats()) {
    CacheSpec spec{.format = f};
    try {
      spec.validate();
    } catch (const Error&) {
      spec.latent = 448;  // fp8_ds_v4's own division of 512
    }
    std::printf("%-12s %15.1f %8s  %s\n", std::string(to_string(f)).c_str(), spec.token_bytes(),
                (text(spec.latent) + "/" + text(spec.rope)).c_str(), std::string(cache::format(f).summary).c_str());
  }
}

void print_entry(const std::string& name, const SafetensorsEntry& e, const std::string& where) {
  std::printf("  %-40s %-8s %-16s %s\n", name.c_str(), e.dtype.c_str(), shape_text(e.shape).c_str(), where.c_str());
}

std::string bytes_text(const SafetensorsEntry& e) {
  return "bytes " + std::to_string(e.begin) + " to " + std::to_string(e.end);
}

// A layer's tensors without its number, to see which layers are alike.
std::string signature(const Checkpoint& checkpoint, int64_t layer) {
  const std::string under = checkpoint.config().attention_name(layer);
  std::string s;
  for (const SafetensorsEntry& e : checkpoint.attention_entries(layer))
    s += e.name.substr(e.name.find(under) + under.size()) + e.dtype + shape_text(e.shape) + ";";
  return s;
}

void print_layers(const Checkpoint& checkpoint, int64_t first, int64_t last) {
  const auto entries = checkpoint.attention_entries(first);
  const std::string under = checkpoint.config().attention_name(first);
  if (first == last) std::printf("layer %s: ", text(first).c_str());
  else std::printf("layers %s to %s, all alike: ", text(first).c_str(), text(last).c_str());
  std::printf("%zu tensors%s\n", entries.size(),
              entries.empty()
                  ? ""
                  : (" under " + entries[0].name.substr(0, entries[0].name.find(under) + under.size() - 1)).c_str());
  for (const SafetensorsEntry& e : entries) {
    const size_t at = e.name.find(under);
    std::set<std::string> files;
    for (int64_t l = first; l <= last; ++l) {
      std::string name = e.name;
      name.replace(at, under.size(), checkpoint.config().attention_name(l));
      files.insert(checkpoint.file_of(name).filename().string());
    }
    std::string where = *files.begin();
    if (files.size() > 1) where += " to " + *files.rbegin();
    if (first == last) where += ", " + bytes_text(e);
    print_entry(e.name.substr(at + under.size()), e, where);
  }
}

// The forms that quantised weights were read in: a line for each that some matrix has.
void print_forms(const LayerTensors& t, const std::string& under) {
  std::vector<std::pair<std::string, std::string>> forms;  // with the matrices that have it
  const auto add = [&](const HostTensor& w) {
    if (w.format.empty()) return;
    std::string module = w.name.substr(w.name.find(under) + under.size());
    module.resize(module.rfind('.'));
    const auto at = std::find_if(forms.begin(), forms.end(), [&](const auto& f) { return f.first == w.format; });
    if (at == forms.end()) forms.emplace_back(w.format, module);
    else at->second += ", " + module;
  };
  for (const HostTensor* w : {&t.query_down, &t.query, &t.kv_down, &t.kv_up, &t.output}) add(*w);
  if (t.indexer)
    for (const HostTensor* w : {&t.indexer->query, &t.indexer->key, &t.indexer->head_weights}) add(*w);
  for (const auto& [form, modules] : forms) std::printf("  read as %s: %s\n", form.c_str(), modules.c_str());
}

// Returns whether every layer has what attention needs.
bool print_checkpoint(const std::filesystem::path& folder, const ReadOptions& options) {
  const Checkpoint checkpoint(folder, options);
  print_config(checkpoint.config());
  std::printf("\n");
  const int64_t layers = checkpoint.config().layers;
  bool complete = true;
  for (int64_t first = 0, last; first < layers; first = last + 1) {
    const std::string mine = signature(checkpoint, first);
    for (last = first; last + 1 < layers && signature(checkpoint, last + 1) == mine;) ++last;
    print_layers(checkpoint, first, last);
    try {
      for (int64_t l = first; l <= last; ++l) checkpoint.check(l);
      print_forms(checkpoint.outline(first), checkpoint.config().attention_name(first));
    } catch (const Error& e) {
      std::printf("  unusable: %s\n", e.what());
      complete = false;
    }
  }
  return complete;
}

void print_safetensors(const std::filesystem::path& file) {
  const Safetensors tensors(file);
  std::printf("%s: %zu tensors\n", file.string().c_str(), tensors.entries().size());
  for (const SafetensorsEntry& e : tensors.entries()) print_entry(e.name, e, bytes_text(e));
}

}  // namespace

void add_info(CLI::App& app, int& status) {
  struct Options {
    std::string path, target;
    ReadOptions read;
    Threads threads;
  };
  CLI::App* command =
      app.add_subcommand("info", "This machine, its roofs, models and cache formats; or what a checkpoint holds");
  auto o = std::make_shared<Options>();
  command->add_option("path", o->path, "Checkpoint folder, config.json, safetensors file, or a preset's name");
  add_allow_unknown(*command, o->read);
  add_threads(*command, o->threads);
  command->footer(
      "Examples:\n"
      "  mla info\n"
      "  mla info deepseek-v3\n"
      "  mla info ~/checkpoints/DeepSeek-V2-Lite       config, and each layer's attention tensors\n"
      "Exit code 1 when a layer of the checkpoint lacks what attention needs.");
  command->callback([o, &status] {
    namespace fs = std::filesystem;
    const fs::path path(o->path);
    if (o->path.empty()) {
      print_machine(o->threads);
      print_models();
      print_formats();
    } else if (fs::is_directory(path)) {
      status = print_checkpoint(path, o->read) ? 0 : 1;
    } else if (path.extension() == ".json") {
      print_config(read_config(path, o->read));
    } else if (fs::exists(path)) {
      print_safetensors(path);
    } else {
      const auto names = preset_names();
      if (std::find(names.begin(), names.end(), o->path) == names.end()) {
        std::string known;
        for (std::string_view name : names) known += " " + std::string(name);
        throw InputError("'" + o->path + "' is neither a file or folder nor a model; known models:" + known);
      }
      print_config(preset(o->path));
    }
  });
}

}  // namespace mla::cli
