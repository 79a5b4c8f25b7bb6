// A step as plain data: which path each request takes, context chunks, split-KV, workspace. A pure function of its
// inputs; all policy lives here, and the layer executes it without thinking.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mla/batch.hpp"
#include "mla/cache.hpp"
#include "mla/device.hpp"
#include "mla/index_cache.hpp"
#include "mla/index_plan.hpp"
#include "mla/model.hpp"
#include "mla/parallel.hpp"
#include "mla/plan_digest.hpp"
#include "mla/quant.hpp"
#include "mla/sharding.hpp"
#include "mla/step.hpp"
#include "mla/weights.hpp"
#include "mla/work.hpp"

namespace mla {

/// sparse: the latent form over the keys that the indexer selects.
enum class Path : uint8_t { latent, expanded, sparse };
enum class PathPolicy : uint8_t {
  automatic,  ///< per request, by the cost model; latent under SplitPolicy::batch_invariant
  latent,
  expanded,
  by_length,  ///< latent up to reorder_batch_threshold new tokens, expanded above; latent under batch_invariant
  /// Prompts expanded, tokens behind them latent: a token's own position decides (Batch::prompt_lens), so that
  /// batch_invariant may have it. Of a request a step brings tokens of the one kind or of the other, else BatchError.
  /// Where keys are selected the sparse path is taken, as by any policy.
  by_prompt,
};
enum class SplitPolicy : uint8_t {
  fast,  ///< splits from the whole batch
  /// A token's bits follow from its request's tokens up to it, weights, cache format and options: neither from the
  /// request's neighbours nor from which of its tokens a step brought and which the cache had. Paths do not follow from
  /// lengths (PathPolicy; models that select their keys do so from the first token on), sums are cut at fixed
  /// positions, and the expanded path reads the step's own rows back from the cache. With CacheUse::none prompts come
  /// whole, their rows straight from the call: the bits are others than with a cache.
  batch_invariant,
};
/// How rows attend to what the indexer selected. Requests whose whole sequence fits the
/// indexer's topk are attended densely, without scoring. Under SplitPolicy::batch_invariant they are sparse, too, and
/// all rows are read in place.
enum class SparsePolicy : uint8_t {
  automatic,  ///< prefills by the cost model masked, through a workspace or in place; all rows in place share a launch
  mixed,      ///< every row in one launch, cache rows read in place
  direct,     ///< decodes and prefills in launches of their own, cache rows read in place
  upconvert,  ///< prefills gather their whole sequences into a workspace in the compute dtype, in chunks; decodes in
              ///< place
  dense,      ///< no selection: everything is attended; the index cache is still filled
  masked,  ///< prefills in the expanded form, over all keys of which masks hide those not selected; decodes in place.
           ///< Of the block form, and not for select(): a mask names a position once, and none past the token
};
/// What the expanded path, which prefills take, multiplies.
enum class PrefillOperands : uint8_t {
  compute,  ///< queries, keys and values in PlanOptions::compute
  fp8,      ///< as e4m3 codes, by the layer's LayerWeights::prefill scales; saturating
  fp8_raw,  ///< the same, faster on Hopper: sums are what its tensor cores add, some 14 bits of them; their error grows
            ///< with the keys (docs/numerics.md). Elsewhere as fp8
};
/// What the latent path multiplies where queries are fp8 (PlanOptions::fp8_query).
enum class DecodeOperands : uint8_t {
  compute,  ///< queries and cached rows as they dequantise
  fp8,      ///< on Hopper their codes, with probabilities in e4m3, too (docs/numerics.md): half of the arithmetic.
            ///< Elsewhere, and where pages have an odd number of tokens, as compute
};
/// Dtype of the rows that calls take and give. Rows between ops and operands of products are what they are with native:
/// rows of another dtype are cast on the way in, and results are rounded once, from f32, on the way out.
enum class ActivationDtype : uint8_t {
  native,  ///< hidden states of f32 or bf16, as each call has them; the attention form's inputs of Plan::activations()
  f32,     ///< all are
  bf16,
  f16,
};
/// What ranks that share a cache send each other on the latent and sparse paths.
enum class ContextExchange : uint8_t {
  latents,  ///< latent queries, and what was found for them before W_UV
  heads,    ///< heads' queries before W_UK, and what was found behind W_UV: a third and a quarter of the numbers. Each
            ///< rank multiplies all its group's heads by W_UK and W_UV (LayerTensors::group_kv_up)
};
/// What forward() writes of the hidden rows that ranks' parts are summed to.
enum class HiddenSums : uint8_t {
  all,  ///< all of them, on every rank
  own,  ///< on each rank a range of the step's rows (row_share), for layers around attention that share out the tokens
        ///< (sequence parallelism): half of what is sent
};
/// Which calls a plan serves.
enum class LayerForm : uint8_t {
  block,      ///< forward(), and attend() too, unless its output is quantised
  attention,  ///< attend() and select(): nothing is planned or reserved for projections and the indexer
};
/// What the attention form has to do with the cache.
enum class CacheUse : uint8_t {
  append,  ///< the step's rows are written, then attended to behind those before them
  read,    ///< they are there already: another layer, or another stream that is waited for, has written them
  none,    ///< there is no cache: requests are new, their tokens attend to one another on the expanded path
};
std::string_view to_string(Path p);
std::string_view to_string(PathPolicy p);
std::string_view to_string(SplitPolicy p);
std::string_view to_string(SparsePolicy p);
std::string_view to_string(PrefillOperands p);
std::string_view to_string(DecodeOperands d);
std::string_view to_string(ActivationDtype t);
std::string_view to_string(ContextExchange e);
std::string_view to_string(HiddenSums s);
std::string_view to_string(LayerForm f);
std::string_view to_string(CacheUse u);
PathPolicy parse_path_policy(std::string_view name);
SplitPolicy parse_split_policy(std::string_view name);
SparsePolicy parse_sparse_policy(std::string_view name);
PrefillOperands parse_prefill_operands(std::string_view name);
DecodeOperands parse_decode_operands(std::string_view name);
ActivationDtype parse_activation_dtype(std::string_view name);
ContextExchange parse_context_exchange(std::string_view name);
HiddenSums parse_hidden_sums(std::string_view name);
LayerForm parse_layer_form(std::string_view name);
CacheUse parse_cache_use(std::string_view name);

/// Rates that turn counted work into time: of a core, or of a whole GPU. Only their ratios matter for the path; all
/// ones and no bytes count arithmetic alone.
struct CostModel {
  double latent_flops = 1.0;      ///< attention over the cache
  double expanded_flops = 1.0;    ///< attention over flat keys
  double projection_flops = 1.0;  ///< matrix products
  double bytes = 0.0;             ///< memory traffic, bytes a second; 0: not counted
  double row_element = 4.0;       ///< bytes of an element of rows that one op writes and the next reads
  double plain_elements = 0.0;    ///< elements of plain cache rows brought into a tile, a second; 0: not counted
  double fp8_elements = 0.0;      ///< the same for fp8 formats; 0: not counted
  /// Attention over flat keys goes by tiles of a head and 128 query rows, of which as many run beside each other: fewer
  /// take as long. 0: not counted.
  double expanded_tiles = 0.0;
  /// What a request's context takes on the expanded path beside its work, seconds: its chunks' launches. Of a request
  /// that is alone in its step on that path; others' launches are there.
  double context_seconds = 0.0;
};
/// Rates fitted to measurements on an usual device of the kind: a core with AVX-512 BF16 dot products, an H200.
CostModel default_cost_model(Device device);

/// Tiles of a request's query rows (CostModel::expanded_tiles).
int64_t expanded_tiles(int64_t heads, int64_t new_tokens);
/// Seconds (in the model's units) of one request on a path: new tokens after `context` cached ones. beside: tiles of
/// the step's other requests, which may run on the expanded path beside this one's.
double path_cost(const ModelConfig& model, const CacheSpec& cache, const CostModel& rates, Path path,
                 int64_t new_tokens, int64_t context, int64_t beside = 0);

/// How a sparse request's rows meet their keys.
enum class SparseForm : uint8_t {
  direct,     ///< latent queries over selected cache rows, in place
  upconvert,  ///< the same through a workspace that holds the whole sequence in 16 or 32 bits
  masked,     ///< the expanded form over all keys, those not selected hidden
};
/// Seconds of a sparse request; what all forms have in common, the indexer, is left out.
double sparse_cost(const ModelConfig& model, const CacheSpec& cache, const CostModel& rates, SparseForm form,
                   int64_t new_tokens, int64_t context);

/// A cache whose tokens are split over ranks, which split the heads, too (decode context parallelism). Ranks 0 ..
/// tensor_parallel - 1 make groups of sharding.ranks() that follow one another, each with one whole cache: rank r is
/// member r % sharding.ranks() of its group. The batch's lengths and query starts are the sequences'; its block table
/// has the rank's own pages, its slots are those of the tokens that the member holds, below 0 for the others
/// (CacheSharding::slot).
///
/// On the latent path each rank attends to the tokens that it holds with the queries of all its group's heads, and gets
/// back what the others found for its own. On the expanded path it gets the cached rows of all members, chunk by chunk,
/// and goes on as a rank with the whole cache. PathPolicy::automatic, under SplitPolicy::fast: requests without context
/// take the expanded path, single tokens behind one the latent path, the rest the cheaper one, by the largest rank's
/// heads, PlanOptions::link and PlanOptions::rates; where these are empty by default_cost_model, for what is measured
/// may differ from rank to rank. On the sparse path a rank scores the keys that it holds, all members select the best
/// of what each selected, and attention goes as on the latent path over what was selected; under
/// SparsePolicy::automatic rows are read in place, none by masks. UnsupportedError for CacheUse::none.
struct ContextParallel {
  CacheSharding sharding;      ///< over a group's ranks, which divide tensor_parallel; one rank: the cache is whole
  int rank = 0;                ///< this plan's, of tensor_parallel; with HiddenSums::own of a whole cache, too
  std::vector<int64_t> heads;  ///< of each rank of tensor_parallel; the model's own at [rank]
  /// heads: UnsupportedError with fully absorbed weights; a quantised output then takes a call of its own.
  ContextExchange exchange = ContextExchange::latents;

