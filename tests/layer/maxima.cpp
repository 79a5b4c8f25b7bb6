// Steps of an engine's maxima: whatever batch within them, the same calls do what its own plan's would, and leave rows
// past its tokens alone. What a captured call does when a batch takes the place of another is done here by hand: the
// batch's lists are written where the captured calls' are read.
#include <gtest/gtest.h>

#include <cstring>

#include "layer/random_layer.hpp"
#include "layer/reference.hpp"
#include "layer/restage.hpp"
#include "support/message.hpp"
#include "support/sanitized.hpp"

namespace mla::test {
namespace {

constexpr StepMaxima kMaxima{.requests = 6, .tokens = 14, .query_len = 4, .seq_len = 120};

struct Way {
  const char* name;
  bool sparse, absorbed;
  PlanOptions plan;
};
std::vector<Way> ways() {
  return {
      {"latent", false, false, {.path = PathPolicy::latent}},
      {"invariant", false, false, {.path = PathPolicy::latent, .split = SplitPolicy::batch_invariant}},
      {"absorbed", false, true, {.absorbed = true}},
      {"sparse", true, false, {.path = PathPolicy::latent}},
      {"sparse, invariant", true, false, {.path = PathPolicy::latent, .split = SplitPolicy::batch_invariant}},
      {"selected by nobody", true, false, {.path = PathPolicy::latent, .sparse = SparsePolicy::dense}},
  };
}

// Lengths within the maxima: below, at and past what is selected (24).
Requests random_requests(cases::Random& random, bool long_ones) {
  std::vector<int32_t> queries, contexts;
  int64_t left = kMaxima.tokens;
  for (int64_t r = random.integer(0, kMaxima.requests); r > 0; --r) {
    const int64_t query = random.integer(random.integer(0, 3) == 0 ? 0 : 1, kMaxima.query_len);
    queries.push_back(static_cast<int32_t>(std::min(left, query)));
    left -= queries.back();
    const int64_t most = kMaxima.seq_len - queries.back();
    const int64_t kinds[] = {random.integer(0, most), random.integer(0, 24 - queries.back()), 24 - queries.back(),
                             25 - queries.back(), most};
    contexts.push_back(static_cast<int32_t>(long_ones ? random.integer(24, most) : kinds[random.integer(0, 4)]));
  }
  return Requests(queries, contexts);
}

std::string shape_of(const Requests& r) {
  std::string text;
  for (size_t i = 0; i < r.lengths.size(); ++i)
    text += (i ? ", " : "") + std::to_string(r.starts[i + 1] - r.starts[i]) + " of " + std::to_string(r.lengths[i]);
  return "[" + text + "]";
}

PlanOptions of_maxima(PlanOptions o) {
  o.maxima = kMaxima;
  return o;
}

// Inputs of as many rows as a call may look at: the tokens', then poison.
struct Inputs {
  std::vector<float> hidden, q, kv_c, k_pe;
  Inputs(const ModelConfig& m, int64_t tokens, int64_t rows) {
    const auto make = [&](int64_t width, uint64_t seed) {
      auto x = random_values(tokens * width, seed);
      x.resize(static_cast<size_t>(rows * width), cases::poison());
      return x;
    };
    hidden = make(m.hidden, 3), q = make(m.heads * m.query_key(), 4), kv_c = make(m.latent, 5), k_pe = make(m.rope, 6);
  }
};

constexpr float kSentinel = -1.5e30f;

// What a call leaves: its output, and the cache. positions: of the batch's tokens.
struct Left {
  std::vector<float> out;
  std::vector<std::byte> cache;
};

Left forward_by(Layer& l, const Plan& p, const Batch& b, std::span<const int32_t> positions) {
  const ModelConfig& m = l.model;
  const Buffer workspace = filled(p.workspace_bytes, std::byte{0xff}),
               selection = filled(p.selection_bytes, std::byte{0xff});
  const Inputs in(m, std::ssize(positions), p.tokens);
  Left left{std::vector<float>(in.hidden.size(), kSentinel), {}};
  l.reset();
  forward(l.stream, l.context(p, b, workspace, selection),
          View<const float, Token, Hidden>(in.hidden.data(), {p.tokens, m.hidden}),
          View<float, Token, Hidden>(left.out.data(), {p.tokens, m.hidden}));
  l.stream.synchronize();
  left.cache = l.cache_bytes();
  return left;
}

// The caller's choice: of what each token sees the first. Behind the tokens positions that no sequence has.
void choose_seen(Layer& l, const LayerContext& c, std::span<const int32_t> positions) {
  const int64_t topk = c.plan.topk;
  if (topk == 0) return;
  std::vector<int32_t> choice(static_cast<size_t>(c.plan.tokens * topk), 0x7fffffff);
  for (int64_t i = 0; i < std::ssize(positions); ++i)
    for (int64_t k = 0; k < topk; ++k)
      choice[static_cast<size_t>(i * topk + k)] = k <= positions[static_cast<size_t>(i)] ? static_cast<int32_t>(k) : -1;
  select(l.stream, c, View<const int32_t, Token, Topk>(choice.data(), {c.plan.tokens, topk}));
  l.stream.synchronize();
}

Left attend_by(Layer& l, const Plan& p, const Batch& b, std::span<const int32_t> positions) {
  const ModelConfig& m = l.model;
  const Buffer workspace = filled(p.workspace_bytes, std::byte{0xff}),
               selection = filled(p.selection_bytes, std::byte{0xff});
  const Inputs in(m, std::ssize(positions), p.tokens);
  Left left{std::vector<float>(static_cast<size_t>(p.tokens * m.heads * m.value), kSentinel), {}};
  l.reset();
  const LayerContext c = l.context(p, b, workspace, selection);
  choose_seen(l, c, positions);
  attend(l.stream, c, View<const float, Token, Head, QueryKey>(in.q.data(), {p.tokens, m.heads, m.query_key()}),
         View<const float, Token, Latent>(in.kv_c.data(), {p.tokens, m.latent}),
         View<const float, Token, Rope>(in.k_pe.data(), {p.tokens, m.rope}),
         View<float, Token, Head, Value>(left.out.data(), {p.tokens, m.heads, m.value}));
  l.stream.synchronize();
  left.cache = l.cache_bytes();
  return left;
}

void expect_same(const Left& found, const Left& right, bool bits, const std::string& how) {
  const size_t rows = right.out.size();
  ASSERT_GE(found.out.size(), rows) << how;
  if (bits) {
    EXPECT_TRUE(rows == 0 || std::memcmp(found.out.data(), right.out.data(), rows * sizeof(float)) == 0) << how;
  } else if (rows > 0) {
    EXPECT_LE(reference::relative_error(std::span(found.out).first(rows),
                                        std::vector<double>(right.out.begin(), right.out.end())),
              2e-6)
        << how;
  }
  expect_same_cache(found.cache, right.cache, how);
  for (size_t i = rows; i < found.out.size(); ++i) ASSERT_EQ(found.out[i], kSentinel) << how << ", element " << i;
}

// Calls of a batch's plan of maxima, and of the captured step with the batch in its place, against those of its own.
template <class Call>
void expect_served(Layer& l, const PlanOptions& plain, bool sparse, Call&& call, const std::string& how) {
  cases::Random random(17);
  const PlanOptions options = of_maxima(plain);
  StepOfMaxima captured = plan_maxima(l.model, l.spec, device_info(l.stream, l.model), l.planned(options));
  layer::StagedLists lists;
  lists.lay_out(captured.plan, captured.batch);
  for (int i = 0; i < 20; ++i) {
    const bool long_ones = i % 2 == 0;
    const Requests r = i == 0 ? Requests({}, {}) : random_requests(random, long_ones);
    const Batch b = r.batch();
    const Plan own = l.plan_of(b, plain), p = l.plan_of(b, options);
    ASSERT_EQ(p.workspace_bytes, captured.plan.workspace_bytes) << how;
    ASSERT_EQ(p.selection_bytes, captured.plan.selection_bytes) << how;
    ASSERT_EQ(p.steps.size(), captured.plan.steps.size()) << how;
    const std::string what = how + " " + shape_of(r);
    // Short requests are attended by the sparse path's arithmetic, where all are.
    // On a GPU products take the algorithm of the rows there are.
    const bool bits = !kOnGpu && (!sparse || long_ones);
    const Left right = call(l, own, b, own.positions), direct = call(l, p, b, own.positions);
    expect_same(direct, right, bits, what);
    restage(lists, captured.plan, captured.batch, p, b);
    const Left replayed = call(l, captured.plan, captured.batch, own.positions);
    expect_same(replayed, right, bits, what + " restaged");
    EXPECT_TRUE(std::memcmp(replayed.out.data(), direct.out.data(), direct.out.size() * sizeof(float)) == 0) << what;
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Maxima, EveryBatchWithinThemIsServedByTheBlockForm) {
  for (const Way& w : sampled(ways(), 2)) {
    PrepareOptions prepared;
    if (w.absorbed) prepared.absorption = Absorption::full;
    Layer l(w.sparse ? small_sparse() : small_deepseek(), prepared);
    expect_served(l, w.plan, w.sparse && w.plan.sparse != SparsePolicy::dense, forward_by, w.name);
  }
}

TEST(Maxima, EveryBatchWithinThemIsServedByTheAttentionForm) {
  for (const Way& w : sampled(ways(), 2)) {
    if (w.absorbed) continue;  // has no attention form
    Layer l(w.sparse ? small_sparse() : small_deepseek());
    PlanOptions attention = w.plan;
    attention.form = LayerForm::attention;
    for (const PlanOptions& o : {w.plan, attention})
      expect_served(l, o, w.sparse && w.plan.sparse != SparsePolicy::dense, attend_by, w.name);
  }
}

TEST(Maxima, WhatDoesNotFitIsNamed) {
  Layer l(small_deepseek());
  const auto message = [&](const Requests& r, PlanOptions o) {
    return message_of([&] { (void)l.plan_of(r.batch(), o); });
  };
  const PlanOptions o = of_maxima({.path = PathPolicy::latent});
  EXPECT_EQ(message(Requests({1, 1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1, 1}), o),
            "batch: 7 requests, the step's maxima allow 6 (PlanOptions::maxima, requests)");
  EXPECT_EQ(message(Requests({4, 4, 4, 4}, {1, 1, 1, 1}), o),
            "batch: 16 new tokens, the step's maxima allow 14 (PlanOptions::maxima, tokens)");
  EXPECT_EQ(message(Requests({1, 5}, {1, 1}), o),
            "batch: request 1: 5 new tokens, the step's maxima allow 4 (PlanOptions::maxima, query_len)");
  EXPECT_EQ(message(Requests({1, 1}, {1, 120}), o),
            "batch: request 1: seq_len is 121, the step's maxima allow 120 (PlanOptions::maxima, seq_len)");
  EXPECT_EQ(message(Requests({1}, {1}), of_maxima({.path = PathPolicy::expanded})),
            "plan: a step of maxima (PlanOptions::maxima) with path policy expanded: its requests take the latent or "
            "the sparse path");
  EXPECT_EQ(message(Requests({1}, {1}), of_maxima({.dummy = true})),
            "plan: a step of maxima (PlanOptions::maxima) with dummy: plan the dummy step without");
  EXPECT_EQ(message_of([&] { (void)plan_maxima(l.model, l.spec, device_info(l.stream, l.model), {}); }),
            "plan_maxima: the options have no maxima (PlanOptions::maxima)");

  // A table of fewer positions than a sequence may have.
  StepMaxima longer = kMaxima;
  longer.seq_len = 300;
  PlanOptions far = o;
  far.maxima = longer;
  const StepOfMaxima s = plan_maxima(l.model, l.spec, device_info(l.stream, l.model), far);
  const Buffer workspace(s.plan.workspace_bytes, kDevice), none(0, kDevice);
  std::vector<float> rows(static_cast<size_t>(s.plan.tokens * l.model.hidden));
  EXPECT_EQ(message_of([&] {
              forward(l.stream, l.context(s.plan, s.batch, workspace, none),
                      View<const float, Token, Hidden>(rows.data(), {s.plan.tokens, l.model.hidden}),
                      View<float, Token, Hidden>(rows.data(), {s.plan.tokens, l.model.hidden}));
            }),
            "layer: rotary table has 256 positions, the step's maxima allow sequences of 300");

  // A plan of other maxima, or none, in a captured step's place.
  layer::StagedLists lists;
  const StepOfMaxima captured = plan_maxima(l.model, l.spec, device_info(l.stream, l.model), o);
  lists.lay_out(captured.plan, captured.batch);
  const Requests r({1}, {5});
  EXPECT_EQ(message_of([&] { (void)lists.fit(l.plan_of(r.batch(), {.path = PathPolicy::latent}), r.batch()); }),
            "restage: the plan's maxima (PlanOptions::maxima) are none, the staged step's are requests 6, tokens 14, "
            "query_len 4, seq_len 120");
}

}  // namespace
}  // namespace mla::test
