// Random weights and preparation.
#include "mla/weights.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "mla/error.hpp"
#include "support/models.hpp"

namespace mla {
namespace {

TEST(RandomLayer, PureAndOfTheRightScale) {
  const ModelConfig m = test::small_deepseek();
  const LayerTensors a = random_layer(m, 3, 9, Dtype::bf16), b = random_layer(m, 3, 9, Dtype::bf16);
  EXPECT_EQ(std::memcmp(a.kv_up.data, b.kv_up.data, static_cast<size_t>(a.kv_up.size()) * 2), 0);
  EXPECT_NE(a.kv_up.to_f32(), random_layer(m, 4, 9, Dtype::bf16).kv_up.to_f32());
  EXPECT_NE(a.kv_up.to_f32(), random_layer(m, 3, 10, Dtype::bf16).kv_up.to_f32());
  double sum = 0, square = 0;
  const auto w = random_layer(m, 0, 1, Dtype::f32).kv_up.to_f32();
  for (float x : w) {
    sum += x;
    square += x * x;
  }
  const double n = static_cast<double>(w.size());
  EXPECT_NEAR(sum / n, 0, 4 / std::sqrt(n * 512));
  EXPECT_NEAR(square / n * 512, 1, 0.02);
  // In another dtype: the same numbers, rounded.
  const auto f = random_layer(m, 3, 9, Dtype::f32).output.to_f32(), h = a.output.to_f32();
  for (size_t i = 0; i < f.size(); i += 97) EXPECT_EQ(h[i], to_float(to_bf16(f[i])));
  EXPECT_THROW(random_layer(m, 0, 1, Dtype::fp8_e4m3), UnsupportedError);
}

TEST(Prepare, ShapesAndErrors) {
  const ModelConfig m = test::small_deepseek();
  LayerTensors t = random_layer(m, 0, 1, Dtype::f16);
  const LayerWeights w = prepare(m, t, Dtype::bf16);
  EXPECT_EQ(w.absorb_key->heads, m.heads);
  EXPECT_EQ(w.absorb_key->in, m.nope);
  EXPECT_EQ(w.absorb_key->out, m.latent);
  EXPECT_EQ(w.value_up->in, m.latent);
  EXPECT_EQ(w.value_up->out, m.value);
  EXPECT_EQ(w.kv_up->out, m.heads * (m.nope + m.value));
  EXPECT_GT(w.bytes(), 0u);
  EXPECT_THROW(prepare(m, t, Dtype::f16), UnsupportedError);
  auto message = [&](const LayerTensors& tensors) -> std::string {
    try {
      prepare(m, tensors, Dtype::f32);
    } catch (const ShapeError& e) {
      return e.what();
    }
    return "prepared";
  };
  LayerTensors missing = t;
  missing.output = {};
  EXPECT_EQ(message(missing), "prepare: output is missing, expected shape [96, 384]");
  t.kv_norm.shape = {511};
  EXPECT_EQ(message(t),
            "prepare: kv_norm (model.layers.0.self_attn.kv_a_layernorm.weight) has shape [511], expected [512]");
}

}  // namespace
}  // namespace mla
