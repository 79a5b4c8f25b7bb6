#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string>

#include "mla/error.hpp"
#include "mla/model.hpp"
#include "mla/rotary.hpp"

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
  // Short and long factors are the same ones, and the length is the original one: magnitude 1 at any length.
  m.rotary.scaling = RopeConfig::Scaling::longrope;
  m.rotary.short_factors =
      m.rotary.long_factors = {1.0591234137867171, 1.1241891283591912, 1.2596935748670968, 1.5380380402321725,
                               2.093982484148734,  3.1446935121267696, 4.937952647693647,  7.524541999994549,
                               10.475458000005451, 13.062047352306353, 14.85530648787323,  15.906017515851266,
                               16.461961959767827, 16.740306425132907, 16.87581087164081,  16.940876586213285};
  m.rotary.original_max_position = m.rotary.max_position = 32768;
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

double ModelConfig::query_growth(int64_t position) const {
  if (query_growth_beta == 0) return 1.0;
  const double lengths = static_cast<double>(position) / static_cast<double>(query_growth_length);
  return 1.0 + query_growth_beta * std::log1p(std::floor(lengths));
}

int64_t ModelConfig::model_layer(int64_t index) const {
  if (index < 0 || index >= layers || attentions_per_layer < 1)
    throw InputError("model " + name + ": attention is " + std::to_string(index) + ", allowed 0 to " +
                     std::to_string(layers - 1));
  const int64_t layer = index / attentions_per_layer;
  return model_layers.empty() ? layer : model_layers.at(static_cast<size_t>(layer));
}

std::string ModelConfig::attention_name(int64_t index) const {
  std::string path = "layers." + std::to_string(model_layer(index)) + ".self_attn.";
  if (attentions_per_layer > 1) path += std::to_string(index % attentions_per_layer) + ".";
  return path;
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
  // What follows from constants that are finite themselves; kernels take it in f32.
  auto require_f32 = [&](const char* what, double found) {
    const float f = static_cast<float>(found);
    if (std::isfinite(f) && f > 0) return;
    char text[160];
    const int n = std::snprintf(text, sizeof text, "%g", found);
    if (rotary.scaling == RopeConfig::Scaling::yarn)
      std::snprintf(text + n, sizeof text - static_cast<size_t>(n), " by rope factor %g, mscale %g, mscale_all_dim %g",
                    rotary.factor, rotary.mscale, rotary.mscale_all_dim);
    throw ShapeError("model " + name + ": " + what + " is " + text + ", must be within f32's range");
  };
  require_number("rms_eps", rms_eps, rms_eps >= 0, "not be negative");
  require_number("rms_eps", rms_eps, rms_eps <= 1, "be at most 1");
  require_number("rope theta", rotary.theta, rotary.theta > 0, "be above 0");
  require_number("query scale", query_scale, query_scale > 0, "be above 0");
  require_number("latent scale", latent_scale, latent_scale > 0, "be above 0");
  require_number("query growth beta", query_growth_beta, query_growth_beta >= 0, "not be negative");
  if (query_growth_beta > 0 && (query_growth_length < 1 || query_growth_length > INT32_MAX))
    throw ShapeError("model " + name + ": query growth length is " + std::to_string(query_growth_length) +
                     ", allowed 1 to " + std::to_string(INT32_MAX));
  if (query_growth_beta > 0) require_f32("query growth at the last position", query_growth(INT32_MAX));
  if (query_latent == 0 && (query_scale != 1 || query_growth_beta != 0))
    throw UnsupportedError("model " + name + ": queries that are scaled need a query latent, its q_lora_rank is 0");
  require("attentions per layer", attentions_per_layer, 1);
  if (layers % attentions_per_layer != 0)
    throw ShapeError("model " + name + ": layers is " + std::to_string(layers) + ", no multiple of " +
                     std::to_string(attentions_per_layer) + " attentions per layer");
  if (!model_layers.empty() && static_cast<int64_t>(model_layers.size()) != layers / attentions_per_layer)
    throw ShapeError("model " + name + ": model layers has " + std::to_string(model_layers.size()) +
                     " entries, the model has " + std::to_string(layers / attentions_per_layer) + " layers with MLA");
  for (size_t i = 0; i < model_layers.size(); ++i) {
    require("model layer", model_layers[i], 0);
    if (i > 0 && model_layers[i] <= model_layers[i - 1])
      throw ShapeError("model " + name + ": model layer " + std::to_string(model_layers[i]) + " comes after " +
                       std::to_string(model_layers[i - 1]) + ", they must ascend");
  }
  if (rotary.scaling == RopeConfig::Scaling::none) return;
  require_number("rope attention factor", rotary.attention_factor, rotary.attention_factor > 0, "be above 0");
  if (rotary.original_max_position < 1)
    throw ShapeError("model " + name + ": rope original max position is " +
                     std::to_string(rotary.original_max_position) + ", must be above 0");
  if (rotary.scaling == RopeConfig::Scaling::longrope) {
    for (const auto& [what, divisors] :
         {std::pair("short", &rotary.short_factors), std::pair("long", &rotary.long_factors)}) {
      if (static_cast<int64_t>(divisors->size()) != rope / 2)
        throw ShapeError("model " + name + ": rope " + what + " factors are " + std::to_string(divisors->size()) +
                         ", rope " + std::to_string(rope) + " needs " + std::to_string(rope / 2));
      for (double d : *divisors) require_number("rope factor of a pair", d, d > 0, "be above 0");
    }
    require_f32("magnitude of cos and sin", rotary_magnitude(rotary));
    return;
  }
  // YaRN divides by ln(theta), and by a temperature that is at least 1 for mscales of at least 0.
  require_number("rope theta", rotary.theta, rotary.theta > 1, "be above 1");
  require_number("rope factor", rotary.factor, rotary.factor > 0, "be above 0");
  require_number("rope beta_fast", rotary.beta_fast, rotary.beta_fast > 0, "be above 0");
  require_number("rope beta_slow", rotary.beta_slow, rotary.beta_slow > 0, "be above 0");
  require_number("rope mscale", rotary.mscale, rotary.mscale >= 0, "not be negative");
  require_number("rope mscale_all_dim", rotary.mscale_all_dim, rotary.mscale_all_dim >= 0, "not be negative");
  require_f32("softmax scale", softmax_scale());
  require_f32("magnitude of cos and sin", rotary_magnitude(rotary));
}

}  // namespace mla
