// Reads the attention part of a model's config. Two generations of rope keys exist: `rope_theta` with `rope_scaling`,
// and `rope_parameters` that holds both; each names the kind `type` or `rope_type`. Models' own code has other names.
#include "model/quantised/config.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "mla/error.hpp"
#include "mla/model.hpp"
#include "mla/rotary.hpp"
#include "model/config_keys.hpp"
#include "model/config_reader.hpp"
#include "model/json.hpp"
#include "model/text.hpp"

namespace mla {
namespace {

using Json = nlohmann::json;

using Reader = ConfigReader;

constexpr int64_t kMostLayers = int64_t{1} << 20;  // as ModelConfig::validate

std::string format(const char* pattern, double a, double b = 0, double c = 0) {
  char s[200];
  std::snprintf(s, sizeof s, pattern, a, b, c);
  return s;
}

// What a class takes for a key that its config lacks. 0: the key is needed.
struct Family {
  std::string_view type;
  int64_t hidden, layers, heads, query_latent, latent, nope, rope, value;
  double eps, theta;
  int64_t max_position;
  int64_t index_heads = 0, index_dim = 0, index_topk = 0;  // of those with an indexer
  bool interleaved_indexer = false;
};

constexpr Family kUnknown{"", 0, 0, 0, 0, 0, 0, 0, 0, 1e-6, 1e4, 4096};
constexpr std::array kFamilies{
    Family{"deepseek_v2", 4096, 32, 32, 1536, 512, 128, 64, 128, 1e-6, 1e4, 2048},
    Family{"deepseek_v3", 7168, 61, 128, 1536, 512, 128, 64, 128, 1e-6, 1e4, 4096},
    Family{"kimi_k2", 7168, 61, 64, 1536, 512, 128, 64, 128, 1e-6, 1e4, 4096},
    Family{"deepseek_v32", 7168, 61, 128, 1536, 512, 128, 64, 128, 1e-6, 1e4, 163840, 64, 128, 2048, false},
    Family{"glm_moe_dsa", 6144, 78, 64, 2048, 512, 192, 64, 256, 1e-5, 1e4, 202752, 32, 128, 2048, true},
    Family{"glm4_moe_lite", 2048, 47, 20, 768, 512, 192, 64, 256, 1e-5, 1e4, 202752},
    Family{"longcat_flash", 6144, 56, 64, 1536, 512, 128, 64, 128, 1e-5, 1e7, 131072},
    Family{"mistral4", 4096, 36, 32, 1024, 256, 64, 64, 128, 1e-6, 1e4, 1048576},
    Family{"kimi_linear", 2304, 27, 32, 0, 512, 128, 64, 128, 1e-5, 1e4, 1048576},
    Family{"minicpm3", 2560, 62, 40, 768, 256, 64, 32, 0, 1e-5, 1e4, 32768},
    Family{"youtu", 2048, 32, 16, 1536, 512, 128, 64, 128, 1e-6, 1e4, 131072},
    Family{"axk1", 7168, 61, 64, 1536, 512, 128, 64, 128, 1e-6, 1e4, 32768},
    Family{"pangu_ultra_moe", 0, 0, 0, 0, 0, 0, 0, 0, 1e-5, 25600000, 131072},
};

// Classes whose attention is another, and what it is that this library does not do.
struct Other {
  std::string_view type, what;
};
constexpr std::array kOthers{
    Other{"deepseek_v4", "compressed and windowed attention"},
    Other{"hy_v4", "an output gate and sinks"},
    Other{"kimi_k3", "an output gate"},
    Other{"glm5_next", "linear attention beside a pooled indexer"},
    Other{"bailing_hybrid", "linear attention and gates"},
    Other{"bailing_moe_linear", "linear attention and gates"},
    Other{"bailing_moe_v2_5", "linear attention and gates"},
    Other{"gigachat3_5", "an output gate"},
    Other{"axk2", "a gated norm"},
    Other{"dots3_note", "a sliding window"},
    Other{"mistral_large4", "layers that share keys or do not rotate"},
};

// The class that an architecture's name says before "For", "CausalLM" or "Model".
constexpr std::array<std::pair<std::string_view, std::string_view>, 29> kArchitectures{{
    {"DeepseekV2", "deepseek_v2"},
    {"DeepseekV3", "deepseek_v3"},
    {"DeepseekV32", "deepseek_v32"},
    {"MistralLarge3", "deepseek_v3"},
    {"KimiK2", "kimi_k2"},
    {"KimiK25", "kimi_k2"},
    {"GlmMoeDsa", "glm_moe_dsa"},
    {"Glm4MoeLite", "glm4_moe_lite"},
    {"LongcatFlash", "longcat_flash"},
    {"LongcatFlashNgram", "longcat_flash"},
    {"Longcat", "longcat_flash"},
    {"Mistral4", "mistral4"},
    {"KimiLinear", "kimi_linear"},
    {"MiniCPM3", "minicpm3"},
    {"Youtu", "youtu"},
    {"YoutuLLM", "youtu"},
    {"AXK1", "axk1"},
    {"PanguUltraMoE", "pangu_ultra_moe"},
    {"DeepseekV4", "deepseek_v4"},
    {"HYV4", "hy_v4"},
    {"KimiK3", "kimi_k3"},
    {"Glm5Next", "glm5_next"},
    {"BailingHybrid", "bailing_hybrid"},
    {"BailingMoeLinear", "bailing_moe_linear"},
    {"BailingMoeV2_5", "bailing_moe_v2_5"},
    {"GigaChat35", "gigachat3_5"},
    {"AXK2", "axk2"},
    {"Dots3Note", "dots3_note"},
    {"MistralLarge4", "mistral_large4"},
}};

// Names by which a class is known elsewhere.
std::string canonical(std::string type) {
  if (type.ends_with("_text")) type.resize(type.size() - 5);  // a wrapper's language model
  if (type == "youtu_llm") return "youtu";
  if (type == "AXK1") return "axk1";
  if (type == "longcat_flash_ngram") return "longcat_flash";
  if (type == "openpangu" || type == "openpangu_ultra_moe" || type == "openpangu_moe" || type == "PanguUltraMoE")
    return "pangu_ultra_moe";
  return type;
}

// A class as a config names it.
struct ClassName {
  std::string said;   // "model_type is 'kimi_k2'"
  std::string type;   // as kFamilies and kOthers have it; of an architecture that is not known: empty
  std::string model;  // what a model of it is called
};

// By model_type first, then by each of the architectures.
std::vector<ClassName> class_names(const Reader& config) {
  std::vector<ClassName> names;
  if (const std::string type = config.text("model_type", ""); !type.empty())
    names.push_back({"model_type is '" + type + "'", canonical(type), type});
  const Json* architectures = config.list("architectures");
  if (!architectures) return names;
  for (const Json& e : *architectures) {
    if (!e.is_string()) config.fail("architectures", "holds " + e.dump() + ", a string is needed");
    const std::string name = e.get<std::string>();
    const std::string_view stem =
        std::string_view(name).substr(0, std::min({name.find("For"), name.find("CausalLM"), name.find("Model")}));
    const auto known =
        std::find_if(kArchitectures.begin(), kArchitectures.end(), [&](const auto& a) { return a.first == stem; });
    const std::string type(known == kArchitectures.end() ? "" : known->second);
    names.push_back({"architectures holds '" + name + "'", type, type});
  }
  return names;
}

const Family* family_of(std::string_view type) {
  const auto at = std::find_if(kFamilies.begin(), kFamilies.end(), [&](const Family& f) { return f.type == type; });
  return at == kFamilies.end() ? nullptr : &*at;
}

// Whether a class's attention is DeepSeek V3's in all but defaults.
bool plain(const Family& f) {
  return f.index_topk == 0 && f.type != "longcat_flash" && f.type != "mistral4" && f.type != "kimi_linear" &&
         f.type != "minicpm3";
}

// The first of the names is the one that counts; the others must not be of another attention.
void check_classes(const Reader& config, const std::vector<ClassName>& names, bool own_names_of_dims) {
  for (const ClassName& n : names)
    for (const Other& o : kOthers)
      if (n.type == o.type) config.unsupported(n.said + ": " + std::string(o.what) + ", not supported");
  if (names.empty()) return;
  const Family* first = family_of(names[0].type);
  if (!first) {
    if (own_names_of_dims) return;
    std::string known;
    for (const Family& f : kFamilies) known += " " + std::string(f.type);
    config.unsupported(names[0].said + ", which is not known; known are" + known +
                       " (allow_unknown reads it by its keys)");
  }
  for (const ClassName& n : names) {
    const Family* other = family_of(n.type);
    if (other && other != first && !(plain(*other) && plain(*first)))
      config.unsupported(names[0].said + ", " + n.said + ": their attention differs (allow_unknown goes by the first)");
  }
}

// The names of openPangu's, Mistral's and DeepSeek's own parameter files as Hugging Face's, where they are there. What
// is said once must not be said again with another value.
class Renamed {
 public:
  Renamed(const Reader& from) : from_(from), json_(from.json()) {}

