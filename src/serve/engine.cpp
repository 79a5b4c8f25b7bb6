#include "serve/engine.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <future>
#include <new>

#include "backend/run.hpp"
#include "core/named_buffer.hpp"
#include "mla/quant_scales.hpp"
#include "serve/kv_scales.hpp"
#include "serve/shares.hpp"

namespace mla::serve {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_of(Clock::time_point t) { return std::chrono::duration<double>(t.time_since_epoch()).count(); }

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Larger batches are launched op by op: their kernels are long enough.
constexpr int64_t kMostCaptured = 512;
// New tokens of a request in a captured step: what speculative decoding asks for, and the ends of prompts.
constexpr int64_t kMostQuery = 4;
// Steps whose first layer is also run op by op under the profile, on a GPU.
constexpr int64_t kProfiledSteps = 16;

Stream stream_of(const Options& o, ThreadPool& pool) {
  return o.device.kind == DeviceKind::cpu ? Stream(pool) : Stream(o.device);
}

void count_sparse(const Plan& p, Result& r) {
  if (p.topk == 0) return;
  // Rows past the batch's, of a step of maxima, lie behind all others.
  const int64_t rows = std::min(p.sparse_rows(), p.batch_tokens);
  r.unscored_rows += p.batch_tokens - rows;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t seen = int64_t{p.sparse_positions[static_cast<size_t>(i)]} + 1;
    if (seen <= p.topk) {  // the first rows of a request that outgrows topk
      ++r.unscored_rows;
      continue;
    }
    ++r.sparse_rows;
    r.seen_keys += seen;
    r.selected_keys += p.topk;
  }
}

PlanOptions with(PlanOptions o, const ContextParallel& context) {
  o.context_parallel = context;
  return o;
}

Buffer grown(const char* what, const Buffer& from, size_t bytes) {
  return named_buffer(what, bytes + bytes / 4, from.device());
}

}  // namespace

// A step of maxima, captured; batches within them are staged in its place.
struct Engine::CapturedSteps {
  StepOfMaxima step;
  Buffer workspace, selection, hidden, out;  // out: [layers, tokens, hidden]
  bool apart = false;                        // the selections
  StagedStep staged;
  Graph graph;

  explicit CapturedSteps(Stream& stream) : staged(stream) {}
  Working memory() const {
    return {{workspace.data(), workspace.size()}, {selection.data(), selection.size()}, staged, apart};
  }
};

Engine::Engine(const Options& o, const Part& part, int64_t positions, ThreadPool& pool, const std::atomic<bool>& stop,
               Result& r)
    : o_(o),
      model_(part_of(o.model, part.heads)),
      ranks_(part.ranks),
      plan_(with(o.plan, part.context)),
      pool_(pool),
      stream_(stream_of(o, pool)),
      spec_(cache_spec(model_, o.format, o.limits.page_size / part.context.sharding.ranks())),
      positions_(positions),
      index_caches_(static_cast<size_t>(o.layers)),
      rotary_(model_.rotary, model_.rope, positions, o.device),
      index_rotary_(model_.indexer ? RotaryTable(model_.index_rotary(), model_.rope, positions, o.device)
                                   : RotaryTable()),
      device_(device_info(stream_, model_)),
      io_(hidden_dtype(o)),
      workspace_(0, o.device),
      selection_(0, o.device),
      hidden_(0, o.device),
      out_(0, o.device),
      staged_(stream_) {
  if (model_.indexer) index_spec_ = index_cache_spec(model_, spec_, o.plan.index_format);
  // A layer's tensors are made and laid out by one thread; a GPU's machine has threads for several at a time.
  const int64_t at_once = gpu() ? std::clamp<int64_t>(pool.threads() / 2, 1, 8) : 1;
  for (int64_t first = 0; first < o.layers && !stop; first += at_once) {
    std::vector<std::future<LayerWeights>> made;
    try {
      for (int64_t l = first; l < std::min(o.layers, first + at_once); ++l)
        made.push_back(
            std::async(at_once > 1 ? std::launch::async : std::launch::deferred, [&o, &part, &model = model_, l] {
              try {
                return prepare(model, tensors_of(o, l, part.heads, group_share(part.context, o.model.heads)),
                               prepare_options(o), o.device);
              } catch (const std::bad_alloc&) {
                throw DeviceError("weights of layer " + std::to_string(l) + ": no memory is left to prepare them in");
              }
            }));
    } catch (const std::system_error& e) {
      throw DeviceError("a thread that prepares weights could not be started: " + std::string(e.what()));
    }
    for (auto& m : made) {
      weights_.push_back(m.get());
      if (!gpu()) weights_.back().place(pool);
    }
  }
  const bool touches = !gpu() && positions > 1;  // where no request fits nothing is written
  for (int64_t l = 0; l < static_cast<int64_t>(weights_.size()); ++l) {
    caches_.emplace_back(spec_, o.limits.pages, o.device);
    r.weight_bytes += weights_[static_cast<size_t>(l)].bytes();
    r.cache_bytes += spec_.page_bytes() * static_cast<size_t>(o.limits.pages);
    // Touched now, as an engine would at its start: otherwise the first write to each page waits for the system to find
    // memory.
    const CacheView cache = caches_.back().view();
    if (touches) {
      caches_.back().place(pool);
      pool.run(cache.pages, [&](int64_t page, int) { std::memset(cache.page(page), 0, spec_.page_bytes()); });
    }
    if (!model_.layer_has_indexer(l)) continue;
    IndexCache& index = index_caches_[static_cast<size_t>(l)] = IndexCache(index_spec_, o.limits.pages, o.device);
    r.index_cache_bytes += index_spec_.page_bytes() * static_cast<size_t>(o.limits.pages);
    if (touches) {
      index.place(pool);
      pool.run(index.pages(),
               [&](int64_t page, int) { std::memset(index.view().page(page), 0, index_spec_.page_bytes()); });
    }
  }
  if (gpu() && !stop && o.limits.pages > 0) warm_up();
  if (o.spans > 0) keep_spans(r);
}

