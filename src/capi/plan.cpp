#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/backend.hpp"
#include "capi/objects.hpp"
#include "capi/tensor.hpp"

using namespace mla;
using namespace mla::capi;

static_assert(static_cast<int>(Path::expanded) == MLA_PATH_EXPANDED &&
              static_cast<int>(Path::sparse) == MLA_PATH_SPARSE);
static_assert(static_cast<int>(PathPolicy::latent) == MLA_PATHS_LATENT &&
              static_cast<int>(PathPolicy::expanded) == MLA_PATHS_EXPANDED &&
              static_cast<int>(PathPolicy::by_length) == MLA_PATHS_BY_LENGTH &&
              static_cast<int>(PathPolicy::by_prompt) == MLA_PATHS_BY_PROMPT);
static_assert(static_cast<int>(SplitPolicy::batch_invariant) == MLA_SPLIT_BATCH_INVARIANT);
static_assert(static_cast<int>(DecodeOperands::fp8) == MLA_DECODE_FP8);
static_assert(static_cast<int>(ContextExchange::heads) == MLA_EXCHANGE_HEADS &&
              static_cast<int>(HiddenSums::own) == MLA_SUMS_OWN);
static_assert(static_cast<int>(PrefillOperands::fp8) == MLA_PREFILL_FP8 &&
              static_cast<int>(PrefillOperands::fp8_raw) == MLA_PREFILL_FP8_RAW);
static_assert(static_cast<int>(ActivationDtype::native) == MLA_ACTIVATION_DTYPE_NATIVE &&
              static_cast<int>(ActivationDtype::f32) == MLA_ACTIVATION_DTYPE_F32 &&
              static_cast<int>(ActivationDtype::bf16) == MLA_ACTIVATION_DTYPE_BF16 &&
              static_cast<int>(ActivationDtype::f16) == MLA_ACTIVATION_DTYPE_F16);
static_assert(static_cast<int>(LayerForm::attention) == MLA_FORM_ATTENTION);
static_assert(static_cast<int>(CacheUse::read) == MLA_CACHE_USE_READ &&
              static_cast<int>(CacheUse::none) == MLA_CACHE_USE_NONE);
static_assert(static_cast<int>(SparsePolicy::mixed) == MLA_SPARSE_MIXED &&
              static_cast<int>(SparsePolicy::direct) == MLA_SPARSE_DIRECT &&
              static_cast<int>(SparsePolicy::upconvert) == MLA_SPARSE_UPCONVERT &&
              static_cast<int>(SparsePolicy::dense) == MLA_SPARSE_DENSE &&
              static_cast<int>(SparsePolicy::masked) == MLA_SPARSE_MASKED);

