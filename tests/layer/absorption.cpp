// Absorbed and quantised weights: the golden files and every model's shapes come out within the error that the same
// roundings cost a plain computation; what such weights cannot serve is refused by name.
#include <gtest/gtest.h>

#include <map>

#include "layer/reference.hpp"
#include "support/count_allocations.hpp"
#include "support/engine.hpp"
#include "support/golden.hpp"
#include "support/invariance.hpp"
#include "support/message.hpp"
#include "support/models.hpp"
#include "support/sanitized.hpp"

namespace mla::test {
namespace {

// As tests/layer/golden.cpp.
constexpr double kFileError = 5e-6, kFloor = 2e-6;

struct Choice {
  std::string name;
  PrepareOptions options;
  int64_t block = 0;  // of fp8, in place of the config's
  // What a plain computation with these roundings may lose, so that a wrong one cannot hide behind its own bound. A
  // relative error of at most 2^-b per weight is uniform, so 2^-b / sqrt(3) in the root mean square; it enters twice,
  // with queries and with outputs, and the softmax moves with its scores. b is 9 for bf16, 4 for e4m3, 2 for e2m1.
  double most;
};

std::vector<Choice> choices() {
  std::vector<Choice> all;
  for (Dtype t : {Dtype::f32, Dtype::bf16}) {
    auto add = [&](const std::string& name, Absorption a, WeightFormat up, int64_t block, double most) {
      all.push_back({name + "_" + std::string(to_string(t)),
                     {.dtype = t, .absorption = a, .up = up},
                     block,
                     std::max(most, t == Dtype::bf16 ? 8e-3 : 0.0)});
    };
    add("full", Absorption::full, WeightFormat::plain, 0, 2e-6);
    add("full_fp8_tensor", Absorption::full_fp8, WeightFormat::plain, 0, 0.08);
    add("full_fp8_block", Absorption::full_fp8, WeightFormat::plain, 128, 0.08);
    add("up_fp8", Absorption::runtime, WeightFormat::fp8, 0, 0.08);
    add("up_mxfp4", Absorption::runtime, WeightFormat::mxfp4, 0, 0.3);
  }
  return all;
}

ModelConfig with_block(ModelConfig m, int64_t block) {
  if (block > 0) m.fp8_block_rows = m.fp8_block_cols = block;
  return m;
}

PlanOptions latent_plan(const PrepareOptions& o) {
  PlanOptions p;
  p.path = o.absorption == Absorption::runtime ? PathPolicy::latent : PathPolicy::automatic;
  p.absorbed = o.absorption != Absorption::runtime;
  p.up = o.up;
  return p;
}

std::vector<int64_t> first_rows(int64_t n) {
  std::vector<int64_t> rows(n);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

class AbsorbedGolden : public testing::TestWithParam<GoldenCase> {};

TEST_P(AbsorbedGolden, FilesAreReproduced) {
  const Golden g = read_golden(GetParam());
  const std::vector<int64_t> rows = first_rows(g.length);
  const auto exact = reference::output_rows(g.config, reference::plain_weights(g.tensors, Dtype::f32), g.hidden, rows);
  for (const Choice& c : choices()) {
    const ModelConfig config = with_block(g.config, c.block);
    const LayerWeights weights = prepare(config, g.tensors, c.options, kDevice);
    const reference::Weights plain_weights = reference::plain_weights(config, g.tensors, c.options);
    for (CacheFormat format : {CacheFormat::f32, CacheFormat::bf16}) {
      const reference::Rounding rounding{.weights = c.options.dtype, .cache = cache_spec(config, format)};
      const auto y = reference::output_rows(config, plain_weights, g.hidden, rows, &rounding);
      const double plain = reference::relative_error(std::vector<float>(y.begin(), y.end()), exact);
      EXPECT_LE(plain, std::max(c.most, format == CacheFormat::bf16 ? 8e-3 : 0.0)) << c.name;
      const double bound = 2 * plain + kFloor;
      for (int64_t chunk : {g.length, int64_t{23}}) {
        Engine engine(weights, cache_spec(config, format, chunk == 23 ? 3 : 64), {.plan = latent_plan(c.options)});
        const std::vector<float> got = engine.run_alone(engine.add(g.hidden), g.length, chunk);
        const std::string how =
            g.name + " " + c.name + " " + std::string(to_string(format)) + " chunks of " + std::to_string(chunk);
        EXPECT_LE(reference::relative_error(got, exact), bound) << how;
        EXPECT_LE(reference::relative_error(got, std::vector<double>(g.output.begin(), g.output.end())),
                  bound + kFileError)
            << how;
        EXPECT_FALSE(engine.padding_touched) << how;
      }
    }
  }
}

TEST_P(AbsorbedGolden, TokenByTokenInMixedBatches) {
  const Golden g = read_golden(GetParam());
  const int64_t n = std::min<int64_t>(g.length, 48);
  const std::vector<int64_t> rows = first_rows(n);
  const auto exact = reference::output_rows(g.config, reference::plain_weights(g.tensors, Dtype::f32), g.hidden, rows);
  const LayerWeights weights = prepare(g.config, g.tensors, PrepareOptions{.absorption = Absorption::full}, kDevice);
  Engine engine(weights, cache_spec(g.config, CacheFormat::f32, 7),
                {.plan = {.path = PathPolicy::by_length, .reorder_batch_threshold = 16, .absorbed = true}});
  const int64_t slow = engine.add(g.hidden), fast = engine.add(g.hidden);
  std::vector<float> slow_out, fast_out;
  for (int64_t done = 0; done < n; ++done) {
    std::vector<Engine::Piece> pieces{{slow, 1}};
    if (done * 16 < n) pieces.insert(pieces.begin() + done % 2, {fast, std::min<int64_t>(16, n - done * 16)});
    const auto out = engine.step(pieces);
    for (size_t i = 0; i < pieces.size(); ++i) {
      std::vector<float>& to = pieces[i].sequence == slow ? slow_out : fast_out;
      to.insert(to.end(), out[i].begin(), out[i].end());
    }
  }
  EXPECT_LE(reference::relative_error(slow_out, exact), 6e-6);
  EXPECT_EQ(fast_out.size(), slow_out.size());
  EXPECT_LE(reference::relative_error(fast_out, exact), 6e-6);
}

INSTANTIATE_TEST_SUITE_P(Files, AbsorbedGolden, testing::ValuesIn(sampled(golden_cases(), 3)),
                         [](const auto& i) { return i.param.name(); });

// Every model's head shapes, few heads and a narrow hidden state.
std::vector<ModelConfig> small_models() {
  std::vector<ModelConfig> all;
  for (std::string_view name : preset_names()) all.push_back(preset(name));
  ModelConfig glm = preset("deepseek-v3");
  glm.name = "glm-shaped";
  glm.nope = 192;
  glm.value = 256;
  glm.rotary = {};
  glm.indexer = IndexerConfig{.heads = 32, .dim = 128, .topk = 2048, .interleaved = true, .full = {1, 0}};
  all.push_back(glm);
  ModelConfig nope = preset("deepseek-v2-lite");
  nope.name = "kimi-linear-shaped";
  nope.rotary = {};
  nope.rotary.rotate = false;
  all.push_back(nope);
  all.push_back(odd_nope());
  for (ModelConfig& m : all) {
    m.layers = std::min<int64_t>(m.layers, 2);
    m.heads = std::min<int64_t>(m.heads, 3);
    m.hidden = std::min<int64_t>(m.hidden, 136);
    m.query_latent = std::min<int64_t>(m.query_latent, 72);
    if (m.indexer) m.indexer->heads = 2;
  }
  return all;
}

TEST(Absorption, EveryModelsShapes) {
  Sample sample(3);
  for (const ModelConfig& m : small_models()) {
    const LayerTensors tensors = random_layer(m, 1, 4, Dtype::bf16);
    const std::vector<float> hidden = cases::random_values(40 * m.hidden, 9);
    const std::vector<int64_t> rows = first_rows(40);
    const auto exact = reference::output_rows(m, reference::plain_weights(tensors, Dtype::f32), hidden, rows);
    for (const Choice& c : choices()) {
      if (!sample.take()) continue;
      const ModelConfig config = with_block(m, c.block);
      const LayerWeights weights = prepare(config, tensors, c.options, kDevice);
      const reference::Rounding rounding{.weights = c.options.dtype};
      const auto y =
          reference::output_rows(config, reference::plain_weights(config, tensors, c.options), hidden, rows, &rounding);
      const double plain = reference::relative_error(std::vector<float>(y.begin(), y.end()), exact);
      EXPECT_LE(plain, c.most) << m.name << " " << c.name;
      Engine engine(weights, cache_spec(config, CacheFormat::f32), {.plan = latent_plan(c.options)});
      EXPECT_LE(reference::relative_error(engine.run_alone(engine.add(hidden), 40, 17), exact), 2 * plain + kFloor)
          << m.name << " " << c.name;
    }
  }
}

TEST(Absorption, Fp8QueriesAndBf16Attention) {
  const ModelConfig m = small_deepseek();
  const LayerTensors tensors = random_layer(m, 0, 1, Dtype::f32);
  const std::vector<float> hidden = cases::random_values(70 * m.hidden, 9);
  const std::vector<int64_t> rows = first_rows(70);
  const auto exact = reference::output_rows(m, reference::plain_weights(tensors, Dtype::f32), hidden, rows);
  const PrepareOptions options{.dtype = Dtype::bf16, .absorption = Absorption::full};
  const LayerWeights weights = prepare(m, tensors, options, kDevice);
  const reference::Weights plain_weights = reference::plain_weights(m, tensors, options);
  auto judge = [&](const PlanOptions& plan, CacheFormat format, const reference::Rounding& rounding) {
    const auto y = reference::output_rows(m, plain_weights, hidden, rows, &rounding);
    const double plain = reference::relative_error(std::vector<float>(y.begin(), y.end()), exact);
    EXPECT_LE(plain, 0.2);
    Engine engine(weights, cache_spec(m, format), {.plan = plan});
    EXPECT_LE(reference::relative_error(engine.run_alone(engine.add(hidden), 70, 33), exact), 2 * plain + kFloor);
  };
  judge({.absorbed = true, .compute = Dtype::bf16}, CacheFormat::bf16,
        {.weights = Dtype::bf16, .compute = Dtype::bf16, .cache = cache_spec(m, CacheFormat::bf16)});
  judge({.absorbed = true, .fp8_query = true, .q_scale = 0.125f}, CacheFormat::fp8,
        {.weights = Dtype::bf16, .cache = cache_spec(m, CacheFormat::fp8), .q_scale = 0.125f});
}

TEST(Absorption, BitsIgnoreThreadsAndNeighbours) {
  const ModelConfig m = with_block(small_deepseek(), 128);
  const LayerTensors tensors = random_layer(m, 0, 1, Dtype::f32);
  const auto mine = cases::random_values(60 * m.hidden, 1), other = cases::random_values(90 * m.hidden, 2);
  for (const Choice& c : choices()) {
    const LayerWeights weights = prepare(m, tensors, c.options, kDevice);
    PlanOptions plan = latent_plan(c.options);
    plan.split = SplitPolicy::batch_invariant;
    expect_bits_ignore_threads_and_neighbours(weights, cache_spec(m, CacheFormat::bf16, 16), plan, mine, other, c.name);
  }
}

TEST(Absorption, AllocatesNothingAfterThePlan) {
  const ModelConfig m = small_deepseek();
  const std::vector<float> hidden = cases::random_values(100 * m.hidden, 1);
  for (const Choice& c : choices()) {
    const LayerWeights weights = prepare(with_block(m, c.block), random_layer(m, 0, 1, Dtype::f32), c.options, kDevice);
    Engine engine(weights, cache_spec(m, CacheFormat::bf16), {.plan = latent_plan(c.options)});
    engine.counter = allocation_count;
    engine.run_alone(engine.add(hidden), 100, 70);
    EXPECT_EQ(engine.allocations, 0) << c.name;
  }
}

TEST(Absorption, WhatItCannotServeIsNamed) {
  const ModelConfig m = small_deepseek();
  const LayerTensors tensors = random_layer(m, 0, 1, Dtype::f32);
  std::vector<float> hidden(40 * m.hidden);
  auto step = [&](Absorption a, const PlanOptions& plan) {
    return message_of<UnsupportedError>([&] {
      const LayerWeights weights = prepare(m, tensors, PrepareOptions{.absorption = a}, kDevice);
      Engine engine(weights, cache_spec(m, CacheFormat::f32), {.plan = plan});
      const int64_t first = engine.add(hidden), second = engine.add(hidden);
      const std::vector<Engine::Piece> pieces{{first, 1}, {second, 40}};
      engine.step(pieces);
    });
  };
  EXPECT_EQ(step(Absorption::full, {.absorbed = true}), "no error");
  EXPECT_EQ(
      step(Absorption::full, {.path = PathPolicy::expanded, .absorbed = true}),
      "plan: request 0 with 1 new tokens takes the expanded path by policy expanded, fully absorbed weights serve "
      "the latent path alone");
  EXPECT_EQ(step(Absorption::full, {.path = PathPolicy::by_length, .reorder_batch_threshold = 39, .absorbed = true}),
            "plan: request 1 with 40 new tokens takes the expanded path by policy by_length, fully absorbed weights "
            "serve the latent path alone");
  EXPECT_EQ(step(Absorption::full, {.absorbed = true, .output = {.kind = OutputKind::fp8}}),
            "plan: output fp8 is the attention form's, fully absorbed weights serve the block form alone");
  EXPECT_EQ(step(Absorption::full_fp8, {.path = PathPolicy::latent}),
            "layer: weights are prepared with absorption full_fp8, the plan is for runtime absorption "
            "(PlanOptions::absorbed)");
  EXPECT_EQ(step(Absorption::runtime, {.absorbed = true}),
            "layer: weights are prepared with absorption runtime, the plan is for fully absorbed ones "
            "(PlanOptions::absorbed)");
}

}  // namespace
}  // namespace mla::test