  void rename(std::string_view old, std::string_view known) {
    const Json* v = from_.find(old);
    if (!v) return;
    Json& now = json_[std::string(known)];
    if (!now.is_null() && now != *v)
      from_.fail(old, "is " + v->dump() + ", " + std::string(known) + " is " + now.dump());
    now = *v;
    json_.erase(std::string(old));
  }
  void set(std::string_view key, Json value) { json_[std::string(key)] = std::move(value); }
  void drop(std::string_view key) { json_.erase(std::string(key)); }
  Json& json() { return json_; }

 private:
  const Reader& from_;
  Json json_;
};

// Mistral's params.json: YaRN as `yarn` with alpha and beta, whose magnitude cancels and whose score factor
// `apply_scale` can switch off.
void mistral_native(const Reader& from, const ReadOptions& options, Renamed& r) {
  r.rename("norm_eps", "rms_norm_eps");
  r.rename("n_kv_heads", "num_key_value_heads");
  r.rename("hidden_dim", "intermediate_size");
  r.rename("max_seq_len", "max_position_embeddings");
  if (from.has("yarn")) {
    const Reader yarn(from.object("yarn"), from.where() + ": yarn");
    yarn.only({"factor", "original_max_position_embeddings", "alpha", "beta", "apply_scale"}, options);
    Json rope;
    rope["rope_type"] = "yarn";
    rope["factor"] = yarn.number("factor", 1.0);
    rope["mscale"] = rope["mscale_all_dim"] = 1.0;
    if (yarn.has("original_max_position_embeddings"))
      rope["original_max_position_embeddings"] = yarn.integer("original_max_position_embeddings");
    if (yarn.has("beta")) rope["beta_fast"] = yarn.number("beta", 32);
    if (yarn.has("alpha")) rope["beta_slow"] = yarn.number("alpha", 1);
    if (!yarn.flag("apply_scale", true)) {
      rope["mscale"] = rope["mscale_all_dim"] = 0;
      rope["attention_factor"] = 1.0;
    }
    r.set("rope_scaling", std::move(rope));
    r.drop("yarn");
  }
}

// The parameters of DeepSeek's inference code: YaRN over rope_factor unless it is 1, with one mscale for both.
void deepseek_native(const Reader& from, Renamed& r) {
  Json rope;
  rope["rope_type"] = "yarn";
  rope["factor"] = from.number("rope_factor", 40.0);
  rope["original_max_position_embeddings"] = from.integer("original_seq_len", 4096);
  rope["beta_fast"] = from.number("beta_fast", 32);
  rope["beta_slow"] = from.number("beta_slow", 1);
  rope["mscale"] = rope["mscale_all_dim"] = from.number("mscale", 1.0);
  // Its sequences are no longer than this, and it scales nothing when none is longer than the original length.
  const int64_t longest = from.integer("max_seq_len", 16384);
  if (longest > from.integer("original_seq_len", 4096)) r.set("rope_scaling", std::move(rope));
  if (!from.mentions("q_lora_rank")) r.set("q_lora_rank", nullptr);
  for (const char* key : {"rope_factor", "original_seq_len", "beta_fast", "beta_slow", "mscale", "max_seq_len"})
    r.drop(key);
}

Json with_known_names(const Reader& from, const ReadOptions& options) {
  Renamed r(from);
  r.rename("attention_kv_lora_dim", "kv_lora_rank");
  r.rename("attention_q_lora_dim", "q_lora_rank");
  r.rename("attention_qk_dim", "qk_nope_head_dim");
  r.rename("attention_qk_rope_dim", "qk_rope_head_dim");
  r.rename("attention_v_dim", "v_head_dim");
  if (!from.has("dim") || from.has("hidden_size")) return r.json();
  r.rename("dim", "hidden_size");
  r.rename("n_layers", "num_hidden_layers");
  r.rename("n_heads", "num_attention_heads");
  const bool mistral = from.has("norm_eps") || from.has("hidden_dim") || from.has("yarn") || from.has("moe") ||
                       from.has("llama_4_scaling");
  mistral ? mistral_native(from, options, r) : deepseek_native(from, r);
  return r.json();
}

// A config's rope object, by its old or its new key. One for each kind of layer counts when they are all the same.
const Json* rope_object(const Reader& config) {
  const char* key = config.has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  const Json* rope = config.find(key);
  if (!rope) return nullptr;
  if (!rope->is_object()) config.fail(key, "is " + rope->dump() + ", an object is needed");
  const bool typed = std::any_of(rope->begin(), rope->end(), [](const Json& v) { return v.is_object(); });
  if (!typed) return rope;
  const Json* one = nullptr;
  for (const auto& [layer_type, object] : rope->items()) {
    if (object.is_null()) continue;
    if (!object.is_object()) config.fail(key, "has " + layer_type + " beside objects of layer types");
    if (layer_type != "full_attention" && layer_type != "indexed_attention" &&
        layer_type != "deepseek_sparse_attention" && rope->size() == 1)
      config.unsupported(std::string(key) + " is for " + layer_type + ": such layers are not supported");
    if (one && *one != object)
      config.unsupported(std::string(key) + " is " + rope->dump() +
                         ": layers that rotate differently are not supported");
    one = &object;
  }
  return one;
}

class RopeReader {
 public:
  RopeReader(const Reader& config, const Json& object, const Family& family, const ReadOptions& options, ModelConfig& m)
      : config_(config),
        rope_(object, config.where() + ": rope"),
        family_(family),
        options_(options),
        m_(m),
        r_(m.rotary) {}

