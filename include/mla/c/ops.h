// The ops that a layer is made of, one function each: mla_<op>(stream, args). An op checks its whole contract first, so
// a call that fails has changed nothing. Tensors lie on the stream's device; lists (`const int32_t*`, items, floats) on
// the host. Tensors and lists said to be optional may be NULL, lists then with a count of 0.
#ifndef MLA_C_OPS_H
#define MLA_C_OPS_H

#include "mla/c/base.h"
#include "mla/c/cache.h"
#include "mla/c/device.h"
#include "mla/c/model.h"
#include "mla/c/quant.h"
#include "mla/c/weights.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- Units of work: plain data, read as they lie.

/// Cached positions [start, start + count) of a request, placed at flat rows [row, row + count).
typedef struct mla_gather_piece {
  int32_t request, start, count, row;
} mla_gather_piece;

/// Query rows [q_begin, q_begin + q_count) over key rows [k_begin, k_begin + k_count): query i sees keys j <= i +
/// visible.
typedef struct mla_expanded_item {
  int32_t q_begin, q_count, k_begin, k_count;
  int32_t visible;     ///< 0: causal over equal-length queries and keys; INT32_MAX / 2: all keys
  uint8_t last;        ///< 1: the rows' last part, quantised where the call quantises; else 0
  uint8_t masked;      ///< 1: rows see, of those keys, the ones that the call's mask names alone; else 0
  uint8_t padding[2];  ///< not read
  int32_t mask_begin;  ///< masked: column of the first key in the mask
} mla_expanded_item;

/// Query rows of a request over its cached positions [kv_begin, kv_end): query i sees positions j <= visible + i.
typedef struct mla_latent_item {
  int32_t request;  ///< row of the block table
  int32_t q_begin, q_count, kv_begin, kv_end, visible;
  int32_t partial;  ///< first partial row to write; -1: straight to the output rows
} mla_latent_item;

/// The same in the sparse indexer. Scores lie at rows [row, row + q_count), column 0 is position kv_begin + first.
typedef struct mla_index_item {
  int32_t request, q_begin, q_count, kv_begin, kv_end, visible, row;
} mla_index_item;

/// Query rows [q_begin, q_begin + q_count), each over keys [k_begin, k_end) of its own list of slots.
typedef struct mla_sparse_item {
  int32_t q_begin, q_count, k_begin, k_end;
  int32_t partial;  ///< first partial row to write; -1: straight to the output rows
} mla_sparse_item;

/// Split s of query row i lies at partial + s * rows + i; joined into output row `row` + i.
typedef struct mla_split_rows {
  int32_t row, rows, partial, splits;
} mla_split_rows;

typedef struct mla_page_copy {
  int32_t from, to;
} mla_page_copy;

/// Pages of each request in order: [requests, pages], rows `stride` entries apart (0: pages).
typedef struct mla_block_table {
  const int32_t* data;
  int64_t requests, pages, stride;
} mla_block_table;

// ---- Working memory.

/// Largest dimensions that ops with `scratch` will be called with; 0 for those that none has.
typedef struct mla_scratch_shape {
  size_t struct_size;
  int64_t heads, latent, rope, nope, value, hidden, query_latent, index_heads, index_dim;
  int64_t topk;
} mla_scratch_shape;
/// Bytes of scratch, 64-byte aligned on the stream's device, that serve every op at these dimensions. The inputs of
/// mla_project's weights count as hidden.
MLA_API mla_status mla_scratch_bytes(const mla_stream* stream, const mla_scratch_shape* shape, size_t* bytes);

// ---- Rows.

/// RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, each row by itself, in f32.
typedef struct mla_norm_args {
  size_t struct_size;
  const DLTensor* x;       ///< [Token, In], rows, In dense
  const DLTensor* weight;  ///< [In], f32, dense
  double eps;              ///< such as 1e-6; finite, from 0 on
  const DLTensor* y;       ///< as x, or x itself
} mla_norm_args;
MLA_API mla_status mla_norm(mla_stream* stream, const mla_norm_args* args);

/// LayerNorm: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, each row by itself.
typedef struct mla_layer_norm_args {
  size_t struct_size;
  const DLTensor* x;              ///< [Token, In], f32, In dense
  const DLTensor *weight, *bias;  ///< [In], f32, dense
  double eps;                     ///< finite, from 0 on
  const DLTensor* y;              ///< as x, or x itself
} mla_layer_norm_args;
MLA_API mla_status mla_layer_norm(mla_stream* stream, const mla_layer_norm_args* args);

