#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "mla/error.hpp"
#include "mla/model.hpp"

namespace mla {
namespace {

RopeConfig yarn(double factor, double mscale, double mscale_all_dim) {
  RopeConfig r;
  r.scaling = RopeConfig::Scaling::yarn;
  r.factor = factor;
  r.mscale = mscale;
  r.mscale_all_dim = mscale_all_dim;
  return r;
}

ModelConfig deepseek_v3(std::string name) {
  ModelConfig m;
  m.name = std::move(name);
  m.hidden = 7168;
  m.layers = 61;
  m.heads = 128;
  m.query_latent = 1536;
  m.latent = 512;
  m.nope = 128;
  m.rope = 64;
  m.value = 128;
  m.rotary = yarn(40, 1.0, 1.0);
  m.fp8_block_rows = m.fp8_block_cols = 128;
  return m;
}

ModelConfig make(std::string_view name) {
  if (name == "deepseek-v2-lite") {
    ModelConfig m = deepseek_v3("deepseek-v2-lite");
    m.hidden = 2048;
    m.layers = 27;
    m.heads = 16;
    m.query_latent = 0;
    m.rotary = yarn(40, 0.707, 0.707);
    m.fp8_block_rows = m.fp8_block_cols = 0;
    return m;
  }
  if (name == "deepseek-v3") return deepseek_v3("deepseek-v3");
  if (name == "deepseek-v3.2") {
    ModelConfig m = deepseek_v3("deepseek-v3.2");
    m.indexer = IndexerConfig{.heads = 64, .dim = 128, .topk = 2048};
    return m;
  }
  if (name == "kimi-k2") {
    ModelConfig m = deepseek_v3("kimi-k2");
    m.heads = 64;
    m.rotary = yarn(32, 1.0, 1.0);
    m.rotary.theta = 50000.0;
    m.rotary.beta_fast = 1.0;
    return m;
  }
  ModelConfig m;  // minicpm3
  m.name = "minicpm3";
  m.hidden = 2560;
  m.layers = 62;
  m.heads = 40;
  m.query_latent = 768;
  m.latent = 256;
  m.nope = 64;
  m.rope = 32;
  m.value = 64;
  m.rms_eps = 1e-5;
  m.rotary.interleaved = false;
  return m;
}

constexpr std::array<std::string_view, 5> kNames{"deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2", "kimi-k2",
                                                 "minicpm3"};
constexpr std::array<std::string_view, 3> kFromConfig{"glm-4.7-flash", "glm-5", "kimi-linear"};

}  // namespace

std::span<const std::string_view> preset_names() { return kNames; }

ModelConfig preset(std::string_view name) {
  std::string known;
  for (std::string_view n : kNames) {
    if (n == name) return make(name);
    known += ' ';
    known += n;
  }
  for (std::string_view n : kFromConfig)
    if (n == name)
      throw InputError("no preset for '" + std::string(name) +
                       "': its dimensions come from its config.json; pass that file or its folder");
  throw InputError("unknown model '" + std::string(name) + "'; presets:" + known +
                   "; or a config.json or checkpoint folder");
}

double yarn_mscale(double scale, double mscale) { return scale <= 1 ? 1.0 : 0.1 * mscale * std::log(scale) + 1.0; }

double ModelConfig::softmax_scale() const {
  double scale = 1.0 / std::sqrt(static_cast<double>(query_key()));
  if (rotary.scaling == RopeConfig::Scaling::yarn && rotary.mscale_all_dim != 0) {
    const double m = yarn_mscale(rotary.factor, rotary.mscale_all_dim);
    scale *= m * m;
  }
  return scale;
}

RopeConfig ModelConfig::index_rotary() const {
  RopeConfig r = rotary;
  r.interleaved = indexer && indexer->interleaved;
  return r;
}

bool ModelConfig::layer_has_indexer(int64_t layer) const {
  return indexer && layer >= 0 && layer < layers && (indexer->full.empty() || indexer->full[layer] != 0);
}

void ModelConfig::validate() const {
  auto require = [&](const char* what, int64_t found, int64_t lo) {
    constexpr int64_t kMost = int64_t{1} << 20;
    if (found < lo || found > kMost)
      throw ShapeError("model " + name + ": " + what + " is " + std::to_string(found) + ", allowed " +
                       std::to_string(lo) + " to " + std::to_string(kMost));
  };
  require("hidden", hidden, 1);
  require("layers", layers, 1);
  require("heads", heads, 1);
  require("query latent", query_latent, 0);
  require("latent", latent, 1);
  require("nope", nope, 1);
  require("rope", rope, 0);
  require("value", value, 1);
  if (rope % 2 != 0) throw ShapeError("model " + name + ": rope is " + std::to_string(rope) + ", must be even");
  if (indexer) {
    require("indexer heads", indexer->heads, 1);
    require("indexer dim", indexer->dim, std::max<int64_t>(1, rope));
    require("indexer topk", indexer->topk, 1);
    // Its queries are projected from the query latent.
    require("query latent of a model with an indexer", query_latent, 1);
    if (!indexer->full.empty()) {
      if (static_cast<int64_t>(indexer->full.size()) != layers)
        throw ShapeError("model " + name + ": indexer layers has " + std::to_string(indexer->full.size()) +
                         " entries, the model has " + std::to_string(layers) + " layers");
      if (indexer->full[0] == 0)
        throw ShapeError("model " + name + ": indexer of layer 0 is shared, there is no layer before it");
    }
  }
  auto require_number = [&](const char* what, double found, bool fits, const char* limit) {
    if (!fits || !std::isfinite(found))
      throw ShapeError("model " + name + ": " + what + " is " + std::to_string(found) + ", must " + limit);
  };
  require_number("rms_eps", rms_eps, rms_eps >= 0, "not be negative");
  require_number("rope theta", rotary.theta, rotary.theta > 0, "be above 0");
  if (rotary.scaling != RopeConfig::Scaling::yarn) return;
  // YaRN divides by ln(theta), and by a temperature that is at least 1 for mscales of at least 0.
  require_number("rope theta", rotary.theta, rotary.theta > 1, "be above 1");
  require_number("rope factor", rotary.factor, rotary.factor > 0, "be above 0");
  require_number("rope beta_fast", rotary.beta_fast, rotary.beta_fast > 0, "be above 0");
  require_number("rope beta_slow", rotary.beta_slow, rotary.beta_slow > 0, "be above 0");
  require_number("rope mscale", rotary.mscale, rotary.mscale >= 0, "not be negative");
  require_number("rope mscale_all_dim", rotary.mscale_all_dim, rotary.mscale_all_dim >= 0, "not be negative");
  require_number("rope attention factor", rotary.attention_factor, rotary.attention_factor > 0, "be above 0");
  if (rotary.original_max_position < 1)
    throw ShapeError("model " + name + ": rope original max position is " +
                     std::to_string(rotary.original_max_position) + ", must be above 0");
}

}  // namespace mla
