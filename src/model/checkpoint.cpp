#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <system_error>
#include <unordered_map>

#include "mla/error.hpp"
#include "mla/weights.hpp"
#include "model/json.hpp"
#include "model/text.hpp"

namespace mla {
namespace {

/// Where tensors are looked up by name: one file, or the shards of an index.
using Find = std::function<const Safetensors*(const std::string&)>;

/// What a layer may have: the tensors that are read, their block scales, and what follows from the config.
constexpr std::array<std::string_view, 15> kKnown{"q_proj.weight",
                                                  "q_a_proj.weight",
                                                  "q_a_layernorm.weight",
                                                  "q_b_proj.weight",
                                                  "kv_a_proj_with_mqa.weight",
                                                  "kv_a_layernorm.weight",
                                                  "kv_b_proj.weight",
                                                  "o_proj.weight",
                                                  "rotary_emb.inv_freq",
                                                  "q_proj.weight_scale_inv",
                                                  "q_a_proj.weight_scale_inv",
                                                  "q_b_proj.weight_scale_inv",
                                                  "kv_a_proj_with_mqa.weight_scale_inv",
                                                  "kv_b_proj.weight_scale_inv",
                                                  "o_proj.weight_scale_inv"};
constexpr std::array<std::string_view, 8> kKnownOfIndexers{
    "indexer.wq_b.weight",         "indexer.wk.weight",
    "indexer.k_norm.weight",       "indexer.k_norm.bias",
    "indexer.weights_proj.weight", "indexer.wq_b.weight_scale_inv",
    "indexer.wk.weight_scale_inv", "indexer.weights_proj.weight_scale_inv"};

/// UnsupportedError for a tensor under the prefix that nothing reads. A layer that shares its choice may come with an
/// indexer's tensors all the same.
void require_known(std::string_view prefix, std::string_view tensor, std::string_view where, const ModelConfig& m) {
  if (!tensor.starts_with(prefix)) return;
  const std::string_view role = tensor.substr(prefix.size());
  if (std::find(kKnown.begin(), kKnown.end(), role) != kKnown.end()) return;
  if (m.indexer && std::find(kKnownOfIndexers.begin(), kKnownOfIndexers.end(), role) != kKnownOfIndexers.end()) return;
  throw UnsupportedError(std::string(where) + ": tensor '" + std::string(tensor) +
                         "' is not one that attention of model " + m.name + " has (allow_unknown goes on past it)");
}

class LayerReader {
 public:
  /// Without data, tensors are looked up and checked, not read.
  LayerReader(const Find& find, std::string prefix, std::string where, const ModelConfig& config, int64_t layer,
              bool data = true)
      : find_(find),
        prefix_(std::move(prefix)),
        where_(std::move(where)),
        config_(config),
        layer_(layer),
        data_(data) {}

  LayerTensors read() const {
    const ModelConfig& m = config_;
    LayerTensors t;
    if (m.query_latent > 0) {
      t.query_down = tensor("q_a_proj.weight", {m.query_latent, m.hidden});
      t.query_norm = tensor("q_a_layernorm.weight", {m.query_latent});
      t.query = tensor("q_b_proj.weight", {m.heads * m.query_key(), m.query_latent});
    } else {
      t.query = tensor("q_proj.weight", {m.heads * m.query_key(), m.hidden});
    }
    t.kv_down = tensor("kv_a_proj_with_mqa.weight", {m.entry(), m.hidden});
    t.kv_norm = tensor("kv_a_layernorm.weight", {m.latent});
    t.kv_up = tensor("kv_b_proj.weight", {m.heads * (m.nope + m.value), m.latent});
    t.output = tensor("o_proj.weight", {m.hidden, m.heads * m.value});
    if (m.layer_has_indexer(layer_)) {
      const IndexerConfig& x = *m.indexer;
      t.indexer = IndexerTensors{.query = tensor("indexer.wq_b.weight", {x.heads * x.dim, m.query_latent}),
                                 .key = tensor("indexer.wk.weight", {x.dim, m.hidden}),
                                 .key_norm = tensor("indexer.k_norm.weight", {x.dim}),
                                 .key_norm_bias = tensor("indexer.k_norm.bias", {x.dim}),
                                 .head_weights = tensor("indexer.weights_proj.weight", {x.heads, m.hidden})};
    }
    return t;
  }