/// Rotates queries and the shared key in place. positions: one a token, each below the table's.
typedef struct mla_rope_args {
  size_t struct_size;
  const DLTensor* q;  ///< optional: [Token, Head, Rope], rows, Rope dense
  const DLTensor* k;  ///< optional: [Token, Rope], rows, Rope dense
  const int32_t* positions;
  int64_t positions_count;
  const mla_rotary* table;
} mla_rope_args;
MLA_API mla_status mla_rope(mla_stream* stream, const mla_rope_args* args);

/// Copies rows to another dtype and layout: y = x / scale.
typedef struct mla_cast_args {
  size_t struct_size;
  const DLTensor* x;      ///< [Token, Head, In], rows, In dense
  const int32_t* x_rows;  ///< optional: row of x for each row of y
  int64_t x_rows_count;
  const DLTensor* y;  ///< [Token, Head, In], f32, bf16, f16 or fp8 (saturating), In dense; its rows are written
  float scale;        ///< above 0
  float reserved;
} mla_cast_args;
MLA_API mla_status mla_cast(mla_stream* stream, const mla_cast_args* args);

/// y = x W^T, one matrix or one a head. bf16 weights take x rounded to bf16; sums are f32.
typedef struct mla_project_args {
  size_t struct_size;
  const DLTensor* x;      ///< [Token, Head, In], f32 or bf16, In dense; Head = the weights' matrices
  const int32_t* x_rows;  ///< optional: rows of x to read, in order
  int64_t x_rows_count;
  const mla_linear* weights;
  const DLTensor* y;      ///< [Token, Head, Out], f32 or bf16, Out dense; NULL with `quantized`
  const int32_t* y_rows;  ///< optional: rows of y to write; below 0: nowhere
  int64_t y_rows_count;
  int64_t rows;                    ///< how many; with lists: their count
  const mla_quantized* quantized;  ///< optional: takes y's place, one head after another in a row
  void* scratch;
  size_t scratch_bytes;
  int32_t batch_invariant;  ///< 1: a row's bits do not depend on the other rows
  int32_t activations;      ///< MLA_ACTIVATIONS_..., fp8_128 of fp8 weights alone; default plain
} mla_project_args;
MLA_API mla_status mla_project(mla_stream* stream, const mla_project_args* args);

/// Rows to a quantised output, and zeros into its scales' padding.
typedef struct mla_quantize_args {
  size_t struct_size;
  const DLTensor* x;  ///< [Token, HeadValue], f32 or bf16, HeadValue dense
  const mla_quantized* y;
} mla_quantize_args;
MLA_API mla_status mla_quantize(mla_stream* stream, const mla_quantize_args* args);

/// Zeros into the scales' padding alone, where `rows` rows are written by another op.
typedef struct mla_quantize_padding_args {
  size_t struct_size;
  const mla_quantized* y;
  int64_t rows;
} mla_quantize_padding_args;
MLA_API mla_status mla_quantize_padding(mla_stream* stream, const mla_quantize_padding_args* args);

/// Indexer queries and keys times the orthonormal Walsh-Hadamard matrix, in place.
typedef struct mla_hadamard_args {
  size_t struct_size;
  const DLTensor* q;  ///< optional: [Token, IndexHead, IndexDim], f32, IndexDim dense and a power of two
  const DLTensor* k;  ///< optional: [Token, IndexDim], likewise
} mla_hadamard_args;
MLA_API mla_status mla_hadamard(mla_stream* stream, const mla_hadamard_args* args);

// ---- The cache.

/// New tokens' rows into the cache, one for each slot; a negative slot writes nothing. No two tokens may have one slot.
typedef struct mla_append_args {
  size_t struct_size;
  const DLTensor* kv_c;  ///< [Token, Latent], f32 or bf16, on the CPU f16 too; Latent dense; at least as many rows as
                         ///< slots
  const DLTensor* k_pe;  ///< [Token, Rope], dtype of kv_c, Rope dense, rotated
  const int32_t* slots;
  int64_t slots_count;
  mla_cache* cache;
} mla_append_args;
MLA_API mla_status mla_append(mla_stream* stream, const mla_append_args* args);

