// Rows past a step's tokens: of the call's inputs they are not read, of its outputs they are left alone, in every form;
// and the lists of a step that takes a larger one's place touch no row of the step's own tokens.
#include <gtest/gtest.h>

#include <cstring>

#include "layer/random_layer.hpp"
#include "layer/reference.hpp"
#include "layer/restage.hpp"
#include "support/message.hpp"
#include "support/quantised.hpp"

namespace mla::test {
namespace {

constexpr int64_t kMore = 3;  // rows past the tokens

// Rows of the step's tokens, and behind them what must not be read.
std::vector<float> poisoned(std::vector<float> rows, int64_t width) {
  rows.resize(rows.size() + static_cast<size_t>(kMore * width), cases::poison());
  return rows;
}

template <class T>
void expect_left_alone(const std::vector<T>& out, const std::vector<T>& exact, T sentinel, const std::string& how) {
  ASSERT_TRUE(exact.empty() || std::memcmp(out.data(), exact.data(), exact.size() * sizeof(T)) == 0) << how;
  for (size_t i = exact.size(); i < out.size(); ++i)
    ASSERT_EQ(std::memcmp(&out[i], &sentinel, sizeof(T)), 0) << how << " element " << i;
}

// The block form, in both of its output dtypes.
template <class T>
void forward_leaves_rows_alone(Layer& l, const Requests& r, const PlanOptions& o, T sentinel, const std::string& how) {
  const ModelConfig& m = l.model;
  const Batch b = r.batch();
  const Plan p = l.plan_of(b, o);
  const int64_t t = p.tokens;
  const auto run = [&](std::vector<float> hidden, int64_t rows) {
    const Buffer workspace = filled(p.workspace_bytes, std::byte{0xff}),
                 selection = filled(p.selection_bytes, std::byte{0xff});
    std::vector<T> out(static_cast<size_t>(rows * m.hidden), sentinel);
    l.reset();
    forward(l.stream, l.context(p, b, workspace, selection),
            View<const float, Token, Hidden>(hidden.data(), {rows, m.hidden}),
            View<T, Token, Hidden>(out.data(), {rows, m.hidden}));
    l.stream.synchronize();
    return out;
  };
  const auto hidden = random_values(t * m.hidden, 3);
  const auto exact = run(hidden, t);
  const auto bytes = l.cache_bytes();
  expect_left_alone(run(poisoned(hidden, m.hidden), t + kMore), exact, sentinel, how);
  EXPECT_TRUE(l.cache_bytes() == bytes) << how;
}

// The attention form in `output`, on choices of the caller's where the step selects.
void attend_leaves_rows_alone(Layer& l, const Requests& r, PlanOptions o, const std::string& output,
                              const std::string& how) {
  const ModelConfig& m = l.model;
  const Batch b = r.batch();
  o.output = parse_output_spec(output);
  const Plan p = l.plan_of(b, o);
  const int64_t t = p.tokens, width = m.heads * m.value;
  // Of a float output the values, of a quantised one its memory.
  const auto run = [&](int64_t rows, const auto& attends) {
    const auto fit = [&](std::vector<float> x, int64_t row) { return rows > t ? poisoned(std::move(x), row) : x; };
    const auto q = fit(random_values(t * m.heads * m.query_key(), 3), m.heads * m.query_key()),
               kv_c = fit(random_values(t * m.latent, 4), m.latent), k_pe = fit(random_values(t * m.rope, 5), m.rope);
    const Buffer workspace = filled(p.workspace_bytes, std::byte{0xff}),
                 selection = filled(p.selection_bytes, std::byte{0xff});
    l.reset();
    const LayerContext c = l.context(p, b, workspace, selection);
    choose(l, c, rows);
    attends(c, View<const float, Token, Head, QueryKey>(q.data(), {rows, m.heads, m.query_key()}),
            View<const float, Token, Latent>(kv_c.data(), {rows, m.latent}),
            View<const float, Token, Rope>(k_pe.data(), {rows, m.rope}));
    l.stream.synchronize();
  };
  if (o.output.kind == OutputKind::none) {
    const auto heads = [&](int64_t rows) {
      std::vector<float> out(static_cast<size_t>(rows * width), -1.5e30f);
      run(rows, [&](const LayerContext& c, auto q, auto kv_c, auto k_pe) {
        attend(l.stream, c, q, kv_c, k_pe, View<float, Token, Head, Value>(out.data(), {rows, m.heads, m.value}));
      });
      return out;
    };
    const auto exact = heads(t);
    const auto bytes = l.cache_bytes();
    expect_left_alone(heads(t + kMore), exact, -1.5e30f, how);
    EXPECT_TRUE(l.cache_bytes() == bytes) << how;
    return;
  }
  // The layout of scales follows from the rows that there is room for: the same in both runs.
  const auto codes = [&](int64_t rows) {
    QuantisedMemory memory(o.output, t + kMore, width);
    run(rows, [&](const LayerContext& c, auto q, auto kv_c, auto k_pe) {
      attend(l.stream, c, q, kv_c, k_pe, memory.view());
    });
    return memory;
  };
  const QuantisedMemory exact = codes(t), got = codes(t + kMore), untouched(o.output, t + kMore, width);
  EXPECT_TRUE(got.codes == exact.codes && got.scales == exact.scales) << how << " " << output;
  const auto row = static_cast<size_t>(o.output.row_bytes(width) + 7);
  EXPECT_TRUE(std::equal(got.codes.begin() + static_cast<int64_t>(row) * t, got.codes.end(),
                         untouched.codes.begin() + static_cast<int64_t>(row) * t))
      << how << " " << output;
  for (int64_t i = t; i < t + kMore; ++i)
    for (int64_t g = 0; g < (o.output.kind == OutputKind::fp8 ? 0 : o.output.groups(width)); ++g) {
      const auto at = static_cast<size_t>(o.output.scale_offset(t + kMore, width, i, g));
      ASSERT_EQ(got.scales[at], std::byte{0x5a}) << how << " " << output << " row " << i << " group " << g;
    }
}

TEST(Padding, TheBlockFormLeavesRowsPastTheTokensAlone) {
  for (const Kind& k : kinds()) {
    Layer l = layer_of(k);
    forward_leaves_rows_alone<float>(l, requests(), k.plan, -1.5e30f, std::string(k.name) + " f32");
    forward_leaves_rows_alone<bf16>(l, requests(), k.plan, to_bf16(-3.0f), std::string(k.name) + " bf16");
  }
}

TEST(Padding, TheAttentionFormLeavesRowsPastTheTokensAlone) {
  for (const Kind& k : attention_kinds()) {
    Layer l = layer_of(k);
    for (const char* output : {"none", "fp8", "fp8_128", "fp8_128_tma", "fp8_64_packed", "nvfp4", "mxfp4"})
      attend_leaves_rows_alone(l, requests(), k.plan, output, k.name);
  }
}

// A step without any token, and one whose requests are partly empty, into memory with rows.
TEST(Padding, StepsOfFewTokensAndMuchRoom) {
  for (const Kind& k : kinds()) {
    Layer l = layer_of(k);
    for (const Requests& r : {Requests({0, 0}, {0, 0}), Requests({0, 1, 0}, {5, 60, 0})})
      forward_leaves_rows_alone<float>(l, r, k.plan, -1.5e30f, std::string(k.name) + " of few");
  }
}

// What a captured call does when a smaller step takes the staged one's place: its lists are overwritten where the
// call's kernels read them, here where the call does.
class Restaged {
 public:
  Restaged(Layer& l, const Requests& most, const PlanOptions& o)
      : l_(l), most_(most), batch_(most_.batch()), plan_(l.plan_of(batch_, o)), options_(o) {
    lists_.lay_out(plan_, batch_);
  }
  std::string restage(const Requests& r) {
    const Batch b = r.batch();
    const Plan p = l_.plan_of(b, options_);
    return message_of([&] { test::restage(lists_, plan_, batch_, p, b); });
  }
  std::vector<float> forward_on(std::span<const float> hidden) {
    const Buffer workspace = filled(plan_.workspace_bytes, std::byte{0xff}),
                 selection = filled(plan_.selection_bytes, std::byte{0xff});
    const int64_t h = l_.model.hidden, t = plan_.tokens;
    std::vector<float> in(hidden.begin(), hidden.end()), out(static_cast<size_t>(t * h), -1.5e30f);
    in.resize(out.size(), cases::poison());
    const LayerContext c = l_.context(plan_, batch_, workspace, selection);
    choose(l_, c, t);
    forward(l_.stream, c, View<const float, Token, Hidden>(in.data(), {t, h}),
            View<float, Token, Hidden>(out.data(), {t, h}));
    l_.stream.synchronize();
    return out;
  }