 private:
  HostTensor tensor(const std::string& role, const std::vector<int64_t>& shape) const {
    const std::string name = prefix_ + role;
    const Safetensors* file = find_(name);
    if (!file) refuse(where_, "tensor '" + name + "' is missing, expected shape " + shape_text(shape));
    HostTensor t = file->outline(name);
    if (t.shape != shape)
      refuse(file->file().string(),
             "tensor '" + name + "' has shape " + shape_text(t.shape) + ", expected " + shape_text(shape));
    if (data_) t = file->tensor(name);
    if (t.dtype == Dtype::fp8_e4m3) scales(t);
    return t;
  }

  void scales(HostTensor& t) const {
    if (t.shape.size() != 2)
      refuse(where_, "tensor '" + t.name + "' is fp8 with shape " + shape_text(t.shape) + ", only matrices may be");
    t.block_rows = config_.fp8_block_rows > 0 ? config_.fp8_block_rows : 128;
    t.block_cols = config_.fp8_block_cols > 0 ? config_.fp8_block_cols : 128;
    const std::vector<int64_t> shape{(t.shape[0] + t.block_rows - 1) / t.block_rows,
                                     (t.shape[1] + t.block_cols - 1) / t.block_cols};
    const std::string name = t.name + "_scale_inv";
    const Safetensors* file = find_(name);
    if (!file)
      refuse(where_, "tensor '" + name + "' is missing, expected shape " + shape_text(shape) + " for the fp8 weight");
    const HostTensor s = file->outline(name);
    if (s.shape != shape)
      refuse(file->file().string(),
             "tensor '" + name + "' has shape " + shape_text(s.shape) + ", expected " + shape_text(shape));
    if (s.dtype == Dtype::fp8_e4m3) refuse(file->file().string(), "tensor '" + name + "' is fp8, a float is needed");
    if (data_) t.block_scales = file->tensor(name).to_f32();
  }

  const Find& find_;
  std::string prefix_, where_;
  const ModelConfig& config_;
  int64_t layer_;
  bool data_;
};

}  // namespace

LayerTensors layer_tensors(const Safetensors& file, std::string_view prefix, const ModelConfig& config, int64_t layer,
                           const ReadOptions& options) {
  if (!options.allow_unknown)
    for (const SafetensorsEntry& e : file.entries()) require_known(prefix, e.name, file.file().string(), config);
  const Find find = [&](const std::string& name) { return file.find(name) ? &file : nullptr; };
  return LayerReader(find, std::string(prefix), file.file().string(), config, layer).read();
}

struct Checkpoint::State {
  std::filesystem::path folder;
  ModelConfig config;
  ReadOptions options;
  std::vector<Safetensors> files;
  std::unordered_map<std::string, size_t> file_of;  // tensor name -> index into files

  LayerTensors read(int64_t index, bool data) const;

  const Safetensors* find(const std::string& name) const {
    const auto it = file_of.find(name);
    return it == file_of.end() ? nullptr : &files[it->second];
  }
  std::string prefix(int64_t layer) const {
    const std::string name = config.attention_name(layer);
    for (const char* above : {"language_model.model.", "model.language_model."})
      if (find(above + name + "kv_a_proj_with_mqa.weight")) return above + name;
    return "model." + name;
  }
  void add(const std::filesystem::path& file) { files.emplace_back(file); }

