// A cache split over ranks: steps of every rank against one rank with the whole cache.
#include <gtest/gtest.h>

#include <array>

#include "layer/kernels.hpp"
#include "layer/ranks.hpp"
#include "support/message.hpp"
#include "support/models.hpp"
#include "support/quantised.hpp"

namespace mla::test::ranks {
namespace {

ModelConfig model_of() {
  ModelConfig m = small_deepseek();
  m.heads = 5;
  return m;
}

PlanOptions latent(SplitPolicy split = SplitPolicy::fast) { return {.path = PathPolicy::latent, .split = split}; }

// Ragged contexts, some shorter than a block of the sharding, none, and several query tokens.
const Lengths& ragged() {
  static const Lengths l{{1, 3, 1, 2, 7}, {130, 40, 1, 0, 65}};
  return l;
}

TEST(ContextParallel, RanksGiveTheLayersRows) {
  const ModelConfig m = model_of();
  for (const SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
    const Ran right = by_one(m, ragged(), {}, latent(split));
    for (const int ranks : {2, 3, 4})
      for (const int64_t interleave : {1, 2, 4, 16, 64})
        for (const Grid& g : exchanges(grid_of(m, ranks, ranks, interleave)))
          expect_same(by_ranks(m, g, ragged(), {}, {.split = split}), right, 1e-5f, g.name());
  }
}

// Groups of ranks that follow one another hold a cache each, and have other heads, and other numbers of them.
TEST(ContextParallel, GroupsWithinTheRanks) {
  ModelConfig m = model_of();
  m.heads = 9;
  const Ran right = by_one(m, ragged(), {}, latent());
  for (const auto& [ranks, members] : {std::pair{4, 2}, {6, 3}, {6, 2}, {8, 4}, {8, 2}})
    for (const int64_t interleave : {1, 4, 64})
      for (const Grid& g : exchanges(grid_of(m, ranks, members, interleave)))
        expect_same(by_ranks(m, g, ragged(), {}, latent()), right, 1e-5f, g.name());
}

TEST(ContextParallel, HeadsMayBeUneven) {
  const ModelConfig m = model_of();
  const Ran right = by_one(m, ragged(), {}, latent());
  for (const Grid& g : {Grid{{{4, 1}, {0, 4}}, 2, 4}, Grid{{{0, 1}, {1, 3}, {4, 1}}, 3, 4},
                        Grid{{{4, 1}, {0, 2}, {3, 1}, {2, 1}}, 2, 4}})
    for (const Grid& e : exchanges(g)) {
      const auto ran = by_ranks(m, e, ragged());
      expect_same(ran, right, 1e-5f, e.name());
      EXPECT_EQ(by_ranks(m, e, ragged())[0].out, ran[0].out) << "again";
    }
}

// Rows are rounded when they are stored, wherever that is.
TEST(ContextParallel, EveryFormatOfTheCache) {
  const ModelConfig m = model_of();
  for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8, CacheFormat::fp8_ds_mla})
    for (const Grid& g : exchanges(grid_of(m, 2, 2, 2)))
      expect_same(by_ranks(m, g, ragged(), {.cache = format}, latent()),
                  by_one(m, ragged(), {.cache = format}, latent()), 1e-5f, std::string(to_string(format)) + g.name());
}

// Contexts long enough that a rank cuts what it holds into ranges, and one of which a rank holds nothing.
TEST(ContextParallel, LongAndShortContexts) {
  const ModelConfig m = model_of();
  const Lengths l{{1, 1}, {1300, 3}};
  for (const SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant})
    for (const int64_t interleave : {1, 64})
      for (const Grid& g : exchanges(grid_of(m, 2, 2, interleave)))
        expect_same(by_ranks(m, g, l, {}, {.split = split}), by_one(m, l, {}, latent(split)), 1e-5f, g.name());
}