  bool shared() const { return sharding.ranks() > 1; }
  int member() const { return static_cast<int>(rank % sharding.ranks()); }
  int first() const { return rank - member(); }  ///< rank of the group's member 0
  /// Heads of each member of this rank's group.
  std::span<const int64_t> group_heads() const {
    return std::span(heads).subspan(static_cast<size_t>(first()), static_cast<size_t>(sharding.ranks()));
  }
  /// The most of `tokens` that a rank holds.
  int64_t longest(int64_t tokens) const { return sharding.length(0, tokens); }
};

/// What a rank's messages take, for expected times alone: a call's own time, and bytes a second that a rank sends.
struct LinkRates {
  double seconds = 0, bytes = 0;  ///< bytes 0: unknown, times are then not expected
};

/// The largest step that an engine makes, in any mix: every number bounds the batch's own.
struct StepMaxima {
  int64_t requests = 0;
  int64_t tokens = 0;     ///< new tokens of all requests together; more than requests * query_len are never met
  int64_t query_len = 0;  ///< new tokens of one request
  int64_t seq_len = 0;    ///< cached context and new tokens of one request
  friend bool operator==(const StepMaxima&, const StepMaxima&) = default;
};

struct PlanOptions {
  LayerForm form = LayerForm::block;
  /// Other than append: with form attention alone. none: of the batch query_start_loc and seq_lens alone are looked at;
  /// UnsupportedError for path latent, and for a request that selects its keys (longer than the indexer's topk, unless
  /// sparse is dense).
  CacheUse cache_use = CacheUse::append;
  /// For an engine's dummy runs: calls write zeros, or the codes and scales of zeros, to the rows of the step's tokens,
  /// and do nothing else. Of the batch query_start_loc and seq_lens alone are looked at; caches, selection, tables and
  /// inputs of the calls are not, and may be missing.
  bool dummy = false;
  /// Ranks that split a layer's heads (mla/parallel.hpp), each with a plan of its own: forward() then sums their hidden
  /// rows over LayerContext::ranks. The attention form needs no sum.
  int tensor_parallel = 1;
  /// Of tensor_parallel's ranks, in forward() and attend() alike; by default none.
  ContextParallel context_parallel;
  HiddenSums sums = HiddenSums::all;  ///< own: of context_parallel.rank's rows, whether a cache is split or not
  LinkRates link;                     ///< between the ranks
  PathPolicy path = PathPolicy::automatic;
  /// by_length's longest latent query; of sparse requests, those longer are the prefills that SparsePolicy means. At
  /// least 0.
  int64_t reorder_batch_threshold = 1;
  /// For weights with full absorption (LayerWeights::absorbed()), which serve the latent path alone: automatic then
  /// means latent, and a request that the policy puts on the expanded path is an UnsupportedError.
  bool absorbed = false;
  /// How the weights hold W_UK and W_UV of the latent path (LayerWeights::up()).
  WeightFormat up = WeightFormat::plain;
  /// What products whose weights are held in fp8 take their inputs as. fp8_128 is what engines do with fp8 checkpoints:
  /// inputs lose up to 1/16 of each number, and on Hopper both sides are multiplied as they are. A layer without such
  /// weights refuses it with an UnsupportedError.
  Activations activations = Activations::plain;
  /// Of the calls' rows. Results may be f32, too.
  ActivationDtype activation_dtype = ActivationDtype::native;
  SplitPolicy split = SplitPolicy::fast;
  /// Operands of attention's products: f32, or bf16 (queries, expanded keys and values rounded; sums f32).
  Dtype compute = Dtype::f32;
  /// Of the expanded path. With fully absorbed weights, which do not serve it: UnsupportedError for other than compute.
  PrefillOperands prefill = PrefillOperands::compute;
  /// Latent queries as fp8 e4m3 with a static scale: stored q / q_scale, saturating. 0: each layer's own
  /// (LayerWeights::query_scale); not over a cache that ranks share, where it must be one number for all.
  bool fp8_query = false;
  float q_scale = 1.0f;
  /// UnsupportedError for other than compute without fp8_query, and for a model with an indexer.
  DecodeOperands decode = DecodeOperands::compute;
  /// What the attention form writes; none: f32 heads. Its scale and global_scale are not read: they come with the
  /// output itself, for they differ from layer to layer. The block form has no quantised output.
  OutputSpec output;
  SparsePolicy sparse = SparsePolicy::automatic;
  /// Of the index cache. fp8 also quantises the indexer's queries; otherwise they take the compute dtype.
  IndexCacheFormat index_format = IndexCacheFormat::fp8;
  /// Rotates the indexer's queries and keys before they are stored or scored. One choice for the life of a cache.
  bool index_hadamard = false;
  /// Of scores of fp8 queries and keys; read with index_format fp8 alone.
  IndexArithmetic index_arithmetic = IndexArithmetic::exact;
  /// Rows of the context workspace; 0: clamp(max(8 max_model_len, 4 max_requests page_size), .. 64 Ki, max_requests
  /// page_size ..). batch_invariant cuts every sequence at multiples of 4096 positions, or of these rows where they are
  /// fewer: bits then follow from them.
  int64_t context_rows = 0;
  int64_t max_model_len = 0;       ///< 0: the batch's longest sequence
  int64_t max_requests = 0;        ///< 0: the batch's
  std::optional<CostModel> rates;  ///< for PathPolicy::automatic; empty: the device's
  /// Of a step whose calls are captured once (Graph) and launched for every batch within the maxima, or take the place
  /// of captured ones: plans have the same steps, rows, regions and list lengths whatever the batch, entries that it
  /// does not need do nothing (StepOfMaxima). Requests take the sparse path, all of them, where seq_len passes what the
  /// indexer selects, otherwise the latent path, all of them; sparse rows are attended in place. Plan::tokens is then
  /// the maxima's: calls take inputs and outputs of as many rows, read of those past the batch's tokens what cannot
  /// reach another row, and write none of the outputs'. Of select(), rows of short requests are read, too.
  /// UnsupportedError for path expanded, a cache_use of none, a dummy step, and a quantised output.
  std::optional<StepMaxima> maxima;
};

/// What a plan needs to know of the machine. Never changes results, only workspace.
/// Keys of a split at least where a batch has few: a split pays for its queries and outputs what some 50 keys take.
constexpr int64_t kSplitKeys = 512;

struct DeviceInfo {
  Device device;
  int threads = 1;
  size_t scratch_per_worker = 0;
  /// Keys of a split at least, under SplitPolicy::fast: for bf16 operands, others have kSplitKeys.
  int64_t split_keys = kSplitKeys;
  /// What it was measured to do with operands of f32 and of bf16; empty: default_cost_model of the device.
  std::optional<CostModel> f32_rates = {}, bf16_rates = {};
};
/// Of the device behind a stream, for a model's dimensions.
DeviceInfo device_info(const Stream& stream, const ModelConfig& model);
/// Of a device that need not be there: a plan for it can be looked at. UnsupportedError when this build serves no such
/// device.
DeviceInfo device_info(Device device, int threads, const ModelConfig& model);

struct RequestPlan {
  Path path = Path::latent;
  int32_t q_begin = 0, query_len = 0, context = 0;
  bool masked = false;  ///< of a sparse one: its rows attend on the expanded path, by masks
  bool expands() const { return path == Path::expanded || masked; }
};

/// Cached rows gathered, expanded and attended together: of the context, under batch_invariant the step's own, too.
struct ContextChunk {
  std::vector<GatherPiece> pieces;
  std::vector<ExpandedItem> items;  ///< merged into the tokens' rows
  int64_t rows = 0;
  bool first = false;  ///< of sequences' beginnings: the tokens' rows hold nothing yet, and are written
  // Of a split cache. Members send what they hold of the pieces, one behind another; all of it, member 0's first, is
  // read as a request whose position p lies at sources[p].
  std::vector<GatherPiece> held;    ///< start counts the rank's own tokens of the request
  std::vector<int64_t> held_rows;   ///< of each member
  std::vector<int32_t> sources;     ///< [rows]
  std::vector<GatherPiece> placed;  ///< every row of the chunk to its place
};

/// Sparse attention of a step: the arguments of attend_sparse and merge_sparse that are decided before it runs.
struct SparseWork {
  std::vector<SparseItem> items;
  std::vector<SplitRows> splits;  ///< empty: nothing to merge
  int64_t partial_rows = 0;
  int32_t part_keys = 0;  ///< batch_invariant: keys of a part; 0: an item is one part
};

/// Sparse rows attended in one launch: [begin, begin + count) of the sparse rows.
struct SparseGroup {
  int32_t begin = 0, count = 0;
  SparseWork work;  ///< q_begin counts the group's rows
  // Through a workspace; empty when cache rows are read in place.
  std::vector<GatherPiece> pieces;  ///< whole sequences
  int64_t rows = 0;                 ///< of the workspace; 0: in place
};

/// A named part of the workspace.
struct Region {
  std::string_view name;
  size_t offset = 0, bytes = 0;
};

struct Plan {
  ModelConfig model;
  CacheSpec cache;
  PlanOptions options;
  DeviceInfo device;
  int64_t tokens = 0;        ///< rows of the calls' inputs and outputs
  int64_t batch_tokens = 0;  ///< that are the batch's: all of them, unless options.maxima are there
  std::vector<RequestPlan> requests;
  std::vector<int32_t> positions;  ///< [tokens] position of each token in its sequence; 0 of rows past the batch's

