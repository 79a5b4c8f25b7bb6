// Batches, block tables, slots and options of any kind: refused, or a plan that checks out against a plain reading of
// the batch, and that runs on memory of exactly the sizes it names, next to pages of NaN that nobody holds.
#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <vector>

#include "fuzz/fuzz.hpp"
#include "fuzz/plan_checks.hpp"
#include "mla/mla.hpp"

using namespace mla;

namespace {

struct Prepared {
  ModelConfig model;
  LayerWeights weights;
  RotaryTable rotary, index_rotary;
  explicit Prepared(const ModelConfig& m)
      : model(m),
        weights(prepare(m, random_layer(m, 0, 1, Dtype::f32), PrepareOptions{.dtype = Dtype::f32})),
        rotary(m.rotary, m.rope, 256),
        index_rotary(m.indexer ? RotaryTable(m.index_rotary(), m.rope, 256) : RotaryTable()) {}
};

const Prepared& prepared(int which) {
  static const std::vector<Prepared>* all = [] {
    ModelConfig dense;
    dense.name = "dense";
    dense.hidden = 16;
    dense.layers = 1;
    dense.heads = 2;
    dense.latent = 16;
    dense.nope = 8;
    dense.rope = 4;
    dense.value = 8;
    ModelConfig sparse = dense;
    sparse.name = "sparse";
    sparse.query_latent = 8;
    sparse.rope = 8;
    sparse.indexer = IndexerConfig{.heads = 2, .dim = 16, .topk = 6};
    ModelConfig odd = dense;
    odd.name = "odd";
    odd.hidden = 11;
    odd.heads = 3;
    odd.latent = 12;
    odd.nope = 5;
    odd.rope = 0;
    odd.value = 7;
    odd.rotary.rotate = false;
    auto* v = new std::vector<Prepared>;
    for (const ModelConfig& m : {dense, sparse, odd}) v->emplace_back(m);
    return v;
  }();
  return (*all)[static_cast<size_t>(which)];
}

// Exactly so many bytes, aligned, every one of them set.
struct Exact {
  std::unique_ptr<std::byte, void (*)(void*)> memory;
  size_t size;
  Exact(size_t n, int byte)
      : memory(static_cast<std::byte*>(std::aligned_alloc(64, (n + 63) / 64 * 64)), std::free),
        size((n + 63) / 64 * 64) {
    FUZZ_CHECK(n == 0 || memory);
    if (n > 0) std::memset(memory.get(), byte, size);
  }
  std::byte* data() const { return memory.get(); }
};

struct DamagedStep {
  std::vector<int64_t> queries, contexts;
  std::vector<int32_t> starts{0}, lengths, table, slots;
  int64_t page_size = 1, pages = 1, width = 1;

  explicit DamagedStep(fuzz::Source& in) {
    page_size = in.odd(1, 20);
    const int64_t q = std::clamp<int64_t>(page_size, 1, 64);
    const int64_t requests = in.within(0, 5);
    int64_t needed = 0;
    for (int64_t r = 0; r < requests; ++r) {
      queries.push_back(in.within(0, 3) ? in.within(0, 3) : in.within(0, 40));
      contexts.push_back(in.within(0, 2) ? in.within(0, 90) : 0);
      const int64_t own = (queries.back() + contexts.back() + q - 1) / q;
      width = std::max(width, own);
      needed += own;
    }
    pages = needed + in.within(0, 3);
    // Each request its own pages, from the last on, as a pool hands them out; then what a caller may get wrong.
    int32_t next = static_cast<int32_t>(pages);
    table.assign(static_cast<size_t>(requests * width), -7);
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t length = queries[r] + contexts[r];
      for (int64_t p = 0; p < (length + q - 1) / q; ++p) table[r * width + p] = --next;
      for (int64_t at = contexts[r]; at < length; ++at)
        slots.push_back(static_cast<int32_t>(table[r * width + at / q] * q + at % q));
      starts.push_back(static_cast<int32_t>(starts.back() + queries[r]));
      lengths.push_back(static_cast<int32_t>(length));
    }
    for (int64_t damage = in.within(0, 15) < 10 ? 0 : in.within(1, 3); damage > 0; --damage) {
      const int32_t value = static_cast<int32_t>(in.odd(-1, pages + 1));
      const size_t at = in.raw<uint16_t>();
      switch (in.within(0, 5)) {
        case 0: starts[at % starts.size()] = value; break;
        case 1:
          if (!lengths.empty()) lengths[at % lengths.size()] = value;
          break;
        case 2:
          if (!table.empty()) table[at % table.size()] = value;
          break;
        case 3:
          if (!slots.empty()) slots[at % slots.size()] = value;
          break;
        case 4: slots.push_back(value); break;
        default: pages = value;
      }
    }
  }
  Batch batch() const {
    return {starts, lengths, {table.data(), {static_cast<int64_t>(lengths.size()), width}}, slots};
  }

