// Dummy steps: zeros in every form, of a batch's lengths alone, whatever lies in the memory that they are given.
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "backend/run.hpp"
#include "layer/kernels.hpp"
#include "layer/random_layer.hpp"
#include "support/message.hpp"
#include "support/quantised.hpp"

namespace mla::test {
namespace {

constexpr int64_t kRoom = 3;  // rows past the step's tokens

// Of 7 tokens, with contexts but without pages and slots.
struct Step {
  Layer l;
  std::vector<int32_t> starts{0, 5, 5, 7}, lengths{90, 3, 41};
  Batch batch{starts, lengths, {}, {}};
  Plan plan;
  Buffer workspace;

  Step(const Kind& k, PlanOptions o) : l(layer_of(k)) {
    o.dummy = true;
    plan = mla::plan(l.model, l.spec, 0, batch, device_info(l.stream, l.model), l.planned(o));
    workspace = filled(plan.workspace_bytes, std::byte{0xff});
  }
  LayerContext context() const {
    static const RotaryTable none;
    return {.plan = plan,
            .batch = batch,
            .weights = l.weights,
            .rotary = none,
            .cache = {},
            .workspace = {workspace.data(), workspace.size()}};
  }
};

template <class T>
void forward_gives_zeros(const Step& s, T sentinel, const std::string& how) {
  const int64_t rows = s.plan.tokens + kRoom, h = s.l.model.hidden;
  std::vector<T> out(static_cast<size_t>(rows * h), sentinel);
  Stream stream = s.l.stream;
  forward(stream, s.context(), View<const float, Token, Hidden>(nullptr, {0, h}),
          View<T, Token, Hidden>(out.data(), {rows, h}));
  stream.synchronize();
  for (size_t i = 0; i < out.size(); ++i) {
    const bool written = i < static_cast<size_t>(s.plan.tokens * h);
    ASSERT_EQ(std::memcmp(&out[i], written ? std::vector<T>(1).data() : &sentinel, sizeof(T)), 0) << how << " " << i;
  }
}

TEST(Dummy, TheBlockFormWritesZeros) {
  for (const Kind& k : kinds())
    for (SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
      PlanOptions o = k.plan;
      o.split = split;
      const Step s(k, o);
      forward_gives_zeros<float>(s, -1.5e30f, std::string(k.name) + " f32");
      forward_gives_zeros<bf16>(s, to_bf16(-3.0f), std::string(k.name) + " bf16");
      EXPECT_TRUE(s.plan.lists.empty()) << k.name;
      EXPECT_NE(s.plan.describe().find("dummy: calls write zeros"), std::string::npos);
      PrepareOptions weights;
      if (k.absorbed) weights.absorption = Absorption::full;
      EXPECT_TRUE(layer::kernels(s.plan, s.batch, weights).empty()) << k.name;
    }
}

TEST(Dummy, TheAttentionFormWritesZerosIntoRowsOfAnyStrides) {
  for (const Kind& k : attention_kinds()) {
    for (LayerForm form : {LayerForm::block, LayerForm::attention}) {
      PlanOptions o = k.plan;
      o.form = form;
      const Step s(k, o);
      const ModelConfig& m = s.l.model;
      const int64_t t = s.plan.tokens, rows = t + kRoom, n = m.heads, v = m.value;
      // Heads side by side, heads apart, and head by head.
      for (const std::array<int64_t, 3> strides :
           {std::array<int64_t, 3>{n * v, v, 1}, {n * (v + 5) + 2, v + 5, 1}, {v, rows * v, 1}}) {
        std::vector<float> out(static_cast<size_t>(rows * n * (v + 5) + 2 * rows), -1.5e30f);
        const View<float, Token, Head, Value> view(out.data(), {rows, n, v}, strides);
        Stream stream = s.l.stream;
        attend(stream, s.context(), View<const float, Token, Head, QueryKey>(nullptr, {0, n, m.query_key()}),
               View<const float, Token, Latent>(nullptr, {0, m.latent}),
               View<const float, Token, Rope>(nullptr, {0, m.rope}), view);
        stream.synchronize();
        std::vector<float> right(out.size(), -1.5e30f);
        for (int64_t i = 0; i < t; ++i)
          for (int64_t h = 0; h < n; ++h)
            for (int64_t e = 0; e < v; ++e)
              right[static_cast<size_t>(i * strides[0] + h * strides[1] + e * strides[2])] = 0;
        EXPECT_TRUE(out == right) << k.name << " strides " << strides[0] << " " << strides[1];
      }
      // A choice of the caller's is taken, and nothing made of it.
      Stream stream = s.l.stream;
      select(stream, s.context(), View<const int32_t, Token, Topk>(nullptr, {0, 0}));
    }
  }
}

TEST(Dummy, QuantisedOutputsHoldQuantisedZeros) {
  const Kind k = kinds()[0];
  for (const char* name : {"fp8", "fp8_128", "fp8_64_tma", "fp8_128_packed", "nvfp4", "mxfp4"}) {
    const OutputSpec spec = parse_output_spec(name);
    const Step s(k, {.output = spec});
    const ModelConfig& m = s.l.model;
    const int64_t t = s.plan.tokens, width = m.heads * m.value;
    QuantisedMemory got(spec, t + kRoom, width), right(spec, t + kRoom, width);
    Stream stream = s.l.stream;
    attend(stream, s.context(), View<const float, Token, Head, QueryKey>(nullptr, {0, m.heads, m.query_key()}),
           View<const float, Token, Latent>(nullptr, {0, m.latent}),
           View<const float, Token, Rope>(nullptr, {0, m.rope}), got.view());
    const std::vector<float> zeros(static_cast<size_t>(t * width));
    ops::run(stream, ops::QuantizeArgs{.x = {Dtype::f32, zeros.data(), {t, width}}, .y = right.view()});
    stream.synchronize();
    EXPECT_TRUE(got.codes == right.codes && got.scales == right.scales) << name;
  }
}

TEST(Dummy, WhatCannotBeIsNamed) {
  const Step s(kinds()[0], {});
  const ModelConfig& m = s.l.model;
  std::vector<float> out(static_cast<size_t>(7 * m.heads * m.value));
  Stream stream = s.l.stream;
  const auto into = [&](const View<float, Token, Head, Value>& view) {
    return message_of([&] {
      attend(stream, s.context(), View<const float, Token, Head, QueryKey>(nullptr, {0, m.heads, m.query_key()}),
             View<const float, Token, Latent>(nullptr, {0, m.latent}),
             View<const float, Token, Rope>(nullptr, {0, m.rope}), view);
    });
  };
  EXPECT_EQ(into({out.data(), {6, m.heads, m.value}}), "layer: out has 6 rows, the plan has 7 tokens");
  EXPECT_EQ(into({nullptr, {7, m.heads, m.value}}), "layer: out has no data");
  EXPECT_EQ(into({out.data(), {7, m.heads, m.value}, {5, m.value, 1}}),
            "layer: out Token has stride 5, a row takes 384");
  const std::vector<int32_t> starts{0, 3, 1}, lengths{3, 3};
  EXPECT_EQ(message_of([&] {
              (void)plan(m, s.l.spec, 0, {starts, lengths, {}, {}}, device_info(stream, m), {.dummy = true});
            }),
            "batch: request 1: query_start_loc falls from 3 to 1");
}

}  // namespace
}  // namespace mla::test
