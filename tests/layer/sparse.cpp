// Sparse attention end to end: the golden DeepSeek V3.2 module by prefill, chunks, single tokens and mixed batches, on
// every plan mode and cache format; invariance; shared selections; what must be refused.
#include <gtest/gtest.h>

#include <cmath>

#include "layer/reference.hpp"
#include "mla/error.hpp"
#include "ops/run.hpp"
#include "support/count_allocations.hpp"
#include "support/engine.hpp"
#include "support/golden.hpp"
#include "support/models.hpp"
#include "support/quantised.hpp"

namespace mla::test {
namespace {

constexpr double kFileError = 5e-6, kFloor = 2e-6;

struct V32 {
  Golden golden = read_golden(golden_folder() / "v32.safetensors", true);
  reference::Weights plain = reference::plain_weights(golden.tensors, Dtype::f32);
  LayerWeights weights = prepare(golden.config, golden.tensors, Dtype::f32, kDevice);
  LayerWeights without_indexer = weights;
  std::vector<int64_t> rows = std::vector<int64_t>(static_cast<size_t>(golden.length));
  std::vector<std::vector<double>> scores;

  V32() {
    without_indexer.indexer.reset();
    std::iota(rows.begin(), rows.end(), 0);
    scores = reference::index_scores(golden.config, plain, golden.hidden, rows);
  }
  int64_t topk() const { return golden.config.indexer->topk; }
  /// The file's choice for a row, ascending; masked (future) tokens dropped.
  std::vector<int32_t> chosen(int64_t row) const {
    std::vector<int32_t> c;
    for (int64_t k = 0; k < topk(); ++k)
      if (const int32_t j = golden.topk[row * topk() + k]; j <= row) c.push_back(j);
    std::sort(c.begin(), c.end());
    return c;
  }
};

const V32& v32() {
  static const V32 v;
  return v;
}

/// Runs the sequence through an engine by chunks; what each row attended to, and its output.
struct Ran {
  std::vector<float> out;
  std::vector<std::vector<int32_t>> selected;
};
Ran run(Engine& engine, std::span<const float> hidden, int64_t tokens, int64_t chunk) {
  Ran r;
  const int64_t id = engine.add(hidden);
  for (int64_t done = 0; done < tokens; done += chunk) {
    const Engine::Piece piece{id, std::min(chunk, tokens - done)};
    const auto rows = engine.step({&piece, 1});
    r.out.insert(r.out.end(), rows[0].begin(), rows[0].end());
    for (auto& s : engine.selected()) r.selected.push_back(std::move(s));
  }
  return r;
}

/// Judges outputs on the rows' own selections, and the selections by the exact scores.
void judge(const Ran& r, CacheFormat format, Dtype compute, IndexCacheFormat index, bool hadamard,
           const std::string& how) {
  const V32& v = v32();
  const Golden& g = v.golden;
  const int64_t n = static_cast<int64_t>(r.selected.size());
  const reference::Rounding rounding{.weights = Dtype::f32,
                                     .compute = compute,
                                     .activations = kOnGpu ? compute : Dtype::f32,
                                     .cache = cache_spec(g.config, format),
                                     .path = Path::latent,
                                     .index_cache = index_cache_spec(g.config, cache_spec(g.config, format), index),
                                     .index_hadamard = hadamard};
  const std::span rows = std::span(v.rows).first(static_cast<size_t>(n));
  const auto exact = reference::output_rows(g.config, v.plain, g.hidden, rows, nullptr, r.selected);
  const auto plain = reference::output_rows(g.config, v.plain, g.hidden, rows, &rounding, r.selected);
  const double bound = 2 * reference::relative_error(std::vector<float>(plain.begin(), plain.end()), exact) + kFloor;
  EXPECT_LE(reference::relative_error(r.out, exact), bound) << how;
  const auto plain_scores = reference::index_scores(g.config, v.plain, g.hidden, rows, &rounding);
  for (int64_t i = 0; i < n; ++i) {
    if (r.selected[i].empty()) continue;
    EXPECT_LE(reference::selection_error(r.selected[i], v.scores[i], plain_scores[i], v.topk()), 1)
        << how << " row " << i;
  }
}

TEST(SparseReference, ChoosesWhatTheFileChose) {
  const V32& v = v32();
  int64_t tied = 0;
  for (int64_t row = 0; row < v.golden.length; ++row) {
    const auto ours = reference::best(v.scores[row], v.topk()), file = v.chosen(row);
    ASSERT_EQ(ours.size(), file.size()) << row;
    if (ours == file) continue;
    // Then they differ in positions of one and the same score.
    std::vector<int32_t> a, b;
    std::set_difference(ours.begin(), ours.end(), file.begin(), file.end(), std::back_inserter(a));
    std::set_difference(file.begin(), file.end(), ours.begin(), ours.end(), std::back_inserter(b));
    for (int32_t j : a) EXPECT_EQ(v.scores[row][j], 0) << row;
    for (int32_t j : b) EXPECT_EQ(v.scores[row][j], 0) << row;
    ++tied;
  }
  EXPECT_LE(tied, 14);  // the file's authors count as many
}

// The file's own choice, through weights without an indexer: outputs are then the file's.
TEST(SparseGolden, OutputsOnTheFilesChoice) {
  const V32& v = v32();
  const Golden& g = v.golden;
  const std::vector<double> file(g.output.begin(), g.output.end());
  for (SparsePolicy policy : {SparsePolicy::mixed, SparsePolicy::direct, SparsePolicy::upconvert})
    for (int64_t chunk : {g.length, int64_t{64}, int64_t{23}}) {
      Engine engine(v.without_indexer, cache_spec(g.config, CacheFormat::f32, 16), {.plan = {.sparse = policy}});
      engine.chooser = [&](int64_t, int64_t position) { return v.chosen(position); };
      EXPECT_LE(reference::relative_error(engine.run_alone(engine.add(g.hidden), g.length, chunk), file), kFileError)
          << to_string(policy) << " chunks of " << chunk;
      EXPECT_FALSE(engine.padding_touched);
    }
}

TEST(SparseGolden, PrefillAndChunksOnEveryModeAndFormat) {
  const Golden& g = v32().golden;
  for (CacheFormat format :
       {CacheFormat::f32, CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8, CacheFormat::fp8_ds_mla})
    for (SparsePolicy policy :
         {SparsePolicy::automatic, SparsePolicy::mixed, SparsePolicy::direct, SparsePolicy::upconvert})
      for (int64_t chunk : {g.length, int64_t{23}}) {
        const IndexCacheFormat index = chunk == 23 ? IndexCacheFormat::fp8 : IndexCacheFormat::f32;
        Engine engine(v32().weights, cache_spec(g.config, format, chunk == 23 ? 3 : 64),
                      {.plan = {.sparse = policy, .index_format = index}});
        judge(run(engine, g.hidden, g.length, chunk), format, Dtype::f32, index, false,
              std::string(to_string(format)) + " " + std::string(to_string(policy)) + " chunks of " +
                  std::to_string(chunk));
        EXPECT_FALSE(engine.padding_touched);
      }
}

TEST(SparseGolden, IndexFormatsAndRotation) {
  const Golden& g = v32().golden;
  for (IndexCacheFormat index : index_cache_formats())
    for (bool hadamard : {false, true})
      for (Dtype compute : {Dtype::f32, Dtype::bf16}) {
        Engine engine(v32().weights, cache_spec(g.config, CacheFormat::bf16),
                      {.plan = {.compute = compute, .index_format = index, .index_hadamard = hadamard}});
        judge(run(engine, g.hidden, g.length, 50), CacheFormat::bf16, compute, index, hadamard,
              std::string(to_string(index)) + (hadamard ? " rotated" : "") + " compute " +
                  std::string(to_string(compute)));
      }
}

TEST(SparseGolden, TokenByToken) {
  const Golden& g = v32().golden;
  Engine engine(v32().weights, cache_spec(g.config, CacheFormat::f32, 7),
                {.plan = {.index_format = IndexCacheFormat::f32}});
  judge(run(engine, g.hidden, g.length, 1), CacheFormat::f32, Dtype::f32, IndexCacheFormat::f32, false,
        "token by token");
}

TEST(SparseGolden, DensePolicyAttendsToEverything) {
  const V32& v = v32();
  Engine engine(v.weights, cache_spec(v.golden.config, CacheFormat::f32), {.plan = {.sparse = SparsePolicy::dense}});
  const auto exact = reference::output_rows(v.golden.config, v.plain, v.golden.hidden, v.rows);
  EXPECT_LE(reference::relative_error(engine.run_alone(engine.add(v.golden.hidden), v.golden.length, 100), exact),
            kFloor);
}

// One request beside others, alone, in other orders and pages: the same bits, selection included.
TEST(SparseInvariance, NeighboursThreadsAndPoison) {
  const Golden& g = v32().golden;
  for (SparsePolicy policy : {SparsePolicy::mixed, SparsePolicy::automatic, SparsePolicy::upconvert})
    for (Dtype compute : {Dtype::f32, Dtype::bf16}) {
      const Engine::Options options{
          .plan = {.split = SplitPolicy::batch_invariant, .compute = compute, .sparse = policy}};
      auto go = [&](Engine::Options o, int others) {
        Engine engine(v32().weights, cache_spec(g.config, CacheFormat::fp8_ds_mla, 16), o);
        const int64_t me = engine.add(g.hidden);
        for (int i = 0; i < others; ++i)
          engine.add(std::span(g.hidden).subspan(static_cast<size_t>(i) * g.config.hidden));
        std::vector<float> out;
        for (int64_t count : {100, 1, 60, 1, 1, 90}) {
          std::vector<Engine::Piece> pieces;
          for (int i = 0; i < others; ++i) pieces.push_back({i + 1, i % 2 ? 1 : 17});
          pieces.insert(pieces.begin() + others / 2, {me, count});
          const auto rows = engine.step(pieces);
          out.insert(out.end(), rows[others / 2].begin(), rows[others / 2].end());
        }
        return out;
      };
      const auto alone = go(options, 0);
      for (float x : alone) ASSERT_TRUE(std::isfinite(x));
      EXPECT_EQ(go(options, 6), alone) << to_string(policy) << " " << to_string(compute);
      Engine::Options other = options;
      other.threads = 1;
      other.poison = false;
      other.page_seed = 8;
      EXPECT_EQ(go(other, 3), alone) << to_string(policy) << " " << to_string(compute);
      other.threads = 5;
      EXPECT_EQ(go(other, 0), alone) << to_string(policy) << " " << to_string(compute);
    }
}

TEST(SparseLayer, AllocatesNothingAfterThePlan) {
  const Golden& g = v32().golden;
  for (SparsePolicy policy : {SparsePolicy::mixed, SparsePolicy::upconvert})
    for (IndexCacheFormat index : index_cache_formats()) {
      Engine engine(v32().weights, cache_spec(g.config, CacheFormat::bf16),
                    {.plan = {.sparse = policy, .index_format = index}});
      engine.counter = allocation_count;
      engine.run_alone(engine.add(g.hidden), 200, 90);
      EXPECT_EQ(engine.allocations, 0) << to_string(policy) << " " << to_string(index);
    }
}

// A step over one request with a context of 100, ready to be run, for what the layer must refuse.
struct Step {
  const V32& v = v32();
  ModelConfig model = v.golden.config;
  std::vector<int32_t> starts{0, 200}, lengths{200}, table{0, 1, 2, 3}, slots;
  CacheSpec spec = cache_spec(model, CacheFormat::f32);
  Cache cache{spec, 4};
  IndexCache index{index_cache_spec(model, spec, IndexCacheFormat::fp8), 4};
  RotaryTable rotary{model.rotary, model.rope, 256}, index_rotary{model.index_rotary(), model.rope, 256};
  ThreadPool pool{2};
  Stream stream{pool};
  Buffer workspace, selection;
  std::vector<float> out = std::vector<float>(200 * static_cast<size_t>(model.hidden));

