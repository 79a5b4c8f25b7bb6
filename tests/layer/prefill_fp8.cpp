// Prefills by products of e4m3 codes: a layer comes out within the error that the same roundings cost a plain
// computation, with scales of tensors and of heads, with and without context, from every kind of cache.
#include <gtest/gtest.h>

#include "layer/reference.hpp"
#include "support/count_allocations.hpp"
#include "support/engine.hpp"
#include "support/invariance.hpp"
#include "support/message.hpp"
#include "support/models.hpp"
#include "support/sanitized.hpp"

namespace mla::test {
namespace {

constexpr double kFloor = 2e-6;  // another order of f32 sums (docs/numerics.md)
constexpr int64_t kTokens = 150, kChunk = 70;

// Scales as a checkpoint may have them: none, one of each, some, one a head.
std::vector<StoredScales> scales_of(const ModelConfig& m) {
  StoredScales heads;
  for (int64_t h = 0; h < m.heads; ++h) {
    const float x = static_cast<float>(h);
    heads.q.push_back(0.011f + 0.002f * x);
    heads.k.push_back(0.05f / (1 + 0.3f * x));
    heads.v.push_back(0.02f * (1 + x));
  }
  return {{}, {{0.013f}, {0.027f}, {0.031f}}, {{}, {0.04f}, {}}, heads};
}

TEST(PrefillFp8, EveryCacheAndScaleAgainstFloat64) {
  Sample sample(5);
  std::vector<int64_t> rows(kTokens), contexts;
  std::iota(rows.begin(), rows.end(), 0);
  for (const int64_t row : rows) contexts.push_back(row / kChunk * kChunk);
  for (const ModelConfig& m : {small_deepseek(), odd_nope()}) {
    const std::vector<float> hidden = cases::random_values(kTokens * m.hidden, 9);
    LayerTensors tensors = random_layer(m, 1, 4, Dtype::bf16);
    const auto exact = reference::output_rows(m, reference::plain_weights(tensors, Dtype::f32), hidden, rows);
    for (const StoredScales& scales : scales_of(m))
      for (const CacheFormat format : {CacheFormat::f32, CacheFormat::bf16, CacheFormat::fp8})
        for (const Dtype compute : {Dtype::f32, Dtype::bf16}) {
          if (!sample.take()) continue;
          tensors.scales = scales;
          const LayerWeights weights = prepare(m, tensors, {.dtype = compute}, kDevice);
          CacheSpec spec = cache_spec(m, format, 7);
          spec.k_scale = 0.02f;
          const reference::Rounding rounding{.weights = compute,
                                             .compute = compute,
                                             .activations = kOnGpu ? compute : Dtype::f32,
                                             .cache = spec,
                                             .path = Path::expanded,
                                             .prefill = &scales,
                                             .prefill_probabilities = kOnGpu ? Dtype::fp8_e4m3 : Dtype::bf16};
          const auto y = reference::output_rows(m, reference::plain_weights(m, tensors, {.dtype = compute}), hidden,
                                                rows, &rounding, {}, contexts);
          const double plain = reference::relative_error(std::vector<float>(y.begin(), y.end()), exact);
          const std::string where = m.name + " " + std::string(to_string(format)) + " " +
                                    std::string(to_string(compute)) + ", scales " + std::to_string(scales.q.size()) +
                                    " " + std::to_string(scales.k.size());
          // Values round by 2^-4 at most, 2^-4 / sqrt(3) in the root mean square, keys and queries move the softmax.
          EXPECT_LE(plain, 0.1) << where;
          EXPECT_GE(plain, 0.01) << where;
          for (const PrefillOperands prefill : {PrefillOperands::fp8, PrefillOperands::fp8_raw}) {
            Engine engine(weights, spec,
                          {.plan = {.path = PathPolicy::expanded, .compute = compute, .prefill = prefill}});
            EXPECT_LE(reference::relative_error(engine.run_alone(engine.add(hidden), kTokens, kChunk), exact),
                      2 * plain + kFloor)
                << where;
            EXPECT_FALSE(engine.padding_touched) << where;
          }
        }
  }
}

// Requests whose keys begin anywhere among one another's, a workspace of several chunks, decodes beside them.
TEST(PrefillFp8, MixedBatchesGiveEachRequestWhatItGetsAlone) {
  const ModelConfig m = small_deepseek();
  LayerTensors tensors = random_layer(m, 1, 4, Dtype::f32);
  tensors.scales = {{0.013f}, {0.027f}, {0.031f}};
  const LayerWeights weights = prepare(m, tensors, Dtype::f32, kDevice);
  const PlanOptions plan{.path = PathPolicy::by_length,
                         .split = SplitPolicy::batch_invariant,
                         .prefill = PrefillOperands::fp8,
                         .context_rows = 64};
  std::vector<std::vector<float>> hidden;
  for (uint64_t i = 0; i < 5; ++i) hidden.push_back(cases::random_values(100 * m.hidden, 20 + i));
  const std::vector<std::vector<int64_t>> counts{{23, 1, 40, 17, 3}, {1, 30, 1, 9, 60}, {50, 2, 19, 1, 8}};
  Engine together(weights, cache_spec(m, CacheFormat::bf16, 16), {.plan = plan});
  std::vector<int64_t> ids;
  for (const auto& h : hidden) ids.push_back(together.add(h));
  std::vector<std::vector<float>> rows(hidden.size());
  for (const auto& step : counts) {
    std::vector<Engine::Piece> pieces;
    for (size_t i = 0; i < step.size(); ++i) pieces.push_back({ids[i], step[i]});
    const auto out = together.step(pieces);
    for (size_t i = 0; i < out.size(); ++i) rows[i].insert(rows[i].end(), out[i].begin(), out[i].end());
  }
  for (size_t i = 0; i < hidden.size(); ++i) {
    Engine alone(weights, cache_spec(m, CacheFormat::bf16, 16), {.plan = plan});
    const int64_t id = alone.add(hidden[i]);
    std::vector<float> mine;
    for (const auto& step : counts) {
      const Engine::Piece piece{id, step[i]};
      const auto out = alone.step({&piece, 1});
      mine.insert(mine.end(), out[0].begin(), out[0].end());
    }
    EXPECT_TRUE(mine == rows[i]) << "request " << i;
  }
}

TEST(PrefillFp8, BitsIgnoreThreadsAndNeighbours) {
  const ModelConfig m = small_deepseek();
  const LayerWeights weights = prepare(m, random_layer(m, 0, 1, Dtype::f32), Dtype::bf16, kDevice);
  const PlanOptions plan{.path = PathPolicy::expanded,
                         .split = SplitPolicy::batch_invariant,
                         .compute = Dtype::bf16,
                         .prefill = PrefillOperands::fp8};
  expect_bits_ignore_threads_and_neighbours(weights, cache_spec(m, CacheFormat::bf16, 16), plan,
                                            cases::random_values(60 * m.hidden, 1),
                                            cases::random_values(90 * m.hidden, 2), "prefill fp8");
}

TEST(PrefillFp8, AllocatesNothingAfterThePlan) {
  const ModelConfig m = small_deepseek();
  const std::vector<float> hidden = cases::random_values(50 * m.hidden, 3);
  const LayerWeights weights = prepare(m, random_layer(m, 0, 1, Dtype::f32), Dtype::bf16, kDevice);
  Engine engine(weights, cache_spec(m, CacheFormat::bf16),
                {.plan = {.path = PathPolicy::expanded, .compute = Dtype::bf16, .prefill = PrefillOperands::fp8}});
  if (!kOnGpu) engine.counter = allocation_count;  // the first products of a shape choose their algorithm there
  engine.run_alone(engine.add(hidden), 50, 20);
  EXPECT_EQ(engine.allocations, 0);
}

TEST(PrefillFp8, HeadsOfAPartKeepTheirScales) {
  const ModelConfig m = small_deepseek();
  LayerTensors tensors = random_layer(m, 0, 1, Dtype::f32);
  tensors.scales = {{}, {0.1f, 0.2f, 0.4f}, {0.5f}};
  const LayerWeights w = prepare(m, tensors, Dtype::f32);
  EXPECT_EQ(std::vector<float>(w.prefill.q.values().begin(), w.prefill.q.values().end()), std::vector<float>(3, 1.0f));
  EXPECT_EQ(std::vector<float>(w.prefill.q_rope.values().begin(), w.prefill.q_rope.values().end()),
            (std::vector<float>{0.25f, 0.5f, 1.0f}));
  EXPECT_EQ(std::vector<float>(w.prefill.k_rope.values().begin(), w.prefill.k_rope.values().end()),
            std::vector<float>{0.4f});
  const LayerTensors part = part_of(m, tensors, {.begin = 1, .count = 2});
  const LayerWeights p = prepare(part_of(m, {.begin = 1, .count = 2}), part, Dtype::f32);
  EXPECT_EQ(std::vector<float>(p.prefill.k.values().begin(), p.prefill.k.values().end()),
            (std::vector<float>{0.2f, 0.4f}));
  EXPECT_EQ(std::vector<float>(p.prefill.v.values().begin(), p.prefill.v.values().end()), std::vector<float>(2, 0.5f));
}

TEST(PrefillFp8, WhatCannotBeIsRefused) {
  const ModelConfig m = small_deepseek();
  LayerTensors tensors = random_layer(m, 0, 1, Dtype::f32);
  const std::vector<float> hidden = cases::random_values(4 * m.hidden, 3);
  const LayerWeights absorbed = prepare(m, tensors, PrepareOptions{.absorption = Absorption::full}, kDevice);
  EXPECT_EQ(message_of([&] {
              Engine engine(absorbed, cache_spec(m, CacheFormat::f32),
                            {.plan = {.absorbed = true, .prefill = PrefillOperands::fp8}});
              engine.run_alone(engine.add(hidden), 4, 4);
            }),
            "plan: prefill fp8 is the expanded path's, fully absorbed weights serve the latent path alone");
  EXPECT_EQ(message_of([] { parse_prefill_operands("e4m3"); }),
            "unknown prefill operands 'e4m3'; known: compute fp8 fp8_raw");
  tensors.scales.k = {0.5f, 0.5f};
  EXPECT_EQ(message_of([&] { prepare(m, tensors, Dtype::f32); }),
            "prepare: k scales have 2 elements, expected 1 or one for each of 3 heads");
  tensors.scales.k = {0.0f};
  EXPECT_EQ(message_of([&] { prepare(m, tensors, Dtype::f32); }),
            "prepare: k scale is 0.000000 at element 0, must be finite and above 0");
}

}  // namespace
}  // namespace mla::test
