#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <map>
#include <system_error>
#include <unordered_map>
#include <unordered_set>

#include "mla/error.hpp"
#include "mla/weights.hpp"
#include "model/json.hpp"
#include "model/part.hpp"
#include "model/quantised/cache_scales.hpp"
#include "model/quantised/formats.hpp"
#include "model/text.hpp"

namespace mla {
namespace {

constexpr std::array<std::string_view, 6> kMatrices{"q_proj.",    "q_a_proj.", "q_b_proj.", "kv_a_proj_with_mqa.",
                                                    "kv_b_proj.", "o_proj."};
constexpr std::array<std::string_view, 3> kIndexerMatrices{"indexer.wq_b.", "indexer.wk.", "indexer.weights_proj."};
constexpr std::array<std::string_view, 3> kOthers{"q_a_layernorm.weight", "kv_a_layernorm.weight",
                                                  "rotary_emb.inv_freq"};
constexpr std::array<std::string_view, 2> kIndexerVectors{"indexer.k_norm.weight", "indexer.k_norm.bias"};
/// What may be stored of a matrix, in one form or another.
constexpr std::array<std::string_view, 16> kParts{"weight",
                                                  "weight_scale",
                                                  "weight_scale_inv",
                                                  "weight_scale_2",
                                                  "weight_global_scale",
                                                  "weight_packed",
                                                  "weight_shape",
                                                  "weight_zero_point",
                                                  "weight_g_idx",
                                                  "qweight",
                                                  "qzeros",
                                                  "scales",
                                                  "g_idx",
                                                  "input_scale",
                                                  "input_global_scale",
                                                  "input_zero_point"};

template <class Names>
bool among(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// UnsupportedError for a tensor of a layer that nothing reads.
[[noreturn]] void refuse_tensor(std::string_view tensor, std::string_view where, const ModelConfig& m) {
  throw UnsupportedError(std::string(where) + ": tensor '" + std::string(tensor) +
                         "' is not one that attention of model " + m.name + " has (allow_unknown goes on past it)");
}

bool of_an_indexer(std::string_view role) { return role.starts_with("indexer."); }

/// Some model's attention has this, be it stored in one form or another.
void require_known(std::string_view prefix, std::string_view tensor, std::string_view where, const ModelConfig& m) {
  if (!tensor.starts_with(prefix)) return;
  const std::string_view role = tensor.substr(prefix.size());
  if (among(kOthers, role) || is_cache_scale(role)) return;
  const size_t dot = role.rfind('.') + 1;
  const std::string_view module = role.substr(0, dot), part = role.substr(dot);
  if (among(kMatrices, module) && among(kParts, part)) return;
  if (m.indexer && (among(kIndexerVectors, role) || (among(kIndexerMatrices, module) && among(kParts, part)))) return;
  refuse_tensor(tensor, where, m);
}

/// A layer's tensors that the form of its weights has no use for: scales beside a plain weight, another form's codes. A
/// layer that shares its choice may come with an indexer's tensors all the same.
void require_used(std::string_view prefix, std::string_view tensor, std::string_view where, const ModelConfig& m,
                  bool indexer, const std::unordered_set<std::string>& used) {
  if (!tensor.starts_with(prefix)) return;
  if (used.contains(std::string(tensor))) return;
  const std::string_view role = tensor.substr(prefix.size());
  if (role == "rotary_emb.inv_freq" || (of_an_indexer(role) && !indexer)) return;
  refuse_tensor(tensor, where, m);
}

class LayerReader {
 public:
  /// Without data, tensors are looked up and checked, not read.
  LayerReader(const FindTensor& find, std::string prefix, std::string where, const ModelConfig& config, int64_t layer,
              HeadRange heads, std::span<const HeadRange> group = {}, bool data = true)
      : find_(find),
        prefix_(std::move(prefix)),
        where_(std::move(where)),
        config_(config),
        layer_(layer),
        heads_(heads),
        group_(group),
        data_(data) {}

  LayerTensors read() {
    const ModelConfig& m = config_;
    LayerTensors t;
    if (m.query_latent > 0) {
      t.query_down = matrix("q_a_proj.", m.query_latent, m.hidden);
      t.query_norm = vector("q_a_layernorm.weight", m.query_latent);
      t.query = rows_of_heads("q_b_proj.", heads_, m.query_key(), m.query_latent);
    } else {
      t.query = rows_of_heads("q_proj.", heads_, m.query_key(), m.hidden);
    }
    t.kv_down = matrix("kv_a_proj_with_mqa.", m.entry(), m.hidden);
    t.kv_norm = vector("kv_a_layernorm.weight", m.latent);
    t.kv_up = rows_of_heads("kv_b_proj.", heads_, m.nope + m.value, m.latent);
    for (const HeadRange& member : group_) {
      const bool own = member.begin == heads_.begin && member.count == heads_.count;
      t.group_kv_up.push_back(own ? t.kv_up : rows_of_heads("kv_b_proj.", member, m.nope + m.value, m.latent));
    }
    t.output = columns_of_heads("o_proj.", m.hidden, m.value);
    if (m.layer_has_indexer(layer_)) {
      const IndexerConfig& x = *m.indexer;
      t.indexer = IndexerTensors{.query = matrix("indexer.wq_b.", x.heads * x.dim, m.query_latent),
                                 .key = matrix("indexer.wk.", x.dim, m.hidden),
                                 .key_norm = vector("indexer.k_norm.weight", x.dim),
                                 .key_norm_bias = vector("indexer.k_norm.bias", x.dim),
                                 .head_weights = matrix("indexer.weights_proj.", x.heads, m.hidden)};
    }
    t.scales = part_of(m, scales(), heads_);
    return t;
  }
  StoredScales scales() { return read_cache_scales(find_, prefix_, config_.heads, data_, used_); }
  /// UnsupportedError for one of a file's tensors that nothing has read.
  void require_used_of(const Safetensors& file) const {
    for (const SafetensorsEntry& e : file.entries())
      require_used(prefix_, e.name, file.file().string(), config_, config_.layer_has_indexer(layer_), used_);
  }

 private:
  HostTensor matrix(const std::string& module, int64_t rows, int64_t cols) {
    return matrix(module, rows, cols, {.rows = rows, .cols = cols});
  }
  HostTensor rows_of_heads(const std::string& module, HeadRange heads, int64_t of_one, int64_t cols) {
    return matrix(module, config_.heads * of_one, cols,
                  {.row = heads.begin * of_one, .rows = heads.count * of_one, .cols = cols});
  }
  HostTensor columns_of_heads(const std::string& module, int64_t rows, int64_t of_one) {
    return matrix(module, rows, config_.heads * of_one,
                  {.rows = rows, .col = heads_.begin * of_one, .cols = heads_.count * of_one});
  }
  HostTensor matrix(const std::string& module, int64_t rows, int64_t cols, const MatrixPart& wanted) {
    return read_matrix(StoredMatrix(find_, prefix_ + module, where_, rows, cols, wanted, config_, data_, used_));
  }

  HostTensor vector(const std::string& role, int64_t size) {
    const std::string name = prefix_ + role;
    const Safetensors* file = find_(name);
    if (!file) refuse(where_, "tensor '" + name + "' is missing, expected shape " + shape_text({size}));
    HostTensor t = file->outline(name);
    if (t.dtype == Dtype::fp8_e4m3)
      refuse(where_, "tensor '" + t.name + "' is fp8 with shape " + shape_text(t.shape) + ", only matrices may be");
    if (t.shape != std::vector<int64_t>{size})
      refuse(file->file().string(),
             "tensor '" + name + "' has shape " + shape_text(t.shape) + ", expected " + shape_text({size}));
    used_.insert(name);
    return data_ ? file->tensor(name) : t;
  }

  const FindTensor& find_;
  std::string prefix_, where_;
  const ModelConfig& config_;
  int64_t layer_;
  HeadRange heads_;
  std::span<const HeadRange> group_;
  bool data_;
  std::unordered_set<std::string> used_;
};

}  // namespace

LayerTensors layer_tensors(const Safetensors& file, std::string_view prefix, const ModelConfig& config, int64_t layer,
                           const ReadOptions& options, std::optional<HeadRange> heads) {
  if (heads) require_heads("layer", config, *heads);
  if (!options.allow_unknown)
    for (const SafetensorsEntry& e : file.entries()) require_known(prefix, e.name, file.file().string(), config);
  const FindTensor find = [&](const std::string& name) { return file.find(name) ? &file : nullptr; };
  LayerReader reader(find, std::string(prefix), file.file().string(), config, layer,
                     heads.value_or(HeadRange{0, config.heads}));
  LayerTensors t = reader.read();
  if (!options.allow_unknown) reader.require_used_of(file);
  return t;
}

struct Checkpoint::State {
  std::filesystem::path folder;
  ModelConfig config;
  ReadOptions options;
  std::vector<Safetensors> files;
  std::unordered_map<std::string, size_t> file_of;  // tensor name -> index into files

