// The layer's own duties: both forms agree, arguments are checked, nothing is allocated after the plan.
#include <gtest/gtest.h>

#include "layer/reference.hpp"
#include "support/count_allocations.hpp"
#include "support/engine.hpp"
#include "support/message.hpp"
#include "support/models.hpp"

namespace mla::test {
namespace {

std::vector<float> random_rows(int64_t n, uint64_t seed) {
  std::vector<float> x(n);
  cases::Random(seed).fill_normal(x);
  return x;
}

TEST(Layer, AllocatesNothingAfterThePlan) {
  const ModelConfig m = small_deepseek();
  const auto hidden = random_rows(200 * m.hidden, 1);
  for (Dtype t : {Dtype::f32, Dtype::bf16}) {
    const LayerWeights weights = prepare(m, random_layer(m, 0, 1, Dtype::f32), t);
    for (PathPolicy path : {PathPolicy::latent, PathPolicy::expanded, PathPolicy::automatic}) {
      Engine engine(weights, cache_spec(m, CacheFormat::bf16), {.plan = {.path = path, .compute = t}});
      engine.counter = allocation_count;
      engine.run_alone(engine.add(hidden), 200, 90);
      EXPECT_EQ(engine.allocations, 0) << to_string(path) << " " << to_string(t);
    }
  }
}

TEST(Layer, OddDimensionsWithoutRopeAgreeWithFloat64) {
  const ModelConfig m = odd_nope();
  const LayerTensors tensors = random_layer(m, 0, 3, Dtype::f32);
  const LayerWeights weights = prepare(m, tensors, Dtype::f32);
  const auto hidden = random_rows(70 * m.hidden, 2);
  std::vector<int64_t> rows(70);
  std::iota(rows.begin(), rows.end(), 0);
  const auto exact = reference::output_rows(m, reference::plain_weights(tensors, Dtype::f32), hidden, rows);
  for (PathPolicy path : {PathPolicy::latent, PathPolicy::expanded}) {
    Engine engine(weights, cache_spec(m, CacheFormat::f32, 5), {.plan = {.path = path}});
    EXPECT_LE(reference::relative_error(engine.run_alone(engine.add(hidden), 70, 19), exact), 2e-6) << to_string(path);
  }
}

struct Step {
  ModelConfig model = small_deepseek();
  LayerTensors tensors = random_layer(model, 0, 1, Dtype::f32);
  LayerWeights weights = prepare(model, tensors, Dtype::f32);
  RotaryTable rotary{model.rotary, model.rope, 128};
  std::vector<int32_t> starts{0, 3, 4}, lengths{3, 1}, table{1, 0}, slots{64, 65, 66, 0};
  Batch batch{starts, lengths, {table.data(), {2, 1}}, slots};
  ThreadPool pool{2};
  Stream stream{pool};
  Cache cache{cache_spec(model, CacheFormat::f32), 2};
  Plan plan = mla::plan(model, cache.spec(), 2, batch, device_info(stream, model));
  Buffer workspace{plan.workspace_bytes};
  std::vector<float> hidden = random_rows(4 * model.hidden, 8), out = std::vector<float>(4 * model.hidden);

