// Batches, block tables, slots and options of any kind: refused, or a plan that checks out against a plain reading of
// the batch, and that runs on memory of exactly the sizes it names, next to pages of NaN that nobody holds; or, for
// ranks with a part of the cache each, plans that fit together.
#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
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
  DeviceInfo device;
  explicit Prepared(const ModelConfig& m)
      : model(m),
        weights(prepare(m, random_layer(m, 0, 1, Dtype::f32), PrepareOptions{.dtype = Dtype::f32})),
        rotary(m.rotary, m.rope, 256),
        index_rotary(m.indexer ? RotaryTable(m.index_rotary(), m.rope, 256) : RotaryTable()),
        device(device_info(Device{}, 1, m)) {}
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

// A part of memory that is kept, so that no input pays for fresh pages: what lies around parts that are in use is
// poisoned. Every byte of a part is set.
class Kept {
 public:
  static constexpr size_t kMost = size_t{1} << 24;
  Kept(size_t n, int byte) : size_((n + 63) / 64 * 64), data_(memory() + used()) {
    FUZZ_CHECK(used() + size_ + kApart <= 2 * kMost);
    used() += size_ + kApart;
    ASAN_UNPOISON_MEMORY_REGION(data_, size_);
    std::memset(data_, byte, size_);
  }
  ~Kept() {
    ASAN_POISON_MEMORY_REGION(data_, size_);
    used() -= size_ + kApart;
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  static constexpr size_t kApart = 4096;
  static size_t& used() {
    static size_t n = kApart;
    return n;
  }
  static std::byte* memory() {
    static std::byte* const all = [] {
      auto* p = static_cast<std::byte*>(std::aligned_alloc(64, 2 * kMost));
      ASAN_POISON_MEMORY_REGION(p, 2 * kMost);
      return p;
    }();
    return all;
  }
  size_t size_;
  std::byte* data_;
};

// What a step is, and what a caller may get wrong of it.
struct Requests {
  std::vector<int64_t> queries, contexts;
  int64_t page_size = 1, spare = 0;
  struct Damage {
    int kind;
    size_t at;
    int64_t value;
  };
  std::vector<Damage> damages;

  // scale: of contexts and pages, so that keys of some requests are many and block tables short.
  Requests(fuzz::Source& in, int64_t scale) {
    page_size = in.odd(1, 20);
    if (scale > 1 && page_size > 0 && page_size <= 20) page_size *= 16;
    const int64_t q = usable_page_size();
    int64_t needed = 0;
    for (int64_t r = in.within(0, 5); r > 0; --r) {
      queries.push_back(in.within(0, 3) ? in.within(0, 3) : in.within(0, 40));
      contexts.push_back(in.within(0, 2) ? scale * in.within(0, 90) : 0);
      needed += (queries.back() + contexts.back() + q - 1) / q;
    }
    spare = in.within(0, 3);
    for (int64_t n = in.within(0, 15) < 10 ? 0 : in.within(1, 3); n > 0; --n) {
      const int64_t value = in.odd(-1, needed + spare + 1);
      const size_t at = in.raw<uint16_t>();
      damages.push_back({static_cast<int>(in.within(0, 5)), at, value});
    }
  }
  int64_t usable_page_size() const { return std::clamp<int64_t>(page_size, 1, 320); }
};

// The step as one member has it, damaged.
struct DamagedStep {
  fuzz::Member who;
  std::vector<int64_t> queries, contexts;
  std::vector<int32_t> starts{0}, lengths, prompts, table, slots;
  int64_t page_size, pages, width = 1;

