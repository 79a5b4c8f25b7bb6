// A model's attention: presets, config.json, fields; rotary tables.
#ifndef MLA_C_MODEL_H
#define MLA_C_MODEL_H

#include "mla/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MLA_ROPE_SCALING_NONE = 0, MLA_ROPE_SCALING_YARN = 1 };

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
  return f;
}

typedef struct mla_model mla_model;

/// Names of the presets, 0 to count - 1; NULL past them.
MLA_API const char* mla_preset_name(int32_t index);
/// MLA_ERROR_INPUT listing the names when there is no such preset.
MLA_API mla_status mla_model_create_preset(const char* name, mla_model** model);
/// From the text of a Hugging Face config.json. MLA_ERROR_CHECKPOINT names the key that is missing or impossible,
/// MLA_ERROR_UNSUPPORTED what this library does not do.
MLA_API mla_status mla_model_create_config(const char* json, size_t length, mla_model** model);
MLA_API mla_status mla_model_read_config(const char* file, mla_model** model);
/// MLA_ERROR_SHAPE naming the field that is impossible.
MLA_API mla_status mla_model_create(const mla_model_fields* fields, mla_model** model);
MLA_API mla_status mla_model_destroy(mla_model* model);
/// Fills the fields that fields->struct_size has room for. name and indexer_full are the model's and live as long.
MLA_API mla_status mla_model_get(const mla_model* model, mla_model_fields* fields);
/// (nope + rope)^-0.5, times YaRN's factor.
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