// attend() exchanges the same, for a rank's own heads.
TEST(ContextParallel, TheAttentionForm) {
  const ModelConfig m = model_of();
  const Lengths& l = ragged();
  // Contexts come from block steps.
  const auto attended = [&](Rank& rank, const Held& held, const PlanOptions& o) {
    rank.run(Step(held, {l.contexts, std::vector<int32_t>(l.contexts.size())}), o, 3);
    return rank.attended(Step(held, l), o, m.heads, 5);
  };
  Rank one(m, {0, m.heads}, CacheFormat::f32, {});
  const std::vector<float> right = attended(one, Held({}, l), latent());
  for (const Grid& grid : {grid_of(m, 3, 3, 2), grid_of(m, 4, 2, 4)})
    for (const Grid& g : exchanges(grid))
      on_ranks(m, g, {}, l, latent(), [&](Rank& rank, const Held& held, const PlanOptions& o, int r) {
        const std::vector<float> out = attended(rank, held, o);
        const int64_t own = rank.heads.count * m.value;
        for (int64_t i = 0; i < std::ssize(out); ++i)
          ASSERT_NEAR(out[static_cast<size_t>(i)],
                      right[static_cast<size_t>((i / own * m.heads + rank.heads.begin) * m.value + i % own)], 1e-5f)
              << g.name() << ", rank " << r << " element " << i;
      });
}

// batch_invariant: each rank's rows are the same, however a prompt is cut into steps.
TEST(ContextParallel, CutsOfAPromptDoNotChangeBits) {
  constexpr int32_t kTokens = 130;
  ModelConfig dense = model_of(), sparse = small_sparse();
  sparse.heads = dense.heads;
  struct Mode {
    const ModelConfig& model;
    Formats formats;
    PlanOptions plan;
  };
  for (const Mode& mode : {Mode{dense, {.cache = CacheFormat::bf16}, {.path = PathPolicy::automatic}},
                           Mode{dense, {.cache = CacheFormat::fp8}, {.path = PathPolicy::expanded, .context_rows = 50}},
                           Mode{sparse, {.cache = CacheFormat::fp8_ds_mla}, {}}})
    for (const Grid& g : {grid_of(mode.model, 2, 2, 4), grid_of(mode.model, 3, 3, 1), grid_of(mode.model, 4, 2, 16),
                          grid_of(mode.model, 2, 1, 1), exchanges(grid_of(mode.model, 4, 2, 4))[1]}) {
      const ModelConfig& m = mode.model;
      PlanOptions options = mode.plan;
      options.split = SplitPolicy::batch_invariant;
      const auto hidden = cases::random_values(kTokens * m.hidden, 3);
      const auto in_steps = [&](const std::vector<int32_t>& lengths) {
        std::vector<std::vector<float>> out(g.heads.size());
        on_ranks(m, g, mode.formats, {{kTokens}, {0}}, options,
                 [&](Rank& rank, const Held& held, const PlanOptions& o, int r) {
                   auto at = hidden.begin();
                   for (int32_t done = 0; const int32_t n : lengths) {
                     const auto end = at + n * m.hidden;
                     const auto rows = rank.run(Step(held, {{n}, {done}}), o, std::vector<float>(at, end));
                     out[static_cast<size_t>(r)].insert(out[static_cast<size_t>(r)].end(), rows.begin(), rows.end());
                     done += n, at = end;
                   }
                 });
        return out;
      };
      const auto whole = in_steps({kTokens});
      for (const std::vector<int32_t>& lengths :
           {std::vector<int32_t>{51, 1, 1, 77}, {1, 129}, {20, 20, 20, 20, 20, 30}})
        EXPECT_TRUE(in_steps(lengths) == whole)
            << m.name << " " << to_string(options.path) << ", " << g.name() << ", first " << lengths[0];
    }
}

// Codes of a row's queries are the same wherever they are made; sums over the positions differ.
TEST(ContextParallel, Fp8Queries) {
  ModelConfig m = model_of();
  PlanOptions o = latent();
  o.fp8_query = true;
  o.q_scale = 0.125f;
  const Formats fp8{.cache = CacheFormat::fp8};
  const Ran right = by_one(m, ragged(), fp8, o), plain = by_one(m, ragged(), fp8, latent());
  EXPECT_NE(right.out, plain.out);
  for (const Grid& grid : {grid_of(m, 2, 2, 4), grid_of(m, 3, 3, 1), grid_of(m, 4, 2, 16)})
    for (const Grid& g : exchanges(grid)) expect_same(by_ranks(m, g, ragged(), fp8, o), right, 1e-5f, g.name());
  m = small_sparse();
  m.heads = 5;
  o.path = PathPolicy::automatic;
  for (const Grid& g : exchanges(grid_of(m, 4, 2, 4)))
    expect_same(by_ranks(m, g, ragged(), fp8, o), by_one(m, ragged(), fp8, o), 1e-5f, "sparse, " + g.name());
  // They are sent as the codes that they are.
  Rank rank(part_of(m, {0, 3}), {0, 3}, CacheFormat::fp8, IndexCacheFormat::f32);
  const Lengths l{{2}, {20}};
  const Held held({.sharding = CacheSharding(2, 4), .rank = 0, .heads = {3, 2}}, l);
  o.path = PathPolicy::latent;
  o = options_of(held, o);
  o.index_format = IndexCacheFormat::f32;
  const Step step(held, l);
  for (const layer::KernelUse& u : layer::kernels(rank.plan_of(step, o), step.batch, {.dtype = Dtype::f32}))
    EXPECT_TRUE(u.op != "gather_queries" || u.bytes == 2 * 3 * 576) << u.bytes;
}

