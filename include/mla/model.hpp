// The attention of a model: its dimensions, rotary embedding and softmax scale; presets and config.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mla {

/// Rotary embedding. YaRN: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models"
/// (2309.00071). longrope: Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens" (2402.13753).
struct RopeConfig {
  enum class Scaling : uint8_t { none, yarn, longrope };
  bool rotate = true;       ///< false: the rope dims stay unrotated (NoPE)
  bool interleaved = true;  ///< pairs (2i, 2i+1); false: NeoX halves (i, i + rope/2)
  double theta = 10000.0;
  Scaling scaling = Scaling::none;
  double factor = 1.0;  ///< of longrope: longest over original length, for its magnitude
  double beta_fast = 32.0, beta_slow = 1.0;
  double mscale = 1.0;            ///< used on cos/sin as m(factor, mscale) / m(factor, mscale_all_dim)
  double mscale_all_dim = 0.0;    ///< 0: the softmax scale takes no factor
  double attention_factor = 1.0;  ///< one more factor of cos and sin; of longrope the only one
  int64_t original_max_position = 4096;
  bool truncate = true;  ///< YaRN's correction dims are rounded outwards to whole ones
  /// longrope: divisors of each pair's frequency [rope / 2]. The long ones hold for a model that serves sequences
  /// longer than original_max_position, for all positions of all its requests, so that keys in the cache never change.
  std::vector<double> short_factors, long_factors;
  int64_t max_position = 0;  ///< the longest sequence that will be served: longrope's choice; nothing else reads it
  friend bool operator==(const RopeConfig&, const RopeConfig&) = default;
};

/// Sparse attention's indexer (DeepSeek V3.2, GLM-5).
struct IndexerConfig {
  int64_t heads = 0, dim = 0, topk = 0;
  bool interleaved = false;  ///< rotary pairs of the indexer; independent of the attention's
  /// [layers], 1: the layer has an indexer of its own; 0: it takes the choice of the nearest layer before it that has
  /// one. Empty: every layer has its own.
  std::vector<uint8_t> full;
};

/// What a config says of quantised weights (quantization_config). Tensors say the rest: a weight that is stored plain
/// is plain.
struct QuantisationConfig {
  std::string method;                ///< quant_method, "fp8" where a config leaves it out; empty: no such object
  std::vector<int64_t> bits;         ///< of integer weights, each number once; empty: not said
  std::vector<int64_t> group_sizes;  ///< inputs that share a scale, each number once; -1: all of them
  bool zero_points = false;          ///< all of its integer weights have them
  int64_t zero_offset = 0;           ///< GPTQ: a zero point is this above the number stored
};

/// Heads [begin, begin + count) of a model.
struct HeadRange {
  int64_t begin = 0, count = 0;
};

struct ModelConfig {
  std::string name;
  int64_t hidden = 0;        ///< H
  int64_t layers = 0;        ///< MLA attentions with a cache of their own: see attention_name() for where they are
  int64_t heads = 0;         ///< N
  int64_t query_latent = 0;  ///< q_lora_rank; 0: queries are projected from hidden directly
  int64_t latent = 0;        ///< kv_lora_rank, L
  int64_t nope = 0;          ///< qk_nope_head_dim, P
  int64_t rope = 0;          ///< qk_rope_head_dim, R; may be 0
  int64_t value = 0;         ///< v_head_dim, V
  double rms_eps = 1e-6;
  RopeConfig rotary;
  std::optional<IndexerConfig> indexer;
  int64_t fp8_block_rows = 0, fp8_block_cols = 0;  ///< block-scaled fp8 checkpoint weights; 0: none
  QuantisationConfig quantisation;                 ///< of a checkpoint's weights
  /// LongCat: queries, all nope + rope dims, are multiplied by this after their projection and before their rotation.
  /// Needs a query latent when it is not 1.
  double query_scale = 1.0;
  /// LongCat: the normed latent is multiplied by this; the cache holds the product.
  double latent_scale = 1.0;
  /// Mistral: a query at position p is multiplied by 1 + beta ln(1 + floor(p / length)); beta 0: none. Needs a query
  /// latent.
  double query_growth_beta = 0.0;
  int64_t query_growth_length = 0;
  /// Attentions in one layer of the model (LongCat: 2): attention i is number i % this of its layer.
  int64_t attentions_per_layer = 1;
  /// [layers / attentions_per_layer] which of the model's layers have MLA (Kimi Linear), ascending. Empty: the first
  /// ones.
  std::vector<int64_t> model_layers;
  /// What a reader of the same config elsewhere takes otherwise, or what was decided in reading it: one line each.
  std::vector<std::string> notes;

  int64_t query_key() const { return nope + rope; }
  int64_t entry() const { return latent + rope; }
  /// The indexer's rotary embedding: the model's, with the indexer's own pairs.
  RopeConfig index_rotary() const;
  /// Whether a layer has indexer weights of its own; false for every layer of a model without an indexer.
  bool layer_has_indexer(int64_t layer) const;
  /// (nope + rope)^-0.5, times m(factor, mscale_all_dim)^2 under YaRN. The same on both paths. query_scale and
  /// query_growth are not in it: they are queries' own.
  double softmax_scale() const;
  /// What Mistral's rule multiplies a query at this position by; 1 without it.
  double query_growth(int64_t position) const;
  /// The model's layer that attention `index` is in. InputError when there is no such attention.
  int64_t model_layer(int64_t index) const;
  /// Where attention `index` is among a model's parts: "layers.3.self_attn.", or "layers.3.self_attn.1." where a layer
  /// has more than one.
  std::string attention_name(int64_t index) const;
  /// ShapeError naming the field when a dimension is impossible (negative, zero where it may not be, odd rope), or a
  /// constant of the norms or of the rotary embedding is, or what follows from them is not finite in f32.
  void validate() const;
};

/// The YaRN attention temperature: 0.1 mscale ln(scale) + 1, and 1 for scale <= 1.
double yarn_mscale(double scale, double mscale);

/// Names of the built-in presets, each with its true dimensions.
std::span<const std::string_view> preset_names();
/// InputError listing the names when there is no such preset.
ModelConfig preset(std::string_view name);

struct ReadOptions {
  /// Go on past keys, values and tensors that are not understood, as if they were not there.
  bool allow_unknown = false;
};

/// Reads a model's attention from its config: a Hugging Face config.json (old keys rope_theta + rope_scaling, or new
/// rope_parameters; a nested "text_config" is followed), or the parameter files of DeepSeek's, Mistral's and
/// openPangu's own code. What a key's absence means follows from model_type. `where` names the source in messages.
///
/// CheckpointError names the key that is missing, misshaped or impossible. UnsupportedError names what this library
/// does not do, by a list of what it does: a model_type that is not known, or without one an architecture, one of other
/// attention beside it, and every key that looks as if it concerned attention and is not understood. A key looks so if
/// one of its words (parts between underscores) is of attention's vocabulary, such as attn, rope, head, q, kv, lora,
/// index, window, sink, gate, norm, scale, position, layer, linear or conv, or consists of them; not when one is of
/// something else, such as moe, expert, router, mlp, vision or mtp, and none of the plainest of attention's is there.
/// Bookkeeping keys are known by name. Null is as good as absent. `allow_unknown` goes on past what is refused alone.
ModelConfig parse_config(std::string_view json, std::string_view where = "config.json",
                         const ReadOptions& options = {});
ModelConfig read_config(const std::filesystem::path& file, const ReadOptions& options = {});

}  // namespace mla
