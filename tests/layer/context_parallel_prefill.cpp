// Cached context on the expanded path, of a cache that is split over ranks: bit for bit what a rank with the same heads
// and the whole cache makes of the same chunks.
#include <gtest/gtest.h>

#include "layer/kernels.hpp"
#include "layer/ranks.hpp"
#include "support/message.hpp"
#include "support/models.hpp"
#include "support/sanitized.hpp"

namespace mla::test::ranks {
namespace {

ModelConfig model_of() {
  ModelConfig m = small_deepseek();
  m.heads = 5;
  return m;
}

PlanOptions expanded(int64_t context_rows, SplitPolicy split = SplitPolicy::fast) {
  return {.path = PathPolicy::expanded, .split = split, .context_rows = context_rows};
}

// What attend() gives each rank for the queries, and what it gives the same heads with a cache of their own.
void expect_bits(const ModelConfig& m, const Grid& g, const Lengths& l, CacheFormat format, const PlanOptions& options,
                 const std::string& what) {
  const auto attended = [&](Rank& rank, const Held& held, const PlanOptions& o) {
    PlanOptions prompts = o;
    prompts.path = PathPolicy::automatic;
    rank.run(Step(held, {l.contexts, std::vector<int32_t>(l.contexts.size())}), prompts, 3);
    return rank.attended(Step(held, l), o, m.heads, 5);
  };
  on_ranks(m, g, {.cache = format}, l, options, [&](Rank& rank, const Held& held, const PlanOptions& o, int r) {
    const std::vector<float> found = attended(rank, held, o);
    Rank alone(m, rank.heads, format, {});
    const std::vector<float> right = attended(alone, Held({}, l), options);
    ASSERT_EQ(found.size(), right.size());
    EXPECT_EQ(std::memcmp(found.data(), right.data(), right.size() * sizeof(float)), 0)
        << what << ", " << g.name() << ", rank " << r;
  });
}

// A chunk of 192 rows is no whole number of turns of two times 64, 600 none of chunks.
TEST(ContextParallelPrefill, ChunksThatAreNoWholeTurns) {
  const ModelConfig m = model_of();
  for (const SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
    expect_bits(m, grid_of(m, 2, 2, 64), {{7}, {600}}, CacheFormat::f32, expanded(192, split), "192 rows");
    expect_bits(m, grid_of(m, 3, 3, 1), {{7}, {600}}, CacheFormat::f32, expanded(192, split), "192 rows");
    expect_bits(m, grid_of(m, 3, 3, 1), {{5, 1}, {130, 77}}, CacheFormat::f32, expanded(100, split), "100 rows");
    expect_bits(m, grid_of(m, 4, 2, 16), {{5, 1}, {130, 77}}, CacheFormat::f32, expanded(10, split), "10 rows");
  }
}

// Some requests have no context, some so little that most ranks hold nothing of it; chunks mix them.
TEST(ContextParallelPrefill, RaggedContexts) {
  const ModelConfig m = model_of();
  const Lengths l{{3, 1, 20, 2, 9, 0}, {130, 1, 0, 3, 64, 50}};
  Sample sample(2);
  for (const int ranks : {2, 3, 5})
    for (const int64_t interleave : {1, 2, 4, 16, 64})
      for (const int64_t rows : {0, 37, 150})
        if (sample.take())
          expect_bits(m, grid_of(m, ranks, ranks, interleave), l, CacheFormat::bf16, expanded(rows), "ragged");
}

TEST(ContextParallelPrefill, RandomLengths) {
  cases::Random random(5);
  for (int i = 0; i < 12; ++i) {
    ModelConfig m = model_of();
    m.heads = 8;
    const int members = static_cast<int>(random.integer(2, 8)), groups = 1 + (members <= 4 && random.integer(0, 1));
    const int64_t interleave = int64_t{1} << std::array{0, 1, 2, 4, 6}[static_cast<size_t>(random.integer(0, 4))];
    Lengths l;
    for (int64_t r = random.integer(1, 5); r > 0; --r) {
      l.queries.push_back(static_cast<int32_t>(random.integer(0, 12)));
      l.contexts.push_back(static_cast<int32_t>(random.integer(0, random.integer(0, 1) ? 500 : 20)));
    }
    expect_bits(m, grid_of(m, members * groups, members, interleave), l, CacheFormat::f32,
                expanded(random.integer(1, 300)), "random " + std::to_string(i));
  }
}

// Stored rows are sent as they are, those of an odd number of bytes in f32.
TEST(ContextParallelPrefill, EveryFormatOfTheCache) {
  const Lengths l{{3, 9}, {130, 64}};
  const ModelConfig m = model_of();
  for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8, CacheFormat::fp8_ds_mla})
    expect_bits(m, grid_of(m, 2, 2, 4), l, format, expanded(100), std::string(to_string(format)));
  ModelConfig odd = odd_nope();
  odd.latent = 37;
  for (const CacheFormat format : {CacheFormat::f32, CacheFormat::f16, CacheFormat::fp8})
    expect_bits(odd, grid_of(odd, 2, 2, 4), l, format, expanded(100), "odd " + std::string(to_string(format)));
}