  // With options.maxima: the batch's lists, as long as the maxima's.
  std::vector<int32_t> slots;         ///< [tokens] its slot mapping, then -1
  std::vector<int32_t> lengths;       ///< [maxima.requests] its seq_lens, then 0
  std::vector<int32_t> written_rows;  ///< [tokens] 0, 1, ... of the batch's tokens, then -1
  std::vector<int32_t> written_sums;  ///< [own_rows().count] of HiddenSums::own: the same, of the rank's rows

  // Latent path: compact rows over the tokens of latent requests.
  std::vector<int32_t> latent_tokens;    ///< token of each compact row
  std::vector<LatentItem> latent_items;  ///< q_begin counts compact rows
  std::vector<SplitRows> splits;         ///< row counts compact rows
  std::vector<SplitRows> rank_splits;    ///< what members found of each compact row, member 0's first; of a split cache
  int64_t partial_rows = 0;              ///< that the workspace holds: the most of this path's and any sparse launch's

  // Expanded path: compact key rows over the tokens of expanded requests; queries stay at their token rows. Under
  // batch_invariant with a cache chunks have all keys, and there are no such rows. With e4m3 operands a request's keys
  // begin at a multiple of 16 rows: a token before them is there once more in rows between.
  std::vector<int32_t> expanded_tokens;
  std::vector<ExpandedItem> suffix_items;  ///< causal, over the new tokens
  std::vector<ContextChunk> chunks;
  int64_t context_rows = 0;  ///< rows of the context workspace
  /// Of a split cache: cached rows as members send them, pages of one. As they are stored, for no form has fewer bytes;
  /// in f32 where a stored row is no whole number of 4 bytes. What is read of either is the same.
  CacheSpec sent_rows;

