// Reads the attention part of a Hugging Face config.json. Two generations of rope keys exist: `rope_theta` with
// `rope_scaling`, and `rope_parameters` that holds both; each names the kind `type` or `rope_type`.
#include <algorithm>
#include <cmath>

#include "mla/error.hpp"
#include "mla/model.hpp"
#include "mla/rotary.hpp"
#include "model/json.hpp"
#include "model/text.hpp"

namespace mla {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMostLayers = int64_t{1} << 20;  // as ModelConfig::validate

class Reader {
 public:
  Reader(const Json& json, std::string where) : json_(json), where_(std::move(where)) {}

  [[noreturn]] void fail(std::string_view key, const std::string& why) const {
    refuse(where_, std::string(key) + " " + why);
  }
  [[noreturn]] void unsupported(const std::string& what) const {
    throw UnsupportedError(one_line(where_ + ": " + what));
  }
  /// Absent and null are the same.
  const Json* find(std::string_view key) const {
    const auto it = json_.find(key);
    return it == json_.end() || it->is_null() ? nullptr : &*it;
  }
  int64_t integer(std::string_view key, int64_t fallback) const {
    const Json* v = find(key);
    if (!v) return fallback;
    constexpr double kMost = 1e12;
    const double x = v->is_number() ? v->get<double>() : NAN;
    if (!(std::fabs(x) <= kMost) || x != std::floor(x)) fail(key, "is " + v->dump() + ", an integer is needed");
    return static_cast<int64_t>(x);
  }
  int64_t integer(std::string_view key) const {
    if (!find(key)) fail(key, "is missing");
    return integer(key, 0);
  }
  double number(std::string_view key, double fallback) const {
    const Json* v = find(key);
    if (!v) return fallback;
    if (!v->is_number() || !std::isfinite(v->get<double>())) fail(key, "is " + v->dump() + ", a number is needed");
    return v->get<double>();
  }
  bool flag(std::string_view key, bool fallback) const {
    const Json* v = find(key);
    if (!v) return fallback;
    if (!v->is_boolean()) fail(key, "is " + v->dump() + ", true or false is needed");
    return v->get<bool>();
  }
  std::string text(std::string_view key, std::string fallback) const {
    const Json* v = find(key);
    if (!v) return fallback;
    if (!v->is_string()) fail(key, "is " + v->dump() + ", a string is needed");
    return v->get<std::string>();
  }
  const std::string& where() const { return where_; }

 private:
  const Json& json_;
  std::string where_;
};

void read_rope(const Reader& config, const std::string& model_type, ModelConfig& m) {
  RopeConfig& r = m.rotary;
  r.interleaved = config.flag("rope_interleave", model_type != "minicpm3");
  r.theta = config.number("rope_theta", 10000.0);
  const Json* parameters = config.find("rope_parameters");
  if (!parameters) parameters = config.find("rope_scaling");
  if (!parameters) return;
  if (!parameters->is_object()) config.fail("rope_scaling", "is " + parameters->dump() + ", an object is needed");
  const Reader rope(*parameters, config.where() + ": rope");
  r.theta = rope.number("rope_theta", r.theta);
  const std::string kind = rope.text("rope_type", rope.text("type", "default"));
  if (kind == "default") return;
  if (kind != "yarn" && kind != "deepseek_yarn")
    config.unsupported("rope type '" + kind + "' is not supported (default and yarn are)");
  r.scaling = RopeConfig::Scaling::yarn;
  r.factor = rope.number("factor", 1.0);
  r.beta_fast = rope.number("beta_fast", 32.0);
  r.beta_slow = rope.number("beta_slow", 1.0);
  r.mscale = rope.number("mscale", 1.0);
  r.mscale_all_dim = rope.number("mscale_all_dim", 0.0);
  r.original_max_position =
      rope.integer("original_max_position_embeddings", config.integer("max_position_embeddings", 4096));
  // `attn_factor` multiplies the magnitude, `attention_factor` is all of it.
  r.attention_factor = rope.number("attn_factor", 1.0);
  if (rope.find("attention_factor")) {
    r.attention_factor = 1.0;
    r.attention_factor = rope.number("attention_factor", 1.0) / rotary_magnitude(r);
  }
}

// Which layers have an indexer of their own, in the three forms of configs, the most explicit first: a list of "full"
// and "shared", a pattern of F and S, or a period (with an offset) after the first layers.
std::vector<uint8_t> indexer_layers(const Reader& config, int64_t layers) {
  std::vector<uint8_t> full;
  auto add = [&](std::string_view key, const std::string& kind) {
    const bool own = kind == "full" || kind == "F";
    if (!own && kind != "shared" && kind != "S")
      config.fail(key, "holds '" + kind + "', full or shared (F or S) are known");
    full.push_back(own);
  };
  for (const char* key : {"indexer_types", "index_topk_pattern"}) {
    const Json* v = config.find(key);
    if (!v) continue;
    if (v->is_string()) {
      for (char c : v->get<std::string>()) add(key, std::string(1, c));
    } else {
      if (!v->is_array()) config.fail(key, "is " + v->dump() + ", a list or a string is needed");
      for (const Json& e : *v) add(key, e.is_string() ? e.get<std::string>() : e.dump());
    }
    // Lists may go on for layers past the model's own (speculative decoding's).
    if (static_cast<int64_t>(full.size()) < layers)
      config.fail(
          key, "has " + std::to_string(full.size()) + " entries, the model has " + std::to_string(layers) + " layers");
    full.resize(static_cast<size_t>(layers));
    return full;
  }
  const int64_t period = config.integer("index_topk_freq", 1), offset = config.integer("index_skip_topk_offset", 2);
  if (period < 1) config.fail("index_topk_freq", "is " + std::to_string(period) + ", at least 1 is needed");
  if (period == 1) return {};
  for (int64_t l = 0; l < layers; ++l) full.push_back(std::max<int64_t>(l - offset + 1, 0) % period == 0);
  return full;
}

void reject_unsupported(const Reader& config) {
  auto reject = [&](std::string_view key, const std::string& what) {
    const Json* v = config.find(key);
    if (v && !(v->is_boolean() && !v->get<bool>()) && !(v->is_number() && v->get<double>() == 0))
      config.unsupported(std::string(key) + " is " + v->dump() + ": " + what + " is not supported");
  };
  const bool windowed = config.flag("use_sliding_window", true);
  if (windowed) reject("sliding_window", "a sliding window");
  reject("attn_logit_softcapping", "a logit soft cap");
  reject("attn_logit_soft_cap", "a logit soft cap");
  reject("alibi", "ALiBi");
  reject("num_kv_shared_layers", "KV sharing between layers");
  reject("attention_bias", "a bias in attention's projections");
}

}  // namespace