/// rope and append in one pass. Rows with a negative slot are rotated all the same; no two others may have one slot.
typedef struct mla_rope_append_args {
  size_t struct_size;
  const DLTensor* q_pe;      ///< [Token, Head, Rope], rows, Rope dense; rotated in place
  const DLTensor* kv_c;      ///< [Token, Latent], dtype of q_pe, Latent dense
  const DLTensor* k_pe;      ///< [Token, Rope], dtype of q_pe, Rope dense; rotated in place
  const int32_t* positions;  ///< one for each slot
  int64_t positions_count;
  const mla_rotary* table;
  const int32_t* slots;
  int64_t slots_count;
  mla_cache* cache;
} mla_rope_append_args;
MLA_API mla_status mla_rope_append(mla_stream* stream, const mla_rope_append_args* args);

/// mla_norm of kv_c in place, then mla_rope_append, in one pass. Rows with a negative slot are normed and rotated all
/// the same; no two others may have one slot.
typedef struct mla_norm_rope_append_args {
  size_t struct_size;
  const DLTensor* q_pe;      ///< [Token, Head, Rope], rows, Rope dense; rotated in place
  const DLTensor* kv_c;      ///< [Token, Latent], dtype of q_pe, Latent dense; normed in place
  const DLTensor* k_pe;      ///< [Token, Rope], dtype of q_pe, Rope dense; rotated in place
  const DLTensor* weight;    ///< [Latent], f32, dense
  double eps;                ///< such as 1e-6; finite, from 0 on
  const int32_t* positions;  ///< one for each slot
  int64_t positions_count;
  const mla_rotary* table;
  const int32_t* slots;
  int64_t slots_count;
  mla_cache* cache;
} mla_norm_rope_append_args;
MLA_API mla_status mla_norm_rope_append(mla_stream* stream, const mla_norm_rope_append_args* args);

/// Whole pages within a cache (copy on write): of latent rows, or of index keys. Give one of the two caches. Pages are
/// copied in no order: no page may be written twice, or written and read.
typedef struct mla_copy_pages_args {
  size_t struct_size;
  mla_cache* cache;
  mla_index_cache* index_cache;
  const mla_page_copy* copies;
  int64_t copies_count;
} mla_copy_pages_args;
MLA_API mla_status mla_copy_pages(mla_stream* stream, const mla_copy_pages_args* args);

/// Dequantises runs of cached tokens into flat rows. Any start.
typedef struct mla_gather_args {
  size_t struct_size;
  const mla_cache* cache;
  mla_block_table block_table;
  const mla_gather_piece* pieces;
  int64_t pieces_count;
  const DLTensor* kv_c;  ///< [Key, Latent], f32, bf16 or f16, Latent dense
  const DLTensor* k_pe;  ///< [Key, Rope], dtype of kv_c, Rope dense
} mla_gather_args;
MLA_API mla_status mla_gather(mla_stream* stream, const mla_gather_args* args);

// ---- Attention.

/// Multi-head attention over flat keys and values. out = softmax(scale * q . [k_nope | k_pe]) v, lse in nats; a row
/// that sees nothing: 0 and -inf.
typedef struct mla_attend_expanded_args {
  size_t struct_size;
  const DLTensor* q;       ///< [Token, Head, QueryKey] = [nope | rope], rows, QueryKey dense
  const DLTensor* k_nope;  ///< [Key, Head, Nope], f32 or bf16, Nope dense
  const DLTensor* k_pe;    ///< [Key, Rope], dtype of k_nope, Rope dense; Rope may be 0
  const DLTensor* v;       ///< [Key, Head, Value], dtype of k_nope, Value dense
  const mla_expanded_item* items;
  int64_t items_count;
  float scale;
  int32_t accumulate;              ///< 1: the result is merged into what out and lse hold
  const DLTensor* out;             ///< [Token, Head, Value], rows, Value dense
  const DLTensor* lse;             ///< [Token, Head], f32
  const mla_quantized* quantized;  ///< optional: where rows of items that are `last` go instead of out
  void* scratch;
  size_t scratch_bytes;
  /// Optional, of masked items: int32 [Token, Word], Word dense, each 32 bits. Row t of q sees an item's key j where
  /// bit c % 32 of word (t, c / 32) is set, c = mask_begin + j. A struct that ends before this field had shorter items
  /// and is refused.
  const DLTensor* mask;
} mla_attend_expanded_args;
MLA_API mla_status mla_attend_expanded(mla_stream* stream, const mla_attend_expanded_args* args);