  /// A quantised output: heads are quantised where they are finished, on a GPU those of the expanded path. False when
  /// groups span heads, or nobody takes that path there: all heads are then written to the workspace in f32 and
  /// quantised by one call.
  bool fused_output = false;
  int64_t head_rows = 0;  ///< token rows of f32 heads in the workspace

  // Sparse path: its rows are those of latent_tokens from sparse_begin on, group by group, then those of masked
  // requests.
  int64_t topk = 0;  ///< positions selected for a row; 0: nothing is selected in this step
  int64_t sparse_begin = 0;
  int64_t masked_begin = 0;               ///< sparse rows from here on are masked ones
  int64_t mask_words = 0;                 ///< of a masked row: of as many positions as the longest sequence has
  std::vector<int32_t> sparse_tokens;     ///< token of each sparse row
  std::vector<int32_t> sparse_requests;   ///< request of each sparse row
  std::vector<int32_t> sparse_positions;  ///< position of each sparse row in its sequence
  std::vector<SparseGroup> sparse_groups;
  std::vector<int32_t> gathered_starts, gathered_counts;  ///< [requests]: rows of their group's workspace
  IndexCacheSpec index_cache;    ///< what the layer's index cache must be; of models with an indexer
  IndexSchedule index_schedule;  ///< q_begin of its items counts sparse rows
  size_t selection_bytes = 0;    ///< what layers that share a selection pass on; 0: nothing is selected
  /// Of the sparse rows: their requests, positions, slots and order. A selection's memory holds it once the choice is
  /// made, and is looked at before the choice is used.
  uint64_t selection_stamp = 0;
  /// Of what the messages between ranks follow from: query and sequence lengths, how heads and cache are split, the
  /// paths, chunks and format of a split cache, dtypes, SplitPolicy. The same on all ranks of a step; all 0 with one
  /// rank.
  PlanDigest digest;