// A quantised output is made of the merged rows: the codes and scales of what the plain form gives.
TEST(ContextParallel, QuantisedOutputs) {
  const ModelConfig m = model_of();
  const Lengths& l = ragged();
  for (const OutputSpec& spec : output_specs())
    for (const PathPolicy path : {PathPolicy::latent, PathPolicy::by_length}) {
      if (spec.kind == OutputKind::none) continue;
      PlanOptions o{.path = path, .reorder_batch_threshold = 2, .output = spec};
      o.output.scale = 0.01f, o.output.global_scale = 30.0f;
      for (const Grid& g : exchanges(grid_of(m, 4, 2, 4)))
        on_ranks(m, g, {}, l, {}, [&](Rank& rank, const Held& held, PlanOptions prompts, int r) {
          rank.run(Step(held, {l.contexts, std::vector<int32_t>(l.contexts.size())}), prompts, 3);
          PlanOptions own = o;
          own.tensor_parallel = prompts.tensor_parallel;
          own.context_parallel = prompts.context_parallel;
          PlanOptions plain = own;
          plain.output = {};
          const Step s(held, l);
          const std::vector<float> rows = rank.attended(s, plain, m.heads, 5);
          const int64_t tokens = s.batch.tokens(), width = rank.heads.count * m.value;
          QuantisedMemory found(o.output, tokens, width), right(o.output, tokens, width);
          rank.attended(s, own, m.heads, 5, found.view());
          two_step(rows, tokens, right.view());
          EXPECT_TRUE(found.codes == right.codes) << to_string(spec) << ", rank " << r;
          EXPECT_TRUE(found.scales == right.scales) << to_string(spec) << ", rank " << r;
        });
    }
}

// Rows that somebody else has written: here the same call before.
TEST(ContextParallel, RowsThatAreThere) {
  const ModelConfig m = model_of();
  for (const PathPolicy path : {PathPolicy::latent, PathPolicy::expanded})
    for (const Grid& g : exchanges(grid_of(m, 4, 2, 4)))
      on_ranks(m, g, {}, ragged(), {.path = path}, [&](Rank& rank, const Held& held, PlanOptions o, int r) {
        rank.run(Step(held, {ragged().contexts, {0, 0, 0, 0, 0}}), o, 3);
        const Step s(held, ragged());
        const std::vector<float> right = rank.attended(s, o, m.heads, 5);
        o.cache_use = CacheUse::read;
        EXPECT_TRUE(rank.attended(s, o, m.heads, 5) == right) << "rank " << r;
      });
}

// W_Q W_UK^T and W_UV W_O around the same exchanges.
TEST(ContextParallel, FullAbsorption) {
  const ModelConfig m = model_of();
  const auto absorbed = [&](Rank& rank) {
    rank.weights = prepare(rank.model, part_of(m, random_layer(m, 0, 1, Dtype::f32), rank.heads),
                           {.dtype = Dtype::f32, .absorption = Absorption::full});
  };
  PlanOptions o = latent();
  o.absorbed = true;
  Rank one(m, {0, m.heads}, CacheFormat::f32, {});
  absorbed(one);
  const Ran right = two_steps(one, Held({}, ragged()), ragged(), o, o);
  for (const Grid& g : {grid_of(m, 3, 3, 1), grid_of(m, 4, 2, 16)}) {
    std::vector<Ran> ran(g.heads.size());
    on_ranks(m, g, {}, ragged(), o, [&](Rank& rank, const Held& held, const PlanOptions& own, int r) {
      absorbed(rank);
      ran[static_cast<size_t>(r)] = two_steps(rank, held, ragged(), own, own);
    });
    expect_same(ran, right, 1e-5f, g.name());
  }
}

