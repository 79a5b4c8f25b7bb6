// A cache split over ranks: steps of every rank against one rank with the whole cache.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>

#include "cases/compare.hpp"
#include "layer/kernels.hpp"
#include "layer/shares.hpp"
#include "mla/mla.hpp"
#include "support/message.hpp"
#include "support/models.hpp"

namespace mla::test {
namespace {

struct Lengths {
  std::vector<int32_t> queries, contexts;
};
constexpr int64_t kPageSize = 16, kPages = 96;

ModelConfig model_of() {
  ModelConfig m = small_deepseek();
  m.heads = 5;
  return m;
}

// One rank's requests: pages of the tokens that it holds, scattered.
struct Held {
  CacheSharding sharding;
  int rank;
  std::vector<std::vector<int32_t>> tables;

  Held(const CacheSharding& s, int of, const Lengths& most) : sharding(s), rank(of) {
    int32_t next = 5 + of;
    for (size_t r = 0; r < most.queries.size(); ++r) {
      std::vector<int32_t>& table = tables.emplace_back();
      for (int64_t p = 0; p < s.pages(of, most.queries[r] + most.contexts[r], kPageSize); ++p)
        table.push_back(next = static_cast<int32_t>((next * 5 + 7) % kPages));
    }
    // No page twice.
    std::vector<int32_t> order(kPages);
    std::iota(order.begin(), order.end(), 0);
    std::rotate(order.begin(), order.begin() + 11 + of, order.end());
    size_t at = 0;
    for (auto& table : tables)
      for (int32_t& page : table) page = order[at++];
  }
};

struct Step {
  std::vector<int32_t> starts{0}, lengths, table, slots;
  int64_t width = 1;
  Batch batch;

  Step(const Held& h, const Lengths& l) {
    for (const auto& t : h.tables) width = std::max<int64_t>(width, std::ssize(t));
    table.assign(static_cast<size_t>(width) * h.tables.size(), 0x7fffffff);  // entries past a rank's pages are not read
    for (size_t r = 0; r < h.tables.size(); ++r) {
      std::copy(h.tables[r].begin(), h.tables[r].end(), table.begin() + static_cast<int64_t>(r) * width);
      starts.push_back(starts.back() + l.queries[r]);
      lengths.push_back(l.queries[r] + l.contexts[r]);
      for (int64_t p = l.contexts[r]; p < lengths.back(); ++p)
        slots.push_back(static_cast<int32_t>(h.sharding.slot(h.rank, p, h.tables[r], kPageSize)));
    }
    batch = {starts, lengths, {table.data(), {std::ssize(lengths), width}}, slots};
  }
};

struct Rank {
  ModelConfig model;
  LayerWeights weights;
  RotaryTable rotary;
  ThreadPool pool{1};
  Stream stream{pool};
  CacheSpec spec;
  Cache cache;

  Rank(const ModelConfig& whole, HeadRange heads, CacheFormat format)
      : model(part_of(whole, heads)),
        weights(prepare(model, part_of(whole, random_layer(whole, 0, 1, Dtype::f32), heads), Dtype::f32)),
        rotary(model.rotary, model.rope, 4096),
        spec(cache_spec(model, format, kPageSize)),
        cache(spec, kPages) {
    std::memset(cache.view().data, 0xff, spec.page_bytes() * kPages);  // NaN, of what is not written
  }
  Plan plan_of(const Step& s, const PlanOptions& o) {
    return plan(model, spec, kPages, s.batch, device_info(stream, model), o);
  }
  std::vector<float> run(const Step& s, const PlanOptions& o, Communicator* ranks, uint64_t seed) {
    const Plan p = plan_of(s, o);
    Buffer workspace(p.workspace_bytes);
    std::memset(workspace.data(), 0xff, workspace.size());
    const auto hidden = cases::random_values(p.tokens * model.hidden, seed);
    std::vector<float> out(hidden.size(), -7.0f);
    forward(stream,
            {.plan = p,
             .batch = s.batch,
             .weights = weights,
             .rotary = rotary,
             .cache = cache.view(),
             .workspace = {workspace.data(), workspace.size()},
             .ranks = ranks,
             .deadline = std::chrono::seconds(30)},
            View<const float, Token, Hidden>(hidden.data(), {p.tokens, model.hidden}),
            View<float, Token, Hidden>(out.data(), {p.tokens, model.hidden}));
    return out;
  }
};

// Prefills, then a step of these queries behind them, by all ranks.
std::vector<std::vector<float>> by_ranks(const ModelConfig& m, const std::vector<HeadRange>& heads, int64_t interleave,
                                         const Lengths& l, CacheFormat format, SplitPolicy split,
                                         PathPolicy path = PathPolicy::automatic) {
  const int ranks = static_cast<int>(heads.size());
  std::vector<Communicator> group = thread_communicators(ranks);
  std::vector<std::vector<float>> out(heads.size());
  std::vector<std::jthread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      Rank rank(m, heads[static_cast<size_t>(r)], format);
      const Held held(CacheSharding(ranks, interleave), r, l);
      PlanOptions o{.tensor_parallel = ranks, .split = split};
      o.context_parallel = {.sharding = held.sharding, .rank = r, .heads = {}};
      for (const HeadRange& h : heads) o.context_parallel.heads.push_back(h.count);
      Communicator* const own = &group[static_cast<size_t>(r)];
      rank.run(Step(held, {l.contexts, std::vector<int32_t>(l.contexts.size())}), o, own, 3);
      o.path = path;
      out[static_cast<size_t>(r)] = rank.run(Step(held, l), o, own, 4);
    });
  threads.clear();
  return out;
}