  // As the header says it, read once more. cache: are pages and slots looked at?
  void check_accepted(bool cache) {
    FUZZ_CHECK(starts.front() == 0 && starts.size() == lengths.size() + 1);
    FUZZ_CHECK(!cache || (page_size >= 1 && pages >= 0 && static_cast<int64_t>(slots.size()) == starts.back()));
    queries.clear();
    contexts.clear();
    for (size_t r = 0; r < lengths.size(); ++r) {
      const int64_t count = starts[r + 1] - starts[r];
      FUZZ_CHECK(count >= 0 && lengths[r] >= count);
      queries.push_back(count);
      contexts.push_back(lengths[r] - count);
      if (!cache) continue;
      const int64_t used = count == 0 ? 0 : (lengths[r] + page_size - 1) / page_size;
      FUZZ_CHECK(used <= width);
      for (int64_t p = 0; p < used; ++p) {
        const int32_t page = table[r * static_cast<size_t>(width) + static_cast<size_t>(p)];
        FUZZ_CHECK(page >= 0 && page < pages);
      }
    }
    if (!cache) return;
    // Every slot is that of its token's position, and one token's.
    std::set<int32_t> written;
    for (size_t r = 0; r < lengths.size(); ++r)
      for (int32_t t = starts[r]; t < starts[r + 1]; ++t) {
        const int32_t slot = slots[static_cast<size_t>(t)];
        if (slot < 0) continue;
        const int64_t at = lengths[r] - starts[r + 1] + t;
        const int64_t page = table[r * static_cast<size_t>(width) + static_cast<size_t>(at / page_size)];
        FUZZ_CHECK(slot == page * page_size + at % page_size);
        FUZZ_CHECK(written.insert(slot).second);
      }
  }
};

PlanOptions options_of(fuzz::Source& in) {
  PlanOptions o;
  o.path = static_cast<PathPolicy>(in.within(0, 3));
  o.split = static_cast<SplitPolicy>(in.within(0, 1));
  o.sparse = static_cast<SparsePolicy>(in.within(0, 4));
  o.compute = in.flag() ? Dtype::bf16 : Dtype::f32;
  o.index_format = static_cast<IndexCacheFormat>(in.within(0, 2));
  o.index_hadamard = in.byte() < 40;
  o.prefill = in.byte() < 64 ? PrefillOperands::fp8 : PrefillOperands::compute;
  o.index_arithmetic = in.flag() ? IndexArithmetic::fp8 : IndexArithmetic::exact;
  o.reorder_batch_threshold = in.odd(0, 8);
  const int64_t rows = in.odd(0, 60);
  o.context_rows = in.flag() ? rows : 0;
  o.max_model_len = in.byte() < 32 ? in.odd(0, 200) : 0;
  o.max_requests = in.byte() < 32 ? in.odd(0, 8) : 0;
  o.fp8_query = in.byte() < 32;
  if (in.byte() < 16) o.q_scale = in.raw<float>();
  o.absorbed = in.byte() < 8;
  if (in.byte() < 16) o.output = OutputSpec{.kind = OutputKind::fp8};
  if (in.byte() < 16)
    o.rates = CostModel{
        .latent_flops = in.raw<float>(), .expanded_flops = in.raw<float>(), .projection_flops = in.raw<float>()};
  const uint8_t form = in.byte();
  if (form >= 248) {
    o.form = LayerForm::attention;
    o.cache_use = static_cast<CacheUse>(in.within(0, 2));
  } else if (form >= 244) {
    o.tensor_parallel = static_cast<int>(in.odd(0, 4));
  } else if (form >= 240) {
    o.dummy = true;
  }
  return o;
}

