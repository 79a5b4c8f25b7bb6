#include "model/config_keys.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "mla/error.hpp"

namespace mla {
namespace {

using Json = nlohmann::json;
using Names = std::unordered_set<std::string_view>;

// Read by parse_config.
const Names& understood() {
  static const Names names{"model_type",
                           "architectures",
                           "hidden_size",
                           "num_hidden_layers",
                           "num_layers",
                           "num_attention_heads",
                           "q_lora_rank",
                           "kv_lora_rank",
                           "qk_nope_head_dim",
                           "qk_rope_head_dim",
                           "v_head_dim",
                           "rms_norm_eps",
                           "rope_interleave",
                           "rope_theta",
                           "rope_scaling",
                           "rope_parameters",
                           "partial_rotary_factor",
                           "max_position_embeddings",
                           "original_max_position_embeddings",
                           "mla_use_nope",
                           "mla_scale_q_lora",
                           "mla_scale_kv_lora",
                           "llama_4_scaling",
                           "layer_types",
                           "index_topk",
                           "index_n_heads",
                           "index_head_dim",
                           "indexer_types",
                           "index_topk_pattern",
                           "index_topk_freq",
                           "index_skip_topk_offset",
                           "indexer_rope_interleave",
                           "quantization_config",
                           "quantization"};
  return names;
}

// Of the understood ones, those that an object around the language model's has for itself, or for both.
const Names& of_wrappers() {
  static const Names names{"model_type", "architectures", "quantization_config", "quantization"};
  return names;
}

// Of layers with linear attention, which are not read: they have no cache of ours.
const Names& linear_attention() {
  static const Names names{"linear_attn_config", "linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads",
                           "short_conv_kernel_size"};
  return names;
}

// None of attention's, or nothing that changes it, though their words look so: head_dim repeats others, as qk_head_dim
// must, key-value heads are one latent, norms are those between layers, and the rest are of experts, training or
// generation.
const Names& bookkeeping() {
  static const Names names{"_attn_implementation",
                           "_attn_implementation_autoset",
                           "_attn_implementation_internal",
                           "attn_implementation",
                           "attention_dropout",
                           "attn_dropout",
                           "attention_probs_dropout_prob",
                           "chunk_size_feed_forward",
                           "dim_model_base",
                           "emb_scale",
                           "ep_size",
                           "final_logit_softcapping",
                           "first_k_dense_replace",
                           "head_dim",
                           "init_method",
                           "layer_norm_eps",
                           "length_penalty",
                           "max_window_layers",
                           "model_max_length",
                           "n_dense_layers",
                           "n_group",
                           "n_kv_heads",
                           "norm_topk_prob",
                           "num_beam_groups",
                           "num_dense_layers",
                           "num_expert_group",
                           "num_key_value_heads",
                           "num_mtp_layers",
                           "num_nextn_predict_layers",
                           "n_mtp_layers",
                           "output_attentions",
                           "output_scores",
                           "qk_head_dim",
                           "return_dict_in_generate",
                           "route_scale",
                           "sandwich_norm",
                           "scale_depth",
                           "scale_emb",
                           "scale_fmt",
                           "score_func",
                           "scoring_func",
                           "temperature",
                           "tf_legacy_loss",
                           "top_k",
                           "topk_group",
                           "topk_method",
                           "use_grouped_topk",
                           "n_expert_groups",
                           "n_limited_groups",
                           "ignore_index"};
  return names;
}

const Names& rope_keys() {
  static const Names names{"rope_type",
                           "type",
                           "rope_theta",
                           "factor",
                           "original_max_position_embeddings",
                           "max_position_embeddings",
                           "beta_fast",
                           "beta_slow",
                           "mscale",
                           "mscale_all_dim",
                           "attention_factor",
                           "attn_factor",
                           "truncate",
                           "partial_rotary_factor",
                           "llama_4_scaling_beta",
                           "apply_yarn_scaling",
                           "long_factor",
                           "short_factor"};
  return names;
}

// What a key asks for when its value is not false, 0 or empty.
struct Refusal {
  std::string_view key, what;
};
constexpr std::array kRefused{
    Refusal{"sliding_window", "a sliding window"},
    Refusal{"sliding_window_size", "a sliding window"},
    Refusal{"window_size", "a sliding window"},
    Refusal{"sliding_window_pattern", "a sliding window"},
    Refusal{"use_sliding_window", "a sliding window"},
    Refusal{"attn_logit_softcapping", "a logit soft cap"},
    Refusal{"attn_logit_soft_cap", "a logit soft cap"},
    Refusal{"alibi", "ALiBi"},
    Refusal{"num_kv_shared_layers", "KV sharing between layers"},
    Refusal{"use_cla", "KV sharing between layers"},
    Refusal{"pruned_heads", "pruning of heads"},
    Refusal{"attention_bias", "a bias in attention's projections"},
    Refusal{"attn_bias", "a bias in attention's projections"},
    Refusal{"qkv_bias", "a bias in attention's projections"},
    Refusal{"use_qkv_bias", "a bias in attention's projections"},
    Refusal{"use_bias", "a bias in attention's projections"},
    Refusal{"use_qk_norm", "a norm of queries and keys per head"},
    Refusal{"qk_norm", "a norm of queries and keys per head"},
    Refusal{"use_qk_layernorm", "a norm of queries and keys per head"},
    Refusal{"qk_layernorm", "a norm of queries and keys per head"},
    Refusal{"zero_centered_norm", "a norm whose weights are added to 1"},
    Refusal{"norm_zero_centered", "a norm whose weights are added to 1"},
    Refusal{"zero_centered_gamma", "a norm whose weights are added to 1"},
    Refusal{"use_zero_centered_gamma", "a norm whose weights are added to 1"},
    Refusal{"layernorm_zero_centered_gamma", "a norm whose weights are added to 1"},
    Refusal{"apply_layernorm_1p", "a norm whose weights are added to 1"},
    Refusal{"mla_use_output_gate", "an output gate"},
    Refusal{"use_output_gate", "an output gate"},
    Refusal{"attn_output_gate", "an output gate"},
    Refusal{"attention_output_gate", "an output gate"},
    Refusal{"use_attention_gate", "an output gate"},
    Refusal{"gated_attention", "an output gate"},
    Refusal{"use_gated_attention", "an output gate"},
    Refusal{"index_kpool", "an indexer over pooled keys"},
    Refusal{"index_kpool_compress", "an indexer over pooled keys"},
    Refusal{"use_sinks", "sinks"},
    Refusal{"use_attention_sinks", "sinks"},
    Refusal{"attention_sinks", "sinks"},
    Refusal{"compress_ratios", "compressed attention"},
    Refusal{"compress_rates", "compressed attention"},
    Refusal{"cross_attention", "cross attention"},
    Refusal{"add_cross_attention", "cross attention"},
    Refusal{"cross_attention_hidden_size", "cross attention"},
};

bool nothing(const Json& v) { return v == false || v == 0 || v == "" || (v.is_structured() && v.empty()); }

// Attention's vocabulary.
const Names& attention_words() {
  static const Names words{"attn",        "attention",
                           "attentions",  "rope",
                           "rotary",      "nope",
                           "yarn",        "ntk",
                           "mscale",      "theta",
                           "beta",        "head",
                           "heads",       "q",
                           "k",           "v",
                           "o",           "kv",
                           "qk",          "qkv",
                           "query",       "queries",
                           "key",         "keys",
                           "value",       "values",
                           "lora",        "rank",
                           "ranks",       "index",
                           "indexer",     "indexers",
                           "topk",        "window",
                           "windows",     "windowed",
                           "sliding",     "swa",
                           "sink",        "sinks",
                           "softcap",     "softcapping",
                           "cap",         "capping",
                           "gate",        "gates",
                           "gated",       "gating",
                           "scale",       "scales",
                           "scaled",      "scaling",
                           "mla",         "mha",
                           "mqa",         "gqa",
                           "latent",      "latents",
                           "position",    "positions",
                           "positional",  "layer",
                           "layers",      "linear",
                           "conv",        "norm",
                           "norms",       "layernorm",
                           "rmsnorm",     "alibi",
                           "bias",        "biases",
                           "dsa",         "nsa",
                           "csa",         "hca",
                           "kda",         "gdn",
                           "mamba",       "ssm",
                           "recurrent",   "delta",
                           "hybrid",      "compress",
                           "compressed",  "compression",
                           "compressor",  "kpool",
                           "pool",        "pooled",
                           "mask",        "masked",
                           "causal",      "share",
                           "shared",      "local",
                           "global",      "chunk",
                           "chunked",     "block",
                           "blocks",      "sparse",
                           "sparsity",    "full",
                           "cross",       "bidirectional",
                           "logn",        "softmax",
                           "sigmoid",     "absorb",
                           "hadamard",    "temperature",
                           "neox",        "interleave",
                           "interleaved", "interleaving",
                           "rotate",      "rotated",
                           "rotates",     "rotating",
                           "rotation",    "xpos",
                           "cla",         "yoco",
                           "gla",         "retention",
                           "rwkv",        "gamma",
                           "rms",         "centered",
                           "centred",     "offset",
                           "span"};
  return words;
}
// What stands beside those in words that are written together: ropetheta, useqknorm.
const Names& fillers() {
  static const Names words{"use",   "num",    "dim", "dims", "size", "type",
                           "style", "factor", "eps", "freq", "mode", "len"};
  return words;
}
// Of something else, unless one of the plainest of attention's is there too.
const Names& other_words() {
  static const Names words{
      "moe",     "expert", "experts",     "router",     "routed",     "routing",  "mlp",         "ffn",        "vision",
      "visual",  "image",  "images",      "audio",      "video",      "token",    "tokens",      "tokenizer",  "vocab",
      "embed",   "emb",    "embd",        "embedding",  "embeddings", "word",     "lm",          "aux",        "loss",
      "dropout", "init",   "initializer", "act",        "activation", "ngram",    "swiglu",      "generation", "beam",
      "beams",   "cls",    "classifier",  "hc",         "logits",     "training", "pretraining", "dtype",      "ep",
      "tp",      "pp",     "projector",   "multimodal", "mm",         "media",    "view"};
  return words;
}
const Names& plainest_words() {
  static const Names words{
      "attn",     "attention", "mla",      "rope",      "rotary",     "q",       "qk",       "kv",      "latent",
      "sink",     "sinks",     "position", "positions", "positional", "indexer", "neox",     "rotate",  "rotated",
      "rotation", "nope",      "yarn",     "ntk",       "mscale",     "theta",   "alibi",    "xpos",    "qkv",
      "latents",  "mha",       "mqa",      "gqa",       "window",     "windows", "windowed", "sliding", "swa",
      "cla",      "yoco",      "dsa",      "nsa",       "csa",        "hca",     "kda",      "gdn",     "gla",
      "mamba",    "ssm",       "kpool",    "causal",    "softcap",    "logn"};
  return words;
}
// Of layers past the model's own, for speculative decoding.
const Names& speculative_words() {
  static const Names words{"mtp", "nextn", "draft", "speculative", "eagle", "medusa"};
  return words;
}

std::vector<std::string> words_of(std::string_view key) {
  std::vector<std::string> words(1);
  for (size_t i = 0; i < key.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(key[i]);
    const bool hump = std::isupper(c) && i > 0 && std::islower(static_cast<unsigned char>(key[i - 1]));
    if (!std::isalnum(c) || hump) words.emplace_back();
    if (std::isalnum(c)) words.back() += static_cast<char>(std::tolower(c));
  }
  return words;
}

// The words that one consists of: "qknorm" of qk and norm. Empty unless all of it is of attention's and fillers.
std::vector<std::string_view> parts_of(std::string_view word) {
  constexpr size_t kLongest = 32;  // a longer one could be taken apart in too many ways
  if (attention_words().contains(word)) return {word};
  if (word.size() > kLongest) return {};
  for (size_t n = word.size(); n-- > 2;) {  // single letters would be found everywhere
    const std::string_view first = word.substr(0, n), rest = word.substr(n);
    const bool filler = fillers().contains(first);
    if (!filler && !attention_words().contains(first)) continue;
    std::vector<std::string_view> parts = parts_of(rest);
    const bool ends = !filler && fillers().contains(rest);
    if (parts.empty() && !ends) continue;
    if (parts.size() == 1 && parts[0].size() < 2) continue;
    if (!filler) parts.push_back(first);
    return parts;
  }
  return {};
}

bool looks_like_attention(std::string_view key) {
  const std::vector<std::string> words = words_of(key);
  const auto any = [&](const Names& names) {
    return std::any_of(words.begin(), words.end(), [&](const std::string& w) { return names.contains(w); });
  };
  if (any(speculative_words())) return false;
  bool attention = false, plainest = words[0] == "index";  // the indexer's keys begin so; image_token_index is none
  for (std::string_view word : words) {
    // norm2, layernorm1
    while (word.size() > 2 && std::isdigit(static_cast<unsigned char>(word.back()))) word.remove_suffix(1);
    for (const std::string_view part : parts_of(word)) {
      attention = true;
      plainest = plainest || plainest_words().contains(part);
    }
  }
  return attention && (plainest || !any(other_words()));
}

// The same for useQkNorm, use_qknorm and use_qk_norm.
std::string letters_of(std::string_view key) {
  std::string letters;
  for (const std::string& word : words_of(key)) letters += word;
  return letters;
}

const Refusal* refusal_of(std::string_view key) {
  static const auto by_letters = [] {
    std::unordered_map<std::string, const Refusal*> map;
    for (const Refusal& r : kRefused) map.emplace(letters_of(r.key), &r);
    return map;
  }();
  const auto at = by_letters.find(letters_of(key));
  return at == by_letters.end() ? nullptr : at->second;
}

[[noreturn]] void refuse_key(std::string_view where, const std::string& key, const Json& value,
                             const std::string& why) {
  throw UnsupportedError(std::string(where) + ": " + key + " is " + value.dump() + ": " + why);
}

// `inner`: what is read instead of this object, if it is not read itself.
void check(const Json& object, const Json* inner, KeysOf keys, std::string_view where) {
  const auto windowless = object.find("use_sliding_window");
  const bool no_window = windowless != object.end() && windowless->is_boolean() && !windowless->get<bool>();
  for (const auto& [key, value] : object.items()) {
    if (value.is_null()) continue;
    if (keys == KeysOf::rope) {
      if (!rope_keys().contains(key))
        refuse_key(where, key, value, "a key that is not known (allow_unknown goes on past it)");
      continue;
    }
    if (key == "qk_latent_layernorm" && value == false)
      refuse_key(where, key, value, "latents without norms are not supported");
    if (key == "qk_latent_layernorm" && value == true) continue;
    if (key == "attention_method" && value == "MLA") continue;
    if (key == "use_mla") {
      if (value != true && value != 1) refuse_key(where, key, value, "attention other than MLA is not supported");
      continue;
    }
    if (key == "position_embedding_type" && (value == "rope" || value == "rotary")) continue;
    if (const Refusal* refusal = refusal_of(key)) {
      const bool window = key.find("window") != std::string::npos;
      if (!nothing(value) && !(window && no_window))
        refuse_key(where, key, value, std::string(refusal->what) + " is not supported");
      continue;
    }
    if (bookkeeping().contains(key) || (understood().contains(key) && (!inner || of_wrappers().contains(key))))
      continue;
    if (understood().contains(key)) {
      const auto read = inner->find(key);
      if (read == inner->end() || *read != value)
        refuse_key(where, key, value,
                   "beside the language model's own config, where it is " +
                       (read == inner->end() ? "missing" : read->dump()) + " (allow_unknown takes the latter)");
      continue;
    }
    if (keys == KeysOf::kimi_linear && linear_attention().contains(key)) continue;
    if (looks_like_attention(key))
      refuse_key(where, key, value,
                 "a key that looks as if it concerned attention and is not known (allow_unknown goes on past it)");
  }
}

}  // namespace

void check_keys(const Json& object, KeysOf keys, std::string_view where) { check(object, nullptr, keys, where); }

void check_keys_around(const Json& outer, const Json& inner, KeysOf keys, std::string_view where) {
  check(outer, &inner, keys, where);
}

}  // namespace mla