Held held_by(const std::vector<int64_t>& heads, int rank, const Lengths& l, int64_t members = 0) {
  return Held({.sharding = CacheSharding(members > 0 ? members : std::ssize(heads), 4), .rank = rank, .heads = heads},
              l);
}

TEST(ContextParallel, TheExchangeIsSteps) {
  Rank rank(model_of(), {0, 3}, CacheFormat::f32, {});
  const Held held = held_by({3, 2}, 0, ragged());
  const PlanOptions o = options_of(held);
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
  const Held of_group = held_by({3, 2, 1, 3}, 3, ragged(), 2);
  EXPECT_NE(rank.plan_of(Step(of_group, ragged()), options_of(of_group))
                .describe()
                .find("rank 3 of 4 in groups of 2 that hold 4 tokens in turn"),
            std::string::npos);
  // Of prompts without context nothing is exchanged.
  const Lengths fresh{{5, 9}, {0, 0}};
  const Held none = held_by({3, 2}, 0, fresh);
  const Step prompts(none, fresh);
  EXPECT_FALSE(rank.plan_of(prompts, o).shares_context());
}

// Queries go before W_UK and come back behind W_UV: a third and a quarter of the numbers.
TEST(ContextParallel, HeadsAreFewerBytes) {
  const ModelConfig m = model_of();
  const Lengths l{{1, 1}, {20, 30}};
  ContextParallel c{.sharding = CacheSharding(2, 4), .rank = 0, .heads = {3, 2}, .exchange = ContextExchange::heads};
  const Held held(c, l);
  Rank rank(m, {0, 3}, CacheFormat::f32, {}, {{0, 3}, {3, 2}});
  const Step step(held, l);
  const Plan p = rank.plan_of(step, options_of(held));
  std::vector<std::string_view> forwards, attends;
  for (const mla::Step& s : p.steps) {
    if (s.calls.any_of(kForward)) forwards.push_back(s.name);
    if (s.calls.any_of(kAttend)) attends.push_back(s.name);
  }
  const auto latent_of = [](const std::vector<std::string_view>& names) {
    std::string all;
    const auto end = std::find(names.begin(), names.end(), "output");
    for (auto at = std::find_if(names.begin(), names.end(), [](auto n) { return n.ends_with("append"); }) + 1; at < end;
         ++at)
      all += std::string(*at) + " ";
    return all;
  };
  const std::string rest =
      "gather_queries absorb query_rope attend_latent value_up exchange_found merge_splits ";
  EXPECT_EQ(latent_of(forwards), rest);
  EXPECT_EQ(latent_of(attends), rest);
  EXPECT_NE(p.describe().find("4 tokens in turn and exchange heads"), std::string::npos) << p.describe();
  for (const layer::KernelUse& u : layer::kernels(p, step.batch, {.dtype = Dtype::f32})) {
    if (u.op == "gather_queries") {
      EXPECT_EQ(u.bytes, 2 * 3 * m.query_key() * 4);
    }
    if (u.op == "exchange_found") {
      EXPECT_EQ(u.bytes, 2 * 2 * (m.value + 1) * 4);
    }
  }
  // Of a batch with requests on either path the latent ones' queries are packed, and their heads placed.
  const Lengths mixed{{9, 1}, {0, 30}};
  const Held other(c, mixed);
  std::vector<std::string_view> names;
  for (const mla::Step& s : rank.plan_of(Step(other, mixed), options_of(other)).steps)
    if (s.calls.any_of(kForward)) names.push_back(s.name);
  for (const std::string_view name : {"pack_queries", "place_heads"})
    EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << name;
}

