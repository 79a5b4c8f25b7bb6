// Sparse attention by a context of the test's own: shared selections, choices of the caller's, what must be refused.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <utility>

#include "backend/run.hpp"
#include "layer/v32.hpp"
#include "mla/error.hpp"
#include "mla/layer.hpp"
#include "support/block_queries.hpp"
#include "support/device.hpp"
#include "support/message.hpp"
#include "support/quantised.hpp"

namespace mla::test {
namespace {

// A step over one request with a context of 100, ready to be run, for what the layer must refuse.
struct Step {
  const V32& v = v32();
  ModelConfig model = v.golden.config;
  std::vector<int32_t> starts{0, 200}, lengths{200}, table{0, 1, 2, 3}, slots;
  CacheSpec spec = cache_spec(model, CacheFormat::f32);
  Cache cache{spec, 4, kDevice};
  IndexCache index{index_cache_spec(model, spec, IndexCacheFormat::fp8), 4, kDevice};
  RotaryTable rotary{model.rotary, model.rope, 256, kDevice},
      index_rotary{model.index_rotary(), model.rope, 256, kDevice};
  ThreadPool pool{2};
  Stream stream = stream_on_device(pool);
  Buffer workspace, selection;
  std::vector<float> out = std::vector<float>(200 * static_cast<size_t>(model.hidden));