  std::vector<Region> regions;
  size_t workspace_bytes = 0;

  std::vector<Step> steps;     ///< of every call that it serves, in order
  std::vector<ListKey> lists;  ///< that they read, each once: what a GPU must have of a step, beside its block table

  /// Of rows between ops: f32 on the CPU, the compute dtype on a GPU.
  Dtype activations() const { return device.device.kind == DeviceKind::cpu ? Dtype::f32 : options.compute; }
  /// Of the attention form's inputs.
  Dtype inputs() const {
    return options.activation_dtype == ActivationDtype::native
               ? activations()
               : static_cast<Dtype>(static_cast<int>(options.activation_dtype) - 1);
  }
  /// Whether attend() casts its inputs, and forward() its hidden states: products take f32 and bf16 as they are.
  bool casts_inputs() const { return !options.dummy && inputs() != activations(); }
  bool casts_hidden() const { return serves_block() && !options.dummy && inputs() == Dtype::f16; }
  /// Of finished heads in the workspace: f32 also where they are quantised, or context is merged into them in parts;
  /// where bits must not follow from neighbours, whatever this batch's need.
  Dtype head_dtype() const {
    return options.output.kind != OutputKind::none || options.split == SplitPolicy::batch_invariant || !chunks.empty()
               ? Dtype::f32
               : activations();
  }
  /// Whether forward() can be called with it: not with a quantised output, which is the attention form's.
  bool serves_block() const { return options.form == LayerForm::block && options.output.kind == OutputKind::none; }
  /// Whether the expanded path multiplies e4m3 codes.
  bool prefills_codes() const { return options.prefill != PrefillOperands::compute; }
  /// Whether any request takes the expanded path.
  bool expands() const { return !suffix_items.empty() || !chunks.empty(); }
  /// Whether attend() looks at kv_c and k_pe.
  bool reads_new_rows() const {
    return !options.dummy && (options.cache_use != CacheUse::read || !expanded_tokens.empty());
  }
  /// Whether each of the ranks on CPUs that split the heads makes a range of what their products with shared weights
  /// give, instead of all of it. Fewer rows than so many a rank cost the reading of the weights, and an exchange more.
  bool divides_rows() const {
    constexpr int64_t kRows = 8;
    return device.device.kind == DeviceKind::cpu && options.tensor_parallel > 1 &&
           tokens >= kRows * options.tensor_parallel;
  }
  /// Whether calls exchange what ranks that share a cache found.
  bool shares_context() const { return options.context_parallel.shared() && !latent_tokens.empty(); }
  /// Whether forward() writes a range of the rows.
  bool sums_own() const { return options.sums == HiddenSums::own && options.tensor_parallel > 1; }
  /// Rows of the calls that forward()'s output has: all, or this rank's.
  RowRange own_rows() const {
    return sums_own() ? row_share(tokens, options.context_parallel.rank, options.tensor_parallel) : RowRange{0, tokens};
  }
  /// Whether ranks that share the cache send each other heads (ContextExchange::heads).
  bool exchanges_heads() const {
    return options.context_parallel.shared() && options.context_parallel.exchange == ContextExchange::heads;
  }
  /// Heads that this rank multiplies by W_UK and W_UV on the latent path: its own, or all its group's.
  int64_t absorbed_heads() const;
  /// Whether calls get cached rows that other ranks hold.
  bool gathers_context() const { return options.context_parallel.shared() && !chunks.empty(); }
  /// Whether calls look at the cache and the batch's block table.
  bool uses_cache() const { return !options.dummy && options.cache_use != CacheUse::none; }
  int64_t sparse_rows() const { return static_cast<int64_t>(sparse_requests.size()); }
  int64_t masked_rows() const { return sparse_rows() - masked_begin; }
  /// Selected positions of each sparse row within a selection's memory, ascending, -1 where a row sees fewer.
  View<int32_t, Token, Topk> selected(std::span<std::byte> selection) const;
  /// The same as rows of the cache or of the workspace, as the row's group reads them.
  View<int32_t, Token, Topk> selected_slots(std::span<std::byte> selection) const;
  static constexpr size_t kStampBytes = 64;  ///< at the end of a selection
  /// Where those rows begin in a selection's memory, bytes.
  size_t slots_offset() const { return selection_bytes > 0 ? (selection_bytes - kStampBytes) / 2 : 0; }

