// The steps of making a plan, in the order they run; each fills its part.
#pragma once

#include "mla/plan.hpp"

namespace mla::planning {

/// Model, cache, options and device, checked, with what follows from them alone.
Plan begin_plan(const ModelConfig& model, const CacheSpec& cache, const DeviceInfo& device, const PlanOptions& options);

constexpr int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }
constexpr int64_t round_up(int64_t x, int64_t to) { return ceil_div(x, to) * to; }

/// Ranges of keys are multiples of this, so that kernels' blocks of positions start alike.
constexpr int64_t kGrain = 64;

/// What attention by masks takes against attention that sees all keys, with what makes the masks: measured on an H200.
constexpr double kMasking = 1.1;

/// What fp8 queries are held in: codes, or, for kernels of GPUs that take 16-bit queries, what the codes stand for.
inline Dtype query_codes(const Plan& plan) {
  const bool codes = plan.device.device.kind == DeviceKind::cpu ||
                     (plan.options.decode == DecodeOperands::fp8 && plan.cache.page_size % 2 == 0);
  return codes ? Dtype::fp8_e4m3 : Dtype::bf16;
}

/// Of e4m3 keys of the expanded path: they begin at multiples of these rows, for their values lie with rows innermost
/// and GPUs copy them from addresses of 16 bytes (ops::AttendExpandedArgs::kTurnedKeys).
constexpr int64_t kCodeRows = 16;
/// Rows whose products lie in the workspace at once on their way to such codes, where they do.
constexpr int64_t kProductRows = 1024;
/// Where keys of the expanded path begin: at multiples of these rows.
inline int64_t key_grain(const Plan& plan) { return plan.prefills_codes() ? kCodeRows : 1; }

/// May a plan have several lanes? On a GPU a decode step is a chain of short kernels, each of which leaves most of it
/// idle.
inline bool may_fork(const Plan& plan) {
  return plan.device.device.kind == DeviceKind::cuda && plan.serves_block() && !plan.options.dummy;
}
/// Beyond, kernels fill a GPU by themselves.
constexpr int64_t kForkedTokens = 256;
inline bool forks(const Plan& plan) { return may_fork(plan) && plan.tokens <= kForkedTokens; }

inline bool invariant(const Plan& plan) { return plan.options.split == SplitPolicy::batch_invariant; }
/// Whether a token's bits must not follow from what of its request came with it: there is a cache where the rest may
/// have been before.
inline bool ignores_cuts(const Plan& plan) { return invariant(plan) && plan.options.cache_use != CacheUse::none; }

/// Keys of a range when `total` of them are to keep `units` workers busy: never so few that what a range pays for its
/// queries and outputs tells, `least` of them where there are few.
int64_t range_length(int64_t total, int64_t units, int64_t least);
/// The least of a plan's device and operands.
int64_t split_keys(const Plan& plan);
/// Of a GPU: tokens that an item over so many positions has at most.
int64_t item_tokens(const Plan& plan, int64_t positions);
/// No number below 0 or past 32 bits, and no more tokens than requests have: ShapeError.
StepMaxima checked(const StepMaxima& maxima);
/// BatchError for a batch past them.
void require_within(const StepMaxima& maxima, const Batch& batch);
/// Whether a request with new tokens and a sequence so long takes the sparse path.
bool selects(const Plan& plan, int64_t seq_len);
/// The batch's lists and the plan's as long as the maxima's, sparse group and tiles as many.
void pad_to_maxima(Plan& plan, const Batch& batch);
/// The rows' schedule, of a split cache over the rank's own keys; in tiles of maxima where there are any.
IndexSchedule schedule_index(const Plan& plan, std::span<const RequestPlan> requests);
/// Of so many rows over sequences up to so long: tiles, and candidates of a member.
IndexTiles index_tiles_of(const Plan& plan, int64_t rows, int64_t longest);
int64_t index_candidates(const Plan& plan, int64_t longest);
/// Of a split cache: the tile's rows over so many candidates of each member.
void join_tile(const Plan& plan, int64_t candidates, IndexTile& tile);
/// Heads that attention over a cache has: of a split one, those of all members.
int64_t attended_heads(const Plan& plan);