void execute(const Prepared& m, const CacheSpec& spec, const DamagedStep& s, const Plan& p, Stream& stream) {
  Cache cache(spec, s.pages);
  IndexCache index;
  if (m.model.indexer) index = IndexCache(p.index_cache, s.pages);
  // Rows of earlier steps are zeros, pages that no request has are NaN. Where no cache is used, nothing has looked at the
  // page table, and all of them are.
  std::set<int64_t> used;
  for (size_t r = 0; p.uses_cache() && r < s.queries.size(); ++r)
    for (int64_t i = 0; s.queries[r] > 0 && i < (s.lengths[r] + s.page_size - 1) / s.page_size; ++i)
      used.insert(s.table[r * static_cast<size_t>(s.width) + static_cast<size_t>(i)]);
  for (int64_t page = 0; page < s.pages; ++page) {
    std::memset(cache.view().page(page), used.count(page) ? 0 : 0xff, spec.page_bytes());
    if (m.model.indexer) std::memset(index.view().page(page), used.count(page) ? 0 : 0xff, p.index_cache.page_bytes());
  }
  const Exact workspace(p.workspace_bytes, 0xff), selection(p.selection_bytes, 0xff);
  std::vector<float> out(static_cast<size_t>((p.tokens + 1) * m.model.hidden), -123.5f);
  std::vector<std::byte> given(out.size() * sizeof(float));
  const Dtype dtype = p.inputs();
  for (size_t i = 0; i < out.size(); ++i)
    store_float(dtype, given.data(), static_cast<int64_t>(i), static_cast<float>((i * 37) % 19) / 8 - 1);
  const Batch batch = s.batch();
  const bool no = fuzz::refused([&] {
    forward(stream,
            {.plan = p,
             .batch = batch,
             .weights = m.weights,
             .rotary = m.rotary,
             .cache = cache.view(),
             .workspace = {workspace.data(), workspace.size},
             .index_cache = index.view(),
             .index_rotary = &m.index_rotary,
             .selection = {selection.data(), selection.size}},
            AnyView<Token, Hidden>(dtype, given.data(), {p.tokens + 1, m.model.hidden}),
            View<float, Token, Hidden>(out.data(), {p.tokens + 1, m.model.hidden}));
  });
  if (no) return;
  // Where every new token is stored, every row sees finite keys alone.
  const bool stored = std::all_of(s.slots.begin(), s.slots.end(), [](int32_t slot) { return slot >= 0; });
  for (int64_t i = 0; i < p.tokens * m.model.hidden; ++i)
    FUZZ_CHECK(!stored || std::isfinite(out[static_cast<size_t>(i)]));
  for (size_t i = static_cast<size_t>(p.tokens * m.model.hidden); i < out.size(); ++i) FUZZ_CHECK(out[i] == -123.5f);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Source in(data, size);
  static ThreadPool pool(2);
  static Stream stream(pool);
  const Prepared& m = prepared(static_cast<int>(in.within(0, 2)));
  const CacheFormat format = cache_formats()[in.byte() % cache_formats().size()];
  const bool run = in.byte() < 64;
  PlanOptions options = options_of(in);
  DamagedStep s(in);
  CacheSpec spec = cache_spec(m.model, format, s.page_size);
  if (in.byte() < 16) spec.k_scale = in.raw<float>();
  if (in.byte() > 200) options.activation_dtype = static_cast<ActivationDtype>(in.within(1, 3));
  fuzz::refused([&] {
    const DeviceInfo device = device_info(stream, m.model);
    const Plan p = plan(m.model, spec, s.pages, s.batch(), device, options);
    s.check_accepted(p.uses_cache());
    fuzz::check_plan(p, s.queries, s.contexts);
    FUZZ_CHECK(p.describe() == plan(m.model, spec, s.pages, s.batch(), device, options).describe());
    if (run && s.pages * static_cast<int64_t>(spec.page_bytes()) < (1 << 20) && p.workspace_bytes < (size_t{1} << 24) &&
        std::all_of(s.lengths.begin(), s.lengths.end(), [](int32_t n) { return n <= 256; }))
      execute(m, spec, s, p, stream);
  });
  return 0;
}
