// A model's attention: presets, config.json, fields; rotary tables.
#ifndef MLA_C_MODEL_H
#define MLA_C_MODEL_H

#include "mla/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MLA_ROPE_SCALING_NONE = 0, MLA_ROPE_SCALING_YARN = 1, MLA_ROPE_SCALING_LONGROPE = 2 };

/// A model in numbers. Of the indexer (sparse attention) all are 0 for a model without one.
typedef struct mla_model_fields {
  size_t struct_size;
  const char* name;      ///< may be NULL
  int64_t hidden;        ///< H
  int64_t layers;        ///< at least 1
  int64_t heads;         ///< N
  int64_t query_latent;  ///< q_lora_rank; 0: queries are projected from hidden directly
  int64_t latent;        ///< kv_lora_rank, L
  int64_t nope;          ///< qk_nope_head_dim, P
  int64_t rope;          ///< qk_rope_head_dim, R; may be 0
  int64_t value;         ///< v_head_dim, V
  double rms_eps;        ///< default 1e-6
  int32_t rotate;        ///< 0: the rope dims stay unrotated; default 1
  int32_t interleaved;   ///< 1: pairs (2i, 2i+1); 0: halves (i, i + rope/2); default 1
  double theta;          ///< default 10000
  int32_t rope_scaling;  ///< MLA_ROPE_SCALING_...
  int32_t indexer_interleaved;
  double factor;                  ///< of YaRN; default 1
  double beta_fast;               ///< default 32
  double beta_slow;               ///< default 1
  double mscale;                  ///< default 1
  double mscale_all_dim;          ///< 0: the softmax scale takes no factor
  double attention_factor;        ///< default 1
  int64_t original_max_position;  ///< default 4096
  int64_t indexer_heads, indexer_dim, indexer_topk;
  const uint8_t* indexer_full;             ///< [layers], 1: the layer has an indexer of its own; NULL: every layer
  int64_t fp8_block_rows, fp8_block_cols;  ///< block-scaled fp8 checkpoint weights; 0: none
  int64_t max_position;                    ///< the longest sequence to be served: longrope's choice of factors
  const double* short_factors;             ///< longrope: divisors of frequencies [rope / 2]; else NULL
  const double* long_factors;              ///< likewise; they hold when max_position is above original_max_position
  double query_scale;                      ///< queries are multiplied by it after their projection; default 1
  double latent_scale;                     ///< normed latents are, and cached so; default 1
  double query_growth_beta;  ///< a query at position p grows by 1 + beta ln(1 + floor(p / length)); 0: none
  int64_t query_growth_length;
  int64_t attentions_per_layer;  ///< default 1; layers counts attentions
  const int64_t* model_layers;   ///< [layers / attentions_per_layer] layers of the model with MLA; NULL: the first ones
  int32_t truncate;              ///< YaRN's correction dims are rounded outwards; default 1
  int32_t reserved;              ///< 0
} mla_model_fields;

static inline mla_model_fields mla_model_fields_default(void) {
  mla_model_fields f;
  memset(&f, 0, sizeof f);
  f.struct_size = sizeof f;
  f.rms_eps = 1e-6;
  f.rotate = 1;
  f.interleaved = 1;
  f.theta = 10000.0;
  f.factor = 1.0;
  f.beta_fast = 32.0;
  f.beta_slow = 1.0;
  f.mscale = 1.0;
  f.attention_factor = 1.0;
  f.original_max_position = 4096;
  f.query_scale = 1.0;
  f.latent_scale = 1.0;
  f.attentions_per_layer = 1;
  f.truncate = 1;
  return f;
}

/// How configs and checkpoints are read.
typedef struct mla_read_options {
  size_t struct_size;
  int32_t allow_unknown;  ///< 1: go on past keys and tensors that are not understood; default 0
  int32_t reserved;       ///< 0
} mla_read_options;

static inline mla_read_options mla_read_options_default(void) {
  mla_read_options o;
  memset(&o, 0, sizeof o);
  o.struct_size = sizeof o;
  return o;
}

typedef struct mla_model mla_model;

/// Names of the presets, 0 to count - 1; NULL past them.
MLA_API const char* mla_preset_name(int32_t index);
/// MLA_ERROR_INPUT listing the names when there is no such preset.
MLA_API mla_status mla_model_create_preset(const char* name, mla_model** model);
/// From the text of a Hugging Face config.json. MLA_ERROR_CHECKPOINT names the key that is missing or impossible,
/// MLA_ERROR_UNSUPPORTED what this library does not do, and a key that looks as if it concerned attention and is not
/// understood.
MLA_API mla_status mla_model_create_config(const char* json, size_t length, mla_model** model);
MLA_API mla_status mla_model_read_config(const char* file, mla_model** model);
/// The same with options; NULL: the defaults.
MLA_API mla_status mla_model_create_config_with(const char* json, size_t length, const mla_read_options* options,
                                                mla_model** model);
MLA_API mla_status mla_model_read_config_with(const char* file, const mla_read_options* options, mla_model** model);
/// MLA_ERROR_SHAPE naming the field that is impossible.
MLA_API mla_status mla_model_create(const mla_model_fields* fields, mla_model** model);
MLA_API mla_status mla_model_destroy(mla_model* model);
/// Fills the fields that fields->struct_size has room for. What it points to is the model's and lives as long.
MLA_API mla_status mla_model_get(const mla_model* model, mla_model_fields* fields);
/// (nope + rope)^-0.5, times YaRN's factor. query_scale and the growth of queries are not in it.
MLA_API mla_status mla_model_softmax_scale(const mla_model* model, double* scale);
/// 1 when a layer has indexer weights of its own, else 0.
MLA_API mla_status mla_model_layer_has_indexer(const mla_model* model, int64_t layer, int32_t* has);

/// cos and sin of positions [0, positions), made once a model.
typedef struct mla_rotary mla_rotary;
/// indexer: 0 for the attention's, 1 for the indexer's pairs. positions: 1 to 2^24.
MLA_API mla_status mla_rotary_create(const mla_model* model, int32_t indexer, int64_t positions, DLDevice device,
                                     mla_rotary** rotary);
MLA_API mla_status mla_rotary_destroy(mla_rotary* rotary);

#ifdef __cplusplus
}
#endif

#endif  // MLA_C_MODEL_H
