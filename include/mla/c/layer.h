// One MLA layer executed by a plan, in two forms: block (hidden in, hidden out) and attention (q, kv_c, k_pe in; heads
// out).
#ifndef MLA_C_LAYER_H
#define MLA_C_LAYER_H

#include "mla/c/base.h"
#include "mla/c/cache.h"
#include "mla/c/device.h"
#include "mla/c/plan.h"
#include "mla/c/quant.h"
#include "mla/c/ranks.h"
#include "mla/c/weights.h"

#ifdef __cplusplus
extern "C" {
#endif

/// A step's lists (items, rows, slots, page numbers) on a GPU, where its kernels read them: needed there
/// (mla_layer_args.staged), does nothing on the CPU.
typedef struct mla_staged_step mla_staged_step;
MLA_API mla_status mla_staged_step_create(mla_stream* stream, mla_staged_step** staged);
/// Calls that read what was staged must have ended; graphs of such calls are not launched any more.
MLA_API mla_status mla_staged_step_destroy(mla_staged_step* staged);
/// One copy, queued on the stream. The plan stays alive while it is staged, whoever destroys its handle.
MLA_API mla_status mla_staged_step_stage(mla_staged_step* staged, const mla_plan* plan);
/// Another step in the place of the one staged, for captured calls to serve. In that of one of maxima
/// (mla_plan_create_maxima): of any batch within, planned with the same options. Otherwise no larger in any array, with
/// the same paths, its rows in order where the first one's were. MLA_ERROR_SHAPE naming the array otherwise; nothing
/// has changed then.
MLA_API mla_status mla_staged_step_restage(mla_staged_step* staged, const mla_plan* plan);

/// Time and counted work by op, summed over the calls that it was given to.
typedef struct mla_profile mla_profile;
typedef struct mla_profile_row {
  size_t struct_size;
  const char* op;  ///< static
  double seconds, bytes, flops;
  int64_t calls;
} mla_profile_row;
MLA_API mla_status mla_profile_create(mla_profile** profile);
MLA_API mla_status mla_profile_destroy(mla_profile* profile);
/// On a GPU waits for the work that it timed.
MLA_API mla_status mla_profile_count(mla_profile* profile, int64_t* rows);
MLA_API mla_status mla_profile_get(mla_profile* profile, int64_t index, mla_profile_row* row);
MLA_API mla_status mla_profile_clear(mla_profile* profile);

/// What a layer's call needs besides inputs and outputs, all of it on the stream's device.
typedef struct mla_layer_args {
  size_t struct_size;
  const mla_plan* plan;
  const mla_weights* weights;
  const mla_rotary* rotary;  ///< of mla_forward: of the plan's model, for all of the step's positions
  mla_cache* cache;          ///< may be NULL with MLA_CACHE_USE_NONE, and for a dummy step
  void* workspace;           ///< 64-byte aligned; contents may be anything
  size_t workspace_bytes;    ///< at least the plan's
  // Of models with an indexer; NULL and 0 otherwise.
  mla_index_cache* index_cache;    ///< page for page beside the cache
  const mla_rotary* index_rotary;  ///< made with indexer = 1
  /// 64-byte aligned. A layer with an indexer or mla_select writes it, later calls of the step read it: MLA_ERROR_BATCH
  /// when they find no choice of this step there
  void* selection;
  size_t selection_bytes;  ///< at least the plan's
  mla_profile* profile;    ///< NULL: not timed
  // Of mla_forward with a plan whose options say tensor_parallel above 1; not looked at otherwise.
  mla_communicator* ranks;  ///< of as many ranks
  double rank_seconds;      ///< that a sum waits for the others, at most; 0: 60
  /// On a GPU: this stream's, holding this plan (mla_staged_step_stage). On the CPU NULL, or this stream's.
  const mla_staged_step* staged;
} mla_layer_args;

/// out = W_O attention(rmsnorm, projections, rope of hidden). hidden and out [Token, Hidden], f32 or bf16 or what
/// the plan's activation_dtype says, at least the plan's tokens; rows past those are neither read nor written. Appends
/// the step's rows to the cache. MLA_ERROR_UNSUPPORTED when the plan was made for the attention form alone or a
/// quantised output.
MLA_API mla_status mla_forward(mla_stream* stream, const mla_layer_args* args, const DLTensor* hidden,
                               const DLTensor* out);

/// The caller's own choice of keys into args->selection: positions int32 [Token, Topk], dense in Topk, counted from
/// each token's request's start, unused entries negative.
MLA_API mla_status mla_select(mla_stream* stream, const mla_layer_args* args, const DLTensor* positions);

/// q [Token, Head, QueryKey] = [nope | rope] rotated, kv_c [Token, Latent] normed, k_pe [Token, Rope] rotated, all of
/// the plan's activations dtype; out [Token, Head, Value], f32, bf16 or f16. The last dimensions are dense.
/// Appends [kv_c | k_pe] first, with MLA_CACHE_USE_APPEND; with MLA_CACHE_USE_READ both are looked at where the plan
/// has requests on the expanded path alone, not by MLA_SPLIT_BATCH_INVARIANT, and may otherwise be NULL. Of a dummy
/// step all three may be.
MLA_API mla_status mla_attend(mla_stream* stream, const mla_layer_args* args, const DLTensor* q, const DLTensor* kv_c,
                              const DLTensor* k_pe, const DLTensor* out);
/// The same with an output quantised as it is finished. out->spec is of the format that the plan was made for; its
/// scale or global_scale is this layer's.
MLA_API mla_status mla_attend_quantized(mla_stream* stream, const mla_layer_args* args, const DLTensor* q,
                                        const DLTensor* kv_c, const DLTensor* k_pe, const mla_quantized* out);

#ifdef __cplusplus
}
#endif

#endif  // MLA_C_LAYER_H