  /// Region by name; Error when there is none.
  const Region& region(std::string_view name) const;
  /// Several lines a person can read: paths, chunks, splits, workspace.
  std::string describe() const;
};

/// Validates the batch and plans it. BatchError, ShapeError or UnsupportedError on anything that does not fit, a batch
/// past options.maxima among it.
/// `pages` is the cache's page count; not looked at without a cache.
Plan plan(const ModelConfig& model, const CacheSpec& cache, int64_t pages, const Batch& batch, const DeviceInfo& device,
          const PlanOptions& options = {});

/// Memory that is enough for every step within the maxima: plan() of such a batch, with the same model, cache, device
/// and options, never asks for more. What engines otherwise measure by a dummy forward pass before they size their
/// caches. Close to the largest plan where that is the maxima's own; paths, splits and chunks that no one batch has
/// together are counted together.
struct StepMemory {
  size_t workspace_bytes = 0, selection_bytes = 0;
};
/// ShapeError for a maximum below 0 or past 32 bits, and where seq_len is below query_len; errors of options as
/// plan()'s.
StepMemory step_memory(const ModelConfig& model, const CacheSpec& cache, const StepMaxima& maxima,
                       const DeviceInfo& device, const PlanOptions& options = {});

/// A step to capture calls with: of options.maxima and no batch. Its item lists are as large as any batch's, so that
/// launches are (what is staged of them is empty items); its batch has a table of room for all, no request and no slot.
/// Stage it (StagedStep::stage), capture the calls, then plan each batch with the same options and restage it. A call
/// made before anything is restaged writes to its workspace and selection alone.
struct StepOfMaxima {
  Plan plan;
  std::vector<int32_t> starts, table;
  Batch batch;  ///< of the two

