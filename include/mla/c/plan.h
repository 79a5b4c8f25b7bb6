// A step: a batch in, a plan out. Planning is host work; nothing is launched.
#ifndef MLA_C_PLAN_H
#define MLA_C_PLAN_H

#include "mla/c/base.h"
#include "mla/c/cache.h"
#include "mla/c/device.h"
#include "mla/c/model.h"
#include "mla/c/quant.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MLA_PATH_LATENT = 0, MLA_PATH_EXPANDED = 1, MLA_PATH_SPARSE = 2 };
enum {
  MLA_PATHS_AUTOMATIC = 0,
  MLA_PATHS_LATENT = 1,
  MLA_PATHS_EXPANDED = 2,
  MLA_PATHS_BY_LENGTH = 3,
  MLA_PATHS_BY_PROMPT = 4
};
/// MLA_SPLIT_BATCH_INVARIANT: a token's bits follow from its request's tokens up to it, weights, cache format and
/// options, neither from other requests nor from how its prompt was cut into steps or found in the cache. Paths
/// automatic and by length are then latent; by prompt stays, for it goes by a token's position in its request.
enum { MLA_SPLIT_FAST = 0, MLA_SPLIT_BATCH_INVARIANT = 1 };
enum {
  MLA_SPARSE_AUTOMATIC = 0,
  MLA_SPARSE_MIXED = 1,
  MLA_SPARSE_DIRECT = 2,
  MLA_SPARSE_UPCONVERT = 3,
  MLA_SPARSE_DENSE = 4,
  MLA_SPARSE_MASKED = 5,
};
/// Queries, keys and values of the expanded path: in the plan's compute dtype, or as e4m3 codes by the scales that the
/// layer was made with; raw sums are faster on Hopper GPUs and less exact.
enum { MLA_PREFILL_COMPUTE = 0, MLA_PREFILL_FP8 = 1, MLA_PREFILL_FP8_RAW = 2 };
enum { MLA_DECODE_COMPUTE = 0, MLA_DECODE_FP8 = 1 };
/// What ranks that share a cache send each other: latent queries and outputs, or heads' own, a third and a quarter of
/// the numbers, by weights that were made with mla_prepare_options.group_heads.
enum { MLA_EXCHANGE_LATENTS = 0, MLA_EXCHANGE_HEADS = 1 };
/// What mla_forward writes of the hidden rows that ranks' parts are summed to: all, or on each rank a range of them, as
/// even as can be, rank 0's first (mla_plan_info.own_row_begin, own_rows).
enum { MLA_SUMS_ALL = 0, MLA_SUMS_OWN = 1 };
/// Dtype of the rows that calls take and give: hidden states, or the attention form's q, kv_c and k_pe. NATIVE: hidden
/// states of f32 or bf16, as each call has them, and the others of mla_plan_info.activations. Others: all are of that
/// dtype, cast on the way in; results are rounded from f32 on the way out, and may also be f32 or bf16.
enum {
  MLA_ACTIVATION_DTYPE_NATIVE = 0,
  MLA_ACTIVATION_DTYPE_F32 = 1,
  MLA_ACTIVATION_DTYPE_BF16 = 2,
  MLA_ACTIVATION_DTYPE_F16 = 3
};
/// MLA_FORM_BLOCK: mla_forward, and mla_attend too unless the output is quantised. MLA_FORM_ATTENTION: mla_attend and
/// mla_select alone, nothing is reserved for projections and the indexer.
enum { MLA_FORM_BLOCK = 0, MLA_FORM_ATTENTION = 1 };
/// What the attention form has to do with the cache. MLA_CACHE_USE_APPEND: the step's rows are written, then attended
/// to. MLA_CACHE_USE_READ: they are there already, by another layer or a stream that is waited for. MLA_CACHE_USE_NONE:
/// requests are new, their tokens attend to one another.
enum { MLA_CACHE_USE_APPEND = 0, MLA_CACHE_USE_READ = 1, MLA_CACHE_USE_NONE = 2 };

/// One step's requests. All arrays are host memory and copied into the plan.
typedef struct mla_batch {
  size_t struct_size;
  int64_t requests;
  int64_t tokens;                  ///< new tokens of all requests
  const int32_t* query_start_loc;  ///< [requests + 1]: first token row of each request; starts at 0, ends at tokens
  const int32_t* seq_lens;         ///< [requests]: cached context + new tokens
  const int32_t* block_table;      ///< [requests, block_table_pages]; entries past a request's end may hold anything
  int64_t block_table_pages;
  int64_t block_table_stride;  ///< from one request's row to the next; 0: block_table_pages
  /// [tokens]: where each new token's row goes, the place of its position in its request's own pages, one slot for one
  /// token; < 0: nowhere. Without a cache, and of a dummy step, neither this nor the block table is looked at: NULL
  const int32_t* slot_mapping;
  /// [requests]: the tokens of each request that are its prompt, its first ones, cached or not. Read by
  /// MLA_PATHS_BY_PROMPT, which puts them on the expanded path and those behind them on the latent one; else NULL
  const int32_t* prompt_lens;
} mla_batch;

