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
/// (2309.00071).
struct RopeConfig {
  enum class Scaling : uint8_t { none, yarn };
  bool rotate = true;       ///< false: the rope dims stay unrotated (NoPE)
  bool interleaved = true;  ///< pairs (2i, 2i+1); false: NeoX halves (i, i + rope/2)
  double theta = 10000.0;
  Scaling scaling = Scaling::none;
  double factor = 1.0;
  double beta_fast = 32.0, beta_slow = 1.0;
  double mscale = 1.0;            ///< used on cos/sin as m(factor, mscale) / m(factor, mscale_all_dim)
  double mscale_all_dim = 0.0;    ///< 0: the softmax scale takes no factor
  double attention_factor = 1.0;  ///< one more factor of cos and sin
  int64_t original_max_position = 4096;
};

/// Sparse attention's indexer (DeepSeek V3.2, GLM-5).
struct IndexerConfig {
  int64_t heads = 0, dim = 0, topk = 0;
  bool interleaved = false;  ///< rotary pairs of the indexer; independent of the attention's
  /// [layers], 1: the layer has an indexer of its own; 0: it takes the choice of the nearest layer before it that has
  /// one. Empty: every layer has its own.
  std::vector<uint8_t> full;
};

struct ModelConfig {
  std::string name;
  int64_t hidden = 0;  ///< H
  int64_t layers = 0;
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

  int64_t query_key() const { return nope + rope; }
  int64_t entry() const { return latent + rope; }
  /// The indexer's rotary embedding: the model's, with the indexer's own pairs.
  RopeConfig index_rotary() const;
  /// Whether a layer has indexer weights of its own; false for every layer of a model without an indexer.
  bool layer_has_indexer(int64_t layer) const;
  /// (nope + rope)^-0.5, times m(factor, mscale_all_dim)^2 under YaRN. The same on both paths.
  double softmax_scale() const;
  /// ShapeError naming the field when a dimension is impossible (negative, zero where it may not be, odd rope), or a
  /// constant of the norms or of the rotary embedding is.
  void validate() const;
};

/// The YaRN attention temperature: 0.1 mscale ln(scale) + 1, and 1 for scale <= 1.
double yarn_mscale(double scale, double mscale);

/// Names of the built-in presets, each with its true dimensions.
std::span<const std::string_view> preset_names();
/// InputError listing the names when there is no such preset.
ModelConfig preset(std::string_view name);

/// Reads a Hugging Face config.json (old keys rope_theta + rope_scaling, or new rope_parameters; a nested "text_config"
/// is followed). CheckpointError names the key that is missing, misshaped or impossible; UnsupportedError names what
/// this library does not do (sliding windows, soft caps, ALiBi, unknown rope types). `where` names the source in
/// messages.
ModelConfig parse_config(std::string_view json, std::string_view where = "config.json");
ModelConfig read_config(const std::filesystem::path& file);

}  // namespace mla