  Step() {
    for (int32_t i = 0; i < 200; ++i) slots.push_back(i);
  }
  Batch batch() const { return {starts, lengths, {table.data(), {1, 4}}, slots}; }
  Plan planned() const {
    return plan(model, spec, 4, batch(), device_info(stream, model), {.sparse = SparsePolicy::mixed});
  }
  std::string go(const LayerWeights& weights, const std::function<void(LayerContext&)>& breaks) {
    const Plan p = planned();
    const Batch b = batch();
    workspace = Buffer(p.workspace_bytes, kDevice);
    selection = Buffer(p.selection_bytes, kDevice);
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
      stream.synchronize();
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
  const IndexCache wrong(other, 4, kDevice);
  EXPECT_EQ(s.go(w, [&](LayerContext& c) { c.index_cache = wrong.view(); }),
            "layer: index cache format is bf16, plan was made for fp8");
}

TEST(SparseLayer, IndexTablesOfAnotherModelAreRefused) {
  Step s;
  const LayerWeights& w = s.v.weights;
  const RotaryTable none, main(s.model.rotary, s.model.rope, 256, kDevice),
      few(s.model.index_rotary(), s.model.rope, 199, kDevice);
  EXPECT_EQ(s.go(w, [&](LayerContext& c) { c.index_rotary = &none; }),
            "layer: index rotary table rotates nothing, the model's rope does");
  EXPECT_EQ(s.go(w, [&](LayerContext& c) { c.index_rotary = &main; }),
            "layer: index rotary table is of interleaved pairs, the model's are NeoX halves");
  EXPECT_EQ(s.go(w, [&](LayerContext& c) { c.index_rotary = &few; }),
            "layer: index rotary table has 199 positions, a request's sequence has 200");
  EXPECT_EQ(s.go(w, [](LayerContext& c) { c.index_cache.page_stride = 64; }).substr(0, 45),
            "layer: index cache page_stride is 64, a page ");
  EXPECT_EQ(s.go(w, [](LayerContext& c) { c.index_cache.data = nullptr; }), "layer: index cache has no data");
  const Buffer larger(s.planned().selection_bytes + 64, kDevice);
  EXPECT_EQ(s.go(w,
                 [&](LayerContext& c) {
                   c.selection = {larger.data() + 4, larger.size() - 64};
                 }),
            "layer: selection is at an address that is 4 past a multiple of 64");
}

// Memory that nobody has put a choice into is not attended to, whatever it holds; nor is another step's choice.
TEST(SparseLayer, StepsWithoutASelectionAreRefused) {
  Step s;
  const LayerWeights& shared = s.v.without_indexer;
  const std::string rows = std::to_string(s.planned().sparse_rows()),
                    none = "layer: " + rows +
                           " tokens attend to chosen keys, and the selection holds no choice: "
                           "select() or a layer with an indexer makes it first",
                    other = "layer: " + rows +
                            " tokens attend to chosen keys, and the selection holds the choice of "
                            "another step: select() or a layer with an indexer makes it first";
  for (int value : {0, 1, 0x7f, 0xff})
    EXPECT_EQ(s.go(shared,
                   [&](LayerContext& c) { fill(s.stream, c.selection.data(), c.selection.size(), std::byte(value)); }),
              none);
  ASSERT_EQ(s.go(s.v.weights, [](LayerContext&) {}), "ran");
  const Buffer kept = std::move(s.selection);
  const auto keep = [&](LayerContext& c) { c.selection = {kept.data(), kept.size()}; };
  EXPECT_EQ(s.go(shared, keep), "ran");

  // The same lengths in other pages are another step.
  std::swap(s.table[0], s.table[3]);
  for (int32_t i = 0; i < 200; ++i)
    s.slots[static_cast<size_t>(i)] = s.table[static_cast<size_t>(i / 64)] * 64 + i % 64;
  EXPECT_EQ(s.go(shared, keep), other);

  // The attention form, too.
  const ModelConfig& m = s.model;
  const Plan p = plan(m, s.spec, 4, s.batch(), device_info(s.stream, m), {.form = LayerForm::attention});
  const Batch b = s.batch();
  const Buffer workspace(p.workspace_bytes, kDevice), selection(p.selection_bytes, kDevice);
  const LayerContext c{.plan = p,
                       .batch = b,
                       .weights = shared,
                       .rotary = s.rotary,
                       .cache = s.cache.view(),
                       .workspace = {workspace.data(), workspace.size()},
                       .selection = {selection.data(), selection.size()}};
  std::vector<float> q(200 * static_cast<size_t>(m.heads * m.query_key())), kv(200 * static_cast<size_t>(m.entry())),
      heads(200 * static_cast<size_t>(m.heads * m.value));
  const auto attention_of = [&](const LayerContext& context) {
    return message_of([&] {
      attend(s.stream, context, View<const float, Token, Head, QueryKey>(q.data(), {200, m.heads, m.query_key()}),
             View<const float, Token, Latent>(kv.data(), {200, m.latent}),
             View<const float, Token, Rope>(kv.data(), {200, m.rope}),
             View<float, Token, Head, Value>(heads.data(), {200, m.heads, m.value}));
      s.stream.synchronize();
    });
  };
  const auto attention = [&] { return attention_of(c); };
  EXPECT_EQ(attention(), none);
  const std::vector<int32_t> choice(200 * static_cast<size_t>(p.topk), 0);
  select(s.stream, c, View<const int32_t, Token, Topk>(choice.data(), {200, p.topk}));
  EXPECT_EQ(attention(), "no error");
  EXPECT_EQ(attention(), "no error");  // layers share it
  // It runs no indexer: weights with one need no index cache.
  const LayerContext own{.plan = p,
                         .batch = b,
                         .weights = s.v.weights,
                         .rotary = s.rotary,
                         .cache = s.cache.view(),
                         .workspace = {workspace.data(), workspace.size()},
                         .selection = {selection.data(), selection.size()}};
  EXPECT_EQ(attention_of(own), "no error");
  EXPECT_EQ(message_of([&] {
              select(s.stream, c, View<const int32_t, Token, Topk>(nullptr, {200, p.topk}));
            }),
            "select: positions has no data");
}

// Of the attention form alone: nothing of projections and the indexer is reserved, and the block form is refused.
TEST(SparseLayer, PlansOfTheAttentionForm) {
  Step s;
  const Plan block = s.planned(),
             p = plan(s.model, s.spec, 4, s.batch(), device_info(s.stream, s.model), {.form = LayerForm::attention});
  for (const char* name : {"query", "query_latent", "kv", "index_key", "index_query", "index_codes", "index_weights",
                           "index_scores", "index_topk"}) {
    EXPECT_GT(block.region(name).bytes, 0u) << name;
    EXPECT_EQ(p.region(name).bytes, 0u) << name;
  }
  EXPECT_EQ(p.selection_bytes, block.selection_bytes);
  EXPECT_EQ(p.selection_stamp, block.selection_stamp);
  EXPECT_NE(block.describe().find("scored in"), std::string::npos);
  EXPECT_EQ(p.describe().find("scored in"), std::string::npos);
  EXPECT_NE(p.describe().find("chosen by the caller"), std::string::npos);
  const Batch b = s.batch();
  const Buffer workspace(p.workspace_bytes, kDevice), selection(p.selection_bytes, kDevice);
  const LayerContext c{.plan = p,
                       .batch = b,
                       .weights = s.v.weights,
                       .rotary = s.rotary,
                       .cache = s.cache.view(),
                       .workspace = {workspace.data(), workspace.size()},
                       .index_cache = s.index.view(),
                       .index_rotary = &s.index_rotary,
                       .selection = {selection.data(), selection.size()}};
  EXPECT_EQ(message_of([&] {
              forward(s.stream, c, View<const float, Token, Hidden>(s.v.golden.hidden.data(), {200, s.model.hidden}),
                      View<float, Token, Hidden>(s.out.data(), {200, s.model.hidden}));
            }),
            "layer: plan was made for the attention form alone (PlanOptions::form)");
}

// A layer without an indexer attends to what the one before it selected.
TEST(SparseLayer, SharedSelection) {
  Step s;
  ASSERT_EQ(s.go(s.v.weights, [](LayerContext&) {}), "ran");
  const std::vector<float> own = s.out;
  const Plan p = s.planned();
  const Buffer kept = std::move(s.selection);
  Cache cache(s.spec, 4, kDevice);
  ASSERT_EQ(s.go(s.v.without_indexer,
                 [&](LayerContext& c) {
                   c.selection = {kept.data(), kept.size()};
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
    std::vector<float> x(static_cast<size_t>(n));
    const auto bytes = read(s.stream, s.workspace.data() + block.region(name).offset, x.size() * sizeof(float));
    std::memcpy(x.data(), bytes.data(), bytes.size());
    return x;
  };
  const int64_t width = m.heads * m.value;
  const auto q =
      block_queries_f32(block, [&](size_t at, size_t bytes) { return read(s.stream, s.workspace.data() + at, bytes); });
  const auto kv = region("kv", 200 * m.entry()), heads = region("heads", 200 * width);
  std::vector<int32_t> choice(200 * static_cast<size_t>(block.topk), -7);
  std::vector<std::byte> chosen = read(s.stream, s.selection.data(), s.selection.size());
  const View<int32_t, Token, Topk> selected = block.selected(chosen);
  for (int64_t row = 0; row < block.sparse_rows(); ++row)
    for (int64_t k = 0; k < block.topk; ++k) choice[block.sparse_tokens[row] * block.topk + k] = selected(row, k);

  for (const char* name : {"none", "fp8_128_tma", "nvfp4", "mxfp4"}) {
    const OutputSpec spec = parse_output_spec(name);
    const Plan p =
        plan(m, s.spec, 4, s.batch(), device_info(s.stream, m), {.output = spec, .sparse = SparsePolicy::mixed});
    const Batch b = s.batch();
    Cache cache(s.spec, 4, kDevice);
    const Buffer workspace(p.workspace_bytes, kDevice), selection(p.selection_bytes, kDevice);
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
      s.stream.synchronize();
      EXPECT_EQ(out, heads);
      continue;
    }
    QuantisedMemory got(spec, 200, width), right(spec, 200, width);
    attend(s.stream, c, queries, kv_c, k_pe, got.view());
    ops::run(s.stream, ops::QuantizeArgs{.x = {Dtype::f32, heads.data(), {200, width}}, .y = right.view()});
    s.stream.synchronize();
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
  const Plan masks = plan(m, s.spec, 4, b, device_info(s.stream, m), {.sparse = SparsePolicy::masked});
  EXPECT_EQ(message_of([&] {
              const LayerContext other{.plan = masks,
                                       .batch = b,
                                       .weights = s.v.without_indexer,
                                       .rotary = s.rotary,
                                       .cache = s.cache.view(),
                                       .workspace = {s.workspace.data(), s.workspace.size()},
                                       .selection = {s.selection.data(), s.selection.size()}};
              select(s.stream, other, View<const int32_t, Token, Topk>(choice.data(), {200, masks.topk}));
            }),
            "select: 200 tokens of the plan attend by masks, which name a position once and none past the token: plan "
            "with sparse mixed, direct or upconvert");
}

}  // namespace
}  // namespace mla::test