ModelConfig parse_config(std::string_view text, std::string_view where) {
  const Json root = parse_object(text, where);
  const bool nested = !root.contains("kv_lora_rank") && root.contains("text_config") && root["text_config"].is_object();
  const Reader config(nested ? root["text_config"] : root, std::string(where));
  reject_unsupported(config);

  const std::string type = config.text("model_type", "");
  ModelConfig m;
  m.name = type.empty() ? "model" : one_line(type);
  m.hidden = config.integer("hidden_size");
  m.layers = config.integer("num_hidden_layers");
  m.heads = config.integer("num_attention_heads");
  m.query_latent = config.integer("q_lora_rank", 0);
  m.latent = config.integer("kv_lora_rank");
  m.nope = config.integer("qk_nope_head_dim");
  m.rope = config.integer("qk_rope_head_dim");
  m.value = config.integer("v_head_dim");
  m.rms_eps = config.number("rms_norm_eps", 1e-6);
  m.rotary.rotate = !config.flag("mla_use_nope", false);
  read_rope(config, type, m);

  if (config.find("index_topk")) {
    if (m.layers < 1 || m.layers > kMostLayers)
      config.fail("num_hidden_layers", "is " + std::to_string(m.layers) + ", allowed 1 to " +
                                           std::to_string(kMostLayers) + " with an indexer");
    m.indexer = IndexerConfig{.heads = config.integer("index_n_heads"),
                              .dim = config.integer("index_head_dim"),
                              .topk = config.integer("index_topk"),
                              .interleaved = config.flag("indexer_rope_interleave", false),
                              .full = indexer_layers(config, m.layers)};
  }
  const Json* quantization = config.find("quantization_config");
  if (!quantization) quantization = Reader(root, config.where()).find("quantization_config");
  if (quantization) {
    if (!quantization->is_object())
      config.fail("quantization_config", "is " + quantization->dump() + ", an object is needed");
    const Reader q(*quantization, config.where() + ": quantization_config");
    if (const Json* block = q.find("weight_block_size")) {
      auto size = [&](size_t i) {
        if (!block->is_array() || block->size() != 2 || !(*block)[i].is_number_integer() ||
            (*block)[i].get<int64_t>() < 1 || (*block)[i].get<int64_t>() > 65536)
          q.fail("weight_block_size", "is " + block->dump() + ", two positive integers are needed");
        return (*block)[i].get<int64_t>();
      };
      m.fp8_block_rows = size(0);
      m.fp8_block_cols = size(1);
    }
  }
  try {
    m.validate();
  } catch (const ShapeError& e) {
    refuse(where, e.what());
  }
  return m;
}

ModelConfig read_config(const std::filesystem::path& file) { return parse_config(read_text(file), file.string()); }

}  // namespace mla