/// Multi-query attention of latent queries over the paged cache: keys are dequantised rows, values their first Value
/// elements.
typedef struct mla_attend_latent_args {
  size_t struct_size;
  const DLTensor* q;  ///< [Token, Head, Entry], f32, bf16 or fp8, Entry dense
  float q_scale;      ///< of fp8 queries
  float scale;
  const mla_cache* cache;
  mla_block_table block_table;
  const mla_latent_item* items;
  int64_t items_count;
  const DLTensor* out;          ///< [Token, Head, Value], rows, Value dense
  const DLTensor* lse;          ///< [Token, Head], f32
  const DLTensor* partial_out;  ///< [Partial, Head, Value], f32, Value dense; where an item has partial >= 0
  const DLTensor* partial_lse;  ///< [Partial, Head], f32; likewise
  void* scratch;
  size_t scratch_bytes;
  int32_t batch_invariant;
  int32_t reserved;
} mla_attend_latent_args;
MLA_API mla_status mla_attend_latent(mla_stream* stream, const mla_attend_latent_args* args);

/// A cache and what is selected from it.
typedef struct mla_sparse_source {
  const mla_cache* cache;
  const DLTensor* slots;   ///< int32 [Token, Topk], Topk dense: page * page_size + offset, others are skipped
  const int32_t* lengths;  ///< optional: slots that count in each row
  int64_t lengths_count;
} mla_sparse_source;

/// Multi-query attention of latent queries over the cached rows that each has selected. A sink is one more logit with
/// no value behind it.
typedef struct mla_attend_sparse_args {
  size_t struct_size;
  const DLTensor* q;  ///< [Token, Head, Entry], f32, bf16 or fp8, Entry dense
  float q_scale;      ///< of fp8 queries
  float scale;
  const mla_sparse_source* sources;  ///< 1 to 8, joined in one softmax
  int64_t sources_count;
  const mla_sparse_item* items;  ///< key ranges count the sources' Topk, one after another
  int64_t items_count;
  const float* sinks;  ///< optional: [heads]
  int64_t sinks_count;
  const DLTensor* out;          ///< [Token, Head, Value], rows, Value dense
  const DLTensor* lse;          ///< [Token, Head], f32
  const DLTensor* max_logits;   ///< optional: [Token, Head], f32
  const DLTensor* partial_out;  ///< [Partial, Head, Value], f32, Value dense; where an item has partial >= 0
  const DLTensor* partial_lse;  ///< [Partial, Head], f32; likewise
  const DLTensor* partial_max;  ///< optional: [Partial, Head], f32
  void* scratch;
  size_t scratch_bytes;
  int32_t part_keys;  ///< 0: an item's keys are one softmax; above: parts of so many keys, joined in order
  int32_t reserved;
} mla_attend_sparse_args;
MLA_API mla_status mla_attend_sparse(mla_stream* stream, const mla_attend_sparse_args* args);

/// out, lse <- merge((out, lse), (other, other_lse)), partial softmaxes with lse in nats.
typedef struct mla_merge_args {
  size_t struct_size;
  const DLTensor* out;        ///< [Token, Head, Value], f32, Value dense
  const DLTensor* lse;        ///< [Token, Head], f32
  const DLTensor* other;      ///< as out
  const DLTensor* other_lse;  ///< as lse
  const int32_t* rows;        ///< optional: row of out for each row of other, distinct
  int64_t rows_count;
} mla_merge_args;
MLA_API mla_status mla_merge(mla_stream* stream, const mla_merge_args* args);

/// Joins split-KV partials in the order of their splits.
typedef struct mla_merge_splits_args {
  size_t struct_size;
  const DLTensor* partial_out;  ///< [Partial, Head, Value], f32, Value dense
  const DLTensor* partial_lse;  ///< [Partial, Head], f32
  const mla_split_rows* items;
  int64_t items_count;
  const DLTensor* out;  ///< [Token, Head, Value], f32, bf16 or f16, Value dense
  const DLTensor* lse;  ///< [Token, Head], f32
} mla_merge_splits_args;
MLA_API mla_status mla_merge_splits(mla_stream* stream, const mla_merge_splits_args* args);