std::vector<float> by_one(const ModelConfig& m, const Lengths& l, CacheFormat format, SplitPolicy split) {
  Rank rank(m, {0, m.heads}, format);
  const Held held(CacheSharding(), 0, l);
  const PlanOptions o{.path = PathPolicy::automatic, .split = split};
  rank.run(Step(held, {l.contexts, std::vector<int32_t>(l.contexts.size())}), o, nullptr, 3);
  PlanOptions latent = o;
  latent.path = PathPolicy::latent;
  return rank.run(Step(held, l), latent, nullptr, 4);
}

void expect_same(const std::vector<std::vector<float>>& found, const std::vector<float>& right, float allowed,
                 const std::string& what) {
  float largest = 0;
  for (const float x : right) largest = std::max(largest, std::abs(x));
  for (const auto& one : found) {
    ASSERT_EQ(one.size(), right.size()) << what;
    for (size_t i = 0; i < right.size(); ++i) {
      ASSERT_NEAR(one[i], right[i], allowed * largest) << what << ", element " << i;
      ASSERT_EQ(one[i], found[0][i]) << what << ", element " << i;
    }
  }
}

// Ragged contexts, some shorter than a block of the sharding, none, and several query tokens.
const Lengths& ragged() {
  static const Lengths l{{1, 3, 1, 2, 7}, {130, 40, 1, 0, 65}};
  return l;
}

TEST(ContextParallel, RanksGiveTheLayersRows) {
  const ModelConfig m = model_of();
  for (const SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
    const std::vector<float> right = by_one(m, ragged(), CacheFormat::f32, split);
    for (const int ranks : {2, 3, 4})
      for (const int64_t interleave : {1, 2, 4, 16, 64}) {
        const auto out = by_ranks(m, shares(m.heads, ranks), interleave, ragged(), CacheFormat::f32, split);
        expect_same(out, right, 1e-5f, std::to_string(ranks) + " ranks, " + std::to_string(interleave) + " together");
      }
  }
}

TEST(ContextParallel, HeadsMayBeUneven) {
  const ModelConfig m = model_of();
  const std::vector<float> right = by_one(m, ragged(), CacheFormat::f32, SplitPolicy::fast);
  for (const std::vector<HeadRange>& heads :
       {std::vector<HeadRange>{{4, 1}, {0, 4}}, std::vector<HeadRange>{{0, 1}, {1, 3}, {4, 1}}}) {
    const auto out = by_ranks(m, heads, 4, ragged(), CacheFormat::f32, SplitPolicy::fast);
    expect_same(out, right, 1e-5f, "uneven");
    EXPECT_EQ(by_ranks(m, heads, 4, ragged(), CacheFormat::f32, SplitPolicy::fast), out) << "again";
  }
}

// Rows are rounded when they are stored, wherever that is.
TEST(ContextParallel, EveryFormatOfTheCache) {
  const ModelConfig m = model_of();
  for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8, CacheFormat::fp8_ds_mla})
    expect_same(by_ranks(m, shares(m.heads, 2), 2, ragged(), format, SplitPolicy::fast, PathPolicy::latent),
                by_one(m, ragged(), format, SplitPolicy::fast), 1e-5f, std::string(to_string(format)));
}

// Contexts long enough that a rank cuts what it holds into ranges, and one of which a rank holds nothing.
TEST(ContextParallel, LongAndShortContexts) {
  const ModelConfig m = model_of();
  const Lengths l{{1, 1}, {1300, 3}};
  for (const SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant})
    for (const int64_t interleave : {1, 64})
      expect_same(by_ranks(m, shares(m.heads, 2), interleave, l, CacheFormat::f32, split),
                  by_one(m, l, CacheFormat::f32, split), 1e-5f, "long");
}