/// Of a split cache, what a request's tokens [first, first + count) see of the rank's own: f(begin, count, sees, held)
/// for runs of them, the first of which sees `sees` tokens; those that the rank holds itself see one more each.
template <class F>
void each_held_run(const ContextParallel& c, int64_t first, int64_t count, F&& f) {
  for (int64_t i = 0; i < count;) {
    const bool held = c.sharding.owner(first + i) == c.member();
    int64_t run = 1;
    while (i + run < count && (c.sharding.owner(first + i + run) == c.member()) == held) ++run;
    f(i, run, c.sharding.length(c.member(), first + i + 1), held);
    i += run;
  }
}
/// What attention over the cache is at most cut into, of any batch within the maxima.
struct MostLatent {
  int64_t items = 0, splits = 0, partial_rows = 0;
};
MostLatent most_latent(const Plan& plan, const StepMaxima& maxima);
/// The same of a launch of sparse rows, up to `rows` of them over `keys` selected ones.
struct MostSparse {
  int64_t items = 0, partial_rows = 0;
};
MostSparse most_sparse(const Plan& plan, int64_t rows, int64_t keys);
/// Rows of the context workspace by options, for sequences and requests up to these.
int64_t context_workspace_rows(const Plan& plan, int64_t longest, int64_t requests);
/// The same for context on the expanded path.
int64_t chunk_rows(const Plan& plan, int64_t longest, int64_t requests);

/// Bytes of the tiles that sparse rows are scored in.
size_t index_tile_bytes(const Plan& plan);
/// Whether a sparse request with so many new tokens attends by masks.
bool masks(const Plan& plan, int64_t query_len, int64_t context);
/// The longest context with which one of up to so many new tokens may; -1: none does.
int64_t most_masked_context(const Plan& plan, int64_t query_len, int64_t seq_len);
/// Whether sequences of sparse requests of up to so many new tokens may be gathered before they are attended.
bool may_upconvert(const Plan& plan, int64_t query_len);
/// Units of work that a launch of sparse rows is cut into.
int64_t sparse_units(const Plan& plan);

/// Of a batch whose block table and slots are not looked at: its query starts and lengths. BatchError.
void validate_lengths(const Batch& batch);
/// By PathPolicy::by_prompt: whether a request's new tokens, one or more, are its prompt's; BatchError if only some
/// are.
bool is_prompt(const Batch& batch, int64_t request);
/// The same of one without a cache: no request has context.
void validate_new(const Batch& batch);
/// A batch of one of the ranks that a cache is split over.
void validate_held(const Batch& batch, int64_t pages, int64_t page_size, const ContextParallel& ranks);
/// latent_items, splits, partial_rows: for requests on the latent path.
void split_kv(Plan& plan);
/// sparse_groups and the rows they stand for: for requests on the sparse path.
void plan_selection(Plan& plan);
/// chunks, context_rows: for cached rows on the expanded path.
void chunk_context(Plan& plan);
/// fused_output, head_rows: where the attention's result is made.
void place_output(Plan& plan);
/// Why a quantised output takes a call of its own; empty when heads are quantised where they are finished.
std::string why_not_fused(const Plan& plan);
/// Of a fused output: whether the latent path's heads are, too.
bool value_up_quantises(const Plan& plan);
/// Rows of what a step keeps in its workspace: of a plan, or the most of any.
struct WorkspaceRows {
  int64_t tokens = 0;
  int64_t latent = 0, partial = 0;                ///< compact rows, sparse ones among them; of splits
  int64_t expanded = 0, context = 0;              ///< new tokens' keys; the largest chunk's
  int64_t heads = 0;                              ///< finished heads
  int64_t sparse = 0, indexed = 0, gathered = 0;  ///< selecting; of them those scored here; the largest group's
  IndexTiles tiles;
  int64_t candidates = 0;
  int64_t mask_words = 0;
  Dtype head_dtype = Dtype::f32;
  bool shares_context = false;
};
WorkspaceRows workspace_rows(const Plan& plan);
/// regions, workspace_bytes, selection_bytes.
void lay_out_workspace(Plan& plan, const WorkspaceRows& rows);
/// steps, lists.
void append_steps(Plan& plan);

}  // namespace mla::planning