TEST(ContextParallelPrefill, OtherOperands) {
  const ModelConfig m = model_of();
  const Lengths l{{3, 9}, {130, 64}};
  for (const PrefillOperands prefill : {PrefillOperands::compute, PrefillOperands::fp8}) {
    PlanOptions o = expanded(100);
    o.compute = Dtype::bf16;
    o.prefill = prefill;
    expect_bits(m, grid_of(m, 2, 2, 4), l, CacheFormat::bf16, o, std::string(to_string(prefill)));
  }
}

// Rows of the whole layer, beside requests on the latent path.
TEST(ContextParallelPrefill, PathsMix) {
  const ModelConfig m = model_of();
  const Lengths l{{1, 9, 3, 1, 30, 0}, {130, 40, 2, 0, 65, 12}};
  for (const SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
    const PlanOptions o{
        .path = PathPolicy::by_length, .reorder_batch_threshold = 3, .split = split, .context_rows = 50};
    const Ran right = by_one(m, l, {.cache = CacheFormat::fp8}, o);
    for (const Grid& g : {grid_of(m, 2, 2, 4), grid_of(m, 3, 3, 1), grid_of(m, 4, 2, 16)})
      expect_same(by_ranks(m, g, l, {.cache = CacheFormat::fp8}, o), right, 1e-5f, g.name());
  }
}

// All ranks choose alike, however many heads each has: by the largest's. Bytes over a slow link count.
TEST(ContextParallelPrefill, AutomaticPathsAreTheSameOnAllRanks) {
  const ModelConfig m = preset("deepseek-v3");
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16, kPageSize);
  const auto path_of = [&](int rank, int32_t query, int32_t context, LinkRates link) {
    const std::vector<int64_t> heads{120, 8};
    const Lengths l{{query}, {context}};
    const ContextParallel c{.sharding = CacheSharding(2, 1), .rank = rank, .heads = heads};
    const Step step(Held(c, l), l);
    PlanOptions o{.tensor_parallel = 2};
    o.context_parallel = c;
    o.link = link;
    DeviceInfo device{.threads = 1, .scratch_per_worker = 4096};
    // What a rank has measured says nothing to the others.
    device.f32_rates = CostModel{.expanded_flops = rank == 0 ? 1e12 : 1.0};
    return plan(part_of(m, {rank == 0 ? 0 : 120, heads[static_cast<size_t>(rank)]}), spec, kPages, step.batch, device,
                o)
        .requests[0]
        .path;
  };
  for (const int rank : {0, 1}) {
    EXPECT_EQ(path_of(rank, 1, 0, {}), Path::expanded);
    EXPECT_EQ(path_of(rank, 1, 1000, {}), Path::latent);
    EXPECT_EQ(path_of(rank, 4, 2500, {}), Path::latent);
    EXPECT_EQ(path_of(rank, 1000, 2000, {}), Path::expanded);
    EXPECT_EQ(path_of(rank, 2, 2500, {.seconds = 0, .bytes = 1e6}), Path::latent);
    EXPECT_EQ(path_of(rank, 1000, 2000, {.seconds = 0, .bytes = 1e6}), Path::expanded);
  }
  // A link so slow that what is sent decides: a few rows' queries of 120 heads against a short context's rows.
  EXPECT_EQ(path_of(0, 20, 100, {.seconds = 0, .bytes = 1e3}), Path::expanded);
}