/// Rates that turn counted work into time. Only their ratios matter for the choice of a path.
typedef struct mla_cost_model {
  size_t struct_size;
  double latent_flops;      ///< attention over the cache; above 0
  double expanded_flops;    ///< attention over flat keys; above 0
  double projection_flops;  ///< matrix products; above 0
  double bytes;             ///< memory traffic, bytes a second; 0: not counted
  double plain_elements;    ///< elements of plain cache rows brought into a tile, a second; 0: not counted
  double fp8_elements;      ///< the same for fp8 formats; 0: not counted
  double row_element;       ///< bytes of an element of rows that one op writes and the next reads; 0: 4
  /// Attention over flat keys goes by tiles of a head and 128 query rows, of which as many run beside each other: fewer
  /// take as long; 0: not counted.
  double expanded_tiles;
  /// What the context of a request that is alone in its step takes there beside its work, seconds; 0: not counted.
  double context_seconds;
} mla_cost_model;
/// Rates fitted to measurements on a device, for models of any number of heads. Fills the fields that
/// rates->struct_size has room for.
MLA_API mla_status mla_cost_model_of(DLDevice device, mla_cost_model* rates);

/// The largest step that an engine makes, in any mix.
typedef struct mla_step_maxima {
  size_t struct_size;
  int64_t requests;
  int64_t tokens;     ///< new tokens of all requests together
  int64_t query_len;  ///< new tokens of one request
  int64_t seq_len;    ///< cached context and new tokens of one request; at least query_len
} mla_step_maxima;

typedef struct mla_plan_options {
  size_t struct_size;
  int32_t path;                     ///< MLA_PATHS_...; default automatic
  int32_t split;                    ///< MLA_SPLIT_...; default fast
  int64_t reorder_batch_threshold;  ///< by length: longest query of the latent path; default 1
  int32_t absorbed;                 ///< 1: the weights have full absorption; default 0
  int32_t up;                       ///< MLA_WEIGHTS_... of W_UK and W_UV; default plain
  int32_t compute;                  ///< operands of attention's products: MLA_F32 (default) or MLA_BF16
  int32_t fp8_query;                ///< 1: latent queries as fp8 with q_scale; default 0
  float q_scale;                    ///< default 1; 0: each layer's own, mla_layer_tensors.q_scales, if heads share it
  int32_t sparse;                   ///< MLA_SPARSE_...; default automatic
  int32_t index_format;             ///< MLA_INDEX_CACHE_...; default fp8
  int32_t index_hadamard;           ///< 1: the indexer's queries and keys are rotated; default 0
  const mla_output_spec* output;    ///< of the attention form; NULL: not quantised. Its scales are not read here
  int64_t context_rows;             ///< of the context workspace; 0: by the default rule
  int64_t max_model_len;            ///< 0: the batch's longest sequence
  int64_t max_requests;             ///< 0: the batch's
  const mla_cost_model* rates;      ///< for MLA_PATHS_AUTOMATIC; NULL: the device's for the model's heads
  int32_t activations;              ///< MLA_ACTIVATIONS_... of products with fp8 weights, without which the layer
                                    ///< returns MLA_ERROR_UNSUPPORTED; default plain
  int32_t form;                     ///< MLA_FORM_...: the calls that the plan serves; default block
  int32_t cache_use;                ///< MLA_CACHE_USE_...; other than append, the default, of form attention alone
  int32_t dummy;                    ///< 1: calls write zeros to the step's rows and do nothing else; default 0
  int64_t tensor_parallel;          ///< ranks that split the heads (ranks.h); 0, the default, and 1: there are none
  int32_t index_arithmetic;         ///< MLA_INDEX_PRODUCTS_... of scores of an fp8 index cache; default exact
  int32_t prefill;                  ///< MLA_PREFILL_...: what the expanded path multiplies; default compute
  const mla_sharding* sharding;     ///< of as many ranks, which divide tensor_parallel: groups of ranks that follow one
                                    ///< another split every sequence's cached tokens, too, and the batch's tables and
                                    ///< slots are those of this rank's cache, member rank % sharding.ranks of its
                                    ///< group; NULL: each has all tokens
  int64_t rank;                     ///< this one, of tensor_parallel; read with sharding and MLA_SUMS_OWN
  const int64_t* rank_heads;        ///< [tensor_parallel] heads of each rank; read with sharding
  const mla_step_maxima* maxima;  ///< of a step whose calls are captured and launched for every batch within: its plans
                                  ///< have one shape, calls take inputs and outputs of mla_plan_info.tokens rows and
                                  ///< leave those of the outputs past the batch's alone; NULL: of the batch alone.
                                  ///< MLA_ERROR_UNSUPPORTED with paths expanded, no cache, dummy, and an output format
  int32_t activation_dtype;       ///< MLA_ACTIVATION_DTYPE_... of the calls' rows; default native
  int32_t decode;                 ///< MLA_DECODE_...: what the latent path multiplies where fp8_query is 1; default
                                  ///< compute
  int32_t exchange;               ///< MLA_EXCHANGE_...; read with sharding; default latents
  int32_t sums;                   ///< MLA_SUMS_...; default all
} mla_plan_options;