Engine::~Engine() = default;

void Engine::warm_up() {
  struct Request {
    int64_t tokens, context;
  };
  const auto step = [&](const std::vector<Request>& requests) {
    std::vector<int32_t> starts{0}, lengths, prompts;
    for (const Request& q : requests) {
      if (q.context + q.tokens > positions_) continue;
      starts.push_back(starts.back() + static_cast<int32_t>(q.tokens));
      lengths.push_back(static_cast<int32_t>(q.context + q.tokens));
      prompts.push_back(static_cast<int32_t>(q.context + (q.tokens > 1 ? q.tokens : 0)));
    }
    if (lengths.empty()) return;
    const int64_t rows = std::ssize(lengths), pages = (positions_ + spec_.page_size - 1) / spec_.page_size;
    const std::vector<int32_t> table(static_cast<size_t>(rows * pages)), slots(static_cast<size_t>(starts.back()), -1);
    const Batch batch{starts, lengths, {table.data(), {rows, pages}}, slots, prompts};
    const Plan p = plan(model_, spec_, o_.limits.pages, batch, device_, plan_);
    const std::vector<std::byte> zeros(static_cast<size_t>(p.tokens * model_.hidden) * size_of(io_));
    const Buffer workspace = named_buffer("workspace of a first step", p.workspace_bytes, o_.device),
                 out = named_buffer("outputs of a first step", zeros.size(), o_.device),
                 hidden = Buffer::copy_of(zeros.data(), zeros.size(), o_.device);
    if (selection_.size() < p.selection_bytes) selection_ = grown("selection of a step", selection_, p.selection_bytes);
    staged_.stage(p, batch);
    forward(stream_,
            context(0, p, batch,
                    {{workspace.data(), workspace.size()}, {selection_.data(), selection_.size()}, staged_}, nullptr),
            AnyView<Token, Hidden>(io_, hidden.data(), {p.tokens, model_.hidden}),
            AnyMutableView<Token, Hidden>(io_, out.data(), {p.tokens, model_.hidden}));
    stream_.synchronize();
  };
  const int64_t topk = model_.indexer ? model_.indexer->topk : 0;
  // Prompts, new, behind a context and beyond what is selected, beside decodes; then decodes alone.
  step({{1, 0}, {1, topk}, {256, 0}, {16, 0}, {64, 192}, {64, topk}});
  step({{1, 0}, {1, 31}});
  if (topk > 0) step({{1, topk}, {1, topk}});
  // As many tokens as a step has, and parts of it: libraries choose their products by the number of rows.
  for (const int64_t part : {1, 2, 4})
    if (const int64_t tokens = std::min(o_.limits.token_budget / part, positions_ - topk); tokens >= 512)
      step({{1, topk}, {tokens / 2, 0}, {tokens - tokens / 2 - 1, topk}});
}

