// Products held in fp8 by blocks, with plain and with fp8 activations: a layer comes out within the error that the same
// roundings cost a plain computation, on both paths; what an fp8 checkpoint stores is multiplied as it is stored.
#include <gtest/gtest.h>

#include "core/quantised_weights.hpp"
#include "layer/reference.hpp"
#include "support/count_allocations.hpp"
#include "support/engine.hpp"
#include "support/invariance.hpp"
#include "support/message.hpp"
#include "support/models.hpp"

namespace mla::test {
namespace {

constexpr double kFloor = 2e-6;  // another order of f32 sums (docs/numerics.md)

std::vector<int64_t> first_rows(int64_t n) {
  std::vector<int64_t> rows(static_cast<size_t>(n));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// Widths that blocks and groups of 128 cut short, and one that they divide; without a query latent too.
std::vector<ModelConfig> models() {
  ModelConfig wide = small_deepseek();
  wide.name = "small-wide";
  wide.hidden = 256;
  wide.query_latent = 128;
  return {small_deepseek(), wide, odd_nope(), small_sparse()};
}

struct Choice {
  PrepareOptions options;
  Activations activations;
};
std::vector<Choice> choices() {
  std::vector<Choice> all;
  for (Dtype t : {Dtype::f32, Dtype::bf16})
    for (Activations a : {Activations::plain, Activations::fp8_128}) {
      all.push_back({{.dtype = t, .products = WeightFormat::fp8}, a});
      all.push_back({{.dtype = t, .up = WeightFormat::fp8, .products = WeightFormat::fp8}, a});
      all.push_back({{.dtype = t, .absorption = Absorption::full_fp8, .products = WeightFormat::fp8}, a});
    }
  return all;
}
std::string name(const ModelConfig& m, const Choice& c, Path path) {
  return m.name + " " + std::string(to_string(c.options.dtype)) + " " + std::string(to_string(c.options.absorption)) +
         " up " + std::string(to_string(c.options.up)) + " activations " + std::string(to_string(c.activations)) + " " +
         std::string(to_string(path));
}

TEST(Fp8Products, EveryChoiceOnBothPaths) {
  for (const ModelConfig& m : models()) {
    const LayerTensors tensors = random_layer(m, 1, 4, Dtype::bf16);
    const std::vector<float> hidden = cases::random_values(40 * m.hidden, 9);
    const std::vector<int64_t> rows = first_rows(40);
    const auto exact = reference::output_rows(m, reference::plain_weights(tensors, Dtype::f32), hidden, rows);
    for (const Choice& c : choices()) {
      const LayerWeights weights = prepare(m, tensors, c.options, kDevice);
      EXPECT_EQ(weights.kv_down->format, WeightFormat::fp8);
      EXPECT_EQ(weights.kv_down->block_rows, 128);
      const reference::Weights held = reference::plain_weights(m, tensors, c.options);
      for (Path path : {Path::latent, Path::expanded}) {
        if (weights.absorbed() && path == Path::expanded) continue;
        const reference::Rounding rounding{.weights = c.options.dtype, .inputs = c.activations, .path = path};
        const auto y = reference::output_rows(m, held, hidden, rows, &rounding);
        const double plain = reference::relative_error(std::vector<float>(y.begin(), y.end()), exact);
        // A relative error of at most 2^-4 is 2^-4 / sqrt(3) in the root mean square: once for a product's weights,
        // once for its inputs, in at most five products on the way of a number; the softmax moves with its scores.
        EXPECT_LE(plain, 0.15) << name(m, c, path);
        EXPECT_GE(plain, 0.01) << name(m, c, path);
        const PlanOptions options{.path = path == Path::latent ? PathPolicy::latent : PathPolicy::expanded,
                                  .absorbed = weights.absorbed(),
                                  .up = c.options.up,
                                  .activations = c.activations,
                                  .sparse = SparsePolicy::dense};
        Engine engine(weights, cache_spec(m, CacheFormat::f32, 7), {.plan = options});
        EXPECT_LE(reference::relative_error(engine.run_alone(engine.add(hidden), 40, 17), exact), 2 * plain + kFloor)
            << name(m, c, path);
        EXPECT_FALSE(engine.padding_touched) << name(m, c, path);
      }
    }
  }
}

// A layer's maps as an fp8 checkpoint stores them.
struct Stored {
  LayerTensors tensors;
  explicit Stored(const ModelConfig& m) : tensors(random_layer(m, 0, 1, Dtype::f32)) {
    for (HostTensor* t : {&tensors.query_down, &tensors.query, &tensors.kv_down, &tensors.kv_up, &tensors.output}) {
      if (!*t) continue;
      auto q = std::make_shared<QuantisedWeights>(
          quantise(t->to_f32(), 1, t->shape[0], t->shape[1], WeightFormat::fp8, 128, 128));
      for (float& s : q->scales) s *= 0.83f;  // not what quantising again would find
      t->dtype = Dtype::fp8_e4m3;
      t->block_scales = q->scales;
      t->block_rows = t->block_cols = 128;
      t->data = reinterpret_cast<const std::byte*>(q->codes.data());
      t->owner = std::shared_ptr<const void>(q, q.get());
    }
  }
};

TEST(Fp8Products, AStoredTensorsCodesAndScalesAreKept) {
  for (const ModelConfig& m : models()) {
    const Stored stored(m);
    const std::vector<float> hidden = cases::random_values(40 * m.hidden, 5);
    const std::vector<int64_t> rows = first_rows(40);
    const auto exact = reference::output_rows(m, reference::plain_weights(stored.tensors, Dtype::f32), hidden, rows);
    const LayerWeights weights = prepare(m, stored.tensors, {.products = WeightFormat::fp8}, kDevice);
    for (PathPolicy path : {PathPolicy::latent, PathPolicy::expanded}) {
      Engine engine(weights, cache_spec(m, CacheFormat::f32), {.plan = {.path = path, .sparse = SparsePolicy::dense}});
      // Nothing but the order of f32 sums is left.
      EXPECT_LE(reference::relative_error(engine.run_alone(engine.add(hidden), 40, 17), exact), 6e-6)
          << m.name << " " << to_string(path);
    }
  }
}

TEST(Fp8Products, BitsIgnoreThreadsAndNeighbours) {
  const ModelConfig m = small_deepseek();
  const LayerTensors tensors = random_layer(m, 0, 1, Dtype::f32);
  const std::vector<float> mine = cases::random_values(60 * m.hidden, 1),
                           other = cases::random_values(90 * m.hidden, 2);
  for (const Choice& c : choices())
    for (PathPolicy path : {PathPolicy::latent, PathPolicy::expanded}) {
      const LayerWeights weights = prepare(m, tensors, c.options, kDevice);
      if (weights.absorbed() && path == PathPolicy::expanded) continue;
      const PlanOptions plan{.path = path,
                             .absorbed = weights.absorbed(),
                             .up = c.options.up,
                             .activations = c.activations,
                             .split = SplitPolicy::batch_invariant};
      expect_bits_ignore_threads_and_neighbours(weights, cache_spec(m, CacheFormat::bf16, 16), plan, mine, other,
                                                name(m, c, Path::latent));
    }
}

TEST(Fp8Products, AllocateNothingAfterThePlan) {
  const ModelConfig m = small_deepseek();
  const LayerTensors tensors = random_layer(m, 0, 1, Dtype::f32);
  const std::vector<float> hidden = cases::random_values(50 * m.hidden, 3);
  const LayerWeights weights = prepare(m, tensors, {.dtype = Dtype::bf16, .products = WeightFormat::fp8}, kDevice);
  Engine engine(weights, cache_spec(m, CacheFormat::bf16), {.plan = {.activations = Activations::fp8_128}});
  if (!kOnGpu) engine.counter = allocation_count;  // the first products of a shape choose their algorithm there
  engine.run_alone(engine.add(hidden), 50, 20);
  EXPECT_EQ(engine.allocations, 0);
}

TEST(Fp8Products, WhatCannotBeIsRefused) {
  const ModelConfig m = small_deepseek();
  const LayerTensors tensors = random_layer(m, 0, 1, Dtype::f32);
  const std::vector<float> hidden = cases::random_values(4 * m.hidden, 3);
  const LayerWeights plain = prepare(m, tensors, PrepareOptions{}, kDevice);
  EXPECT_FALSE(plain.any_fp8());
  EXPECT_EQ(message_of([&] {
              Engine engine(plain, cache_spec(m, CacheFormat::f32), {.plan = {.activations = Activations::fp8_128}});
              engine.run_alone(engine.add(hidden), 4, 4);
            }),
            "layer: plan was made for activations fp8_128, no map of the weights is held in fp8 "
            "(PrepareOptions::products)");
  EXPECT_EQ(message_of([&] { prepare(m, tensors, {.products = WeightFormat::mxfp4}, kDevice); }),
            "prepare: products in mxfp4; plain and fp8 are supported");
  EXPECT_EQ(message_of([] { parse_activations("fp8"); }), "unknown activations 'fp8'; known: plain fp8_128");
  LayerTensors broken = tensors;
  std::vector<float> values = tensors.output.to_f32();
  values[5] = std::numeric_limits<float>::infinity();
  broken.output.data = reinterpret_cast<const std::byte*>(values.data());
  EXPECT_EQ(
      message_of([&] { prepare(m, broken, {.products = WeightFormat::fp8}, kDevice); }),
      "prepare: output (model.layers.0.self_attn.o_proj.weight) is inf at element 5, weights to be quantised must "
      "be finite");
}

}  // namespace
}  // namespace mla::test