  Step() {
    for (int32_t i = 0; i < 200; ++i) slots.push_back(i);
  }
  Batch batch() const { return {starts, lengths, {table.data(), {1, 4}}, slots}; }
  Plan planned() const { return plan(model, spec, 4, batch(), device_info(stream, model)); }
  std::string go(const LayerWeights& weights, const std::function<void(LayerContext&)>& breaks) {
    const Plan p = planned();
    const Batch b = batch();
    workspace = Buffer(p.workspace_bytes);
    selection = Buffer(p.selection_bytes);
    LayerContext c{.plan = p,
                   .batch = b,
                   .weights = weights,
                   .rotary = rotary,
                   .cache = cache.view(),
                   .workspace = {workspace.data(), workspace.size()},
                   .index_cache = index.view(),
                   .index_rotary = &index_rotary,
                   .selection = {selection.data(), selection.size()}};
    breaks(c);
    try {
      forward(stream, c, View<const float, Token, Hidden>(v.golden.hidden.data(), {200, model.hidden}),
              View<float, Token, Hidden>(out.data(), {200, model.hidden}));
    } catch (const Error& e) {
      return e.what();
    }
    return "ran";
  }
};

TEST(SparseLayer, ContextsThatDoNotFitAreNamed) {
  Step s;
  const LayerWeights& w = s.v.weights;
  EXPECT_EQ(s.go(w, [](LayerContext&) {}), "ran");
  EXPECT_EQ(s.go(w, [](LayerContext& c) { c.selection = {}; }),
            "layer: selection is 0 bytes, plan needs " + std::to_string(s.planned().selection_bytes));
  EXPECT_EQ(s.go(w, [](LayerContext& c) { c.index_rotary = nullptr; }), "layer: index_rotary is missing");
  EXPECT_EQ(s.go(w, [](LayerContext& c) { c.index_cache = {}; }),
            "layer: index cache's number of pages is 0, the cache's is 4");
  IndexCacheSpec other = s.index.spec();
  other.format = IndexCacheFormat::bf16;
  const IndexCache wrong(other, 4);
  EXPECT_EQ(s.go(w, [&](LayerContext& c) { c.index_cache = wrong.view(); }),
            "layer: index cache format is bf16, plan was made for fp8");
}

// A layer without an indexer attends to what the one before it selected.
TEST(SparseLayer, SharedSelection) {
  Step s;
  ASSERT_EQ(s.go(s.v.weights, [](LayerContext&) {}), "ran");
  const std::vector<float> own = s.out;
  const Plan p = s.planned();
  std::vector<std::byte> kept(s.selection.data(), s.selection.data() + s.selection.size());
  Cache cache(s.spec, 4);
  ASSERT_EQ(s.go(s.v.without_indexer,
                 [&](LayerContext& c) {
                   std::copy(kept.begin(), kept.end(), c.selection.data());
                   c.cache = cache.view();
                   c.index_cache = {};
                   c.index_rotary = nullptr;
                 }),
            "ran");
  EXPECT_EQ(s.out, own);
}

// The attention form on a choice of the caller's own gives the block form's heads, and quantised ones their bits.
TEST(SparseLayer, AttentionFormOnAChoiceGiven) {
  Step s;
  const ModelConfig& m = s.model;
  ASSERT_EQ(s.go(s.v.weights, [](LayerContext&) {}), "ran");
  const Plan block = s.planned();
  auto region = [&](const char* name, int64_t n) {
    const float* p = reinterpret_cast<const float*>(s.workspace.data() + block.region(name).offset);
    return std::vector<float>(p, p + n);
  };
  const int64_t width = m.heads * m.value;
  const auto q = region("query", 200 * m.heads * m.query_key()), kv = region("kv", 200 * m.entry()),
             heads = region("heads", 200 * width);
  std::vector<int32_t> choice(200 * static_cast<size_t>(block.topk), -7);
  const View<int32_t, Token, Topk> selected = block.selected({s.selection.data(), s.selection.size()});
  for (int64_t row = 0; row < block.sparse_rows(); ++row)
    for (int64_t k = 0; k < block.topk; ++k)
      choice[block.latent_tokens[block.sparse_begin + row] * block.topk + k] = selected(row, k);

  for (const char* name : {"none", "fp8_128_tma", "nvfp4"}) {
    const OutputSpec spec = parse_output_spec(name);
    const Plan p = plan(m, s.spec, 4, s.batch(), device_info(s.stream, m), {.output = spec});
    const Batch b = s.batch();
    Cache cache(s.spec, 4);
    const Buffer workspace(p.workspace_bytes), selection(p.selection_bytes);
    const LayerContext c{.plan = p,
                         .batch = b,
                         .weights = s.v.without_indexer,
                         .rotary = s.rotary,
                         .cache = cache.view(),
                         .workspace = {workspace.data(), workspace.size()},
                         .selection = {selection.data(), selection.size()}};
    select(s.stream, c, View<const int32_t, Token, Topk>(choice.data(), {200, p.topk}));
    const View<const float, Token, Head, QueryKey> queries(q.data(), {200, m.heads, m.query_key()});
    const View<const float, Token, Latent> kv_c(kv.data(), {200, m.latent}, {m.entry(), 1});
    const View<const float, Token, Rope> k_pe(kv.data() + m.latent, {200, m.rope}, {m.entry(), 1});
    if (spec.kind == OutputKind::none) {
      std::vector<float> out(heads.size());
      attend(s.stream, c, queries, kv_c, k_pe, View<float, Token, Head, Value>(out.data(), {200, m.heads, m.value}));
      EXPECT_EQ(out, heads);
      continue;
    }
    QuantisedMemory got(spec, 200, width), right(spec, 200, width);
    attend(s.stream, c, queries, kv_c, k_pe, got.view());
    ops::run(s.stream, ops::QuantizeArgs{.x = {Dtype::f32, heads.data(), {200, width}}, .y = right.view()});
    EXPECT_EQ(got.codes, right.codes) << name;
    EXPECT_EQ(got.scales, right.scales) << name;
  }
  const Plan p = s.planned();
  const Batch b = s.batch();
  const LayerContext c{.plan = p,
                       .batch = b,
                       .weights = s.v.without_indexer,
                       .rotary = s.rotary,
                       .cache = s.cache.view(),
                       .workspace = {s.workspace.data(), s.workspace.size()},
                       .selection = {s.selection.data(), s.selection.size()}};
  EXPECT_THROW(select(s.stream, c, View<const int32_t, Token, Topk>(choice.data(), {200, p.topk - 1})), ShapeError);
  EXPECT_THROW(select(s.stream, c, View<const int32_t, Token, Topk>(choice.data(), {199, p.topk})), ShapeError);
}

}  // namespace
}  // namespace mla::test