  void read() {
    r_.theta = rope_.number("rope_theta", r_.theta);
    const std::string kind = rope_.text("rope_type", rope_.text("type", "default"));
    if (!options_.allow_unknown) check_keys(rope_.json(), KeysOf::rope, rope_.where());
    if (kind == "yarn" || kind == "deepseek_yarn") yarn();
    else if (kind == "longrope") longrope();
    else if (kind != "default")
      config_.unsupported("rope type '" + kind + "' is not supported (default, yarn and longrope are)");
    growth();
  }

 private:
  int64_t longest() const { return config_.integer("max_position_embeddings", family_.max_position); }
  void original_length() {
    r_.original_max_position = config_.integer("original_max_position_embeddings",
                                               rope_.integer("original_max_position_embeddings", longest()));
  }
  // 0 is as good as absent.
  double nonzero(std::string_view key, double fallback) const {
    const double x = rope_.number(key, 0);
    return x != 0 ? x : fallback;
  }
  void note(std::string text) { m_.notes.push_back(std::move(text)); }

  // Magnitude and score factor as transformers reads the keys; servers (vLLM, SGLang) read some otherwise.
  void yarn() {
    r_.scaling = RopeConfig::Scaling::yarn;
    r_.factor = rope_.number("factor", 1.0);
    r_.beta_fast = nonzero("beta_fast", 32.0);
    r_.beta_slow = nonzero("beta_slow", 1.0);
    original_length();
    const double a = rope_.number("mscale", 0), b = rope_.number("mscale_all_dim", 0);
    const double s = r_.factor, servers = yarn_mscale(s, rope_.has("mscale") ? a : 1.0) / yarn_mscale(s, b);
    r_.mscale = a != 0 && (a < 0 || b != 0) ? a : 1.0;
    r_.mscale_all_dim = b;
    // One of the two alone leaves the magnitude at m(factor, 1).
    double magnitude = a != 0 && b != 0 ? rotary_magnitude(r_) : yarn_mscale(s, 1.0);
    if (rope_.has("attention_factor")) magnitude = rope_.number("attention_factor", 1.0);
    if (rope_.has("attn_factor")) {
      magnitude *= rope_.number("attn_factor", 1.0);
      note(format("rope attn_factor multiplies the magnitude, as in servers; transformers does not read it: %.9g",
                  magnitude / rope_.number("attn_factor", 1.0)));
    } else if (std::fabs(magnitude - servers) > 1e-9 * magnitude) {
      note(format("YaRN's magnitude is %.9g as transformers reads the keys; servers such as vLLM read %.9g", magnitude,
                  servers));
    }
    r_.attention_factor = 1.0;
    if (a >= 0 && b >= 0 && s > 0) r_.attention_factor = magnitude / rotary_magnitude(r_);
    r_.truncate = rope_.flag("truncate", true);
    if (!r_.truncate) note("YaRN's truncate false is honoured, as by transformers; vLLM always truncates");
    if (!rope_.flag("apply_yarn_scaling", true) && b != 0)
      note(
          format("YaRN's score factor is %.9g as transformers reads the keys; servers read apply_yarn_scaling false "
                 "as 1",
                 yarn_mscale(s, b) * yarn_mscale(s, b)));
  }