  void require_layer(int64_t index) const {
    if (index < 0 || index >= config.layers)
      throw InputError(folder.string() + ": layer is " + std::to_string(index) + ", allowed 0 to " +
                       std::to_string(config.layers - 1));
  }
  LayerTensors read(int64_t index, HeadRange heads, std::span<const HeadRange> group, bool data) const;

  const Safetensors* find(const std::string& name) const {
    const auto it = file_of.find(name);
    return it == file_of.end() ? nullptr : &files[it->second];
  }
  std::string prefix(int64_t layer) const {
    const std::string name = config.attention_name(layer);
    for (const char* above : {"language_model.model.", "model.language_model."})
      for (const char* part : {"weight", "weight_packed", "qweight"})
        if (find(above + name + "kv_a_proj_with_mqa." + part)) return above + name;
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

LayerTensors Checkpoint::State::read(int64_t index, HeadRange heads, std::span<const HeadRange> group,
                                     bool data) const {
  require_layer(index);
  const FindTensor look_up = [&](const std::string& name) { return find(name); };
  const std::string above = prefix(index);
  if (!options.allow_unknown)
    for (const Safetensors& file : files)
      for (const SafetensorsEntry& e : file.entries()) require_known(above, e.name, file.file().string(), config);
  LayerReader reader(look_up, above, folder.string(), config, index, heads, group, data);
  LayerTensors t = reader.read();
  if (!options.allow_unknown)
    for (const Safetensors& file : files) reader.require_used_of(file);
  return t;
}

LayerTensors Checkpoint::layer(int64_t index) const { return layer(index, {0, config().heads}); }

LayerTensors Checkpoint::layer(int64_t index, HeadRange heads, std::span<const HeadRange> group) const {
  require_heads("layer", config(), heads);
  for (const HeadRange& member : group) require_heads("layer", config(), member);
  return state_->read(index, heads, group, true);
}

StoredScales Checkpoint::scales(int64_t index) const {
  state_->require_layer(index);
  const FindTensor look_up = [&](const std::string& name) { return state_->find(name); };
  return LayerReader(look_up, state_->prefix(index), state_->folder.string(), state_->config, index,
                     {0, state_->config.heads})
      .scales();
}

LayerTensors Checkpoint::outline(int64_t index) const { return state_->read(index, {0, config().heads}, {}, false); }

void Checkpoint::check(int64_t index) const { outline(index); }

std::vector<SafetensorsEntry> Checkpoint::attention_entries(int64_t index) const {
  const std::string prefix = state_->prefix(index);
  std::vector<SafetensorsEntry> found;
  for (const Safetensors& file : state_->files)
    for (const SafetensorsEntry& e : file.entries())
      if (e.name.starts_with(prefix)) found.push_back(e);
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return found;
}

uint64_t Checkpoint::bytes_read() const {
  uint64_t bytes = 0;
  for (const Safetensors& file : state_->files) bytes += file.bytes_read();
  return bytes;
}

std::filesystem::path Checkpoint::file_of(const std::string& tensor) const {
  const Safetensors* file = state_->find(tensor);
  return file ? file->file() : std::filesystem::path();
}

}  // namespace mla