  StepOfMaxima() = default;
  StepOfMaxima(StepOfMaxima&&) noexcept = default;
  StepOfMaxima& operator=(StepOfMaxima&&) noexcept = default;
};
/// ShapeError without options.maxima; other errors as step_memory()'s.
StepOfMaxima plan_maxima(const ModelConfig& model, const CacheSpec& cache, const DeviceInfo& device,
                         const PlanOptions& options);

/// Context workspace rows by the default rule.
int64_t default_context_rows(int64_t max_model_len, int64_t max_requests, int64_t page_size);

/// Contexts packed greedily into chunks of at most `rows` rows: only a chunk's first request may be a continuation,
/// split points are multiples of page_size, requests without context are skipped. `fixed_rows` > 0: contexts are cut at
/// multiples of it whatever their neighbours are (batch-invariant), and a chunk has pieces that begin at one position.
/// A chunk holds at most one piece of a request. Pieces begin at rows that are multiples of `grain`.
std::vector<std::vector<GatherPiece>> pack_context_chunks(std::span<const int32_t> contexts, int64_t rows,
                                                          int64_t page_size, int64_t fixed_rows = 0, int64_t grain = 1);

/// Query rows of a request over its cached positions: row i sees those up to visible + i, below `length`. Not causal:
/// visible is length - 1.
struct LatentRows {
  int32_t request = 0;  ///< row of the block table
  int32_t q_begin = 0, q_count = 0;
  int64_t visible = 0, length = 0;
};
/// Attention over the cache: the arguments of attend_latent and merge_splits that are decided before it runs.
struct LatentWork {
  std::vector<LatentItem> items;  ///< the longest first
  std::vector<SplitRows> splits;  ///< empty: nothing to merge
  int64_t partial_rows = 0;
};
/// Cuts requests into tiles of rows and ranges of positions that a CPU's threads share evenly, however many there are:
/// results must not depend on it. fast: ranges follow from the whole batch and split_keys (DeviceInfo).
/// batch_invariant: of kInvariantKeys, so that a row's bits follow from the row alone. UnsupportedError for more
/// partial rows than 32 bits number.
LatentWork plan_latent(std::span<const LatentRows> rows, SplitPolicy split, int64_t split_keys = kSplitKeys);

/// Units of work that sparse attention is cut into for a CPU: threads share them evenly, however many there are.
constexpr int64_t kSparseUnits = 64;

/// Cuts `rows` query rows with lists of `keys` slots each (all sources together) into items that keep about `units`
/// workers busy. fast: a row's parts follow from all numbers given. batch_invariant: parts of a fixed length, whether
/// they are attended one by one in one item or each in an item of its own, so that a row's bits depend on `keys` alone;
/// at most about `units` rows' worth of partial rows in either mode. ShapeError for a number below 0, no units, or more
/// partial rows than 32 bits number.
SparseWork plan_sparse(int64_t rows, int64_t keys, int64_t heads, SplitPolicy split, int64_t units = kSparseUnits,
                       int64_t split_keys = kSplitKeys);

/// Requests [begin, end) of a batch.
struct RequestRange {
  int32_t begin = 0, end = 0;
  friend bool operator==(const RequestRange&, const RequestRange&) = default;
};

/// Prefills whose whole sequences are gathered into a workspace of `rows` rows before they are attended sparsely: runs
/// of neighbours that fit it together, greedily. [2, 3, 4, 2] in 5 rows: (0, 2), (2, 3), (3, 4). A selected token may
/// lie anywhere in its sequence, so a sequence is never cut: one longer than the workspace is a ShapeError, and an
/// engine gives the workspace its longest sequence's rows.
std::vector<RequestRange> split_prefill_chunks(std::span<const int32_t> lengths, int64_t rows);

}  // namespace mla