namespace {

// A rate of 0 is a thing that is not counted, where that makes sense.
CostModel read_rates(const mla_cost_model* rates) {
  const mla_cost_model r = read_struct("options rates", rates);
  const auto rate = [](const char* name, double value, bool zero) {
    if (!(value >= 0) || !std::isfinite(value) || (value == 0 && !zero))
      throw InputError(std::string("options rates ") + name + " is " + std::to_string(value) + ", must be finite and " +
                       (zero ? "at least 0" : "above 0"));
    return value;
  };
  return {.latent_flops = rate("latent_flops", r.latent_flops, false),
          .expanded_flops = rate("expanded_flops", r.expanded_flops, false),
          .projection_flops = rate("projection_flops", r.projection_flops, false),
          .bytes = rate("bytes", r.bytes, true),
          .row_element = r.row_element == 0 ? CostModel().row_element : rate("row_element", r.row_element, true),
          .plain_elements = rate("plain_elements", r.plain_elements, true),
          .fp8_elements = rate("fp8_elements", r.fp8_elements, true),
          .expanded_tiles = rate("expanded_tiles", r.expanded_tiles, true),
          .context_seconds = rate("context_seconds", r.context_seconds, true)};
}

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

StepMaxima read_maxima(const char* name, const mla_step_maxima* maxima) {
  const mla_step_maxima m = read_struct(name, maxima);
  return {.requests = m.requests, .tokens = m.tokens, .query_len = m.query_len, .seq_len = m.seq_len};
}

PlanOptions read_options(const mla_plan_options* options) {
  mla_plan_options o = mla_plan_options_default();
  if (options) o = read_struct("options", options, o);
  PlanOptions p;
  p.form = read_enum("options form", o.form, LayerForm::attention);
  p.cache_use = read_enum("options cache_use", o.cache_use, CacheUse::none);
  p.dummy = read_flag("options dummy", o.dummy);
  p.tensor_parallel = std::max(1, static_cast<int>(read_range("options tensor_parallel", o.tensor_parallel, 0, kMost)));
  p.path = read_enum("options path", o.path, PathPolicy::by_prompt);
  p.split = read_enum("options split", o.split, SplitPolicy::batch_invariant);
  p.reorder_batch_threshold = read_range("options reorder_batch_threshold", o.reorder_batch_threshold, 0, kMost);
  p.absorbed = read_flag("options absorbed", o.absorbed);
  p.up = read_enum("options up", o.up, WeightFormat::mxfp4);
  p.activations = read_enum("options activations", o.activations, Activations::fp8_128);
  p.compute = read_enum("options compute", o.compute, Dtype::fp8_e4m3);
  p.fp8_query = read_flag("options fp8_query", o.fp8_query);
  p.q_scale = o.q_scale;
  p.sparse = read_enum("options sparse", o.sparse, SparsePolicy::masked);
  p.index_format = read_enum("options index_format", o.index_format, IndexCacheFormat::fp8);
  p.index_hadamard = read_flag("options index_hadamard", o.index_hadamard);
  p.prefill = read_enum("options prefill", o.prefill, PrefillOperands::fp8_raw);
  p.decode = read_enum("options decode", o.decode, DecodeOperands::fp8);
  p.index_arithmetic = read_enum("options index_arithmetic", o.index_arithmetic, IndexArithmetic::fp8);
  if (o.output) p.output = read_output_spec("options output", o.output);
  p.context_rows = read_range("options context_rows", o.context_rows, 0, kMost);
  p.max_model_len = read_range("options max_model_len", o.max_model_len, 0, kMost);
  p.max_requests = read_range("options max_requests", o.max_requests, 0, kMost);
  if (o.rates) p.rates = read_rates(o.rates);
  const auto read_rank = [&] { return static_cast<int>(read_range("options rank", o.rank, 0, p.tensor_parallel - 1)); };
  p.sums = read_enum("options sums", o.sums, HiddenSums::own);
  if (p.sums == HiddenSums::own) p.context_parallel.rank = read_rank();
  if (o.sharding) {
    const mla_sharding sharding = read_struct("options sharding", o.sharding);
    p.context_parallel.sharding = CacheSharding(sharding.ranks, sharding.interleave);
    if (p.tensor_parallel % sharding.ranks != 0)
      throw InputError("options sharding ranks is " + std::to_string(sharding.ranks) + ", tensor_parallel is " +
                       std::to_string(p.tensor_parallel) + ", which must be groups of as many");
    p.context_parallel.rank = read_rank();
    required("options rank_heads", o.rank_heads);
    p.context_parallel.heads.assign(o.rank_heads, o.rank_heads + p.tensor_parallel);
    p.context_parallel.exchange = read_enum("options exchange", o.exchange, ContextExchange::heads);
  }
  if (o.maxima) p.maxima = read_maxima("options maxima", o.maxima);
  p.activation_dtype = read_enum("options activation_dtype", o.activation_dtype, ActivationDtype::f16);
  return p;
}

// The caller's arrays are copied: calls with the plan come later. Those of the cache only when `cached`.
void read_batch(const mla_batch& b, bool cached, mla_plan& p) {
  const auto copy = [](const char* name, const int32_t* data, int64_t count) {
    if (count > 0) required(name, data);
    return std::vector<int32_t>(data, data + count);
  };
  const int64_t requests = read_range("batch requests", b.requests, 0, kMost - 1),
                pages = read_range("batch block_table_pages", b.block_table_pages, 0, kMost);
  const int64_t stride = b.block_table_stride == 0 ? pages : b.block_table_stride;
  constexpr int64_t kMostEntries = int64_t{1} << 59;
  if (stride > kMostEntries / std::max<int64_t>(requests, 1))
    throw ShapeError("batch block_table_stride is " + std::to_string(stride) + ", rows of " + std::to_string(requests) +
                     " requests leave 2^59 entries");
  if (stride < pages)
    throw ShapeError("batch block_table_stride is " + std::to_string(stride) + ", rows have " + std::to_string(pages) +
                     " entries");
  p.query_start_loc = copy("batch query_start_loc", b.query_start_loc, requests + 1);
  p.seq_lens = copy("batch seq_lens", b.seq_lens, requests);
  if (b.prompt_lens) p.prompt_lens.assign(b.prompt_lens, b.prompt_lens + requests);
  const int64_t tokens = read_range("batch tokens", b.tokens, 0, kMost);
  if (!cached) {
    if (p.query_start_loc.back() != tokens)
      throw InputError("batch tokens is " + std::to_string(tokens) + ", query_start_loc ends at " +
                       std::to_string(p.query_start_loc.back()));
    p.batch = {p.query_start_loc, p.seq_lens, {}, {}, p.prompt_lens};
    return;
  }
  p.slot_mapping = copy("batch slot_mapping", b.slot_mapping, tokens);
  if (requests > 0 && pages > 0) {
    required("batch block_table", b.block_table);
    p.block_table.resize(static_cast<size_t>(requests) * static_cast<size_t>(pages));
    for (int64_t r = 0; r < requests; ++r)
      std::memcpy(p.block_table.data() + r * pages, b.block_table + r * stride,
                  static_cast<size_t>(pages) * sizeof(int32_t));
  }
  p.batch = {p.query_start_loc, p.seq_lens, {p.block_table.data(), {requests, pages}}, p.slot_mapping, p.prompt_lens};
}

}  // namespace