/// The same for sparse attention, with its sinks and largest logits.
typedef struct mla_merge_sparse_args {
  size_t struct_size;
  const DLTensor* partial_out;  ///< [Partial, Head, Value], f32, Value dense
  const DLTensor* partial_lse;  ///< [Partial, Head], f32
  const DLTensor* partial_max;  ///< [Partial, Head], f32; with max_logits
  const mla_split_rows* items;
  int64_t items_count;
  const float* sinks;  ///< optional: [heads]
  int64_t sinks_count;
  const DLTensor* out;         ///< [Token, Head, Value], f32 or bf16, Value dense
  const DLTensor* lse;         ///< [Token, Head], f32
  const DLTensor* max_logits;  ///< optional: [Token, Head], f32
} mla_merge_sparse_args;
MLA_API mla_status mla_merge_sparse(mla_stream* stream, const mla_merge_sparse_args* args);

// ---- The sparse indexer.

/// New tokens' indexer keys into the index cache. No two tokens may have one slot.
typedef struct mla_index_append_args {
  size_t struct_size;
  const DLTensor* keys;  ///< [Token, IndexDim], f32, IndexDim dense; at least as many rows as slots
  const int32_t* slots;
  int64_t slots_count;
  mla_index_cache* cache;
} mla_index_append_args;
MLA_API mla_status mla_index_append(mla_stream* stream, const mla_index_append_args* args);

/// Runs of cached indexer keys into flat rows.
typedef struct mla_index_gather_args {
  size_t struct_size;
  const mla_index_cache* cache;
  mla_block_table block_table;
  const mla_gather_piece* pieces;
  int64_t pieces_count;
  const DLTensor* keys;    ///< [Key, IndexDim], f32, bf16, or fp8 (the stored codes), IndexDim dense
  const DLTensor* scales;  ///< [Key], f32, dense; with fp8 keys
} mla_index_gather_args;
MLA_API mla_status mla_index_gather(mla_stream* stream, const mla_index_gather_args* args);

/// Indexer queries to fp8, their scales folded into the weights of the heads.
typedef struct mla_index_query_args {
  size_t struct_size;
  const DLTensor* q;               ///< [Token, IndexHead, IndexDim], f32, IndexDim dense
  const DLTensor* weights;         ///< [Token, IndexHead], f32
  const DLTensor* codes;           ///< fp8 [Token, IndexHead, IndexDim], IndexDim dense
  const DLTensor* scaled_weights;  ///< [Token, IndexHead], f32; may be weights
} mla_index_query_args;
MLA_API mla_status mla_index_query(mla_stream* stream, const mla_index_query_args* args);

/// Scores of cached positions: the sum over heads of scale * weight * relu(q . key).
typedef struct mla_index_score_args {
  size_t struct_size;
  const DLTensor* q;        ///< [Token, IndexHead, IndexDim], f32, bf16 or fp8, IndexDim dense
  const DLTensor* weights;  ///< [Token, IndexHead], f32
  const mla_index_cache* cache;
  mla_block_table block_table;
  const mla_index_item* items;  ///< their rows ascending and disjoint
  int64_t items_count;
  int64_t first;           ///< column 0 is position kv_begin + first of every item
  const DLTensor* scores;  ///< [Token, Key], f32, Key dense
  void* scratch;
  size_t scratch_bytes;
  float scale;
  float reserved;
  int32_t arithmetic;  ///< MLA_INDEX_PRODUCTS_...; default exact
  int32_t reserved2;
} mla_index_score_args;
MLA_API mla_status mla_index_score(mla_stream* stream, const mla_index_score_args* args);

