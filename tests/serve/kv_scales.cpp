// Scales of fp8 caches in a replay: given, read, or found on the trace's first tokens; and how much they cut.
#include "serve/kv_scales.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "mla/error.hpp"
#include "serve/hidden.hpp"
#include "support/models.hpp"
#include "support/safetensors_writer.hpp"

namespace mla::serve {
namespace {

struct Replayed {
  Trace trace = generate_trace({.requests = 5, .input = 40, .output = 4, .rate = 200, .seed = 3});
  Options options;
  ThreadPool pool{2};
  std::atomic<bool> stop{false};
  Replayed() {
    options.model = test::small_deepseek();
    options.model.layers = 2;
    options.format = CacheFormat::fp8;
    options.limits = {.pages = 0, .page_size = 16, .token_budget = 50};
    options.verify = 12;
  }
  Result replayed() { return replay(trace, options, pool, stop); }
};

TEST(KvScales, AreThoseOfTheirLayerOnEveryPath) {
  for (PathPolicy path : {PathPolicy::latent, PathPolicy::expanded}) {
    Replayed run;
    run.options.plan.path = path;
    run.options.limits.token_budget = 12;  // chunks that read what earlier ones stored
    run.options.verify = 40;
    run.options.k_scales = {0.03f, 0.11f};
    const Result r = run.replayed();
    EXPECT_EQ(r.k_scales, run.options.k_scales);
    EXPECT_EQ(verify(run.trace, run.options, r.samples, run.pool, run.stop).failed, 0);
    run.options.k_scales = {0.11f, 0.03f};  // another layer's
    EXPECT_GT(verify(run.trace, run.options, r.samples, run.pool, run.stop).failed, 0) << to_string(path);
  }
  Replayed usual;
  EXPECT_EQ(usual.replayed().k_scales, (std::vector<float>{1, 1}));
  usual.options.format = CacheFormat::bf16;
  EXPECT_TRUE(usual.replayed().k_scales.empty());
}

// max|kv_c| / 200 over the first prompt tokens, the latents from their definition.
TEST(KvScales, FoundOnTheFirstTokens) {
  Replayed run;
  run.options.k_scales = {0, 0.25f};
  const Result r = run.replayed();
  const ModelConfig& m = run.options.model;
  const LayerTensors t = tensors_of(run.options, 0);
  const std::vector<float> down = t.kv_down.to_f32(run.options.weights), norm = t.kv_norm.to_f32();
  double largest = 0;
  int64_t seen = 0;
  for (size_t i = 0; i < run.trace.requests.size(); ++i)
    for (int64_t p = 0; p < run.trace.requests[i].input && seen < 256; ++p, ++seen) {
      std::vector<float> x(static_cast<size_t>(m.hidden));
      hidden_row(run.options.seed, token_key(run.trace, static_cast<int64_t>(i), p), p, x);
      std::vector<double> y;
      double squares = 0;
      for (int64_t o = 0; o < m.latent; ++o) {
        double sum = 0;
        for (int64_t h = 0; h < m.hidden; ++h)
          sum += static_cast<double>(down[static_cast<size_t>(o * m.hidden + h)]) * x[static_cast<size_t>(h)];
        y.push_back(sum);
        squares += sum * sum;
      }
      for (int64_t o = 0; o < m.latent; ++o)
        largest = std::max(largest, std::fabs(y[static_cast<size_t>(o)] * norm[static_cast<size_t>(o)]) /
                                        std::sqrt(squares / static_cast<double>(m.latent) + m.rms_eps));
    }
  ASSERT_GT(seen, 100);
  ASSERT_EQ(r.k_scales.size(), 2u);
  EXPECT_NEAR(r.k_scales[0], largest / 200, 1e-4 * largest / 200);
  EXPECT_EQ(r.k_scales[1], 0.25f);
  run.options.plan.tensor_parallel = 2;
  EXPECT_EQ(run.replayed().k_scales, r.k_scales);
}

TEST(KvScales, WhatTheyCutIsCounted) {
  const std::vector<uint8_t> codes{0x7e, 0xfe, 0x7d, 0xfd, 0x7f, 0xff, 0x00, 0x80, 0x7e};
  EXPECT_EQ(saturated_codes(std::as_bytes(std::span(codes))), 3);
  Replayed run;
  run.options.k_scales = {0, 1e-5f};
  const Result r = run.replayed();
  ASSERT_EQ(r.saturated.size(), 2u);
  EXPECT_EQ(r.saturated[0], 0);
  // All but what is within 448e-5 of 0, of values around 1; unused slots are not counted, whose codes are 0.
  EXPECT_GT(r.saturated[1], 0.98);
  EXPECT_LT(r.saturated[1], 1);
}

TEST(KvScales, OptionsThatCannotBe) {
  const auto refusal = [](const std::function<void(Options&)>& change) {
    Replayed run;
    change(run.options);
    try {
      resolved(run.trace, run.options);
    } catch (const InputError& e) {
      return std::string(e.what());
    }
    return std::string("taken");
  };
  EXPECT_EQ(refusal([](Options& o) { o.k_scales = {1, 0}; }), "taken");
  EXPECT_EQ(refusal([](Options& o) { o.k_scales = {1}; }), "k_scales has 1 elements, the run has 2 layers");
  EXPECT_EQ(refusal([](Options& o) {
              o.k_scales = {1, 1}, o.format = CacheFormat::bf16;
            }),
            "k_scales are there for a cache in bf16, fp8 has them");
  for (float x : {-1.0f, NAN, INFINITY})
    EXPECT_EQ(refusal([&](Options& o) {
                o.k_scales = {1, x};
              }),
              "k_scales is " + std::to_string(x) + " at layer 1, a finite number above 0 is needed, or 0 to find one");
}

TEST(KvScales, FilesOfThem) {
  using List = std::vector<float>;
  const test::TempFolder folder;
  ModelConfig m = test::small_deepseek();
  m.layers = 3;
  const auto json = [&](const std::string& text) {
    test::write_file(folder / "s.json", text);
    return read_k_scales(folder / "s.json", m, 3);
  };
  const auto refusal = [&](const auto& read) {
    try {
      read();
    } catch (const Error& e) {
      const std::string text = e.what();
      return text.substr(text.find(": ") + 2);
    }
    return std::string("read");
  };
  EXPECT_EQ(json(R"({"k_scale":0.5})"), (List{0.5f, 0.5f, 0.5f}));
  EXPECT_EQ(json(R"({"k_scale":[1,2,3],"v_scale":7})"), (List{1, 2, 3}));
  for (const auto& [text, why] :
       {std::pair(R"({})", "k_scale is missing"),
        {R"({"k_scale":1,"q_scale":-3})", "q_scale is -3, known are k_scale, v_scale"},
        {R"({"k_scale":[1,2]})", "k_scale has 2 elements, 1 or one for each of 3 layers is needed"},
        {R"({"k_scale":[1,"a",2]})", "k_scale holds \"a\", a number is needed"},
        {R"({"k_scale":[]})", "k_scale has 0 elements, 1 or one for each of 3 layers is needed"},
        {R"({"k_scale":0})", "k_scale is 0.000000 at element 0, scales must be finite and above 0"},
        {R"({"k_scale":[1,1e39,1]})", "k_scale is inf at element 1, scales must be finite and above 0"},
        {R"([1])", "not a JSON object"}})
    EXPECT_EQ(refusal([&, &t = text] { json(t); }), why);

  const auto tensors = [&](const std::function<void(test::SafetensorsWriter&)>& add) {
    test::SafetensorsWriter w;
    add(w);
    w.write(folder / "s.safetensors");
    return read_k_scales(folder / "s.safetensors", m, 3);
  };
  EXPECT_EQ(tensors([](auto& w) { w.add("k_scale", "F32", {3}, List{1, 2, 3}); }), (List{1, 2, 3}));
  EXPECT_EQ(tensors([](auto& w) { w.add("k_scale", "BF16", {}, std::vector<bf16>{to_bf16(2)}); }), (List{2, 2, 2}));
  const auto layer = [](test::SafetensorsWriter& w, const std::string& name, float x) {
    w.add(name, "F32", {}, List{x});
  };
  EXPECT_EQ(tensors([&](auto& w) {
              layer(w, "model.layers.0.self_attn.k_scale", 4);
              layer(w, "layers.1.self_attn.k_proj.k_scale", 5);
              layer(w, "language_model.model.layers.2.self_attn.kv_scale", 6);
            }),
            (List{4, 5, 6}));
  EXPECT_EQ(refusal([&] { tensors([&](auto& w) { layer(w, "model.layers.0.self_attn.k_scale", 4); }); }),
            "neither k_scale nor a scale of layer 1 ('model.layers.1.self_attn.k_scale' or the like) is there");
  EXPECT_EQ(refusal([&] { tensors([](auto& w) {
                            w.add("k_scale", "F32", {2}, List{1, 2});
                          }); }),
            "k_scale has 2 elements, 1 or one for each of 3 layers is needed");
}

TEST(KvScales, OfACheckpoint) {
  const test::TempFolder folder;
  test::write_file(folder / "config.json",
                   R"({"model_type":"deepseek_v3","hidden_size":8,"num_hidden_layers":3,"num_attention_heads":2,)"
                   R"("kv_lora_rank":4,"qk_nope_head_dim":4,"qk_rope_head_dim":2,"v_head_dim":4})");
  test::SafetensorsWriter w;
  w.add("model.layers.0.self_attn.k_proj.k_scale", "F32", {}, std::vector<float>{0.5f});
  w.add("model.layers.2.self_attn.attn.k_scale", "F32", {2}, std::vector<float>{0.25f, 0.25f});
  w.write(folder / "model.safetensors");
  EXPECT_EQ(checkpoint_k_scales(Checkpoint(folder.path()), 3), (std::vector<float>{0.5f, 0, 0.25f}));
}

}  // namespace
}  // namespace mla::serve