  LayerContext context() { return {plan, batch, weights, rotary, cache.view(), {workspace.data(), workspace.size()}}; }
  View<const float, Token, Hidden> hidden_view() const { return {hidden.data(), {4, model.hidden}}; }
  View<float, Token, Hidden> out_view() { return {out.data(), {4, model.hidden}}; }
};

TEST(Layer, AttentionFormAgreesWithBlockForm) {
  Step s;
  forward(s.stream, s.context(), s.hidden_view(), s.out_view());
  // The block form leaves its rotated queries and normed latents in the workspace.
  const ModelConfig& m = s.model;
  auto copy = [&](const char* region, int64_t n) {
    const float* p = reinterpret_cast<const float*>(s.workspace.data() + s.plan.region(region).offset);
    return std::vector<float>(p, p + n);
  };
  const auto q = copy("query", 4 * m.heads * m.query_key()), kv = copy("kv", 4 * m.entry()),
             heads = copy("heads", 4 * m.heads * m.value);
  Cache other(s.cache.spec(), 2);
  LayerContext context = s.context();
  context.cache = other.view();
  std::vector<float> out(heads.size());
  attend(s.stream, context, View<const float, Token, Head, QueryKey>(q.data(), {4, m.heads, m.query_key()}),
         View<const float, Token, Latent>(kv.data(), {4, m.latent}, {m.entry(), 1}),
         View<const float, Token, Rope>(kv.data() + m.latent, {4, m.rope}, {m.entry(), 1}),
         View<float, Token, Head, Value>(out.data(), {4, m.heads, m.value}));
  EXPECT_EQ(out, heads);
  EXPECT_EQ(std::memcmp(other.view().data, s.cache.view().data, 2 * s.cache.spec().page_bytes()), 0);
}

TEST(Layer, Bf16HiddenAndOutput) {
  Step s;
  std::vector<bf16> hidden, out(s.out.size());
  for (float& x : s.hidden) {
    hidden.push_back(to_bf16(x));
    x = to_float(hidden.back());
  }
  forward(s.stream, s.context(), s.hidden_view(), s.out_view());
  forward(s.stream, s.context(), View<const bf16, Token, Hidden>(hidden.data(), {4, s.model.hidden}),
          View<bf16, Token, Hidden>(out.data(), {4, s.model.hidden}));
  for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(to_float(out[i]), to_float(to_bf16(s.out[i])));
}

TEST(Layer, ProfileCountsEveryOp) {
  Step s;
  Profile profile;
  LayerContext context = s.context();
  context.profile = &profile;
  forward(s.stream, context, s.hidden_view(), s.out_view());
  double flops = 0;
  for (const Profile::Row& row : profile.rows()) {
    EXPECT_GE(row.calls, 1);
    EXPECT_GE(row.seconds, 0);
    flops += row.flops;
  }
  EXPECT_GE(profile.rows().size(), 8u);
  EXPECT_GT(flops, 0);
}

TEST(Layer, MismatchesAreNamed) {
  Step s;
  auto run = [&](const LayerContext& c) { forward(s.stream, c, s.hidden_view(), s.out_view()); };
  {
    LayerContext c = s.context();
    c.workspace = c.workspace.first(c.workspace.size() - 1);
    EXPECT_NE(message_of([&] { run(c); }).find("workspace is " + std::to_string(s.workspace.size() - 1)),
              std::string::npos);
  }
  {
    Cache wrong(cache_spec(s.model, CacheFormat::bf16), 2);
    LayerContext c = s.context();
    c.cache = wrong.view();
    EXPECT_EQ(message_of([&] { run(c); }), "layer: cache format is bf16, plan was made for f32");
  }
  {
    ModelConfig other = s.model;
    other.heads = 4;
    const LayerWeights weights = prepare(other, random_layer(other, 0, 1, Dtype::f32), Dtype::f32);
    const LayerContext c{s.plan, s.batch, weights, s.rotary, s.cache.view(), {s.workspace.data(), s.workspace.size()}};
    EXPECT_EQ(message_of([&] { run(c); }), "layer: weights heads is 4, plan heads is 3");
  }
  {
    LayerWeights weights = s.weights;
    weights.device = {DeviceKind::cuda, 0};
    const LayerContext c{s.plan, s.batch, weights, s.rotary, s.cache.view(), {s.workspace.data(), s.workspace.size()}};
    EXPECT_EQ(message_of([&] { run(c); }), "layer: weights of cuda:0 on a stream of cpu");
  }
  EXPECT_EQ(message_of([&] {
              forward(s.stream, s.context(), View<const float, Token, Hidden>(s.hidden.data(), {4, s.model.hidden - 1}),
                      s.out_view());
            }),
            "layer: hidden Hidden is 95, model hidden is 96");
  {
    ThreadPool many(5);
    Stream stream(many);
    EXPECT_EQ(message_of([&] { forward(stream, s.context(), s.hidden_view(), s.out_view()); }),
              "layer: stream has 5 threads, plan was made for 2");
  }
}

}  // namespace
}  // namespace mla::test
