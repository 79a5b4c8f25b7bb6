// Random weights and preparation.
#include "mla/weights.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "mla/error.hpp"
#include "mla/parallel.hpp"
#include "support/golden.hpp"
#include "support/models.hpp"

namespace mla {
namespace {

std::vector<float> to_vector(const WeightVector& w) { return {w.values().begin(), w.values().end()}; }

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

TEST(RandomLayer, IndexerWhereALayerHasItsOwn) {
  ModelConfig m = test::small_deepseek();
  const LayerTensors dense = random_layer(m, 0, 9, Dtype::f32);
  EXPECT_FALSE(dense.indexer);
  m.indexer = IndexerConfig{.heads = 4, .dim = 128, .topk = 64, .full = {1, 0}};
  const LayerTensors t = random_layer(m, 0, 9, Dtype::f32);
  ASSERT_TRUE(t.indexer);
  EXPECT_EQ(t.indexer->query.shape, (std::vector<int64_t>{4 * 128, 48}));
  EXPECT_EQ(t.indexer->key.shape, (std::vector<int64_t>{128, 96}));
  EXPECT_EQ(t.indexer->key_norm.shape, (std::vector<int64_t>{128}));
  EXPECT_EQ(t.indexer->key_norm_bias.shape, (std::vector<int64_t>{128}));
  EXPECT_EQ(t.indexer->head_weights.shape, (std::vector<int64_t>{4, 96}));
  EXPECT_NE(t.indexer->key_norm_bias.to_f32(), std::vector<float>(128));
  EXPECT_EQ(t.output.to_f32(), dense.output.to_f32());  // the other tensors stay as they were
  EXPECT_FALSE(random_layer(m, 1, 9, Dtype::f32).indexer);
}

std::string prepare_message(const ModelConfig& m, const LayerTensors& t, const PrepareOptions& o) {
  try {
    prepare(m, t, o);
  } catch (const Error& e) {
    return e.what();
  }
  return "prepared";
}

TEST(Prepare, Indexer) {
  ModelConfig m = test::small_deepseek();
  m.indexer = IndexerConfig{.heads = 4, .dim = 128, .topk = 64};
  LayerTensors t = random_layer(m, 0, 9, Dtype::bf16);
  const LayerWeights w = prepare(m, t, Dtype::bf16);
  ASSERT_TRUE(w.indexer);
  EXPECT_EQ(w.indexer->query->in, 48);
  EXPECT_EQ(w.indexer->query->out, 512);
  EXPECT_EQ(w.indexer->key->in, 96);
  EXPECT_EQ(w.indexer->key->out, 128);
  EXPECT_EQ(w.indexer->head_weights->out, 4);
  EXPECT_EQ(to_vector(w.indexer->key_norm), t.indexer->key_norm.to_f32());
  EXPECT_EQ(to_vector(w.indexer->key_norm_bias), t.indexer->key_norm_bias.to_f32());
  LayerTensors shared = t;
  shared.indexer.reset();
  EXPECT_FALSE(prepare(m, shared, Dtype::bf16).indexer);
  EXPECT_GT(w.bytes(), prepare(m, shared, Dtype::bf16).bytes());
  LayerTensors missing = t;
  missing.indexer->key_norm_bias = {};
  EXPECT_EQ(prepare_message(m, missing, {}), "prepare: indexer key_norm_bias is missing, expected shape [128]");
  t.indexer->key.shape = {127, 96};
  EXPECT_EQ(
      prepare_message(m, t, {}),
      "prepare: indexer key (model.layers.0.self_attn.indexer.wk.weight) has shape [127, 96], expected [128, 96]");
  EXPECT_EQ(prepare_message(test::small_deepseek(), t, {}),
            "prepare: tensors of an indexer are there, model small-deepseek has none");
}

TEST(Prepare, GoldenIndexer) {
  const test::Golden g = test::read_golden({test::golden_folder() / "v32.safetensors"});
  const IndexerConfig& x = *g.config.indexer;
  ASSERT_TRUE(g.tensors.indexer);
  const LayerWeights w = prepare(g.config, g.tensors, Dtype::f32);
  EXPECT_EQ(w.indexer->query->out, x.heads * x.dim);
  EXPECT_EQ(w.indexer->key->out, x.dim);
  EXPECT_EQ(w.indexer->head_weights->out, x.heads);
  EXPECT_EQ(w.indexer->key_norm.values().size(), static_cast<size_t>(x.dim));
  EXPECT_EQ(w.indexer->key_norm_bias.values().size(), static_cast<size_t>(x.dim));
}

// One row of a product with prepared weights.
std::vector<float> product_row(const Linear& w, const std::vector<float>& x) {
  ThreadPool pool(1);
  Stream stream(pool);
  const size_t scratch = backend::backend({}).scratch_per_worker({.heads = w.heads, .hidden = w.in});
  const Buffer memory(scratch);
  std::vector<float> y(w.heads * w.out);
  ops::run(stream, ops::ProjectArgs{.x = View<const float, Token, Head, In>(x.data(), {1, w.heads, w.in}, {0, 0, 1}),
                                    .x_rows = {},
                                    .weights = &w,
                                    .y = View<float, Token, Head, Out>(y.data(), {1, w.heads, w.out}),
                                    .y_rows = {},
                                    .rows = 1,
                                    .scratch = {memory.data(), scratch}});
  return y;
}

// Both absorbed maps against the definition, element by element of their products with a unit vector.
TEST(Prepare, FullAbsorptionIsTheProductOfItsFactors) {
  for (ModelConfig m : {test::small_deepseek(), test::odd_nope()}) {
    m.hidden = 70;
    const LayerTensors t = random_layer(m, 0, 2, Dtype::f32);
    const LayerWeights w = prepare(m, t, PrepareOptions{.absorption = Absorption::full});
    EXPECT_TRUE(w.absorbed());
    for (const auto* gone : {&w.query, &w.kv_up, &w.absorb_key, &w.value_up, &w.output}) EXPECT_EQ(*gone, nullptr);
    EXPECT_EQ(w.query_rope != nullptr, m.rope > 0);
    const std::vector<float> query = t.query.to_f32(), up = t.kv_up.to_f32(), output = t.output.to_f32();
    const int64_t in = m.query_latent > 0 ? m.query_latent : m.hidden, per_head = m.nope + m.value;
    auto unit = [](int64_t n, int64_t at) {
      std::vector<float> x(n);
      x[at] = 1;
      return x;
    };
    for (int64_t at : {int64_t{0}, in - 1}) {
      const std::vector<float> y = product_row(*w.absorbed_query, unit(in, at));
      for (int64_t h = 0; h < m.heads; ++h)
        for (int64_t l = 0; l < m.latent; ++l) {
          double sum = 0;
          for (int64_t p = 0; p < m.nope; ++p)
            sum +=
                static_cast<double>(query[(h * m.query_key() + p) * in + at]) * up[(h * per_head + p) * m.latent + l];
          ASSERT_NEAR(y[h * m.latent + l], sum, 1e-6) << h << " " << l;
        }
      if (m.rope == 0) continue;
      const std::vector<float> rope = product_row(*w.query_rope, unit(in, at));
      for (int64_t h = 0; h < m.heads; ++h)
        for (int64_t r = 0; r < m.rope; ++r)
          ASSERT_EQ(rope[h * m.rope + r], query[(h * m.query_key() + m.nope + r) * in + at]);
    }
    for (int64_t at : {int64_t{0}, m.heads * m.latent - 1}) {
      const int64_t h = at / m.latent, l = at % m.latent;
      const std::vector<float> y = product_row(*w.absorbed_output, unit(m.heads * m.latent, at));
      for (int64_t o = 0; o < m.hidden; ++o) {
        double sum = 0;
        for (int64_t v = 0; v < m.value; ++v)
          sum += static_cast<double>(up[(h * per_head + m.nope + v) * m.latent + l]) *
                 output[(o * m.heads + h) * m.value + v];
        ASSERT_NEAR(y[o], sum, 1e-6) << o;
      }
    }
  }
}

std::vector<PrepareOptions> every_choice() {
  std::vector<PrepareOptions> all;
  for (Dtype t : {Dtype::f32, Dtype::bf16}) {
    for (WeightFormat up : {WeightFormat::plain, WeightFormat::fp8, WeightFormat::mxfp4})
      all.push_back({.dtype = t, .up = up});
    for (Absorption a : {Absorption::runtime, Absorption::full_fp8})
      all.push_back({.dtype = t, .absorption = a, .products = WeightFormat::fp8});
    for (Absorption a : {Absorption::full, Absorption::full_fp8}) all.push_back({.dtype = t, .absorption = a});
  }
  return all;
}

TEST(Prepare, MemoryIsWhatWasPromised) {
  ModelConfig m = test::small_deepseek();
  m.hidden = 256;
  m.query_latent = 128;
  m.heads = 4;
  m.indexer = IndexerConfig{.heads = 2, .dim = 128, .topk = 64};
  for (int64_t block : {0, 128}) {
    m.fp8_block_rows = m.fp8_block_cols = block;
    const LayerTensors t = random_layer(m, 0, 1, Dtype::bf16);
    for (PrepareOptions o : every_choice()) {
      const double promised = prepared_bytes(m, 0, o), held = static_cast<double>(prepare(m, t, o).bytes());
      // Columns are padded to 64, and a CPU without bf16 products holds bf16 values as f32.
      EXPECT_GE(held, promised) << to_string(o.dtype) << to_string(o.absorption) << to_string(o.up);
      if (o.dtype == Dtype::f32) {
        EXPECT_LE(held, 1.05 * promised) << to_string(o.absorption) << to_string(o.up);
      }
    }
  }
  // W_UK^T and W_UV: 4 heads of 512 x 128 each, a quarter of f32's and 17/128 of it.
  const LayerTensors t = random_layer(m, 0, 1, Dtype::bf16);
  auto bytes = [&](WeightFormat up) {
    const LayerWeights w = prepare(m, t, PrepareOptions{.up = up});
    return static_cast<double>(w.absorb_key->bytes + w.value_up->bytes);
  };
  const double elements = 2.0 * 4 * 512 * 128;
  EXPECT_GE(bytes(WeightFormat::plain), 4 * elements);
  EXPECT_EQ(bytes(WeightFormat::fp8), elements + 8);
  EXPECT_EQ(bytes(WeightFormat::mxfp4), elements * 17 / 32);
  // Of a part whose group's heads are held, all four are there.
  const HeadRange own{1, 2};
  const ModelConfig part = part_of(m, own);
  const std::vector<HeadRange> group{{1, 2}, {0, 1}, {3, 1}};
  const LayerWeights w = prepare(part, part_of(m, t, own, group), PrepareOptions{});
  EXPECT_EQ(static_cast<double>(w.absorb_key->bytes + w.value_up->bytes), bytes(WeightFormat::plain));
  const double promised = prepared_bytes(part, 0, {}, 4), held = static_cast<double>(w.bytes());
  EXPECT_GE(held, promised);
  EXPECT_LE(held, 1.05 * promised);
  EXPECT_LT(prepared_bytes(part, 0, {}), promised);
}

TEST(Prepare, ChoicesThatCannotBe) {
  const ModelConfig m = test::small_deepseek();
  LayerTensors t = random_layer(m, 0, 1, Dtype::f32);
  EXPECT_EQ(prepare_message(m, t, {.absorption = Absorption::full, .up = WeightFormat::mxfp4}),
            "prepare: W_UK and W_UV in mxfp4 with absorption full, which holds neither");
  for (Absorption a : {Absorption::runtime, Absorption::full, Absorption::full_fp8})
    EXPECT_EQ(parse_absorption(to_string(a)), a);
  EXPECT_THROW(parse_absorption("half"), InputError);

  // NaN and infinity have no code.
  auto with = [&](HostTensor LayerTensors::*role, int64_t at, float x, const PrepareOptions& o) {
    LayerTensors broken = t;
    auto values = std::make_shared<std::vector<float>>((t.*role).to_f32());
    (*values)[at] = x;
    (broken.*role).data = reinterpret_cast<const std::byte*>(values->data());
    (broken.*role).owner = values;
    return prepare_message(m, broken, o);
  };
  const std::string tail = ", weights to be quantised must be finite", name = "model.layers.0.self_attn.";
  for (WeightFormat up : {WeightFormat::fp8, WeightFormat::mxfp4}) {
    EXPECT_EQ(with(&LayerTensors::kv_up, 77, NAN, {.up = up}),
              "prepare: kv_up (" + name + "kv_b_proj.weight) is nan at element 77" + tail);
    EXPECT_EQ(with(&LayerTensors::kv_up, 78, -INFINITY, {.up = up}),
              "prepare: kv_up (" + name + "kv_b_proj.weight) is -inf at element 78" + tail);
    EXPECT_EQ(with(&LayerTensors::output, 5, NAN, {.up = up}), "prepared");  // not quantised here
  }
  const PrepareOptions full{.absorption = Absorption::full_fp8};
  EXPECT_EQ(with(&LayerTensors::query, 3, NAN, full),
            "prepare: query (" + name + "q_b_proj.weight) is nan at element 3" + tail);
  EXPECT_EQ(with(&LayerTensors::kv_up, 77, NAN, full),
            "prepare: kv_up (" + name + "kv_b_proj.weight) is nan at element 77" + tail);
  EXPECT_EQ(with(&LayerTensors::output, 5, INFINITY, full),
            "prepare: output (" + name + "o_proj.weight) is inf at element 5" + tail);
  // Finite factors, a product that is not.
  const std::vector<float> tens(static_cast<size_t>(t.kv_up.size()), 10.0f);
  t.kv_up.data = reinterpret_cast<const std::byte*>(tens.data());
  EXPECT_EQ(with(&LayerTensors::query, 0, 3e38f, full), "prepare: W_Q W_UK^T is inf at element 0" + tail);
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
