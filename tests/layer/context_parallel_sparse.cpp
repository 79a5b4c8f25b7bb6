// Requests that select their keys, of a cache that is split over ranks: the selection is one rank's, bit for bit, and
// attention over it gives the same rows.
#include <gtest/gtest.h>

#include "layer/kernels.hpp"
#include "layer/ranks.hpp"
#include "support/message.hpp"
#include "support/models.hpp"
#include "support/sanitized.hpp"

namespace mla::test::ranks {
namespace {

ModelConfig model_of() {
  ModelConfig m = small_sparse();
  m.heads = 6;
  return m;
}

// Some that fit the 24 that are selected, some that outgrow them within the step, some long.
const Lengths& ragged() {
  static const Lengths l{{1, 3, 1, 2, 30, 5, 0}, {130, 40, 1, 0, 3, 330, 70}};
  return l;
}

TEST(ContextParallelSparse, SelectionsAreOneRanks) {
  const ModelConfig m = model_of();
  Sample sample(3);
  for (const IndexCacheFormat index : {IndexCacheFormat::f32, IndexCacheFormat::bf16, IndexCacheFormat::fp8}) {
    const Formats formats{.index = index};
    const Ran right = by_one(m, ragged(), formats);
    ASSERT_GT(right.chosen.size(), 24u * 8);
    for (const auto& [ranks, members] : {std::pair{2, 2}, {3, 3}, {4, 2}, {6, 6}})
      for (const int64_t interleave : {1, 2, 4, 16, 64}) {
        if ((index != IndexCacheFormat::f32 && interleave % 8 != 0) || !sample.take()) continue;
        for (const Grid& g : exchanges(grid_of(m, ranks, members, interleave)))
          expect_same(by_ranks(m, g, ragged(), formats), right, 1e-5f, g.name() + ", " + std::string(to_string(index)));
      }
  }
}

TEST(ContextParallelSparse, EveryPolicyAndFormat) {
  const ModelConfig m = model_of();
  Sample sample(3);
  for (const SparsePolicy sparse : {SparsePolicy::automatic, SparsePolicy::mixed, SparsePolicy::direct,
                                    SparsePolicy::upconvert, SparsePolicy::dense, SparsePolicy::masked})
    for (const CacheFormat format : {CacheFormat::f32, CacheFormat::bf16, CacheFormat::fp8, CacheFormat::fp8_ds_mla})
      for (const SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
        if ((split != SplitPolicy::fast && format != CacheFormat::bf16) || !sample.take()) continue;
        const PlanOptions o{.path = PathPolicy::latent, .split = split, .sparse = sparse};
        // Ranks take no masks by themselves, one may.
        PlanOptions alone = o;
        if (sparse == SparsePolicy::automatic) alone.sparse = SparsePolicy::mixed;
        const Ran right = by_one(m, ragged(), {.cache = format}, alone);
        for (const Grid& g : {grid_of(m, 2, 2, 4), exchanges(grid_of(m, 6, 3, 1))[1], grid_of(m, 6, 6, 64)})
          expect_same(by_ranks(m, g, ragged(), {.cache = format}, o), right, 1e-5f,
                      g.name() + ", " + std::string(to_string(sparse)) + ", " + std::string(to_string(format)));
      }
}

TEST(ContextParallelSparse, RandomLengthsAndTopk) {
  cases::Random random(9);
  for (int i = 0; i < 16; ++i) {
    ModelConfig m = small_sparse();
    m.heads = 8;
    m.indexer->topk = random.integer(1, random.integer(0, 1) ? 5 : 200);
    const int members = static_cast<int>(random.integer(2, 8)), groups = 1 + (members <= 4 && random.integer(0, 1));
    const int64_t interleave = std::array{1, 2, 4, 16, 64}[static_cast<size_t>(random.integer(0, 4))];
    Lengths l;
    for (int64_t r = random.integer(1, 4); r > 0; --r) {
      l.queries.push_back(static_cast<int32_t>(random.integer(0, 90)));
      l.contexts.push_back(static_cast<int32_t>(random.integer(0, random.integer(0, 1) ? 400 : 20)));
    }
    const Grid g = grid_of(m, members * groups, members, interleave);
    expect_same(by_ranks(m, g, l), by_one(m, l), 1e-5f, g.name() + ", topk " + std::to_string(m.indexer->topk));
  }
}

// Keys that are all zero have equal scores: the lower positions win, whoever holds them.
TEST(ContextParallelSparse, TiesGoToTheLowerPosition) {
  ModelConfig m = model_of();
  const Lengths l{{4}, {200}};
  for (const int64_t interleave : {1, 4, 64}) {
    const Grid g = grid_of(m, 3, 3, interleave);
    on_ranks(m, g, {}, l, {}, [&](Rank& rank, const Held& held, const PlanOptions& o, int) {
      const std::vector<float> zeros(static_cast<size_t>(m.indexer->dim), 0.0f);
      rank.weights.indexer->key_norm = rank.weights.indexer->key_norm_bias = WeightVector(zeros, {});
      two_steps(rank, held, l, o, o);
      std::vector<int32_t> lowest(24);
      std::iota(lowest.begin(), lowest.end(), 0);
      for (int64_t row = 0; row < 4; ++row)
        EXPECT_EQ(std::vector<int32_t>(rank.chosen.begin() + row * 24, rank.chosen.begin() + (row + 1) * 24), lowest)
            << g.name() << ", row " << row;
    });
  }
}

// A choice of the caller's: attention alone.
TEST(ContextParallelSparse, TheCallersChoice) {
  const ModelConfig m = model_of();
  const Lengths l{{3, 40}, {130, 5}};
  const int64_t topk = m.indexer->topk, t = 43;
  cases::Random random(3);
  std::vector<int32_t> choice(static_cast<size_t>(t * topk));
  for (int64_t i = 0; i < t; ++i)
    for (int64_t k = 0; k < topk; ++k)  // unused entries anywhere, others twice, one row of a single rank's tokens
      choice[static_cast<size_t>(i * topk + k)] =
          static_cast<int32_t>(i == 1 ? 4 : random.integer(-3, i < 3 ? 130 + i : 5 + i - 3));
  const auto attended = [&](Rank& rank, const Held& held, PlanOptions o) {
    o.form = LayerForm::attention;
    const Step s(held, l);
    const Plan p = rank.plan_of(s, o);
    rank.selection = Buffer(p.selection_bytes);
    select(rank.stream, rank.context(p, s), View<const int32_t, Token, Topk>(choice.data(), {t, topk}));
    return rank.attended(s, o, m.heads, 5);
  };
  const auto prompts = [&](Rank& rank, const Held& held, const PlanOptions& o) {
    rank.run(Step(held, {l.contexts, std::vector<int32_t>(l.contexts.size())}), o, 3);
  };
  PlanOptions whole;
  whole.index_format = IndexCacheFormat::f32;
  Rank one(m, {0, m.heads}, CacheFormat::f32, IndexCacheFormat::f32);
  prompts(one, Held({}, l), whole);
  const std::vector<float> right = attended(one, Held({}, l), whole);
  const Grid g = grid_of(m, 4, 2, 4);
  on_ranks(m, g, {}, l, {}, [&](Rank& rank, const Held& held, const PlanOptions& o, int r) {
    prompts(rank, held, o);
    const std::vector<float> out = attended(rank, held, o);
    const int64_t own = rank.heads.count * m.value;
    for (int64_t i = 0; i < std::ssize(out); ++i)
      ASSERT_NEAR(out[static_cast<size_t>(i)],
                  right[static_cast<size_t>((i / own * m.heads + rank.heads.begin) * m.value + i % own)], 1e-5f)
          << "rank " << r << " element " << i;
  });
}

// Plans of maxima have the same steps whatever the batch, and their calls give the same rows.
TEST(ContextParallelSparse, StepsOfMaxima) {
  const ModelConfig m = model_of();
  const Lengths l{{1, 3, 2}, {130, 40, 3}};
  const Ran right = by_one(m, l);
  PlanOptions o;
  o.maxima = StepMaxima{.requests = 5, .tokens = 9, .query_len = 4, .seq_len = 300};
  for (const Grid& g : exchanges(grid_of(m, 4, 2, 4))) {
    std::vector<std::vector<float>> out(4);
    on_ranks(m, g, {}, l, {}, [&](Rank& rank, const Held& held, PlanOptions options, int r) {
      rank.run(Step(held, {l.contexts, {0, 0, 0}}), options, 3);
      options.maxima = o.maxima;
      const Step s(held, l);
      const Plan p = rank.plan_of(s, options);
      ASSERT_EQ(p.tokens, 9);
      const auto given = cases::random_values(6 * m.hidden, 4);
      std::vector<float> hidden(static_cast<size_t>(9 * m.hidden), 0.5f);
      std::copy(given.begin(), given.end(), hidden.begin());
      std::vector<float> rows(hidden.size(), -7.0f);
      forward(rank.stream, rank.context(p, s), View<const float, Token, Hidden>(hidden.data(), {9, m.hidden}),
              View<float, Token, Hidden>(rows.data(), {9, m.hidden}));
      out[static_cast<size_t>(r)] = rows;
    });
    for (const auto& rows : out) {
      ASSERT_EQ(rows.size(), static_cast<size_t>(9 * m.hidden));
      for (size_t i = 0; i < rows.size(); ++i)
        if (i < right.out.size()) ASSERT_NEAR(rows[i], right.out[i], 2e-5f) << g.name() << ", element " << i;
        else ASSERT_EQ(rows[i], -7.0f) << g.name() << ", element " << i;
    }
  }
}

TEST(ContextParallelSparse, TheExchangesAreSteps) {
  ModelConfig m = model_of();
  Rank rank(m, {0, 3}, CacheFormat::f32, IndexCacheFormat::f32);
  const Lengths l{{1, 2}, {30, 300}};
  const Held held({.sharding = CacheSharding(2, 4), .rank = 1, .heads = {3, 3}}, l);
  PlanOptions o = options_of(held);
  o.index_format = IndexCacheFormat::f32;
  o.link = {.seconds = 1e-6, .bytes = 1e9};
  const Step step(held, l);
  const Plan p = rank.plan_of(step, o);
  EXPECT_EQ(p.index_schedule.candidates, 24);
  EXPECT_NE(p.describe().find("the best of 24 candidates of each of 2 ranks"), std::string::npos) << p.describe();
  const auto uses = layer::kernels(p, step.batch, {.dtype = Dtype::f32});
  const auto of = [&](std::string_view name) {
    const auto at = std::find_if(uses.begin(), uses.end(), [&](const layer::KernelUse& u) { return u.op == name; });
    return at == uses.end() ? layer::KernelUse{} : *at;
  };
  // Three rows' positions and scores to one other member.
  EXPECT_EQ(of("gather_candidates").calls, 1);
  EXPECT_EQ(of("gather_candidates").bytes, 3 * 24 * 2 * 4);
  EXPECT_EQ(of("gather_candidates").kernel, "of 2 ranks");
  EXPECT_DOUBLE_EQ(of("gather_candidates").seconds, 1e-6 + of("gather_candidates").bytes / 1e9);
  for (const std::string_view name : {"gather_queries", "attend_sparse", "exchange_found"})
    EXPECT_EQ(of(name).calls, 1) << name;
}

// What is selected by must be the same on all ranks.
TEST(ContextParallelSparse, ARankThatSelectsOtherwiseIsNamed) {
  const ModelConfig m = model_of();
  const Lengths l{{4}, {200}};
  on_ranks(m, grid_of(m, 4, 2, 4), {}, l, {}, [&](Rank& rank, const Held& held, PlanOptions o, int r) {
    if (r == 1) o.index_hadamard = true;
    try {
      rank.run(Step(held, l), o, 1);
      ADD_FAILURE() << "rank " << r;
    } catch (const RankError& e) {
      EXPECT_EQ(e.rank(), 1) << e.what();
      EXPECT_EQ(e.step(), "gather_candidates");
    }
  });
}

}  // namespace
}  // namespace mla::test::ranks