void Engine::keep_spans(Result& r) {
  const auto keep = [this, &r](const Profile::Call& call) {
    if (static_cast<int64_t>(r.spans.size()) >= o_.spans) {
      ++r.spans_left_out;
      return;
    }
    double start = call.start;
    if (gpu()) {
      start = span_start_;
      span_start_ += call.seconds;
    }
    r.spans.push_back({call.op, r.steps, layer_, start, call.seconds, call.bytes, call.flops});
  };
  for (Profile* p : {&r.profile, &captured_steps_.profile, &others_.profile}) p->observe(keep);
}

void Engine::calibrate(std::span<const float> hidden, std::vector<float>& k_scales) {
  k_scales.resize(weights_.size(), 1.0f);
  for (size_t l = 0; l < weights_.size(); ++l)
    if (k_scales[l] == 0) k_scales[l] = k_scale_of(weights_[l], hidden);
}

float Engine::k_scale_of(const LayerWeights& w, std::span<const float> hidden) {
  const int64_t rows = std::ssize(hidden) / model_.hidden, entry = model_.entry(), latent = model_.latent;
  if (rows == 0) return 1.0f;
  const Buffer x = Buffer::copy_of(hidden.data(), hidden.size_bytes(), o_.device),
               y = named_buffer("latents to calibrate by", static_cast<size_t>(rows * entry) * sizeof(float),
                                o_.device),
               scratch = named_buffer("scratch of calibration",
                                      static_cast<size_t>(device_.threads) * device_.scratch_per_worker, o_.device);
  ops::run(stream_, ops::ProjectArgs{.x = View<const float, Token, Head, In>(x.as<float>(), {rows, 1, model_.hidden}),
                                     .x_rows = {},
                                     .weights = w.kv_down.get(),
                                     .y = View<float, Token, Head, Out>(y.as<float>(), {rows, 1, entry}),
                                     .y_rows = {},
                                     .rows = rows,
                                     .activations = w.kv_down->format == WeightFormat::fp8 ? o_.plan.activations
                                                                                           : Activations::plain,
                                     .scratch = {scratch.data(), device_.scratch_per_worker}});
  std::vector<float> kv(static_cast<size_t>(rows * entry)), norm(static_cast<size_t>(latent)),
      kv_c(static_cast<size_t>(rows * latent));
  copy(stream_, kv.data(), y.data(), y.size());
  copy(stream_, norm.data(), w.kv_norm.values().data(), norm.size() * sizeof(float));
  stream_.synchronize();
  for (int64_t t = 0; t < rows; ++t) {
    const float* row = kv.data() + t * entry;
    double squares = 0;
    for (int64_t i = 0; i < latent; ++i) squares += static_cast<double>(row[i]) * row[i];
    const double size = std::sqrt(squares / static_cast<double>(latent) + model_.rms_eps);
    for (int64_t i = 0; i < latent; ++i)
      kv_c[static_cast<size_t>(t * latent + i)] = static_cast<float>(row[i] / size * norm[static_cast<size_t>(i)]);
  }
  return calc_kv_scales({nullptr, {0, 1, model_.query_key()}}, {kv_c.data(), {rows, latent}}).k_scale;
}

std::span<std::byte> Engine::selection_of(int64_t layer, const Plan& plan, const Working& memory) const {
  if (!memory.apart) return memory.selection;
  int64_t choices = 0;  // made before the layer's
  for (int64_t l = 1; l <= layer; ++l) choices += model_.layer_has_indexer(l);
  return memory.selection.subspan(static_cast<size_t>(choices) * plan.selection_bytes, plan.selection_bytes);
}

LayerContext Engine::context(int64_t l, const Plan& plan, const Batch& batch, const Working& memory, Profile* profile) {
  const size_t layer = static_cast<size_t>(l);
  CacheView cache = caches_[layer].view();
  if (!k_scales_.empty()) cache.spec.k_scale = k_scales_[layer];
  return {.plan = plan,
          .batch = batch,
          .weights = weights_[layer],
          .rotary = rotary_,
          .cache = cache,
          .workspace = memory.workspace,
          .profile = profile,
          .index_cache = index_caches_[layer].view(),
          .index_rotary = &index_rotary_,
          .selection = selection_of(l, plan, memory),
          .staged = &memory.staged,
          .ranks = ranks_,
          .deadline = o_.patience};
}