  void longrope() {
    r_.scaling = RopeConfig::Scaling::longrope;
    original_length();
    r_.max_position = longest();
    r_.short_factors = rope_.numbers("short_factor");
    r_.long_factors = rope_.numbers("long_factor");
    const double length = static_cast<double>(r_.original_max_position);
    r_.factor = rope_.number("factor", length > 0 ? static_cast<double>(r_.max_position) / length : 1.0);
    const double grown = r_.factor > 1 && length > 1 ? std::sqrt(1 + std::log(r_.factor) / std::log(length)) : 1.0;
    r_.attention_factor = rope_.number("attention_factor", grown);
    r_.mscale_all_dim = 0;
    if (r_.short_factors != r_.long_factors)
      note(std::string("longrope takes its ") + (r_.max_position > r_.original_max_position ? "long" : "short") +
           " factors for every position, as the longest sequence is " + std::to_string(r_.max_position) + " and " +
           std::to_string(r_.original_max_position) + " the original length");
  }

  void growth() {
    if (!rope_.has("llama_4_scaling_beta")) return;
    m_.query_growth_beta = rope_.number("llama_4_scaling_beta", 0);
    original_length();
    m_.query_growth_length = r_.original_max_position;
  }

  const Reader& config_;
  const Reader rope_;
  const Family& family_;
  const ReadOptions& options_;
  ModelConfig& m_;
  RopeConfig& r_;
};

void read_rope(const Reader& config, const Family& family, const ReadOptions& options, ModelConfig& m) {
  m.rotary.theta = config.number("rope_theta", family.theta);
  if (family.type == "minicpm3") m.rotary.interleaved = false;
  else if (family.type != "longcat_flash" && family.type != "glm_moe_dsa")
    m.rotary.interleaved = config.flag("rope_interleave", true);
  m.rotary.rotate = family.type != "kimi_linear" && !config.flag("mla_use_nope", false);
  const Json* rope = rope_object(config);
  if (m.rotary.rotate) {
    JsonDocument mistral4;  // the class's own rope, where none is given
    if (!rope && family.type == "mistral4") {
      mistral4 = parse_object(R"({"rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192,
                                  "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1})",
                              "mistral4");
      rope = &mistral4.root;
    }
    if (rope) RopeReader(config, *rope, family, options, m).read();
    if (rope == &mistral4.root) rope = nullptr;
  }
  const Json& growth = config.object("llama_4_scaling");
  if (!growth.empty()) {
    const Reader r(growth, config.where() + ": llama_4_scaling");
    r.only({"beta", "original_max_position_embeddings"}, options);
    m.query_growth_beta = r.number("beta", 0.0);
    m.query_growth_length = r.integer("original_max_position_embeddings");
  }
  // How many of a head's dims rotate must come to qk_rope_head_dim.
  static const Json none = Json::object();
  const Reader inside(rope ? *rope : none, config.where());
  for (const Reader* r : {&inside, &config}) {
    if (!r->has("partial_rotary_factor") || options.allow_unknown) continue;
    const double part = r->number("partial_rotary_factor", 1.0),
                 of = static_cast<double>(family.type == "mistral4" ? m.nope + m.rope : m.rope);
    if (m.rotary.rotate && std::fabs(part * of - static_cast<double>(m.rope)) > 0.5)
      config.unsupported("partial_rotary_factor is " + r->find("partial_rotary_factor")->dump() +
                         ": rotating other than all " + std::to_string(m.rope) +
                         " dims of qk_rope_head_dim is not supported");
    break;
  }
  if (family.type == "longcat_flash" && config.integer("head_dim", m.rope) != m.rope && !options.allow_unknown)
    config.unsupported("head_dim is " + config.find("head_dim")->dump() + ": rotating other than the " +
                       std::to_string(m.rope) + " dims of qk_rope_head_dim is not supported");
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
    if (std::all_of(full.begin(), full.end(), [](uint8_t own) { return own != 0; })) return {};
    return full;
  }
  const int64_t period = std::max<int64_t>(config.integer("index_topk_freq", 1), 1),
                offset = config.integer("index_skip_topk_offset", 2);
  if (period == 1) return {};
  for (int64_t l = 0; l < layers; ++l) full.push_back(std::max<int64_t>(l - offset + 1, 0) % period == 0);
  return full;
}

void read_indexer(const Reader& config, const Family& family, const ReadOptions& options, ModelConfig& m) {
  static constexpr std::array kKeys{"index_topk", "index_n_heads", "index_head_dim"};
  const bool known = family.type.empty() || family.index_topk > 0;
  if (!known) {
    for (const char* key : kKeys)
      if (const Json* v = config.find(key); v && !options.allow_unknown)
        config.unsupported(std::string(key) + " is " + v->dump() + ", but model_type " + m.name +
                           " has no indexer: its attention is dense (deepseek_v32 and glm_moe_dsa are sparse)");
    return;
  }
  if (family.index_topk == 0 && !config.has("index_topk")) return;
  if (m.layers < 1 || m.layers > kMostLayers)
    config.fail("num_hidden_layers", "is " + std::to_string(m.layers) + ", allowed 1 to " +
                                         std::to_string(kMostLayers) + " with an indexer");
  m.indexer = IndexerConfig{.heads = config.integer_of("index_n_heads", family.index_heads),
                            .dim = config.integer_of("index_head_dim", family.index_dim),
                            .topk = config.integer_of("index_topk", family.index_topk),
                            .interleaved = config.flag("indexer_rope_interleave", family.interleaved_indexer),
                            .full = indexer_layers(config, m.layers)};
}

// Kinds of layers elsewhere than in Kimi Linear: all the same, dense or sparse as the model is.
void check_layer_types(const Reader& config, const ModelConfig& m) {
  const Json* types = config.list("layer_types");
  if (!types) return;
  for (const Json& t : *types) {
    const bool sparse = t == "indexed_attention" || t == "deepseek_sparse_attention";
    if (!(m.indexer ? sparse : t == "full_attention"))
      config.unsupported("layer_types holds " + t.dump() + ": in this model only " +
                         (m.indexer ? "indexed_attention" : "full_attention") + " is supported");
  }
}

// LongCat: a layer has two attentions.
void read_pairs(const Reader& config, const Family& family, ModelConfig& m) {
  m.attentions_per_layer = 2;
  m.layers =
      config.has("num_layers") ? 2 * config.integer("num_layers") : config.integer("num_hidden_layers", family.layers);
  const int64_t given = config.integer("num_hidden_layers", m.layers);
  if (given != m.layers && 2 * given != m.layers)
    config.fail("num_hidden_layers", "is " + std::to_string(given) + ", num_layers is " + std::to_string(m.layers / 2) +
                                         " layers of two attentions each");
  auto scale = [&](const char* key, int64_t rank) {
    if (!config.flag(key, true)) {
      m.notes.push_back(std::string(key) + " false is honoured; transformers always scales");
      return 1.0;
    }
    return rank > 0 ? std::sqrt(static_cast<double>(m.hidden) / static_cast<double>(rank)) : 1.0;
  };
  m.query_scale = scale("mla_scale_q_lora", m.query_latent);
  m.latent_scale = scale("mla_scale_kv_lora", m.latent);
}

// Kimi Linear: the layers that are MLA, and no others. By layer_types, or by two lists that count from 1, or each
// fourth after the first.
void read_layer_map(const Reader& config, ModelConfig& m) {
  const int64_t layers = m.layers;
  if (layers < 1 || layers > kMostLayers)
    config.fail("num_hidden_layers", "is " + std::to_string(layers) + ", allowed 1 to " + std::to_string(kMostLayers));
  const Reader linear(config.object("linear_attn_config"), config.where() + ": linear_attn_config");
  std::vector<uint8_t> kind(static_cast<size_t>(layers));  // 0: not said, 1: MLA, 2: another
  if (const Json* types = config.list("layer_types")) {
    if (static_cast<int64_t>(types->size()) != layers)
      config.fail("layer_types", "has " + std::to_string(types->size()) + " entries, the model has " +
                                     std::to_string(layers) + " layers");
    for (size_t l = 0; l < types->size(); ++l) {
      const Json& t = (*types)[l];
      if (t != "full_attention" && t != "linear_attention")
        config.unsupported("layer_types holds " + t.dump() + ": full_attention and linear_attention are known");
      kind[l] = t == "full_attention" ? 1 : 2;
    }
  } else if (linear.has("full_attn_layers") && linear.has("kda_layers")) {
    for (const auto& [key, value] : {std::pair("full_attn_layers", 1), std::pair("kda_layers", 2)})
      for (const Json& e : *linear.list(key)) {
        if (!e.is_number_integer() || e.get<double>() < 1 || e.get<double>() > static_cast<double>(layers))
          linear.fail(key, "holds " + e.dump() + ", layers are 1 to " + std::to_string(layers));
        uint8_t& k = kind[static_cast<size_t>(e.get<int64_t>() - 1)];
        if (k != 0) linear.fail(key, "holds " + e.dump() + ", which is named already");
        k = static_cast<uint8_t>(value);
      }
    for (int64_t l = 0; l < layers; ++l)
      if (kind[static_cast<size_t>(l)] == 0)
        linear.fail("full_attn_layers",
                    "and kda_layers name no layer " + std::to_string(l + 1) + " of " + std::to_string(layers));
  } else {
    for (const char* key : {"full_attn_layers", "kda_layers"})
      if (linear.has(key)) linear.fail(key, "is there alone, full_attn_layers and kda_layers are needed");
    for (int64_t l = 0; l < layers; ++l) kind[static_cast<size_t>(l)] = l > 0 && l % 4 == 0 ? 1 : 2;
  }
  for (int64_t l = 0; l < layers; ++l)
    if (kind[static_cast<size_t>(l)] == 1) m.model_layers.push_back(l);
  m.layers = static_cast<int64_t>(m.model_layers.size());
  if (m.layers == 0) config.fail("layer_types", "names no layer with MLA, of " + std::to_string(layers));
  if (m.layers == layers) m.model_layers.clear();
}

}  // namespace