// attend() exchanges the same, for a rank's own heads.
TEST(ContextParallel, TheAttentionForm) {
  const ModelConfig m = model_of();
  const Lengths& l = ragged();
  const int64_t t = std::accumulate(l.queries.begin(), l.queries.end(), int64_t{0}), qk = m.query_key();
  const auto q = cases::random_values(t * m.heads * qk, 5), kv_c = cases::random_values(t * m.latent, 6),
             k_pe = cases::random_values(t * m.rope, 7);
  // Contexts come from block steps.
  const auto attended = [&](Rank& rank, const Held& held, HeadRange heads, PlanOptions o, Communicator* ranks) {
    rank.run(Step(held, {l.contexts, std::vector<int32_t>(l.contexts.size())}), o, ranks, 3);
    o.form = LayerForm::attention;
    o.path = PathPolicy::latent;
    const Step s(held, l);
    const Plan p = rank.plan_of(s, o);
    Buffer workspace(p.workspace_bytes);
    std::vector<float> out(static_cast<size_t>(t * heads.count * m.value));
    attend(rank.stream,
           {.plan = p,
            .batch = s.batch,
            .weights = rank.weights,
            .rotary = rank.rotary,
            .cache = rank.cache.view(),
            .workspace = {workspace.data(), workspace.size()},
            .ranks = ranks,
            .deadline = std::chrono::seconds(30)},
           View<const float, Token, Head, QueryKey>(q.data() + heads.begin * qk, {t, heads.count, qk},
                                                    {m.heads * qk, qk, 1}),
           View<const float, Token, Latent>(kv_c.data(), {t, m.latent}),
           View<const float, Token, Rope>(k_pe.data(), {t, m.rope}),
           View<float, Token, Head, Value>(out.data(), {t, heads.count, m.value}));
    return out;
  };
  Rank one(m, {0, m.heads}, CacheFormat::f32);
  const std::vector<float> right = attended(one, Held(CacheSharding(), 0, l), {0, m.heads}, {}, nullptr);
  const std::vector<HeadRange> heads = shares(m.heads, 3);
  std::vector<Communicator> group = thread_communicators(3);
  std::vector<std::jthread> threads;
  for (int r = 0; r < 3; ++r)
    threads.emplace_back([&, r] {
      const HeadRange own = heads[static_cast<size_t>(r)];
      Rank rank(m, own, CacheFormat::f32);
      const Held held(CacheSharding(3, 2), r, l);
      PlanOptions o{.tensor_parallel = 3};
      o.context_parallel = {.sharding = held.sharding, .rank = r, .heads = {}};
      for (const HeadRange& h : heads) o.context_parallel.heads.push_back(h.count);
      const std::vector<float> out = attended(rank, held, own, o, &group[static_cast<size_t>(r)]);
      for (int64_t i = 0; i < t; ++i)
        for (int64_t e = 0; e < own.count * m.value; ++e)
          ASSERT_NEAR(out[static_cast<size_t>(i * own.count * m.value + e)],
                      right[static_cast<size_t>((i * m.heads + own.begin) * m.value + e)], 1e-5f)
              << "rank " << r << " token " << i;
    });
}

TEST(ContextParallel, TheExchangeIsSteps) {
  const ModelConfig m = model_of();
  Rank rank(m, {0, 3}, CacheFormat::f32);
  const Held held(CacheSharding(2, 4), 0, ragged());
  PlanOptions o{.tensor_parallel = 2};
  o.context_parallel = {.sharding = held.sharding, .rank = 0, .heads = {3, 2}};
  const Step step(held, ragged());
  const Plan p = rank.plan_of(step, o);
  std::vector<std::string_view> names;
  for (const mla::Step& s : p.steps) names.push_back(s.name);
  const auto at = [&](std::string_view name) { return std::find(names.begin(), names.end(), name) - names.begin(); };
  EXPECT_LT(at("absorb"), at("gather_queries"));
  EXPECT_LT(at("gather_queries"), at("attend_latent"));
  EXPECT_LT(at("attend_latent"), at("exchange_found"));
  EXPECT_LT(at("exchange_found"), at("value_up"));
  EXPECT_LT(at("value_up"), at("all_reduce"));
  EXPECT_LT(at("all_reduce"), std::ssize(names));
  EXPECT_NE(p.describe().find("rank 0 of 2 that hold 4 tokens in turn"), std::string::npos) << p.describe();
  // Of prompts without context nothing is exchanged.
  const Lengths fresh{{5, 9}, {0, 0}};
  const Held none(CacheSharding(2, 4), 0, fresh);
  const Step prompts(none, fresh);
  EXPECT_FALSE(rank.plan_of(prompts, o).shares_context());
}