// keep_all: each layer writes its own [tokens, hidden] of out; otherwise all the same, from which rows are taken.
void Engine::forward_all(const Plan& plan, const Batch& batch, const Working& memory, const void* hidden, void* out,
                         bool keep_all, std::span<WantedRow> rows, Profile* profile) {
  const int64_t width = model_.hidden;
  const size_t layer_bytes = static_cast<size_t>(plan.tokens * width) * size_of(io_);
  for (int64_t l = 0; l < o_.layers; ++l) {
    layer_ = l;
    std::byte* to = static_cast<std::byte*>(out) + (keep_all ? static_cast<size_t>(l) * layer_bytes : 0);
    forward(stream_, context(l, plan, batch, memory, profile),
            AnyView<Token, Hidden>(io_, hidden, {plan.tokens, width}),
            AnyMutableView<Token, Hidden>(io_, to, {plan.tokens, width}));
    for (WantedRow& row : rows)
      if (row.layer == l) take(row, plan, to, selection_of(l, plan, memory));
  }
}

void Engine::take(WantedRow& row, const Plan& p, const std::byte* out, std::span<std::byte> selection) {
  const size_t width = static_cast<size_t>(model_.hidden), bytes = width * size_of(io_);
  std::vector<std::byte> raw(bytes);
  copy(stream_, raw.data(), out + static_cast<size_t>(row.row) * bytes, bytes);
  // What the token attended to; nothing when that was everything.
  const auto first = p.sparse_tokens.begin(),
             at = std::find(first, p.sparse_tokens.end(), static_cast<int32_t>(row.row));
  std::vector<int32_t> selected;
  if (at != p.sparse_tokens.end()) {
    selected.resize(static_cast<size_t>(p.topk));
    const View<int32_t, Token, Topk> all = p.selected(selection);
    copy(stream_, selected.data(), all.data() + (at - first) * p.topk, selected.size() * sizeof(int32_t));
  }
  stream_.synchronize();
  row.out.resize(width);
  for (size_t i = 0; i < width; ++i) row.out[i] = load_float(io_, raw.data(), static_cast<int64_t>(i));
  std::erase_if(selected, [](int32_t position) { return position < 0; });
  row.selected = std::move(selected);
}

Engine::CapturedSteps* Engine::captured_for(const Batch& batch) {
  const int64_t requests = batch.requests(), tokens = batch.tokens();
  int64_t longest = 0;
  for (int64_t r = 0; r < requests; ++r) longest = std::max(longest, batch.query_len(r));
  const bool short_enough = longest <= plan_.reorder_batch_threshold;
  for (int64_t r = 0; r < requests && plan_.path == PathPolicy::by_prompt; ++r)
    if (batch.query_len(r) > 0 && batch.context_len(r) < batch.prompt_lens[r]) return nullptr;
  // Captured steps take the latent path, or the sparse one in place, whatever is asked for.
  if (!gpu() || tokens == 0 || tokens > kMostCaptured || requests > kMostCaptured || longest > kMostQuery ||
      plan_.path == PathPolicy::expanded || (plan_.path == PathPolicy::by_length && !short_enough) ||
      ((plan_.sparse == SparsePolicy::upconvert || plan_.sparse == SparsePolicy::masked) && !short_enough))
    return nullptr;
  const auto up = [](int64_t n) { return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n))); };
  const Size size{up(requests), longest == 1 ? up(requests) : up(tokens), longest == 1 ? 1 : kMostQuery};
  const auto [at, first] = captured_.try_emplace(size);
  if (!at->second) {
    if (first && longest > 1) return nullptr;
    at->second = capture(
        {.requests = size[0], .tokens = size[1], .query_len = std::min(size[2], positions_), .seq_len = positions_});
  }
  return at->second.get();
}

