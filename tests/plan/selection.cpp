// Plans of sparse models: which requests select, in which launches they attend, and what the indexer walks.
#include <gtest/gtest.h>

#include <set>

#include "cases/compare.hpp"
#include "mla/error.hpp"
#include "mla/plan.hpp"
#include "support/batches.hpp"
#include "support/message.hpp"
#include "support/models.hpp"

namespace mla {
namespace {

using test::Made;
using test::message_of;

ModelConfig sparse_model(int64_t topk) {
  ModelConfig m = test::small_deepseek();
  m.indexer = IndexerConfig{.heads = 4, .dim = 64, .topk = topk};
  return m;
}

Plan make(const ModelConfig& m, CacheFormat format, const Made& b, PlanOptions o = {}, int64_t page_size = 16) {
  return plan(m, cache_spec(m, format, page_size), b.pages, b.batch(), {.threads = 2, .scratch_per_worker = 4096}, o);
}

// Every sparse row stands in one launch's items exactly once per key of its list, or is a masked request's, and is
// scored against exactly what it sees, or filled.
void check(const Plan& p) {
  std::vector<int> attended(static_cast<size_t>(p.masked_begin));
  int32_t next = 0;
  for (const SparseGroup& g : p.sparse_groups) {
    EXPECT_EQ(g.begin, next);
    next += g.count;
    for (const SparseItem& i : g.work.items)
      for (int32_t q = i.q_begin; q < i.q_begin + i.q_count; ++q) attended[g.begin + q] += i.k_end - i.k_begin;
    for (int32_t row = g.begin; row < g.begin + g.count && g.rows > 0; ++row) {
      const int32_t r = p.sparse_requests[row];
      EXPECT_EQ(p.gathered_counts[r], p.requests[r].context + p.requests[r].query_len);
      EXPECT_LE(p.gathered_starts[r] + p.gathered_counts[r], g.rows);
    }
  }
  EXPECT_EQ(next, p.masked_begin);
  for (int n : attended) EXPECT_EQ(n, p.topk);

  std::vector<int64_t> scored(static_cast<size_t>(p.sparse_rows()));
  std::vector<int> finished(static_cast<size_t>(p.sparse_rows()));
  const IndexSchedule& s = p.index_schedule;
  for (const IndexItem& i : s.all)
    for (int32_t q = 0; q < i.q_count; ++q) {
      EXPECT_EQ(p.sparse_requests[i.q_begin + q], i.request);
      EXPECT_LE(i.columns(q), p.topk);
      scored[i.q_begin + q] += i.columns(q);
      ++finished[i.q_begin + q];
    }
  for (const IndexTile& tile : s.selected) {
    for (int64_t r = 0; r < tile.rounds(s.tiles.keys); ++r)
      for (const IndexItem& whole : tile.rows) {
        const IndexItem i = clipped(whole, r * s.tiles.keys, s.tiles.keys);
        for (int32_t q = 0; q < i.q_count; ++q) {
          EXPECT_EQ(p.sparse_requests[i.q_begin + q], i.request);
          EXPECT_LE(i.kv_end - i.kv_begin, s.tiles.keys);
          EXPECT_LT(i.row + q, s.tiles.rows);
          scored[i.q_begin + q] += i.columns(q);
        }
      }
    for (const IndexItem& i : tile.rows)
      for (int32_t q = 0; q < i.q_count; ++q) ++finished[i.q_begin + q];
  }
  for (int64_t row = 0; row < p.sparse_rows(); ++row) {
    EXPECT_EQ(scored[row], p.sparse_positions[row] + 1) << row;
    EXPECT_EQ(finished[row], 1) << row;
    const int32_t token = p.sparse_tokens[row];
    if (row < p.masked_begin) {
      EXPECT_EQ(p.latent_tokens[p.sparse_begin + row], token);
    }
    EXPECT_EQ(p.requests[p.sparse_requests[row]].masked, row >= p.masked_begin);
    EXPECT_EQ(p.positions[token], p.sparse_positions[row]);
  }
  std::set<int32_t> tokens(p.latent_tokens.begin(), p.latent_tokens.end());
  tokens.insert(p.expanded_tokens.begin(), p.expanded_tokens.end());
  EXPECT_EQ(static_cast<int64_t>(tokens.size()), p.tokens);
  EXPECT_EQ(static_cast<int64_t>(p.latent_tokens.size() + p.expanded_tokens.size()), p.tokens);
}

constexpr SparsePolicy kPolicies[] = {SparsePolicy::automatic, SparsePolicy::mixed, SparsePolicy::direct,
                                      SparsePolicy::upconvert, SparsePolicy::dense, SparsePolicy::masked};

TEST(Selection, RandomBatchesAreCoveredOnEveryMode) {
  cases::Random random(3);
  for (int round = 0; round < 40; ++round) {
    std::vector<int64_t> queries, contexts;
    for (int64_t r = random.integer(0, 9); r > 0; --r) {
      queries.push_back(random.integer(0, 3) ? random.integer(0, 2) : random.integer(1, 150));
      contexts.push_back(random.integer(0, 1) ? random.integer(0, 70) : random.integer(0, 600));
    }
    const Made b(queries, contexts, 16);
    for (SparsePolicy policy : kPolicies)
      for (SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
        const Plan p = make(sparse_model(64), CacheFormat::fp8_ds_mla, b, {.split = split, .sparse = policy});
        check(p);
        for (size_t r = 0; r < queries.size(); ++r)
          EXPECT_EQ(p.requests[r].path == Path::sparse,
                    policy != SparsePolicy::dense && queries[r] > 0 &&
                        (queries[r] + contexts[r] > 64 || split == SplitPolicy::batch_invariant));
        for (const SparseGroup& g : p.sparse_groups)
          EXPECT_TRUE(g.rows == 0 || split == SplitPolicy::fast) << "rows of batch_invariant are read in place";
        EXPECT_FALSE(p.describe().empty());
      }
  }
}

TEST(Selection, ModesCutLaunchesAsTheirNamesSay) {
  const ModelConfig m = sparse_model(64);
  const Made b({1, 200, 1, 30, 100, 1}, {500, 0, 20, 400, 10, 64}, 16);  // the third request fits the topk
  auto counts = [&](SparsePolicy policy) {
    std::vector<std::pair<int32_t, bool>> c;
    PlanOptions o{.sparse = policy};
    o.context_rows = 450;
    for (const SparseGroup& g : make(m, CacheFormat::fp8_ds_mla, b, o).sparse_groups)
      c.push_back({g.count, g.rows > 0});
    return c;
  };
  using Groups = std::vector<std::pair<int32_t, bool>>;
  EXPECT_EQ(counts(SparsePolicy::mixed), (Groups{{332, false}}));
  EXPECT_EQ(counts(SparsePolicy::direct), (Groups{{2, false}, {330, false}}));
  // 200 rows alone, then 430: 110 more would not fit 450.
  EXPECT_EQ(counts(SparsePolicy::upconvert), (Groups{{2, false}, {200, true}, {30, true}, {100, true}}));
  EXPECT_EQ(counts(SparsePolicy::dense), Groups{});
  EXPECT_EQ(counts(SparsePolicy::masked), (Groups{{2, false}}));
}

TEST(Selection, TheCostModelWeighsConversionOnceAgainstAtEveryUse) {
  const ModelConfig m = sparse_model(64);
  const CacheSpec spec = cache_spec(m, CacheFormat::fp8_ds_mla, 16);
  const CostModel rates{.bytes = 1e10, .plain_elements = 1e10, .fp8_elements = 1e9};
  const auto cost = [&](SparseForm form, int64_t new_tokens, int64_t context) {
    return sparse_cost(m, spec, rates, form, new_tokens, context);
  };
  // Many queries over a short sequence: converting it once is cheaper. One query over a long one: it is not.
  EXPECT_LT(cost(SparseForm::upconvert, 300, 0), cost(SparseForm::direct, 300, 0));
  EXPECT_GT(cost(SparseForm::upconvert, 2, 100000), cost(SparseForm::direct, 2, 100000));
  const Made b({300, 2, 1}, {0, 3000, 900}, 16);
  const Plan p = make(m, CacheFormat::fp8_ds_mla, b, {.rates = rates});
  ASSERT_EQ(p.sparse_groups.size(), 2u);
  EXPECT_EQ(p.sparse_groups[0].count, 3);
  EXPECT_EQ(p.sparse_groups[0].rows, 0);
  EXPECT_EQ(p.sparse_groups[1].rows, 300);
}

// On a GPU: the expanded form while a row sees a few times what it selects, the latent one beyond.
TEST(Selection, MasksWhereTheyCostLess) {
  const ModelConfig m = preset("deepseek-v3.2");
  const CacheSpec spec = cache_spec(m, CacheFormat::fp8_ds_mla, 64);
  const DeviceInfo gpu{.device = {DeviceKind::cuda, 0}, .scratch_per_worker = 1 << 20};
  const auto masked = [&](int64_t query, int64_t context, PlanOptions o) {
    o.compute = Dtype::bf16;
    const Made b({query, 1}, {context, 9000}, 64);
    const Plan p = plan(m, spec, b.pages, b.batch(), gpu, o);
    EXPECT_FALSE(p.requests[1].masked);
    EXPECT_EQ(p.masked_rows(), p.requests[0].masked ? query : 0);
    EXPECT_EQ(p.describe().find("on the expanded path, masks") != std::string::npos, p.requests[0].masked);
    return p.requests[0].masked;
  };
  EXPECT_TRUE(masked(4096, 0, {}));
  EXPECT_TRUE(masked(4096, 4096, {}));
  EXPECT_FALSE(masked(4096, 16384, {}));
  EXPECT_FALSE(masked(16, 4096, {})) << "too few rows share the keys that are expanded";
  EXPECT_TRUE(masked(4096, 16384, {.sparse = SparsePolicy::masked}));
  EXPECT_FALSE(masked(4096, 4096, {.sparse = SparsePolicy::upconvert}));
  EXPECT_FALSE(masked(4096, 4096, {.form = LayerForm::attention})) << "the caller's choices may be no masks";
  EXPECT_FALSE(masked(4096, 4096, {.split = SplitPolicy::batch_invariant}));
  EXPECT_FALSE(masked(4096, 4096, {.split = SplitPolicy::batch_invariant, .sparse = SparsePolicy::masked}));
  EXPECT_FALSE(masked(4096, 4096, {.prefill = PrefillOperands::fp8})) << "codes have no kernel for masks";
  EXPECT_FALSE(masked(4096, 4096, {.absorbed = true}));
  EXPECT_EQ(message_of([&] { masked(4096, 0, {.absorbed = true, .sparse = SparsePolicy::masked}); }),
            "plan: sparse masked attends on the expanded path, fully absorbed weights serve the latent path alone");
  EXPECT_EQ(message_of([&] { masked(4096, 0, {.form = LayerForm::attention, .sparse = SparsePolicy::masked}); }),
            "plan: sparse masked with form attention, whose choices are the caller's: masks name a position once and "
            "none past the token");
}

TEST(Selection, MemoryOfScoringDoesNotGrowWithContext) {
  const ModelConfig m = sparse_model(64);
  size_t largest = 0;
  for (int64_t context : {1000, 100000, 4000000}) {
    const Made b({64, 1}, {context, context}, 16);
    const Plan p = make(m, CacheFormat::bf16, b, {.sparse = SparsePolicy::mixed});
    const size_t bytes = p.region("index_scores").bytes + p.region("index_topk").bytes;
    EXPECT_LE(bytes, kIndexTileBytes);
    largest = std::max(largest, p.workspace_bytes);
  }
  EXPECT_LT(largest, size_t{64} << 20);
}

TEST(Selection, DescribeCountsPartialRowsWhereTheyBelong) {
  const Made b({1, 1}, {40, 9000}, 16);
  const Plan p = make(sparse_model(4096), CacheFormat::bf16, b, {.path = PathPolicy::latent});
  ASSERT_GT(p.partial_rows, 0);
  EXPECT_NE(p.describe().find("0 split, 0 partial rows"), std::string::npos) << p.describe();
}

TEST(Selection, RotationNeedsAPowerOfTwo) {
  ModelConfig m = sparse_model(64);
  m.indexer->dim = 96;
  const Made b({1}, {100}, 16);
  EXPECT_THROW(make(m, CacheFormat::bf16, b, {.index_hadamard = true}), UnsupportedError);
  EXPECT_NO_THROW(make(m, CacheFormat::bf16, b));
}

TEST(Selection, ImpossibleTopkAndModelsWithoutAnIndexer) {
  const Made b({1}, {100}, 16);
  EXPECT_THROW(make(sparse_model(0), CacheFormat::bf16, b), ShapeError);
  EXPECT_THROW(make(sparse_model(kMostTopk + 1), CacheFormat::bf16, b), ShapeError);
  const Plan p = make(test::small_deepseek(), CacheFormat::bf16, b, {.sparse = SparsePolicy::mixed});
  EXPECT_EQ(p.topk, 0);
  EXPECT_EQ(p.selection_bytes, 0u);
}

}  // namespace
}  // namespace mla
