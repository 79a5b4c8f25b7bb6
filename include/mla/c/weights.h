// A layer's attention weights: random, from a checkpoint folder or from tensors, prepared for a device.
#ifndef MLA_C_WEIGHTS_H
#define MLA_C_WEIGHTS_H

#include "mla/c/base.h"
#include "mla/c/device.h"
#include "mla/c/model.h"

#ifdef __cplusplus
extern "C" {
#endif

/// How W_UK and W_UV of the latent path, or a linear map, are held.
enum { MLA_WEIGHTS_PLAIN = 0, MLA_WEIGHTS_FP8 = 1, MLA_WEIGHTS_MXFP4 = 2 };
/// What products with fp8 weights take their inputs as: rounded to the products' dtype; or e4m3 codes with a scale for
/// each row and 128 inputs.
enum { MLA_ACTIVATIONS_PLAIN = 0, MLA_ACTIVATIONS_FP8_128 = 1 };
/// Where W_UK and W_UV go on the latent path; the two full ones serve the latent path alone.
enum { MLA_ABSORB_RUNTIME = 0, MLA_ABSORB_FULL = 1, MLA_ABSORB_FULL_FP8 = 2 };

typedef struct mla_prepare_options {
  size_t struct_size;
  int32_t dtype;       ///< of products: MLA_F32 (default) or MLA_BF16
  int32_t absorption;  ///< MLA_ABSORB_...; default runtime
  int32_t up;          ///< MLA_WEIGHTS_... of W_UK and W_UV; other than plain with runtime absorption only
  int32_t products;    ///< MLA_WEIGHTS_PLAIN or _FP8 of the other products, not the indexer's; default plain
  int64_t head_begin;  ///< with head_count: weights of these heads alone, for mla_model_part's model
  int64_t head_count;  ///< 0: all of them
  /// With head_count, of ranks that share a cache and exchange heads (MLA_EXCHANGE_HEADS): first head and number of
  /// heads of each member of the rank's group, [group_members][2]; NULL: W_UK and W_UV are held of the rank's own heads
  const int64_t* group_heads;
  int64_t group_members;
} mla_prepare_options;

static inline mla_prepare_options mla_prepare_options_default(void) {
  mla_prepare_options o;
  memset(&o, 0, sizeof o);
  o.struct_size = sizeof o;
  return o;
}

/// A tensor of a checkpoint in host memory, dense: f32, bf16, f16 or fp8. fp8 comes with block_scales, f32
/// [ceil(rows / block_rows), ceil(cols / block_cols)]: a value is its code times its block's scale.
typedef struct mla_host_tensor {
  const DLTensor* values;
  const DLTensor* block_scales;  ///< NULL: none
  int64_t block_rows, block_cols;
} mla_host_tensor;

/// A layer's tensors by role; linear maps are [out, in]. Those that the model does not have stay empty.
typedef struct mla_layer_tensors {
  size_t struct_size;
  mla_host_tensor query;                  ///< q_proj [N*(P+R), H], or q_b_proj [N*(P+R), Lq] with a query latent
  mla_host_tensor query_down;             ///< q_a_proj [Lq, H]
  mla_host_tensor query_norm;             ///< q_a_layernorm [Lq]
  mla_host_tensor kv_down;                ///< kv_a_proj_with_mqa [L+R, H]
  mla_host_tensor kv_norm;                ///< kv_a_layernorm [L]
  mla_host_tensor kv_up;                  ///< kv_b_proj [N*(P+V), L]: per head, P rows of W_UK then V rows of W_UV
  mla_host_tensor output;                 ///< o_proj [H, N*V]
  mla_host_tensor indexer_query;          ///< indexer.wq_b [Ni*Di, Lq]
  mla_host_tensor indexer_key;            ///< indexer.wk [Di, H]
  mla_host_tensor indexer_key_norm;       ///< indexer.k_norm.weight [Di]
  mla_host_tensor indexer_key_norm_bias;  ///< indexer.k_norm.bias [Di]
  mla_host_tensor indexer_head_weights;   ///< indexer.weights_proj [Ni, H]
  /// f32 [1] or [N]: scales of e4m3 queries, keys and values (MLA_PREFILL_FP8), a value is its code times its scale;
  /// NULL: 1
  const DLTensor *q_scales, *k_scales, *v_scales;
} mla_layer_tensors;

/// A Hugging Face checkpoint folder: config.json with model.safetensors, or an index and its shards.
typedef struct mla_checkpoint mla_checkpoint;
/// MLA_ERROR_CHECKPOINT naming file, tensor and reason for anything missing or malformed.
MLA_API mla_status mla_checkpoint_open(const char* folder, mla_checkpoint** checkpoint);
/// The same with options; NULL: the defaults.
MLA_API mla_status mla_checkpoint_open_with(const char* folder, const mla_read_options* options,
                                            mla_checkpoint** checkpoint);
MLA_API mla_status mla_checkpoint_destroy(mla_checkpoint* checkpoint);
MLA_API mla_status mla_checkpoint_model(const mla_checkpoint* checkpoint, mla_model** model);
/// Of which scales mla_checkpoint_scales() is asked.
enum { MLA_SCALES_Q = 0, MLA_SCALES_K = 1, MLA_SCALES_V = 2 };
/// The scales of fp8 queries, keys or values that come with a layer: `count` is 0 where it has none, 1, or the number
/// of heads. As many as there is room for are written; with room 0 scales may be NULL. A latent cache's k_scale
/// (mla_cache_spec) is that of keys. MLA_ERROR_CHECKPOINT naming a tensor that holds no such scale.
MLA_API mla_status mla_checkpoint_scales(const mla_checkpoint* checkpoint, int64_t layer, int32_t which, float* scales,
                                         int64_t room, int64_t* count);

/// Bytes of tensors that were read so far, by all threads. Files' headers are not among them, and neither is what the
/// system reads beside what it is asked for: whole pages, and ahead.
MLA_API mla_status mla_checkpoint_bytes_read(const mla_checkpoint* checkpoint, uint64_t* bytes);

/// A layer's prepared weights on a device. options may be NULL: the defaults.
/// MLA_ERROR_UNSUPPORTED for options that nothing here does, MLA_ERROR_SHAPE naming tensor, found and expected shape.
typedef struct mla_weights mla_weights;
/// Of a trained model's scale, a function of (model, layer, seed), first stored in `stored` (MLA_F32, MLA_BF16 ...).
MLA_API mla_status mla_weights_create_random(const mla_model* model, int64_t layer, uint64_t seed, int32_t stored,
                                             const mla_prepare_options* options, DLDevice device,
                                             mla_weights** weights);
/// With options' head_count a part of the layer is read, not the whole: these heads' rows of the query's map and of
/// kv_up, their columns of output, and what all heads share.
MLA_API mla_status mla_weights_create_checkpoint(const mla_checkpoint* checkpoint, int64_t layer,
                                                 const mla_prepare_options* options, DLDevice device,
                                                 mla_weights** weights);
/// The tensors are copied: they may go afterwards.
MLA_API mla_status mla_weights_create(const mla_model* model, const mla_layer_tensors* tensors,
                                      const mla_prepare_options* options, DLDevice device, mla_weights** weights);
MLA_API mla_status mla_weights_destroy(mla_weights* weights);
/// Moves the CPU's matrices near the threads of a pinned stream that read them; nothing where these are on one node.
/// Nobody uses the weights meanwhile. MLA_ERROR_UNSUPPORTED for weights or a stream on a GPU; MLA_ERROR_DEVICE when the
/// system keeps a page where it is.
MLA_API mla_status mla_weights_place(mla_weights* weights, mla_stream* stream);
/// Memory held, bytes.
MLA_API mla_status mla_weights_bytes(const mla_weights* weights, size_t* bytes);

/// y = x W^T for one matrix or one a head, in a device's layout: what mla_project takes.
typedef struct mla_linear mla_linear;
/// w: f32 [Head, Out, In] on the host, dense. dtype of products MLA_F32 or MLA_BF16; format MLA_WEIGHTS_...; fp8 takes
/// one scale for each block_rows x block_cols of a head's matrix, or one for all with 0 and 0.
MLA_API mla_status mla_linear_create(const DLTensor* w, int32_t dtype, int32_t format, int64_t block_rows,
                                     int64_t block_cols, DLDevice device, mla_linear** linear);
MLA_API mla_status mla_linear_destroy(mla_linear* linear);

#ifdef __cplusplus
}
#endif

#endif  // MLA_C_WEIGHTS_H