std::unique_ptr<Engine::CapturedSteps> Engine::capture(const StepMaxima& maxima) {
  auto c = std::make_unique<CapturedSteps>(stream_);
  PlanOptions options = plan_;
  options.maxima = maxima;
  c->step = plan_maxima(model_, spec_, device_, options);
  const Plan& p = c->step.plan;
  // Rows that are verified are judged by what their layer chose, when all layers have run.
  c->apart = o_.verify > 0;
  int64_t choices = 1;
  for (int64_t l = 1; c->apart && l < o_.layers; ++l) choices += model_.layer_has_indexer(l);
  const size_t rows = static_cast<size_t>(p.tokens), row = static_cast<size_t>(model_.hidden) * size_of(io_);
  c->workspace = named_buffer("workspace of a captured step", p.workspace_bytes, o_.device);
  c->selection =
      named_buffer("selections of a captured step", static_cast<size_t>(choices) * p.selection_bytes, o_.device);
  c->hidden = named_buffer("hidden states of a captured step", rows * row, o_.device);
  c->out = named_buffer("outputs of a captured step", static_cast<size_t>(o_.layers) * rows * row, o_.device);
  c->staged.stage(p, c->step.batch);
  const auto record = [&] {
    forward_all(p, c->step.batch, c->memory(), c->hidden.data(), c->out.data(), true, {}, nullptr);
  };
  record();  // algorithms are chosen and kernels loaded before the capture; there are no slots: caches stay as they are
  stream_.synchronize();
  c->graph = Graph(stream_, record);
  return c;
}

// Every page of the step's table is a page of each rank, which has its share of the page's tokens there.
std::span<const int32_t> Engine::own_slots(const Batch& batch) {
  const ContextParallel& c = plan_.context_parallel;
  if (!c.shared()) return batch.slot_mapping;
  slots_.clear();
  for (int64_t r = 0; r < batch.requests(); ++r) {
    const auto at = static_cast<size_t>(r);
    const int32_t count = batch.query_start_loc[at + 1] - batch.query_start_loc[at];
    const std::span<const int32_t> pages(batch.block_table.data() + r * batch.block_table.stride<Request>(),
                                         static_cast<size_t>(batch.block_table.extent<Page>()));
    for (int32_t p = batch.seq_lens[at] - count; p < batch.seq_lens[at]; ++p)
      slots_.push_back(static_cast<int32_t>(c.sharding.slot(c.member(), p, pages, spec_.page_size)));
  }
  return slots_;
}

StepTime Engine::run(const Batch& whole, std::span<const float> hidden, std::span<WantedRow> rows, Result& r) {
  Batch batch = whole;
  batch.slot_mapping = own_slots(whole);
  CapturedSteps* captured = captured_for(batch);
  PlanOptions options = plan_;
  if (captured) options.maxima = captured->step.plan.options.maxima;
  const auto planning = Clock::now();
  const Plan p = mla::plan(model_, spec_, o_.limits.pages, batch, device_, options);
  const double plan_seconds = since(planning);
  count_sparse(p, r);
  const size_t count = static_cast<size_t>(batch.tokens() * model_.hidden), bytes = count * size_of(io_),
               room = static_cast<size_t>(p.tokens * model_.hidden) * size_of(io_);
  // Between steps: an engine sizes its memory once, for its largest batch.
  if (workspace_.size() < p.workspace_bytes) workspace_ = grown("workspace of a step", workspace_, p.workspace_bytes);
  if (selection_.size() < p.selection_bytes) selection_ = grown("selection of a step", selection_, p.selection_bytes);
  if (hidden_.size() < room) hidden_ = grown("hidden states of a step", hidden_, room);
  if (out_.size() < room) out_ = grown("outputs of a step", out_, room);
  const void* from = hidden.data();
  if (io_ != Dtype::f32) {
    narrow_.resize(count);
    for (size_t i = 0; i < count; ++i) store_float(io_, narrow_.data(), static_cast<int64_t>(i), hidden[i]);
    from = narrow_.data();
  }
  copy(stream_, captured ? captured->hidden.data() : hidden_.data(), from, bytes);
  stream_.synchronize();
  r.workspace_bytes = std::max(r.workspace_bytes, workspace_.size());

  for (WantedRow& row : rows) {
    const auto request = std::upper_bound(batch.query_start_loc.begin(), batch.query_start_loc.end(), row.row);
    const RequestPlan& of = p.requests[static_cast<size_t>(request - batch.query_start_loc.begin() - 1)];
    row.path = of.path;
    row.masked = of.masked;
  }
  const auto step = Clock::now();
  if (captured) {
    captured->staged.restage(p, batch);
    captured->graph.launch(stream_);
    stream_.synchronize();
  } else {
    staged_.stage(p, batch);
    forward_all(p, batch, {{workspace_.data(), workspace_.size()}, {selection_.data(), selection_.size()}, staged_},
                hidden_.data(), out_.data(), false, rows, gpu() ? nullptr : &r.profile);
    stream_.synchronize();
  }
  const auto end = Clock::now();
  if (spec_.format == CacheFormat::fp8) {
    written_.resize(static_cast<size_t>(o_.limits.pages * spec_.page_size));
    for (const int32_t slot : batch.slot_mapping)
      if (slot >= 0) written_[static_cast<size_t>(slot)] = true;
  }
  const StepTime time{.seconds = plan_seconds + std::chrono::duration<double>(end - step).count(),
                      .plan = plan_seconds,
                      .start = seconds_of(planning),
                      .end = seconds_of(end)};

  if (captured)
    for (WantedRow& row : rows)
      take(row, p, captured->out.data() + static_cast<size_t>(row.layer) * room,
           selection_of(row.layer, p, captured->memory()));
  Sample& kind = captured ? captured_steps_ : others_;
  kind.all_seconds += time.seconds;
  // Spread over the run: at first every step of a kind, then ever fewer.
  if (gpu() && (kind.steps < kProfiledSteps / 4 || std::has_single_bit(static_cast<uint64_t>(r.steps + 1)) ||
                r.steps % 64 == 63)) {
    if (captured) {
      staged_.stage(p, batch);
      copy(stream_, hidden_.data(), captured->hidden.data(), bytes);
    }
    layer_ = 0;
    span_start_ = std::max(span_start_, time.start);  // its layer may outlast a step that ran as a graph
    profile_layer(p, batch, kind.profile);
    ++kind.steps;
    kind.seconds += time.seconds;
  }
  return time;
}