/// The best topk of the positions that each row sees, fed window by window. state is memory of the caller's on the
/// stream's device, rows * mla_topk_state_bytes(topk) bytes, 64-byte aligned, the library's own between calls.
MLA_API mla_status mla_topk_state_bytes(int64_t topk, size_t* row_bytes);
typedef struct mla_select_topk_args {
  size_t struct_size;
  const DLTensor* scores;       ///< [Token, Key], f32, Key dense
  const mla_index_item* items;  ///< their rows ascending and disjoint
  int64_t items_count;
  int64_t first;  ///< column 0 is position kv_begin + first of every item
  const DLTensor*
      positions;  ///< optional: int32 [Token, Key], Key dense: position of each column, negative ones skipped
  int64_t topk;   ///< 1 to 8192
  void* state;
  size_t state_bytes;
  /// A GPU's; optional on the CPU, whose threads share long rows with what mla_scratch_bytes says for topk.
  void* scratch;
  size_t scratch_bytes;
  int32_t begin;  ///< 1: these rows' selections begin here
  int32_t reserved;
  /// Optional: int32 [Token, Topk], Topk dense. Of rows whose last window this is: what mla_finish_topk would write.
  const DLTensor* indices;
} mla_select_topk_args;
MLA_API mla_status mla_select_topk(mla_stream* stream, const mla_select_topk_args* args);

/// Ascending positions, then -1: row q_begin + i from state row `row` + i. The state is spent afterwards.
typedef struct mla_finish_topk_args {
  size_t struct_size;
  int64_t topk;
  void* state;
  size_t state_bytes;
  const mla_index_item* items;
  int64_t items_count;
  const DLTensor* indices;  ///< int32 [Token, Topk], Topk dense and as wide as topk
  const DLTensor* scores;   ///< optional: [Token, Topk], f32, Topk dense
} mla_finish_topk_args;
MLA_API mla_status mla_finish_topk(mla_stream* stream, const mla_finish_topk_args* args);

/// All that a row sees, where it fits: no scores needed.
typedef struct mla_fill_topk_args {
  size_t struct_size;
  const mla_index_item* items;
  int64_t items_count;
  const DLTensor* indices;  ///< int32 [Token, Topk], Topk dense
} mla_fill_topk_args;
MLA_API mla_status mla_fill_topk(mla_stream* stream, const mla_fill_topk_args* args);

/// Positions to cache slots; -1 for an unused entry, and for one whose page or position does not exist.
typedef struct mla_map_to_slots_args {
  size_t struct_size;
  const DLTensor* positions;  ///< int32 [Token, Topk], Topk dense
  const int32_t* requests;    ///< of each row to map
  int64_t requests_count;
  mla_block_table block_table;
  int64_t page_size, pages;  ///< of the cache
  const int32_t* lengths;    ///< optional: tokens that each request has
  int64_t lengths_count;
  const DLTensor* slots;  ///< as positions, or positions itself
} mla_map_to_slots_args;
MLA_API mla_status mla_map_to_slots(mla_stream* stream, const mla_map_to_slots_args* args);

/// Positions to rows of a workspace where whole requests lie gathered; -1 for one outside its request.
typedef struct mla_map_to_workspace_args {
  size_t struct_size;
  const DLTensor* positions;  ///< int32 [Token, Topk], Topk dense
  const int32_t* requests;    ///< of each row to map
  int64_t requests_count;
  const int32_t *starts, *counts;  ///< first row and number of rows of each request
  int64_t starts_count, counts_count;
  const DLTensor* rows;  ///< as positions, or positions itself
} mla_map_to_workspace_args;
MLA_API mla_status mla_map_to_workspace(mla_stream* stream, const mla_map_to_workspace_args* args);

/// Row r of picked is row rows[r] of positions.
typedef struct mla_pick_rows_args {
  size_t struct_size;
  const DLTensor* positions;  ///< int32 [Token, Topk], Topk dense
  const int32_t* rows;
  int64_t rows_count;
  const DLTensor* picked;  ///< as positions, apart from it
} mla_pick_rows_args;
MLA_API mla_status mla_pick_rows(mla_stream* stream, const mla_pick_rows_args* args);

/// Positions to masks of them for mla_attend_expanded: bit t % 32 of word t / 32 is set for each position t of a row,
/// all others are cleared. Positions below 0 or past the words are left out.
typedef struct mla_map_to_mask_args {
  size_t struct_size;
  const DLTensor* positions;  ///< int32 [Token, Topk], Topk dense
  const int32_t* rows;        ///< of each row of positions its row of mask, none twice; below 0: none
  int64_t rows_count;
  const DLTensor* mask;  ///< int32 [Token, Word], Word dense; rows that are not named are left alone
} mla_map_to_mask_args;
MLA_API mla_status mla_map_to_mask(mla_stream* stream, const mla_map_to_mask_args* args);

#ifdef __cplusplus
}
#endif

#endif  // MLA_C_OPS_H
