#include "mla/plan.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "mla/error.hpp"
#include "plan/internal.hpp"

namespace mla {
namespace {

void check_sharing(const ModelConfig& model, const PlanOptions& o) {
  const ContextParallel& c = o.context_parallel;
  const int64_t ranks = c.sharding.ranks();
  if ((ranks > 1 || o.sums == HiddenSums::own) && (c.rank < 0 || c.rank >= o.tensor_parallel))
    throw ShapeError("plan: context_parallel rank is " + std::to_string(c.rank) + ", allowed 0 to " +
                     std::to_string(o.tensor_parallel - 1));
  if (ranks == 1) return;
  const std::string what = "plan: a cache split over " + std::to_string(ranks) + " ranks ";
  if (o.tensor_parallel % ranks != 0)
    throw ShapeError(what + "with tensor_parallel " + std::to_string(o.tensor_parallel) +
                     ", which must be groups of as many");
  if (std::ssize(c.heads) != o.tensor_parallel)
    throw ShapeError("plan: context_parallel heads has " + std::to_string(c.heads.size()) +
                     " entries, tensor_parallel is " + std::to_string(o.tensor_parallel));
  for (size_t r = 0; r < c.heads.size(); ++r)
    if (c.heads[r] < 1 || c.heads[r] > std::numeric_limits<int32_t>::max())
      throw ShapeError("plan: context_parallel heads[" + std::to_string(r) + "] is " + std::to_string(c.heads[r]) +
                       ", at least 1 is needed");
  if (c.heads[static_cast<size_t>(c.rank)] != model.heads)
    throw ShapeError("plan: context_parallel heads[" + std::to_string(c.rank) + "] is " +
                     std::to_string(c.heads[static_cast<size_t>(c.rank)]) + ", this rank's model has " +
                     std::to_string(model.heads));
  if (o.cache_use == CacheUse::none) throw UnsupportedError(what + "with cache_use none: there is no cache to split");
  if (o.absorbed && c.exchange == ContextExchange::heads)
    throw UnsupportedError(what + "that exchange heads, with fully absorbed weights, which have none");
}

void check_options(const ModelConfig& model, const CacheSpec& cache, const DeviceInfo& device, const PlanOptions& o) {
  if (cache.latent != model.latent || cache.rope != model.rope)
    throw ShapeError("plan: cache holds latent " + std::to_string(cache.latent) + " and rope " +
                     std::to_string(cache.rope) + ", the model has " + std::to_string(model.latent) + " and " +
                     std::to_string(model.rope));
  if (cache.value_width() != model.latent)
    throw UnsupportedError("plan: cache format " + std::string(to_string(cache.format)) + " has values of " +
                           std::to_string(cache.value_width()) + ", the layer's W_UV takes the latent's " +
                           std::to_string(model.latent));
  if (o.compute != Dtype::f32 && o.compute != Dtype::bf16)
    throw UnsupportedError("plan: compute dtype is " + std::string(to_string(o.compute)) +
                           "; f32 and bf16 are supported");
  if (o.fp8_query && cache.format != CacheFormat::fp8)
    throw UnsupportedError("plan: fp8 queries need cache format fp8, this one is " +
                           std::string(to_string(cache.format)));
  if (o.fp8_query && (!(o.q_scale >= 0) || !std::isfinite(o.q_scale)))
    throw ShapeError("plan: q_scale is " + std::to_string(o.q_scale) +
                     ", must be finite and above 0, or 0: the layers'");
  if (o.fp8_query && o.q_scale == 0 && o.context_parallel.shared())
    throw UnsupportedError("plan: q_scale is 0, the layers' own; over a cache that ranks share it must be one number");
  if (o.decode != DecodeOperands::compute && (!o.fp8_query || model.indexer))
    throw UnsupportedError("plan: decode " + std::string(to_string(o.decode)) +
                           (model.indexer ? " is of models without an indexer" : " needs fp8 queries (fp8_query)"));
  OutputSpec format = o.output;
  format.scale = format.global_scale = 1;  // not the plan's
  format.validate();
  if (o.absorbed && (o.output.kind != OutputKind::none || o.form != LayerForm::block))
    throw UnsupportedError(
        "plan: " + (o.output.kind != OutputKind::none ? "output " + to_string(o.output) : "form attention") +
        " is the attention form's, fully absorbed weights serve the block form alone");
  if (o.absorbed && o.prefill != PrefillOperands::compute)
    throw UnsupportedError("plan: prefill " + std::string(to_string(o.prefill)) +
                           " is the expanded path's, fully absorbed weights serve the latent path alone");
  if (model.indexer && o.sparse == SparsePolicy::masked) {
    if (o.absorbed)
      throw UnsupportedError(
          "plan: sparse masked attends on the expanded path, fully absorbed weights serve the latent path alone");
    if (o.form == LayerForm::attention)
      throw UnsupportedError(
          "plan: sparse masked with form attention, whose choices are the caller's: masks name a position once and "
          "none past the token");
  }
  if (o.cache_use != CacheUse::append && o.form != LayerForm::attention)
    throw UnsupportedError("plan: cache_use " + std::string(to_string(o.cache_use)) +
                           " is the attention form's (PlanOptions::form), this plan is for form " +
                           std::string(to_string(o.form)));
  if (o.cache_use == CacheUse::none && o.path == PathPolicy::latent)
    throw UnsupportedError("plan: path policy latent attends to cached rows, cache_use is none");
  auto require = [](const char* what, int64_t found, int64_t least) {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    if (found < least || found > kMost)
      throw ShapeError(std::string("plan: ") + what + " is " + std::to_string(found) + ", allowed " +
                       std::to_string(least) + " to " + std::to_string(kMost));
  };
  require("context_rows", o.context_rows, 0);
  require("max_model_len", o.max_model_len, 0);
  require("max_requests", o.max_requests, 0);
  require("reorder_batch_threshold", o.reorder_batch_threshold, 0);
  require("device threads", device.threads, 1);
  require("tensor_parallel", o.tensor_parallel, 1);
  check_sharing(model, o);
  if (model.indexer && model.indexer->topk > kMostTopk)
    throw ShapeError("plan: model " + model.name + " has indexer topk " + std::to_string(model.indexer->topk) +
                     ", at most " + std::to_string(kMostTopk) + " are selected");
  if (o.maxima) {
    const auto refuse = [](bool is, const std::string& option) {
      if (is) throw UnsupportedError("plan: a step of maxima (PlanOptions::maxima) with " + option);
    };
    refuse(o.path == PathPolicy::expanded, "path policy expanded: its requests take the latent or the sparse path");
    refuse(o.cache_use == CacheUse::none, "cache_use none: its requests attend to a cache");
    refuse(o.dummy, "dummy: plan the dummy step without");
    refuse(o.output.kind != OutputKind::none, "output " + to_string(o.output) + ": heads are written as they are");
  }
  if (o.index_hadamard && model.indexer && !std::has_single_bit(static_cast<uint64_t>(model.indexer->dim)))
    throw UnsupportedError("plan: index_hadamard with indexer dim " + std::to_string(model.indexer->dim) +
                           ", a power of two is needed");
}

// Of what a selection is for: which rows, in which order, and where their keys are written.
uint64_t stamp_of(const Plan& p, const Batch& batch) {
  uint64_t stamp = static_cast<uint64_t>(p.topk);
  const auto add = [&](int32_t x) {
    stamp = (stamp ^ static_cast<uint32_t>(x)) * 0x9e3779b97f4a7c15u;
    stamp ^= stamp >> 29;
  };
  for (const SparseGroup& g : p.sparse_groups) {
    add(g.count);
    add(static_cast<int32_t>(g.rows));
  }
  for (size_t i = 0; i < p.sparse_requests.size(); ++i) {
    add(p.sparse_requests[i]);
    add(p.sparse_positions[i]);
    add(batch.slot_mapping[static_cast<size_t>(p.sparse_tokens[i])]);
  }
  return stamp;
}

// Not of what a rank may have alone: its heads, pages, slots, threads, and, unless the cache is split, the paths, which
// follow from how many heads it has.
PlanDigest digest_of(const Plan& p) {
  const PlanOptions& o = p.options;
  if (o.tensor_parallel == 1) return {};
  uint64_t hash = static_cast<uint64_t>(o.tensor_parallel);
  const auto add = [&](int64_t x) {
    hash = (hash ^ static_cast<uint64_t>(x)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  };
  const CacheSharding& sharding = o.context_parallel.sharding;
  const bool shared = o.context_parallel.shared();
  if (shared) {
    add(static_cast<int64_t>(p.cache.format));
    add(o.fp8_query ? std::bit_cast<int32_t>(o.q_scale) : 0);
    add(static_cast<int64_t>(o.decode));
    add(o.absorbed);
    add(static_cast<int64_t>(o.context_parallel.exchange));
    for (const ContextChunk& c : p.chunks) add(c.rows);
    // What is selected, and in which order rows stand.
    for (const int64_t x :
         {p.topk, p.index_schedule.tiles.rows, p.index_schedule.candidates, static_cast<int64_t>(o.index_format),
          static_cast<int64_t>(o.index_arithmetic), static_cast<int64_t>(o.index_hadamard)})
      add(x);
    for (const int32_t request : p.sparse_requests) add(request);
  }
  for (const int64_t x : {p.model.hidden, p.model.latent, p.model.rope, sharding.ranks(), sharding.interleave()})
    add(x);
  for (const int64_t heads : o.context_parallel.heads) add(heads);
  add(static_cast<int64_t>(p.activations()));
  add(static_cast<int64_t>(o.split));
  add(static_cast<int64_t>(o.sums));
  add(std::ssize(p.requests));
  for (const RequestPlan& r : p.requests) {
    add(int64_t{r.query_len} << 32 | static_cast<uint32_t>(r.context));
    if (shared) add(static_cast<int64_t>(r.path) << 1 | r.masked);
  }
  return {hash | 1, static_cast<int32_t>(p.tokens), static_cast<int32_t>(p.requests.size())};
}

// Of any rank of a split cache: all must choose alike, however many heads each has.
int64_t most_heads(const Plan& p) {
  const ContextParallel& c = p.options.context_parallel;
  return c.shared() ? *std::max_element(c.heads.begin(), c.heads.end()) : p.model.heads;
}

// Of a split cache, whatever each rank measures.
double shared_cost(const Plan& p, const CostModel& rates, Path path, int64_t new_tokens, int64_t context,
                   int64_t beside) {
  const ContextParallel& c = p.options.context_parallel;
  const LinkRates& link = p.options.link;
  ModelConfig model = p.model;
  model.heads = most_heads(p);
  const bool heads = p.exchanges_heads();
  const auto others = static_cast<double>(c.sharding.ranks() - 1), rows = static_cast<double>(new_tokens * model.heads);
  // A member attends to its part of the positions with as many times its heads: the work of all positions with its own.
  double seconds = path_cost(model, p.cache, rates, path, new_tokens, context, beside);
  if (heads && path == Path::latent)  // the other members' heads through W_UK and W_UV
    seconds +=
        others * rows * 2 * static_cast<double>(model.latent * (model.nope + model.value)) / rates.projection_flops;
  if (!(link.bytes > 0)) return seconds;
  if (path == Path::latent) {
    const double query = static_cast<double>(heads ? model.query_key() : model.entry()) * rates.row_element,
                 found = static_cast<double>((heads ? model.value : p.cache.value_width()) + 1) * sizeof(float);
    return seconds + 2 * link.seconds + others * rows * (query + found) / link.bytes;
  }
  const double row = static_cast<double>(p.sent_rows.page_bytes());
  return seconds + link.seconds + others * static_cast<double>(context / c.sharding.ranks()) * row / link.bytes;
}

// given: the rates of the options before those of the device took their place. beside: path_cost's.
Path choose_path(const Plan& p, const std::optional<CostModel>& given, const Batch& batch, int64_t r, int64_t beside) {
  const int64_t new_tokens = batch.query_len(r), context = batch.context_len(r);
  const bool by_prompt = p.options.path == PathPolicy::by_prompt && new_tokens > 0;
  if (p.options.maxima) {
    if (planning::selects(p, p.options.maxima->seq_len)) return Path::sparse;
    if (by_prompt && planning::is_prompt(batch, r))
      throw BatchError("batch: request " + std::to_string(r) +
                       ": tokens of a prompt in a step of maxima (PlanOptions::maxima), which by path policy by_prompt "
                       "are no latent ones");
    return Path::latent;
  }
  if (p.options.dummy) return Path::latent;
  if (new_tokens > 0 && planning::selects(p, context + new_tokens)) return Path::sparse;
  if (p.options.cache_use == CacheUse::none) return Path::expanded;
  if (by_prompt) return planning::is_prompt(batch, r) ? Path::expanded : Path::latent;
  if (planning::invariant(p)) return p.options.path == PathPolicy::expanded ? Path::expanded : Path::latent;
  const bool shared = p.options.context_parallel.shared();
  if (shared && context == 0 && p.options.path == PathPolicy::automatic && !p.options.absorbed) return Path::expanded;
  switch (p.options.path) {
    case PathPolicy::latent: return Path::latent;
    case PathPolicy::expanded: return Path::expanded;
    case PathPolicy::by_length: return new_tokens <= p.options.reorder_batch_threshold ? Path::latent : Path::expanded;
    case PathPolicy::by_prompt: return Path::latent;  // nothing new
    case PathPolicy::automatic: break;
  }
  // One token joins the batch's other decodes, whose launches there are: alone it would cost more on the other path. So
  // it does without context, too, where the other path is faster (on an H100 by 3 of 22 us): a step that is captured
  // with sequences of one token serves longer ones.
  if (p.options.absorbed || new_tokens <= 1) return Path::latent;
  auto cost = [&](Path path) {
    return shared
               ? shared_cost(p, given ? *given : default_cost_model(p.device.device), path, new_tokens, context, beside)
               : path_cost(p.model, p.cache, *p.options.rates, path, new_tokens, context, beside);
  };
  return cost(Path::expanded) < cost(Path::latent) ? Path::expanded : Path::latent;
}

}  // namespace

namespace planning {
namespace {

// batch_invariant: every sequence is cut at multiples of this, whatever the workspace or its neighbours.
constexpr int64_t kFixedRows = 4096;

// A request's queries over a piece of its context: all of them see all of it.
void add_context_item(const RequestPlan& r, const GatherPiece& piece, std::vector<ExpandedItem>& items) {
  items.push_back({r.q_begin, r.query_len, piece.row, piece.count, ExpandedItem::everything(),
                   /*last=*/piece.start + piece.count == r.context, r.masked, r.masked ? piece.start : 0});
}

// The same over a piece of its whole sequence: queries whose own rows lie in it end there, later ones see all of it.
void add_sequence_items(const RequestPlan& r, const GatherPiece& piece, std::vector<ExpandedItem>& items) {
  const int32_t begin = std::max(piece.start - r.context, 0),
                end = std::clamp(piece.start + piece.count - r.context, 0, r.query_len);
  if (begin < end)
    items.push_back({r.q_begin + begin, end - begin, piece.row, piece.count, r.context + begin - piece.start,
                     /*last=*/true});
  if (end < r.query_len)
    items.push_back({r.q_begin + end, r.query_len - end, piece.row, piece.count, ExpandedItem::everything()});
}

// Who holds which rows of a chunk. A run of positions is a run of each member's tokens, for members keep them in order.
void split_chunk(const ContextParallel& c, ContextChunk& chunk) {
  const CacheSharding& sharding = c.sharding;
  chunk.sources.assign(static_cast<size_t>(chunk.rows), 0);  // of rows between pieces: any
  int32_t sent = 0;
  for (int64_t member = 0; member < sharding.ranks(); ++member) {
    const int32_t first = sent;
    for (const GatherPiece& piece : chunk.pieces) {
      const int64_t begin = sharding.length(member, piece.start),
                    end = sharding.length(member, int64_t{piece.start} + piece.count);
      if (begin == end) continue;
      if (member == c.member())
        chunk.held.push_back({.request = piece.request,
                              .start = static_cast<int32_t>(begin),
                              .count = static_cast<int32_t>(end - begin),
                              .row = sent - first});
      // Runs of positions that lie together, the first of them from its middle on.
      int64_t row = piece.row + sharding.position(member, begin) - piece.start;
      int64_t left = sharding.interleave() - begin % sharding.interleave();
      for (int64_t i = begin; i < end; left = sharding.interleave()) {
        for (; i < end && left > 0; ++i, --left) chunk.sources[static_cast<size_t>(row++)] = sent++;
        row += (sharding.ranks() - 1) * sharding.interleave();
      }
    }
    chunk.held_rows.push_back(sent - first);
  }
  chunk.placed = {{.request = 0, .start = 0, .count = static_cast<int32_t>(chunk.rows), .row = 0}};
}

}  // namespace

int64_t context_workspace_rows(const Plan& plan, int64_t longest, int64_t requests) {
  const PlanOptions& o = plan.options;
  if (o.context_rows > 0) return o.context_rows;
  return default_context_rows(o.max_model_len > 0 ? o.max_model_len : longest,
                              o.max_requests > 0 ? o.max_requests : requests, plan.cache.page_size);
}

int64_t chunk_rows(const Plan& plan, int64_t longest, int64_t requests) {
  const int64_t rows = context_workspace_rows(plan, longest, requests);
  return plan.options.context_rows == 0 && invariant(plan) ? std::max(rows, kFixedRows) : rows;
}

void chunk_context(Plan& plan) {
  const bool whole = ignores_cuts(plan);
  std::vector<int32_t> cached(plan.requests.size());
  int64_t longest = 0, requests = 0;
  for (size_t r = 0; r < plan.requests.size(); ++r) {
    const RequestPlan& q = plan.requests[r];
    if (!q.expands() || q.query_len == 0) continue;
    cached[r] = whole ? q.context + q.query_len : q.context;
    longest = std::max<int64_t>(longest, static_cast<int64_t>(q.context) + q.query_len);
    ++requests;
  }
  const int64_t rows = chunk_rows(plan, longest, requests);
  if (rows == 0) return;  // nothing is expanded
  plan.context_rows = rows;
  for (std::vector<GatherPiece>& pieces : pack_context_chunks(
           cached, rows, plan.cache.page_size, whole ? std::min(rows, kFixedRows) : 0, key_grain(plan))) {
    ContextChunk chunk{.pieces = std::move(pieces), .items = {}};
    chunk.first = whole && chunk.pieces[0].start == 0;
    chunk.items.reserve(chunk.pieces.size());
    for (const GatherPiece& piece : chunk.pieces) {
      const RequestPlan& r = plan.requests[piece.request];
      (whole ? add_sequence_items : add_context_item)(r, piece, chunk.items);
      chunk.rows = std::max<int64_t>(chunk.rows, static_cast<int64_t>(piece.row) + piece.count);
    }
    if (plan.options.context_parallel.shared()) split_chunk(plan.options.context_parallel, chunk);
    plan.chunks.push_back(std::move(chunk));
  }
}

}  // namespace planning

Plan planning::begin_plan(const ModelConfig& model, const CacheSpec& cache, const DeviceInfo& device,
                          const PlanOptions& options) {
  model.validate();
  cache.validate();
  check_options(model, cache, device, options);
  Plan p{.model = model, .cache = cache, .options = options, .device = device};
  if (options.maxima) p.options.maxima = checked(*options.maxima);
  if (!p.options.rates) p.options.rates = options.compute == Dtype::bf16 ? device.bf16_rates : device.f32_rates;
  if (!p.options.rates) p.options.rates = default_cost_model(device.device);
  if (options.context_parallel.shared()) {
    p.sent_rows = cache;
    p.sent_rows.page_size = 1;
    if (p.sent_rows.page_bytes() % sizeof(float) != 0) p.sent_rows.format = CacheFormat::f32;
  }
  if (model.indexer) {
    p.index_cache = index_cache_spec(model, cache, options.index_format);
    if (options.sparse != SparsePolicy::dense) p.topk = model.indexer->topk;
  }
  return p;
}

Plan plan(const ModelConfig& model, const CacheSpec& cache, int64_t pages, const Batch& batch, const DeviceInfo& device,
          const PlanOptions& options) {
  Plan p = planning::begin_plan(model, cache, device, options);
  if (options.dummy) planning::validate_lengths(batch);
  else if (options.cache_use == CacheUse::none) planning::validate_new(batch);
  else if (options.context_parallel.shared())
    planning::validate_held(batch, pages, cache.page_size, options.context_parallel);
  else validate(batch, pages, cache.page_size);

  p.batch_tokens = batch.tokens();
  p.tokens = p.options.maxima ? p.options.maxima->tokens : p.batch_tokens;
  if (p.options.maxima) planning::require_within(*p.options.maxima, batch);
  p.requests.reserve(static_cast<size_t>(batch.requests()));
  p.positions.resize(static_cast<size_t>(p.tokens));
  int64_t tiles = 0;  // of requests that may take the expanded path
  const int64_t heads = most_heads(p);
  for (int64_t r = 0; r < batch.requests(); ++r)
    if (batch.query_len(r) > 1) tiles += expanded_tiles(heads, batch.query_len(r));
  for (int64_t r = 0; r < batch.requests(); ++r) {
    const int64_t beside = tiles - expanded_tiles(heads, batch.query_len(r));
    RequestPlan request{.path = choose_path(p, options.rates, batch, r, beside),
                        .q_begin = batch.query_start_loc[r],
                        .query_len = static_cast<int32_t>(batch.query_len(r)),
                        .context = static_cast<int32_t>(batch.context_len(r))};
    request.masked = request.path == Path::sparse && planning::masks(p, request.query_len, request.context);
    p.requests.push_back(request);
    if (request.path == Path::sparse && options.cache_use == CacheUse::none)
      throw UnsupportedError("plan: request " + std::to_string(r) + " of " + std::to_string(request.query_len) +
                             " tokens attends to the " + std::to_string(p.topk) +
                             " that are selected for each, in a cache; cache_use is none");
    const bool expanded = request.expands(), from_cache = expanded && planning::ignores_cuts(p);
    if (expanded && options.absorbed)
      throw UnsupportedError("plan: request " + std::to_string(r) + " with " + std::to_string(request.query_len) +
                             " new tokens takes the expanded path by policy " + std::string(to_string(options.path)) +
                             ", fully absorbed weights serve the latent path alone");
    const auto first = p.positions.begin() + request.q_begin;
    std::iota(first, first + request.query_len, request.context);
    // Sparse ones follow the latent ones, group by group.
    if (options.dummy || (request.path == Path::sparse && !request.masked) || from_cache) continue;
    if (expanded && request.query_len > 0 && !p.expanded_tokens.empty()) {
      const int64_t begin = planning::round_up(std::ssize(p.expanded_tokens), planning::key_grain(p));
      p.expanded_tokens.resize(static_cast<size_t>(begin), p.expanded_tokens.back());
    }
    if (expanded && request.query_len > 0)
      p.suffix_items.push_back({request.q_begin, request.query_len, static_cast<int32_t>(p.expanded_tokens.size()),
                                request.query_len, 0,
                                /*last=*/request.context == 0, request.masked, request.masked ? request.context : 0});
    std::vector<int32_t>& rows = expanded ? p.expanded_tokens : p.latent_tokens;
    rows.reserve(static_cast<size_t>(p.tokens));
    rows.resize(rows.size() + static_cast<size_t>(request.query_len));
    std::iota(rows.end() - request.query_len, rows.end(), request.q_begin);
  }
  if (!options.dummy) {
    planning::split_kv(p);
    planning::plan_selection(p);
  }
  p.selection_stamp = stamp_of(p, batch);
  if (p.options.maxima) planning::pad_to_maxima(p, batch);
  if (p.shares_context())
    p.rank_splits = {{.row = 0,
                      .rows = static_cast<int32_t>(p.latent_tokens.size()),
                      .partial = 0,
                      .splits = static_cast<int32_t>(options.context_parallel.sharding.ranks())}};
  planning::chunk_context(p);
  p.digest = digest_of(p);
  planning::place_output(p);
  planning::lay_out_workspace(p, planning::workspace_rows(p));
  planning::append_steps(p);
  return p;
}

}  // namespace mla