TEST(ContextParallel, WeightsAreTheExchanges) {
  const ModelConfig m = model_of();
  const Lengths l{{1}, {20}};
  const auto tried = [&](ContextExchange exchange, const std::vector<HeadRange>& group) {
    const Held held({.sharding = CacheSharding(2, 4), .rank = 0, .heads = {3, 2}, .exchange = exchange}, l);
    Rank rank(m, {0, 3}, CacheFormat::f32, {}, group);
    return message_of([&] { (void)rank.run(Step(held, l), options_of(held), 1); });
  };
  EXPECT_EQ(tried(ContextExchange::heads, {}),
            "layer: weights hold W_UK and W_UV of 3 heads, plan needs those of 5: its group's "
            "(LayerTensors::group_kv_up)");
  EXPECT_EQ(tried(ContextExchange::latents, {{0, 3}, {3, 2}}),
            "layer: weights hold W_UK and W_UV of 5 heads, plan needs those of 3");
  EXPECT_EQ(message_of([&] {
              (void)part_of(m, random_layer(m, 0, 1, Dtype::f32), {0, 3}, std::array{HeadRange{3, 3}});
            }),
            "part_of: heads 3 and the 3 from there on, " + m.name + " has 5");
  LayerTensors t = part_of(m, random_layer(m, 0, 1, Dtype::f32), {0, 3}, std::array{HeadRange{3, 2}});
  EXPECT_NE(message_of([&] {
              (void)prepare(part_of(m, {0, 3}), t, {.dtype = Dtype::f32, .absorption = Absorption::full});
            }).find("group_kv_up with absorption full"),
            std::string::npos);
  t.group_kv_up[0].shape[0] -= 1;
  EXPECT_NE(message_of([&] {
              (void)prepare(part_of(m, {0, 3}), t, Dtype::f32);
            }).find("group_kv_up"),
            std::string::npos);
}

// Of a rank's table only its own pages are read: the whole of the last, longest request would not be in it.
TEST(ContextParallel, KernelsOfARanksStep) {
  Rank rank(model_of(), {0, 3}, CacheFormat::f32, {});
  const Lengths l{{1, 1}, {3, 1300}};
  const Held held = held_by({2, 3, 4, 3}, 3, l, 2);
  PlanOptions o = options_of(held);
  o.link = {.seconds = 1e-6, .bytes = 1e9};
  const Step step(held, l);
  const auto uses = layer::kernels(rank.plan_of(step, o), step.batch, {.dtype = Dtype::f32});
  const auto of = [&](std::string_view name) {
    const auto at = std::find_if(uses.begin(), uses.end(), [&](const layer::KernelUse& u) { return u.op == name; });
    return at == uses.end() ? layer::KernelUse{} : *at;
  };
  for (const std::string_view name : {"gather_queries", "attend_latent", "exchange_found"})
    EXPECT_EQ(of(name).calls, 1) << name;
  // Two rows' queries of three heads to one other member.
  EXPECT_EQ(of("gather_queries").kernel, "of 2 ranks");
  EXPECT_EQ(of("gather_queries").bytes, 2 * 3 * 576 * 4);
  EXPECT_DOUBLE_EQ(of("gather_queries").seconds, 1e-6 + of("gather_queries").bytes / 1e9);
  EXPECT_EQ(of("exchange_found").bytes, 2 * 4 * 513 * 4);  // of the other's four heads
  EXPECT_EQ(of("all_reduce").kernel, "of 4 ranks");
}

// What a rank throws when its own call or another's goes wrong: all name the same one.
template <class Change>
void expect_named(const Grid& g, int wrong, const std::string& step, Change&& change) {
  const ModelConfig m = model_of();
  const Lengths l{{1, 4}, {20, 0}};
  on_ranks(m, g, {}, l, {}, [&](Rank& rank, const Held& held, PlanOptions o, int r) {
    Held own = held;
    if (r == wrong) change(own, o);
    try {
      rank.run(Step(own, l), o, 3);
      ADD_FAILURE() << "rank " << r;
    } catch (const RankError& e) {
      EXPECT_EQ(e.rank(), wrong) << e.what();
      EXPECT_EQ(e.step(), step);
      EXPECT_NE(std::string(e.what()).find("their plans differ"), std::string::npos) << e.what();
    }
  });
}

// Paths decide what ranks of a split cache send: here one takes another path for a request without context.
TEST(ContextParallel, ARankWithOtherOptionsIsNamed) {
  const ModelConfig m = model_of();
  for (const Grid& g : {grid_of(m, 3, 3, 4), grid_of(m, 4, 2, 4)})
    expect_named(g, g.ranks() - 1, "gather_queries", [](Held&, PlanOptions& o) { o.path = PathPolicy::latent; });
}

