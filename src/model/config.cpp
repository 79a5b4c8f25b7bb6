// Reads the attention part of a Hugging Face config.json. Two generations of rope keys exist: `rope_theta` with
// `rope_scaling`, and `rope_parameters` that holds both; each names the kind `type` or `rope_type`.
#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "mla/error.hpp"
#include "mla/model.hpp"

namespace mla {
namespace {

using Json = nlohmann::json;

class Reader {
 public:
  Reader(const Json& json, std::string where) : json_(json), where_(std::move(where)) {}

  [[noreturn]] void fail(std::string_view key, const std::string& why) const {
    throw CheckpointError(where_ + ": " + std::string(key) + " " + why);
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
  double positive(std::string_view key, double fallback) const {
    const double x = number(key, fallback);
    if (!(x > 0)) fail(key, "is " + std::to_string(x) + ", must be above 0");
    return x;
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
  r.theta = config.positive("rope_theta", 10000.0);
  const Json* parameters = config.find("rope_parameters");
  if (!parameters) parameters = config.find("rope_scaling");
  if (!parameters) return;
  if (!parameters->is_object()) config.fail("rope_scaling", "is " + parameters->dump() + ", an object is needed");
  const Reader rope(*parameters, config.where() + ": rope");
  r.theta = rope.positive("rope_theta", r.theta);
  const std::string kind = rope.text("rope_type", rope.text("type", "default"));
  if (kind == "default") return;
  if (kind != "yarn" && kind != "deepseek_yarn")
    throw UnsupportedError(config.where() + ": rope type '" + kind + "' is not supported (default and yarn are)");
  r.scaling = RopeConfig::Scaling::yarn;
  r.factor = rope.positive("factor", 1.0);
  r.beta_fast = rope.positive("beta_fast", 32.0);
  r.beta_slow = rope.positive("beta_slow", 1.0);
  r.attention_factor = rope.positive("attention_factor", 1.0);
  r.mscale = rope.number("mscale", 1.0);
  r.mscale_all_dim = rope.number("mscale_all_dim", 0.0);
  r.original_max_position =
      rope.integer("original_max_position_embeddings", config.integer("max_position_embeddings", 4096));
  if (r.original_max_position < 1)
    rope.fail("original_max_position_embeddings",
              "is " + std::to_string(r.original_max_position) + ", must be above 0");
}

void reject_unsupported(const Reader& config) {
  auto reject = [&](std::string_view key, const std::string& what) {
    const Json* v = config.find(key);
    if (v && !(v->is_boolean() && !v->get<bool>()) && !(v->is_number() && v->get<double>() == 0))
      throw UnsupportedError(config.where() + ": " + std::string(key) + " is " + v->dump() + ": " + what +
                             " is not supported");
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
  const Json root = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded()) throw CheckpointError(std::string(where) + ": not valid JSON");
  if (!root.is_object()) throw CheckpointError(std::string(where) + ": not a JSON object");
  const bool nested = !root.contains("kv_lora_rank") && root.contains("text_config") && root["text_config"].is_object();
  const Reader config(nested ? root["text_config"] : root, std::string(where));
  reject_unsupported(config);

  const std::string type = config.text("model_type", "");
  ModelConfig m;
  m.name = type.empty() ? "model" : type;
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
    m.indexer = IndexerConfig{.heads = config.integer("index_n_heads"),
                              .dim = config.integer("index_head_dim"),
                              .topk = config.integer("index_topk"),
                              .interleaved = config.flag("indexer_rope_interleave", false)};
  }
  const Json* quantization = config.find("quantization_config");
  if (!quantization && nested && root.contains("quantization_config") && root["quantization_config"].is_object())
    quantization = &root["quantization_config"];
  if (quantization && quantization->is_object()) {
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
    throw CheckpointError(std::string(where) + ": " + e.what());
  }
  return m;
}

ModelConfig read_config(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) throw CheckpointError(file.string() + ": cannot be read");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  return parse_config(text, file.string());
}

}  // namespace mla