  DamagedStep(const Requests& given, const fuzz::Member& member)
      : who(member), queries(given.queries), contexts(given.contexts), page_size(given.page_size) {
    const int64_t q = given.usable_page_size(), requests = static_cast<int64_t>(queries.size());
    int64_t needed = 0;
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t own = (who.held(queries[r] + contexts[r]) + q - 1) / q;
      width = std::max(width, own);
      needed += own;
    }
    pages = needed + given.spare;
    // Each request its own pages, from the last on, as a pool hands them out; then what a caller may get wrong.
    int32_t next = static_cast<int32_t>(pages);
    table.assign(static_cast<size_t>(requests * width), -7);
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t length = queries[r] + contexts[r];
      for (int64_t p = 0; p < (who.held(length) + q - 1) / q; ++p) table[r * width + p] = --next;
      for (int64_t position = contexts[r]; position < length; ++position) {
        const int64_t at = who.held(position);
        slots.push_back(who.holds(position) ? static_cast<int32_t>(table[r * width + at / q] * q + at % q) : -1);
      }
      starts.push_back(static_cast<int32_t>(starts.back() + queries[r]));
      lengths.push_back(static_cast<int32_t>(length));
      prompts.push_back(static_cast<int32_t>(contexts[r] + (queries[r] > 1 ? queries[r] : 0)));
    }
    for (const Requests::Damage& d : given.damages) {
      const auto value = static_cast<int32_t>(d.value);
      const auto set = [&](std::vector<int32_t>& list) {
        if (!list.empty()) list[d.at % list.size()] = value;
      };
      switch (d.kind) {
        case 0: set(starts); break;
        case 1: set(lengths); break;
        case 2: set(table); break;
        case 3: set(slots); break;
        case 4: slots.push_back(value); break;
        default: pages = value;
      }
    }
  }
  Batch batch() const {
    return {starts, lengths, {table.data(), {static_cast<int64_t>(lengths.size()), width}}, slots, prompts};
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
      const int64_t used = count == 0 ? 0 : (who.held(lengths[r]) + page_size - 1) / page_size;
      FUZZ_CHECK(used <= width);
      for (int64_t p = 0; p < used; ++p) {
        const int32_t page = table[r * static_cast<size_t>(width) + static_cast<size_t>(p)];
        FUZZ_CHECK(page >= 0 && page < pages);
      }
    }
    if (!cache) return;
    // Every slot is that of its token's position, and one token's.
    std::vector<int32_t> written;
    for (size_t r = 0; r < lengths.size(); ++r)
      for (int32_t t = starts[r]; t < starts[r + 1]; ++t) {
        const int32_t slot = slots[static_cast<size_t>(t)];
        if (slot < 0) continue;
        const int64_t position = lengths[r] - starts[r + 1] + t, at = who.held(position);
        FUZZ_CHECK(who.holds(position));
        const int64_t page = table[r * static_cast<size_t>(width) + static_cast<size_t>(at / page_size)];
        FUZZ_CHECK(slot == page * page_size + at % page_size);
        written.push_back(slot);
      }
    std::sort(written.begin(), written.end());
    FUZZ_CHECK(std::adjacent_find(written.begin(), written.end()) == written.end());
  }
};

// Of requests with many keys: contexts up to 90 times as much.
constexpr int64_t kLong = 97;

PlanOptions options_of(fuzz::Source& in, int64_t scale) {
  PlanOptions o;
  o.path = static_cast<PathPolicy>(in.within(0, 4));
  o.split = static_cast<SplitPolicy>(in.within(0, 1));
  o.sparse = static_cast<SparsePolicy>(in.within(0, 5));
  o.compute = in.flag() ? Dtype::bf16 : Dtype::f32;
  o.index_format = static_cast<IndexCacheFormat>(in.within(0, 2));
  o.index_hadamard = in.byte() < 40;
  o.prefill = in.byte() < 64 ? PrefillOperands::fp8 : PrefillOperands::compute;
  o.index_arithmetic = in.flag() ? IndexArithmetic::fp8 : IndexArithmetic::exact;
  o.reorder_batch_threshold = in.odd(0, 8);
  const int64_t rows = in.odd(0, 60);
  o.context_rows = !in.flag() ? 0 : rows >= 0 && rows <= 60 ? rows * scale : rows;
  o.max_model_len = in.byte() < 32 ? in.odd(0, 200) : 0;
  o.max_requests = in.byte() < 32 ? in.odd(0, 8) : 0;
  o.fp8_query = in.byte() < 32;
  if (in.byte() < 16) o.q_scale = in.raw<float>(), o.decode = in.flag() ? DecodeOperands::fp8 : DecodeOperands::compute;
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
  // Rows of earlier steps are zeros, pages that no request has are NaN. Where no cache is used, nothing has looked at
  // the page table, and all of them are.
  std::set<int64_t> used;
  for (size_t r = 0; p.uses_cache() && r < s.queries.size(); ++r)
    for (int64_t i = 0; s.queries[r] > 0 && i < (s.lengths[r] + s.page_size - 1) / s.page_size; ++i)
      used.insert(s.table[r * static_cast<size_t>(s.width) + static_cast<size_t>(i)]);
  for (int64_t page = 0; page < s.pages; ++page) {
    std::memset(cache.view().page(page), used.count(page) ? 0 : 0xff, spec.page_bytes());
    if (m.model.indexer) std::memset(index.view().page(page), used.count(page) ? 0 : 0xff, p.index_cache.page_bytes());
  }
  const Kept workspace(p.workspace_bytes, 0xff), selection(p.selection_bytes, 0xff);
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
             .workspace = {workspace.data(), workspace.size()},
             .index_cache = index.view(),
             .index_rotary = &m.index_rotary,
             .selection = {selection.data(), selection.size()}},
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

// The same step and options make the same plan.
void check_again(const Plan& p, const Plan& again) {
  FUZZ_CHECK(p.workspace_bytes == again.workspace_bytes && p.selection_bytes == again.selection_bytes &&
             p.selection_stamp == again.selection_stamp && p.digest == again.digest);
  FUZZ_CHECK(p.describe() == again.describe() && !p.describe().empty());
}