// Of a rank's table only its own pages are read: the whole of the last, longest request would not be in it.
TEST(ContextParallel, KernelsOfARanksStep) {
  Rank rank(model_of(), {0, 3}, CacheFormat::f32);
  const Lengths l{{1, 1}, {3, 1300}};
  const Held held(CacheSharding(2, 4), 1, l);
  PlanOptions o{.tensor_parallel = 2};
  o.context_parallel = {.sharding = held.sharding, .rank = 1, .heads = {2, 3}};
  const Step step(held, l);
  std::vector<std::string_view> names;
  for (const layer::KernelUse& u : layer::kernels(rank.plan_of(step, o), step.batch, {.dtype = Dtype::f32}))
    names.push_back(u.op);
  for (const std::string_view name : {"gather_queries", "attend_latent", "exchange_found"})
    EXPECT_EQ(std::count(names.begin(), names.end(), name), 1) << name;
}

// Paths decide what ranks of a split cache send: here one takes another path for a request without context.
TEST(ContextParallel, ARankWithOtherOptionsIsNamed) {
  const ModelConfig m = model_of();
  const Lengths l{{1, 4}, {20, 0}};
  std::vector<Communicator> group = thread_communicators(3);
  std::vector<std::jthread> threads;
  for (int r = 0; r < 3; ++r)
    threads.emplace_back([&, r] {
      const std::vector<HeadRange> heads = shares(m.heads, 3);
      Rank rank(m, heads[static_cast<size_t>(r)], CacheFormat::f32);
      const Held held(CacheSharding(3, 4), r, l);
      PlanOptions o{.tensor_parallel = 3, .path = r == 2 ? PathPolicy::latent : PathPolicy::automatic};
      o.context_parallel = {.sharding = held.sharding, .rank = r, .heads = {}};
      for (const HeadRange& h : heads) o.context_parallel.heads.push_back(h.count);
      try {
        rank.run(Step(held, l), o, &group[static_cast<size_t>(r)], 3);
        ADD_FAILURE() << "rank " << r;
      } catch (const RankError& e) {
        EXPECT_EQ(e.rank(), 2) << e.what();
        EXPECT_EQ(e.step(), "gather_queries");
        EXPECT_NE(std::string(e.what()).find("their plans differ"), std::string::npos) << e.what();
      }
    });
}

TEST(ContextParallel, WhatDoesNotFitIsNamed) {
  const ModelConfig m = model_of();
  Rank rank(m, {0, 3}, CacheFormat::f32);
  const CacheSharding sharding(2, 4);
  const Held held(sharding, 0, ragged());
  const Step step(held, ragged());
  PlanOptions o{.tensor_parallel = 2};
  o.context_parallel = {.sharding = sharding, .rank = 0, .heads = {3, 2}};
  EXPECT_EQ(message_of([&] { (void)rank.plan_of(step, o); }), "no error");
  EXPECT_EQ(message_of([&] { (void)rank.run(step, o, nullptr, 1); }),
            "layer: ranks is missing, plan was made for tensor_parallel 2");
  const auto with = [&](auto change) {
    PlanOptions other = o;
    change(other);
    return message_of([&] { (void)rank.plan_of(step, other); });
  };
  EXPECT_EQ(with([](PlanOptions& p) { p.tensor_parallel = 1; }),
            "plan: a cache split over 2 ranks with tensor_parallel 1, they have to be the same ranks");
  EXPECT_EQ(with([](PlanOptions& p) { p.context_parallel.rank = 2; }),
            "plan: context_parallel rank is 2, allowed 0 to 1");
  EXPECT_EQ(with([](PlanOptions& p) { p.context_parallel.heads = {3}; }),
            "plan: context_parallel heads has 1 entries, the cache has 2 ranks");
  EXPECT_EQ(with([](PlanOptions& p) {
              p.context_parallel.heads = {2, 3};
            }),
            "plan: context_parallel heads[0] is 2, this rank's model has 3");
  EXPECT_EQ(with([](PlanOptions& p) { p.path = PathPolicy::expanded; }),
            "plan: request 0 has 130 tokens of context, which several ranks hold: path policy expanded needs them all");
  const auto with_slot = [&](size_t token, int32_t slot) {
    Step other(held, ragged());
    other.slots[token] = slot;
    return message_of([&] { (void)rank.plan_of(other, o); });
  };
  EXPECT_EQ(with_slot(10, 5),
            "batch: request 4: slot_mapping[10] is 5, its token's position 68 is rank 1's, this is rank 0");
  EXPECT_EQ(with_slot(0, 5).substr(0, 89), "batch: request 0: slot_mapping[0] is 5, its token's position 130 is slot " +
                                               std::to_string(step.slots[0]) + " of this rank");
}

}  // namespace
}  // namespace mla::test