// The same calls once more for one layer, each under a stopwatch; held back until all are queued, so that none waits
// for the host.
void Engine::profile_layer(const Plan& p, const Batch& batch, Profile& profile) {
  const AnyView<Token, Hidden> hidden(io_, hidden_.data(), {p.tokens, model_.hidden});
  const AnyMutableView<Token, Hidden> out(io_, out_.data(), {p.tokens, model_.hidden});
  const Working memory{{workspace_.data(), workspace_.size()}, {selection_.data(), selection_.size()}, staged_};
  {
    const HeldStream held(stream_);
    forward(stream_, context(0, p, batch, memory, &profile), hidden, out);
  }
  stream_.synchronize();
  (void)profile.rows();  // the calls are this step's, and so is the selection that they are counted by
}

// Of pages spread over all that hold rows, some hundred: a cache may have millions.
void Engine::count_saturated(Result& r) {
  constexpr int64_t kPages = 512;
  const int64_t page_size = spec_.page_size, entry = spec_.entry();
  std::vector<int64_t> pages;
  for (int64_t slot = 0; slot < std::ssize(written_); ++slot)
    if (written_[static_cast<size_t>(slot)] && (pages.empty() || pages.back() != slot / page_size))
      pages.push_back(slot / page_size);
  const int64_t looked_at = std::min(kPages, std::ssize(pages));
  std::vector<std::byte> page(spec_.page_bytes());
  for (const Cache& cache : caches_) {
    int64_t codes = 0, saturated = 0;
    for (int64_t i = 0; i < looked_at; ++i) {
      const int64_t p = pages[static_cast<size_t>(i * std::ssize(pages) / looked_at)];
      copy(stream_, page.data(), cache.view().page(p), page.size());
      stream_.synchronize();
      for (int64_t t = 0; t < page_size; ++t) {
        if (!written_[static_cast<size_t>(p * page_size + t)]) continue;
        codes += entry;
        saturated +=
            saturated_codes(std::span(page).subspan(static_cast<size_t>(t * entry), static_cast<size_t>(entry)));
      }
    }
    r.saturated.push_back(codes > 0 ? static_cast<double>(saturated) / static_cast<double>(codes) : 0.0);
  }
}

void Engine::finish(Result& r) {
  if (spec_.format == CacheFormat::fp8) count_saturated(r);
  r.profiled_steps = gpu() ? captured_steps_.steps + others_.steps : r.steps;
  for (Sample* sample : {&captured_steps_, &others_}) {
    if (sample->seconds > 0)
      sample->profile.scale(static_cast<double>(o_.layers) * sample->all_seconds / sample->seconds);
    for (const Profile::Row& row : sample->profile.rows()) r.profile.add(row);
  }
  r.profile.observe({});  // it refers to this engine
}

}  // namespace mla::serve