 private:
  Layer& l_;
  Requests most_;
  Batch batch_;
  Plan plan_;
  PlanOptions options_;
  layer::StagedLists lists_;
};

void expect_served(const ModelConfig& m, const PlanOptions& o, const Requests& most, const Requests& fewer,
                   const std::string& how) {
  Layer l(m);
  l.weights.indexer.reset();  // choices are the caller's: contracts of its items' order are for those of one step
  const auto hidden = random_values(fewer.tokens() * m.hidden, 3);
  l.reset();
  const Batch b = fewer.batch();
  const Plan p = l.plan_of(b, o);
  const Buffer workspace = filled(p.workspace_bytes, std::byte{0xff}),
               selection = filled(p.selection_bytes, std::byte{0xff});
  std::vector<float> alone(hidden.size());
  const LayerContext c = l.context(p, b, workspace, selection);
  choose(l, c, p.tokens);
  forward(l.stream, c, View<const float, Token, Hidden>(hidden.data(), {p.tokens, m.hidden}),
          View<float, Token, Hidden>(alone.data(), {p.tokens, m.hidden}));
  l.stream.synchronize();
  const auto bytes = l.cache_bytes();

  l.reset();
  Restaged staged(l, most, o);
  ASSERT_EQ(staged.restage(fewer), "no error") << how;
  const auto got = staged.forward_on(hidden);
  expect_same_cache(l.cache_bytes(), bytes, how);
  for (int64_t i = 0; i < p.tokens; ++i) {
    const auto row = [&](const std::vector<float>& x) { return std::span(x).subspan(i * m.hidden, m.hidden); };
    const auto right = row(alone);
    EXPECT_LE(reference::relative_error(row(got), std::vector<double>(right.begin(), right.end())), 2e-6)
        << how << " token " << i;
  }
}

TEST(Restaged, ASmallerStepsRowsAreItsOwn) {
  const PlanOptions by_length{.path = PathPolicy::by_length, .reorder_batch_threshold = 1};
  const ModelConfig dense = small_deepseek();
  expect_served(dense, {.path = PathPolicy::latent}, Requests({1, 1, 1, 1}, {9, 70, 40, 3}), Requests({1, 1}, {90, 2}),
                "decodes");
  expect_served(dense, by_length, Requests({5, 1, 1, 1}, {20, 70, 40, 3}), Requests({4, 1}, {10, 30}),
                "a prefill before decodes");
  expect_served(dense, by_length, Requests({1, 1, 1, 5}, {60, 70, 40, 20}), Requests({1, 1, 3}, {10, 30, 7}),
                "a prefill behind decodes");
  // Rows of latent_tokens out of order: those of dense requests first, sparse ones behind them.
  expect_served(small_sparse(), {.path = PathPolicy::latent}, Requests({1, 1, 1, 1}, {90, 5, 70, 60}),
                Requests({1, 1}, {50, 9}), "sparse and dense decodes");
  expect_served(small_sparse(), {.path = PathPolicy::latent}, Requests({1, 1, 1, 1}, {90, 80, 70, 60}),
                Requests({1}, {50}), "sparse decodes");
}

TEST(Restaged, WhatDoesNotFitIsNamed) {
  Layer l(small_deepseek());
  const PlanOptions o{.path = PathPolicy::latent};
  Restaged staged(l, Requests({1, 1}, {9, 70}), o);
  EXPECT_EQ(staged.restage(Requests({1, 1, 1}, {9, 9, 9})),
            "restage: positions has 3 entries, the staged step's has 2");
  EXPECT_EQ(staged.restage(Requests({1, 1}, {9, 9}, 9)), "restage: block_table is 2 x 9, the staged step's is 2 x 8");
  EXPECT_EQ(staged.restage(Requests({0, 0}, {9, 9})).substr(0, 9), "restage: ");
}

}  // namespace
}  // namespace mla::test