TEST(ContextParallelPrefill, TheChunksAreSteps) {
  Rank rank(model_of(), {0, 3}, CacheFormat::fp8, {});
  const Lengths l{{30}, {600}};
  const Held held({.sharding = CacheSharding(2, 64), .rank = 1, .heads = {2, 3}}, l);
  PlanOptions o = options_of(held, expanded(192));
  o.link = {.seconds = 1e-6, .bytes = 1e9};
  const Step step(held, l);
  const Plan p = rank.plan_of(step, o);
  ASSERT_EQ(p.chunks.size(), 4u);
  EXPECT_EQ(p.chunks[0].held_rows, (std::vector<int64_t>{128, 64}));
  EXPECT_EQ(p.chunks[1].held_rows, (std::vector<int64_t>{64, 128}));
  EXPECT_EQ(p.chunks[3].held_rows, (std::vector<int64_t>{0, 24}));
  const auto uses = layer::kernels(p, step.batch, {.dtype = Dtype::f32});
  const auto of = [&](std::string_view name) {
    const auto at = std::find_if(uses.begin(), uses.end(), [&](const layer::KernelUse& u) { return u.op == name; });
    return at == uses.end() ? layer::KernelUse{} : *at;
  };
  EXPECT_EQ(of("pack_context").calls, 4);
  EXPECT_EQ(of("gather_context").calls, 4);
  EXPECT_EQ(of("gather_context").bytes, (64 + 128 + 64 + 24) * 576);  // as they are stored
  EXPECT_EQ(of("gather_context").kernel, "of 2 ranks");
  EXPECT_DOUBLE_EQ(of("gather_context").seconds, 4e-6 + of("gather_context").bytes / 1e9);
  EXPECT_EQ(of("gather").calls, 4);
  // attend() needs the ranks for it.
  EXPECT_EQ(message_of([&] { (void)rank.attended(step, o, 5, 1); }),
            "layer: ranks is missing, plan was made for tensor_parallel 2");
}

TEST(ContextParallelPrefill, PagesThatLieOddlyAreRefused) {
  Rank rank(model_of(), {0, 3}, CacheFormat::fp8, {});
  const Lengths l{{30}, {600}};
  const Held held({.sharding = CacheSharding(2, 64), .rank = 1, .heads = {2, 3}}, l);
  PlanOptions o = options_of(held, expanded(192));
  const Step step(held, l);
  const Plan p = rank.plan_of(step, o);
  LayerContext c = rank.context(p, step);
  c.cache.page_stride += 2;
  std::vector<float> hidden(static_cast<size_t>(30 * rank.model.hidden));
  EXPECT_EQ(message_of([&] {
              forward(rank.stream, c, View<const float, Token, Hidden>(hidden.data(), {30, rank.model.hidden}),
                      View<float, Token, Hidden>(hidden.data(), {30, rank.model.hidden}));
            }),
            "layer: cache page_stride is 9218, must be a multiple of 4: ranks send each other rows as they are stored");
}

// A rank that cuts its context into other chunks.
TEST(ContextParallelPrefill, ARankWithOtherChunksIsNamed) {
  const ModelConfig m = model_of();
  const Lengths l{{4}, {200}};
  on_ranks(m, grid_of(m, 4, 2, 4), {}, l, expanded(100), [&](Rank& rank, const Held& held, PlanOptions o, int r) {
    if (r == 3) o.context_rows = 64;
    try {
      rank.attended(Step(held, l), o, m.heads, 5);
      ADD_FAILURE() << "rank " << r;
    } catch (const RankError& e) {
      EXPECT_EQ(e.rank(), 3) << e.what();
      EXPECT_EQ(e.step(), "gather_context");
    }
  });
}

}  // namespace
}  // namespace mla::test::ranks