  void read_index(const std::filesystem::path& index) {
    const JsonDocument document = parse_object(read_text(index), index.string());
    const nlohmann::json& json = document.root;
    auto fail = [&](const std::string& why) { refuse(index.string(), why); };
    const auto map = json.find("weight_map");
    if (map == json.end() || !map->is_object()) fail("weight_map is missing or not an object");
    constexpr size_t kMostShards = 4096;  // each stays open
    std::map<std::string, size_t> shards;
    std::map<std::pair<dev_t, ino_t>, size_t> by_file;  // one file may be spelled in many ways
    for (const auto& [tensor, value] : map->items()) {
      if (!value.is_string()) fail("weight_map of '" + tensor + "' is not a string");
      const std::string name = value.get<std::string>();
      const std::filesystem::path path(name);
      const bool inside = !name.empty() && path.is_relative() && name.find('\0') == std::string::npos &&
                          std::none_of(path.begin(), path.end(), [](const auto& part) { return part == ".."; });
      if (!inside) fail("weight_map of '" + tensor + "' is '" + name + "', which leaves the folder");
      auto [it, fresh] = shards.try_emplace(name, files.size());
      if (fresh) {
        struct stat info {};
        const bool there = stat((folder / path).c_str(), &info) == 0;
        const auto same = by_file.find({info.st_dev, info.st_ino});
        if (there && same != by_file.end()) {
          it->second = same->second;
        } else {
          if (files.size() == kMostShards) fail("weight_map names more than " + std::to_string(kMostShards) + " files");
          add(folder / path);
          if (there) by_file.try_emplace({info.st_dev, info.st_ino}, files.size() - 1);
        }
      }
      if (!files[it->second].find(tensor)) fail("tensor '" + tensor + "' is not in its shard '" + name + "'");
      file_of.emplace(tensor, it->second);
    }
  }
};

Checkpoint::Checkpoint(const std::filesystem::path& folder, const ReadOptions& options) {
  auto s = std::make_shared<State>();
  s->folder = folder;
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) refuse(folder.string(), "not a folder");
  s->options = options;
  s->config = read_config(folder / "config.json", options);
  const auto index = folder / "model.safetensors.index.json", single = folder / "model.safetensors";
  if (std::filesystem::exists(index, error)) {
    s->read_index(index);
  } else if (std::filesystem::exists(single, error)) {
    s->add(single);
    for (const SafetensorsEntry& e : s->files[0].entries()) s->file_of.emplace(e.name, 0);
  } else {
    refuse(folder.string(), "neither model.safetensors nor model.safetensors.index.json is there");
  }
  state_ = std::move(s);
}

const ModelConfig& Checkpoint::config() const { return state_->config; }

LayerTensors Checkpoint::State::read(int64_t index, bool data) const {
  if (index < 0 || index >= config.layers)
    throw InputError(folder.string() + ": layer is " + std::to_string(index) + ", allowed 0 to " +
                     std::to_string(config.layers - 1));
  const Find look_up = [&](const std::string& name) { return find(name); };
  const std::string above = prefix(index);
  if (!options.allow_unknown)
    for (const Safetensors& file : files)
      for (const SafetensorsEntry& e : file.entries()) require_known(above, e.name, file.file().string(), config);
  return LayerReader(look_up, above, folder.string(), config, index, data).read();
}

LayerTensors Checkpoint::layer(int64_t index) const { return state_->read(index, true); }

void Checkpoint::check(int64_t index) const { state_->read(index, false); }

std::vector<SafetensorsEntry> Checkpoint::attention_entries(int64_t index) const {
  const std::string prefix = state_->prefix(index);
  std::vector<SafetensorsEntry> found;
  for (const Safetensors& file : state_->files)
    for (const SafetensorsEntry& e : file.entries())
      if (e.name.starts_with(prefix)) found.push_back(e);
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return found;
}

std::filesystem::path Checkpoint::file_of(const std::string& tensor) const {
  const Safetensors* file = state_->find(tensor);
  return file ? file->file() : std::filesystem::path();
}

}  // namespace mla