mla_status mla_cost_model_of(DLDevice device, mla_cost_model* rates) {
  return guarded("mla_cost_model_of", [&] {
    const Device of = read_device(device);
    const CostModel r =
        of.kind == DeviceKind::cpu ? backend::backend(of).cost_model(Dtype::bf16, 0) : default_cost_model(of);
    write_struct("rates", rates,
                 mla_cost_model{sizeof(mla_cost_model), r.latent_flops, r.expanded_flops, r.projection_flops, r.bytes,
                                r.plain_elements, r.fp8_elements, r.row_element, r.expanded_tiles, r.context_seconds});
  });
}

mla_status mla_plan_create(const mla_stream* stream, const mla_model* model, const mla_cache_spec* cache, int64_t pages,
                           const mla_batch* batch, const mla_plan_options* options, mla_plan** out) {
  return guarded("mla_plan_create", [&] {
    expect_handle("plan", out);
    const auto s = get("stream", stream);
    const auto m = get("model", model);
    const CacheSpec spec = read_cache_spec("cache", cache);
    auto made = std::make_shared<mla_plan>();
    const PlanOptions chosen = read_options(options);
    read_batch(read_struct("batch", batch), !chosen.dummy && chosen.cache_use != CacheUse::none, *made);
    made->plan = plan(m->config, spec, pages, made->batch, device_info(*s->stream, m->config), chosen);
    put(out, std::move(made));
  });
}