ModelConfig parse_config(std::string_view text, std::string_view where, const ReadOptions& options) {
  const JsonDocument document = parse_object(text, where);
  const Json& root = document.root;
  const Reader outer(root, std::string(where));
  const char* inner = "text_config";
  for (const char* key : {"language_config", "llm_config"})
    if (!root.contains(inner) && root.contains(key)) inner = key;
  const bool nested = !root.contains("kv_lora_rank") && root.contains(inner) && root[inner].is_object();
  const Reader given(nested ? root[inner] : root, std::string(where));
  // A copy is made only where keys have other names.
  const bool renames = given.has("attention_kv_lora_dim") || (given.has("dim") && !given.has("hidden_size"));
  const JsonDocument renamed_document(renames ? with_known_names(given, options) : Json());
  const Json& renamed = renames ? renamed_document.root : given.json();
  const Reader config(renamed, std::string(where));

  // Wrappers have classes of their own, which count where the language model's config names none.
  std::vector<ClassName> classes = class_names(config);
  const size_t own = classes.size();
  if (nested)
    for (ClassName& n : class_names(outer)) classes.push_back(std::move(n));
  const bool pangu = given.has("attention_kv_lora_dim");
  if (!options.allow_unknown) check_classes(config, classes, pangu);
  const Family* found = classes.empty() ? nullptr : family_of(classes[0].type);
  const Family& family = found ? *found : pangu ? kFamilies.back() : kUnknown;
  if (!options.allow_unknown) {
    const KeysOf keys = family.type == "kimi_linear" ? KeysOf::kimi_linear : KeysOf::model;
    check_keys(renamed, keys, where);
    if (nested) check_keys_around(root, renamed, keys, where);
  }

  ModelConfig m;
  m.name = "model";
  if (!classes.empty() && !classes[0].model.empty()) m.name = one_line(classes[0].model);
  for (size_t i = 1; i < own; ++i)
    if (classes[i].type.empty())
      m.notes.push_back(one_line(classes[i].said + ", which is not known: " + classes[0].said));
  m.hidden = config.integer_of("hidden_size", family.hidden);
  m.heads = config.integer_of("num_attention_heads", family.heads);
  // Null says that there is none.
  m.query_latent = config.integer("q_lora_rank", config.mentions("q_lora_rank") ? 0 : family.query_latent);
  m.latent = config.integer_of("kv_lora_rank", family.latent);
  m.nope = config.integer_of("qk_nope_head_dim", family.nope);
  m.rope = config.integer_of("qk_rope_head_dim", family.rope);
  if (const int64_t width = config.integer("qk_head_dim", m.nope + m.rope);
      width != m.nope + m.rope && !options.allow_unknown)
    config.unsupported("qk_head_dim is " + std::to_string(width) + ", qk_nope_head_dim and qk_rope_head_dim are " +
                       std::to_string(m.nope) + " and " + std::to_string(m.rope) + ": their sum is needed");
  if (family.type == "minicpm3" && m.heads > 0) m.value = config.integer("v_head_dim", m.hidden / m.heads);
  else m.value = config.integer_of("v_head_dim", family.value);
  m.rms_eps = config.number("rms_norm_eps", family.eps);
  if (family.type == "longcat_flash") read_pairs(config, family, m);
  else m.layers = config.integer_of("num_hidden_layers", family.layers);
  if (family.type == "kimi_linear") read_layer_map(config, m);
  read_rope(config, family, options, m);
  read_indexer(config, family, options, m);
  if (family.type != "kimi_linear" && !options.allow_unknown) check_layer_types(config, m);
  if (m.rms_eps != 1e-6 && found && !pangu)
    m.notes.push_back(
        format("norms of latents take rms_norm_eps %g, as servers do; transformers takes 1e-06", m.rms_eps));

  for (const char* key : {"quantization_config", "quantization"}) {
    const Reader& from = key == std::string_view("quantization_config") && !config.has(key) ? outer : config;
    if (from.has(key)) read_quantisation(from.object(key), std::string(where) + ": " + key, options, m);
  }
  try {
    m.validate();
    if (m.rotary.rotate) (void)inverse_frequencies(m.rotary, m.rope);
  } catch (const ShapeError& e) {
    refuse(where, e.what());
  } catch (const UnsupportedError& e) {
    config.unsupported(e.what());
  }
  return m;
}

ModelConfig read_config(const std::filesystem::path& file, const ReadOptions& options) {
  return parse_config(read_text(file), file.string(), options);
}

}  // namespace mla