static inline mla_plan_options mla_plan_options_default(void) {
  mla_plan_options o;
  memset(&o, 0, sizeof o);
  o.struct_size = sizeof o;
  o.reorder_batch_threshold = 1;
  o.q_scale = 1.0f;
  o.index_format = MLA_INDEX_CACHE_FP8;
  return o;
}

/// A plan in numbers.
typedef struct mla_plan_info {
  size_t struct_size;
  int64_t tokens, requests;
  size_t workspace_bytes;  ///< that a layer's call needs, 64-byte aligned
  size_t selection_bytes;  ///< that layers which share a selection pass on; 0: nothing is selected
  int64_t latent_rows;     ///< tokens on the latent path
  int64_t expanded_rows;   ///< tokens on the expanded path
  int64_t sparse_rows;     ///< tokens on the sparse path
  int64_t latent_items;    ///< pieces of attention on the latent path
  int64_t split_rows;      ///< groups of rows whose partial results are merged
  int64_t partial_rows;    ///< of split-KV partial results in the workspace
  int64_t context_chunks;  ///< gathers of cached context for the expanded path
  int64_t context_rows;    ///< of the workspace for them
  int64_t topk;            ///< positions selected for a sparse row
  int32_t fused_output;    ///< 1: heads are quantised where they are finished, on a GPU those of the expanded path
  int32_t activations;     ///< MLA_F32, MLA_BF16 or MLA_F16: dtype of the attention form's inputs
  int64_t batch_tokens;    ///< rows that are the batch's: `tokens`, unless the options have maxima
  int64_t own_row_begin;   ///< with MLA_SUMS_OWN the first of the rows that mla_forward writes, as rows 0, 1, .. of its
  int64_t own_rows;        ///< output, and how many these are; else 0 and `tokens`
} mla_plan_info;

typedef struct mla_request_plan {
  size_t struct_size;
  int32_t path;         ///< MLA_PATH_...
  int32_t query_begin;  ///< first token row
  int32_t query_length;
  int32_t context;  ///< cached tokens before them
} mla_request_plan;

typedef struct mla_plan mla_plan;

/// For a stream's device. pages is the cache's page count; options may be NULL. The plan holds what it needs of its
/// arguments. MLA_ERROR_BATCH, MLA_ERROR_SHAPE or MLA_ERROR_UNSUPPORTED, naming request, value and limit.
MLA_API mla_status mla_plan_create(const mla_stream* stream, const mla_model* model, const mla_cache_spec* cache,
                                   int64_t pages, const mla_batch* batch, const mla_plan_options* options,
                                   mla_plan** plan);
/// The step to capture calls with, of options->maxima and no batch: stage it (mla_staged_step_stage), capture the
/// calls, then make a plan of each batch with the same options and restage it. Its block table and slots are its own.
MLA_API mla_status mla_plan_create_maxima(const mla_stream* stream, const mla_model* model, const mla_cache_spec* cache,
                                          const mla_plan_options* options, mla_plan** plan);
/// Memory that is enough for every step within the maxima, with these options (whose own maxima are not read), without
/// a batch. workspace_bytes, selection_bytes: either may be NULL. MLA_ERROR_SHAPE for a maximum below 0 or past 32
/// bits.
MLA_API mla_status mla_step_memory(const mla_stream* stream, const mla_model* model, const mla_cache_spec* cache,
                                   const mla_step_maxima* maxima, const mla_plan_options* options,
                                   size_t* workspace_bytes, size_t* selection_bytes);
MLA_API mla_status mla_plan_destroy(mla_plan* plan);
/// Fills the fields that info->struct_size has room for.
MLA_API mla_status mla_plan_get(const mla_plan* plan, mla_plan_info* info);
/// request: 0 to requests - 1.
MLA_API mla_status mla_plan_request(const mla_plan* plan, int64_t request, mla_request_plan* info);
/// [tokens]: position of each token in its sequence. The plan's own memory.
MLA_API mla_status mla_plan_positions(const mla_plan* plan, const int32_t** positions, int64_t* count);
/// Several lines: paths, chunks, splits, workspace.
MLA_API mla_status mla_plan_describe(const mla_plan* plan, char* text, size_t capacity, size_t* length);

#ifdef __cplusplus
}
#endif

#endif  // MLA_C_PLAN_H