// A rank that splits the cache over other groups than the others: known by its global number.
TEST(ContextParallel, ARankOfAnotherGridIsNamed) {
  const ModelConfig m = model_of();
  expect_named(grid_of(m, 4, 2, 4), 2, "gather_queries", [](Held& held, PlanOptions& o) {
    o.context_parallel.sharding = CacheSharding(4, 4);
    held = Held(o.context_parallel, {{1, 4}, {20, 0}});
  });
}

// Ranks of the other groups learn of it at the same call, though nothing was to come from it.
TEST(ContextParallel, ARankThatLeavesEndsAllGroups) {
  const ModelConfig m = model_of();
  const Lengths l{{2}, {30}};
  on_ranks(m, grid_of(m, 4, 2, 4), {}, l, latent(), [&](Rank& rank, const Held& held, const PlanOptions& o, int r) {
    if (r == 3) return rank.group->abort("no memory");
    try {
      rank.run(Step(held, l), o, 3);
      ADD_FAILURE() << "rank " << r;
    } catch (const RankError& e) {
      EXPECT_EQ(e.rank(), 3) << e.what();
      EXPECT_NE(std::string(e.what()).find("rank 3 aborted: no memory"), std::string::npos) << e.what();
    }
  });
}

TEST(ContextParallel, WhatDoesNotFitIsNamed) {
  Rank rank(model_of(), {0, 3}, CacheFormat::f32, {});
  const Held held = held_by({3, 2}, 0, ragged());
  const Step step(held, ragged());
  const PlanOptions o = options_of(held);
  EXPECT_EQ(message_of([&] { (void)rank.plan_of(step, o); }), "no error");
  EXPECT_EQ(message_of([&] { (void)rank.run(step, o, 1); }),
            "layer: ranks is missing, plan was made for tensor_parallel 2");
  const auto with = [&](auto change) {
    PlanOptions other = o;
    change(other);
    return message_of([&] { (void)rank.plan_of(step, other); });
  };
  EXPECT_EQ(with([](PlanOptions& p) { p.tensor_parallel = 1; }),
            "plan: a cache split over 2 ranks with tensor_parallel 1, which must be groups of as many");
  EXPECT_EQ(with([](PlanOptions& p) { p.tensor_parallel = 3; }),
            "plan: a cache split over 2 ranks with tensor_parallel 3, which must be groups of as many");
  EXPECT_EQ(with([](PlanOptions& p) {
              p.tensor_parallel = 4, p.context_parallel.rank = 4, p.context_parallel.heads = {3, 2, 3, 2};
            }),
            "plan: context_parallel rank is 4, allowed 0 to 3");
  EXPECT_EQ(with([](PlanOptions& p) { p.form = LayerForm::attention, p.cache_use = CacheUse::none; }),
            "plan: a cache split over 2 ranks with cache_use none: there is no cache to split");
  EXPECT_EQ(with([](PlanOptions& p) { p.absorbed = true, p.context_parallel.exchange = ContextExchange::heads; }),
            "plan: a cache split over 2 ranks that exchange heads, with fully absorbed weights, which have none");
  EXPECT_EQ(with([](PlanOptions& p) { p.context_parallel.rank = 2; }),
            "plan: context_parallel rank is 2, allowed 0 to 1");
  EXPECT_EQ(with([](PlanOptions& p) { p.context_parallel.heads = {3}; }),
            "plan: context_parallel heads has 1 entries, tensor_parallel is 2");
  EXPECT_EQ(with([](PlanOptions& p) {
              p.context_parallel.heads = {2, 3};
            }),
            "plan: context_parallel heads[0] is 2, this rank's model has 3");
  const auto with_slot = [&](const Held& of, size_t token, int32_t slot) {
    Step other(of, ragged());
    other.slots[token] = slot;
    return message_of([&] { (void)rank.plan_of(other, options_of(of)); });
  };
  EXPECT_EQ(with_slot(held, 10, 5),
            "batch: request 4: slot_mapping[10] is 5, its token's position 68 is rank 1's, this is rank 0");
  EXPECT_EQ(with_slot(held_by({1, 1, 3, 2}, 2, ragged(), 2), 10, 5),
            "batch: request 4: slot_mapping[10] is 5, its token's position 68 is rank 3's, this is rank 2");
  EXPECT_EQ(with_slot(held, 0, 5).substr(0, 89),
            "batch: request 0: slot_mapping[0] is 5, its token's position 130 is slot " +
                std::to_string(step.slots[0]) + " of this rank");
}

}  // namespace
}  // namespace mla::test::ranks