mla_status mla_plan_create_maxima(const mla_stream* stream, const mla_model* model, const mla_cache_spec* cache,
                                  const mla_plan_options* options, mla_plan** out) {
  return guarded("mla_plan_create_maxima", [&] {
    expect_handle("plan", out);
    const auto s = get("stream", stream);
    const auto m = get("model", model);
    const CacheSpec spec = read_cache_spec("cache", cache);
    StepOfMaxima step = plan_maxima(m->config, spec, device_info(*s->stream, m->config), read_options(options));
    auto made = std::make_shared<mla_plan>();
    made->plan = std::move(step.plan);
    made->query_start_loc = std::move(step.starts);
    made->block_table = std::move(step.table);
    made->batch = step.batch;  // of memory that has only changed hands
    put(out, std::move(made));
  });
}

mla_status mla_step_memory(const mla_stream* stream, const mla_model* model, const mla_cache_spec* cache,
                           const mla_step_maxima* maxima, const mla_plan_options* options, size_t* workspace_bytes,
                           size_t* selection_bytes) {
  return guarded("mla_step_memory", [&] {
    const auto s = get("stream", stream);
    const auto m = get("model", model);
    const StepMemory most = step_memory(m->config, read_cache_spec("cache", cache), read_maxima("maxima", maxima),
                                        device_info(*s->stream, m->config), read_options(options));
    if (workspace_bytes) *workspace_bytes = most.workspace_bytes;
    if (selection_bytes) *selection_bytes = most.selection_bytes;
  });
}

mla_status mla_plan_destroy(mla_plan* plan) { return destroy("mla_plan_destroy", "plan", plan); }

mla_status mla_plan_get(const mla_plan* plan, mla_plan_info* info) {
  return guarded("mla_plan_get", [&] {
    const auto held = get("plan", plan);
    const Plan& p = held->plan;
    mla_plan_info i;
    std::memset(&i, 0, sizeof i);
    i.tokens = p.tokens;
    i.requests = static_cast<int64_t>(p.requests.size());
    i.workspace_bytes = p.workspace_bytes;
    i.selection_bytes = p.selection_bytes;
    i.sparse_rows = p.sparse_rows();
    i.latent_rows = static_cast<int64_t>(p.latent_tokens.size()) - p.masked_begin;
    for (const RequestPlan& r : p.requests)
      if (r.path == Path::expanded) i.expanded_rows += r.query_len;
    i.latent_items = static_cast<int64_t>(p.latent_items.size());
    i.split_rows = static_cast<int64_t>(p.splits.size());
    i.partial_rows = p.partial_rows;
    i.context_chunks = static_cast<int64_t>(p.chunks.size());
    i.context_rows = p.context_rows;
    i.topk = p.topk;
    i.fused_output = p.fused_output;
    i.activations = static_cast<int32_t>(p.inputs());
    i.batch_tokens = p.batch_tokens;
    i.own_row_begin = p.own_rows().begin;
    i.own_rows = p.own_rows().count;
    write_struct("info", info, i);
  });
}

mla_status mla_plan_request(const mla_plan* plan, int64_t request, mla_request_plan* info) {
  return guarded("mla_plan_request", [&] {
    const auto held = get("plan", plan);
    const auto& requests = held->plan.requests;
    if (request < 0 || request >= static_cast<int64_t>(requests.size()))
      throw InputError("request is " + std::to_string(request) + ", the plan has " + std::to_string(requests.size()));
    const RequestPlan& r = requests[request];
    write_struct(
        "info", info,
        mla_request_plan{sizeof(mla_request_plan), static_cast<int32_t>(r.path), r.q_begin, r.query_len, r.context});
  });
}

mla_status mla_plan_positions(const mla_plan* plan, const int32_t** positions, int64_t* count) {
  return guarded("mla_plan_positions", [&] {
    const auto held = get("plan", plan);
    required("positions", positions) = held->plan.positions.data();
    if (count) *count = static_cast<int64_t>(held->plan.positions.size());
  });
}

mla_status mla_plan_describe(const mla_plan* plan, char* text, size_t capacity, size_t* length) {
  return guarded("mla_plan_describe", [&] { write_text(get("plan", plan)->plan.describe(), text, capacity, length); });
}