// A step of the batch's own maxima has memory enough for it.
void check_memory(const Plan& p, const PlanOptions& options) {
  StepMaxima maxima{.requests = std::ssize(p.requests), .tokens = p.tokens};
  for (const RequestPlan& r : p.requests) {
    if (r.query_len == 0) continue;
    maxima.query_len = std::max<int64_t>(maxima.query_len, r.query_len);
    maxima.seq_len = std::max<int64_t>(maxima.seq_len, int64_t{r.context} + r.query_len);
  }
  StepMemory memory;
  FUZZ_CHECK(!fuzz::refused([&] { memory = step_memory(p.model, p.cache, maxima, p.device, options); }));
  FUZZ_CHECK(p.workspace_bytes <= memory.workspace_bytes && p.selection_bytes <= memory.selection_bytes);
}

// Ranks with a part of the cache each. All of a group that are accepted have plans that fit together; a rank of another
// group has the same digest.
void check_ranks(fuzz::Source& in, const Requests& requests, ModelConfig model, CacheSpec spec, DeviceInfo device,
                 PlanOptions options) {
  const int64_t members = in.within(2, 4), groups = in.within(1, 2);
  const int64_t interleave = in.flag() ? in.odd(1, 24) : std::max<int64_t>(1, requests.page_size);
  options.tensor_parallel = static_cast<int>(members * groups);
  ContextParallel& ranks = options.context_parallel;
  for (int64_t r = 0; r < members * groups; ++r) ranks.heads.push_back(in.within(1, 3));
  if (in.byte() < 64) options.link = {in.raw<float>(), in.raw<float>()};
  const uint8_t wrong = in.byte();  // 252 and above: something of one rank
  if (wrong == 252) ranks.heads.pop_back();
  if (wrong == 253) ++options.tensor_parallel;
  if (wrong == 254) ranks.heads.back() = in.odd(0, 3);
  ranks.sharding = CacheSharding(members, interleave);
  std::vector<Plan> plans;
  // The first group's, then one of the others.
  for (int64_t r = 0; r < std::min(members * groups, members + 1); ++r) {
    const fuzz::Member who{members, interleave, r % members};
    DamagedStep s(requests, who);
    ranks.rank = static_cast<int>(wrong == 255 ? in.odd(-1, members * groups) : r);
    model.heads = ranks.heads[std::min(static_cast<size_t>(r), ranks.heads.size() - 1)];
    plans.push_back(plan(model, spec, s.pages, s.batch(), device, options));
    if (ranks.rank != r) return;  // another's step that fits it, too
    s.check_accepted(plans.back().uses_cache());
    fuzz::check_plan(plans.back(), s.queries, s.contexts, who);
    if (r == 0) check_memory(plans.back(), options);
    if (plans.back().options.dummy) continue;
    FUZZ_CHECK(plans.back().digest == plans.front().digest);
  }
  plans.resize(static_cast<size_t>(members));
  fuzz::check_group(plans, interleave);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Source in(data, size);
  static Stream one(*new ThreadPool(1)), two(*new ThreadPool(2));
  // Model and kind of step: mostly one rank; of several, with many keys; planned for a GPU.
  const uint8_t kind = in.byte();
  const Prepared& m = prepared(kind % 3);
  const bool ranks = kind / 3 % 2 == 1, long_keys = kind / 6 % 4 == 1, gpu = kind / 24 % 4 == 1;
  const CacheFormat format = cache_formats()[in.byte() % cache_formats().size()];
  const uint8_t run = in.byte();
  PlanOptions options = options_of(in, long_keys ? kLong : 1);
  const Requests requests(in, long_keys ? kLong : 1);
  CacheSpec spec = cache_spec(m.model, format, requests.page_size);
  if (in.byte() < 16) spec.k_scale = in.raw<float>();
  if (in.byte() > 200) options.activation_dtype = static_cast<ActivationDtype>(in.within(1, 3));
  Stream& stream = run == 15 ? two : one;
  DeviceInfo device = m.device;
  device.threads = stream.workers();
  if (gpu) device.device.kind = DeviceKind::cuda;
  fuzz::refused([&] {
    if (ranks) return check_ranks(in, requests, m.model, spec, device, options);
    DamagedStep s(requests, {});
    const Plan p = plan(m.model, spec, s.pages, s.batch(), device, options);
    s.check_accepted(p.uses_cache());
    fuzz::check_plan(p, s.queries, s.contexts);
    if (run % 4 == 1) check_memory(p, options);
    if (run % 4 == 0) check_again(p, plan(m.model, spec, s.pages, s.batch(), device, options));
    if (run < 16 && !gpu && s.pages * static_cast<int64_t>(spec.page_bytes()) < (1 << 20) &&
        p.workspace_bytes < Kept::kMost && p.selection_bytes < Kept::kMost / 2 &&
        std::all_of(s.lengths.begin(), s.lengths.end(), [](int32_t n) { return n <= 256; }))
      execute(m, spec, s, p, stream);
  });
  return 0;
}
