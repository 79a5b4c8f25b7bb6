// Whole plans: coverage of every visible (row, position) pair, workspace, purity, invariance, options.
#include "mla/plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

#include "cases/compare.hpp"
#include "support/batches.hpp"
#include "support/models.hpp"
#include "support/sanitized.hpp"

namespace mla {
namespace {

using test::Made;

Plan make(const ModelConfig& m, const CacheSpec& spec, const Made& b, const PlanOptions& o = {}) {
  return plan(m, spec, b.pages, b.batch(), {.threads = 2, .scratch_per_worker = 4096}, o);
}

// How often each (token, position) pair is attended, by whichever path the token takes.
std::map<std::pair<int64_t, int64_t>, int> coverage(const Plan& p) {
  std::map<std::pair<int64_t, int64_t>, int> seen;
  for (const LatentItem& i : p.latent_items)
    for (int64_t q = 0; q < i.q_count; ++q)
      for (int64_t j = i.kv_begin; j < std::min<int64_t>(i.kv_end, i.visible + q + 1); ++j)
        ++seen[{p.latent_tokens[i.q_begin + q], j}];
  for (const ExpandedItem& i : p.suffix_items)
    for (int64_t q = 0; q < i.q_count; ++q)
      for (int64_t j = 0; j < std::min<int64_t>(i.k_count, q + i.visible + 1); ++j)
        ++seen[{i.q_begin + q, p.positions[p.expanded_tokens[i.k_begin + j]]}];
  for (const ContextChunk& c : p.chunks) {
    std::vector<int64_t> position(c.rows), owner(c.rows, -1);
    for (const GatherPiece& g : c.pieces)
      for (int64_t i = 0; i < g.count; ++i) {
        position[g.row + i] = g.start + i;
        owner[g.row + i] = g.request;
      }
    std::vector<bool> written(p.tokens);
    for (const ExpandedItem& i : c.items)
      for (int64_t q = i.q_begin; q < i.q_begin + i.q_count; ++q) {
        EXPECT_FALSE(written[q]) << "two items of a chunk write token " << q;
        written[q] = true;
        const int64_t sees = std::min<int64_t>(i.k_count, q - i.q_begin + i.visible + 1);
        for (int64_t j = i.k_begin; j < i.k_begin + sees; ++j) {
          const RequestPlan& r = p.requests[owner[j]];
          EXPECT_TRUE(q >= r.q_begin && q < r.q_begin + r.query_len);
          ++seen[{q, position[j]}];
        }
      }
  }
  return seen;
}

void check(const Plan& p) {
  const auto seen = coverage(p);
  size_t pairs = 0;
  for (const RequestPlan& r : p.requests)
    for (int64_t i = 0; i < r.query_len; ++i)
      for (int64_t j = 0; j <= r.context + i; ++j, ++pairs) {
        const auto it = seen.find({r.q_begin + i, j});
        ASSERT_TRUE(it != seen.end() && it->second == 1) << "token " << r.q_begin + i << " position " << j;
      }
  EXPECT_EQ(seen.size(), pairs);

  // Partial rows: each written by one item and joined once.
  std::vector<int> written(p.partial_rows), joined(p.partial_rows);
  for (const LatentItem& i : p.latent_items)
    for (int64_t q = 0; i.partial >= 0 && q < i.q_count; ++q) ++written.at(i.partial + q);
  for (const SplitRows& s : p.splits)
    for (int64_t i = 0; i < static_cast<int64_t>(s.splits) * s.rows; ++i) ++joined.at(s.partial + i);
  EXPECT_TRUE(std::all_of(written.begin(), written.end(), [](int n) { return n == 1; }));
  EXPECT_EQ(written, joined);

  // A row on the expanded path has one last part, after all its others.
  std::map<int64_t, int> lasts;
  auto note = [&](const ExpandedItem& i) {
    for (int64_t q = i.q_begin; q < i.q_begin + i.q_count; ++q) {
      EXPECT_EQ(lasts[q], 0) << "token " << q << " goes on after its last part";
      lasts[q] += i.last;
    }
  };
  for (const ExpandedItem& i : p.suffix_items) note(i);
  for (const ContextChunk& c : p.chunks)
    for (const ExpandedItem& i : c.items) note(i);
  for (const RequestPlan& r : p.requests)
    for (int32_t t = r.q_begin; r.path == Path::expanded && t < r.q_begin + r.query_len; ++t)
      EXPECT_EQ(lasts[t], 1) << "token " << t;

  std::vector<Region> regions = p.regions;
  std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  size_t end = 0;
  for (const Region& r : regions) {
    EXPECT_EQ(r.offset % 64, 0u);
    EXPECT_GE(r.offset, end) << r.name;
    end = std::max(end, r.offset + r.bytes);
  }
  EXPECT_LE(end, p.workspace_bytes);
}

TEST(Plan, RandomBatchesAreCoveredExactlyOnce) {
  const ModelConfig m = test::small_deepseek();
  cases::Random random(3);
  for (int i = 0; i < (test::kSanitized ? 20 : 60); ++i) {
    std::vector<int64_t> queries(random.integer(0, 6)), contexts(queries.size());
    for (size_t r = 0; r < queries.size(); ++r) {
      queries[r] = random.integer(0, 3) ? random.integer(0, 4) : random.integer(0, 200);
      contexts[r] = random.integer(0, 2) ? random.integer(0, 1500) : 0;
    }
    const int64_t page_size = random.integer(1, 80);
    const Made b(queries, contexts, page_size);
    for (PathPolicy path : {PathPolicy::automatic, PathPolicy::latent, PathPolicy::expanded, PathPolicy::by_length})
      for (SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
        PlanOptions o;
        o.path = path;
        o.split = split;
        o.reorder_batch_threshold = 3;
        o.context_rows = random.integer(0, 1) ? 0 : random.integer(1, 900);
        o.prefill = random.integer(0, 1) ? PrefillOperands::fp8 : PrefillOperands::compute;
        const Plan p = make(m, cache_spec(m, CacheFormat::bf16, page_size), b, o);
        check(p);
        if (!p.prefills_codes()) continue;
        for (const ExpandedItem& item : p.suffix_items) EXPECT_EQ(item.k_begin % 16, 0);
        for (const ContextChunk& c : p.chunks)
          for (const ExpandedItem& item : c.items) EXPECT_EQ(item.k_begin % 16, 0);
      }
  }
}

TEST(Plan, ArithmeticBreakEven) {
  ModelConfig m = test::small_deepseek();
  m.heads = 128;
  auto first_expanded = [&](int64_t context) {
    const CacheSpec spec = cache_spec(m, CacheFormat::bf16);
    int64_t t = 1;
    while (path_cost(m, spec, {}, Path::expanded, t, context) >= path_cost(m, spec, {}, Path::latent, t, context)) ++t;
    return t;
  };
  EXPECT_NEAR(static_cast<double>(first_expanded(1 << 20)), 171, 1);
  EXPECT_NEAR(static_cast<double>(first_expanded(4096)), 171, 4);
  m.nope = 192;
  m.value = 256;
  EXPECT_NEAR(static_cast<double>(first_expanded(1 << 20)), 398, 2);
}

// 256 rows of 16 heads are 32 tiles: alone they leave most of a device of 132 idle on the expanded path, four such
// requests do not.
TEST(Plan, TilesBesideEachOther) {
  ModelConfig m = preset("deepseek-v2-lite");
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16);
  const CostModel rates = default_cost_model({DeviceKind::cuda, 0});
  ASSERT_GT(rates.expanded_tiles, 0);
  CostModel without = rates;
  without.expanded_tiles = 0;
  const auto cost = [&](const CostModel& by, Path path, int64_t beside) {
    return path_cost(m, spec, by, path, 256, 16384, beside);
  };
  EXPECT_EQ(expanded_tiles(16, 256), 32);
  EXPECT_EQ(expanded_tiles(16, 257), 48);
  EXPECT_GT(cost(rates, Path::expanded, 0), cost(rates, Path::expanded, 32));
  EXPECT_EQ(cost(rates, Path::expanded, 1000), cost(without, Path::expanded, 1000));
  EXPECT_EQ(cost(rates, Path::latent, 0), cost(without, Path::latent, 0));
  // Launches of a context are the first request's to pay.
  CostModel no_launches = rates;
  no_launches.context_seconds = 0;
  EXPECT_NEAR(cost(rates, Path::expanded, 0) - cost(no_launches, Path::expanded, 0), rates.context_seconds, 1e-12);
  EXPECT_EQ(cost(rates, Path::expanded, 32), cost(no_launches, Path::expanded, 32));

  PlanOptions o;
  o.compute = Dtype::bf16;
  o.rates = rates;
  const auto path_of_first = [&](const std::vector<int64_t>& queries, const PlanOptions& options) {
    const Made b(queries, std::vector<int64_t>(queries.size(), 16384), 64);
    return make(m, spec, b, options).requests[0].path;
  };
  EXPECT_EQ(path_of_first({256}, o), Path::latent);
  EXPECT_EQ(path_of_first({256, 256, 256, 256}, o), Path::expanded);
  EXPECT_EQ(path_of_first({256, 1, 1, 1}, o), Path::latent);  // single tokens are never there
  o.rates = without;
  EXPECT_EQ(path_of_first({256}, o), Path::expanded);
}

// Ranks that share a cache choose alike, however many heads each has.
TEST(Plan, RanksOfUnevenHeadsChooseAlike) {
  ModelConfig m = preset("deepseek-v2-lite");
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16);
  int64_t latent = 0, expanded = 0;
  for (int64_t queries : {64, 160, 256, 320, 512})
    for (int64_t context : {2048, 8192, 16384})
      for (size_t requests : {1, 2, 3}) {
        const Made b(std::vector<int64_t>(requests, queries), std::vector<int64_t>(requests, context), 64);
        std::vector<std::string> paths;
        for (int rank : {0, 1}) {
          PlanOptions o;
          o.compute = Dtype::bf16;
          o.rates = default_cost_model({DeviceKind::cuda, 0});
          o.tensor_parallel = 2;
          o.context_parallel = {.sharding = CacheSharding(2, 64), .rank = rank, .heads = {16, 5}};
          ModelConfig own = m;
          own.heads = o.context_parallel.heads[static_cast<size_t>(rank)];
          std::string& s = paths.emplace_back();
          for (const RequestPlan& r : make(own, spec, b, o).requests) s += to_string(r.path)[0];
        }
        EXPECT_EQ(paths[0], paths[1]) << requests << " of " << queries << " behind " << context;
        (paths[0][0] == 'l' ? latent : expanded) += 1;
      }
  EXPECT_GT(latent, 5);
  EXPECT_GT(expanded, 5);
}

TEST(Plan, PromptsAndTheTokensBehindThem) {
  const ModelConfig m = test::small_deepseek();
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16);
  const auto planned = [&](std::vector<int32_t> prompts, PlanOptions o = {}) {
    Made b({1, 3, 0}, {100, 97, 50}, 64);
    b.prompts = std::move(prompts);
    o.path = PathPolicy::by_prompt;
    std::string s;
    const std::string error = test::message_of([&] {
      for (const RequestPlan& r : make(m, spec, b, o).requests) s += to_string(r.path)[0];
    });
    return error == "no error" ? s : error;
  };
  for (const SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
    const PlanOptions o{.split = split};
    EXPECT_EQ(planned({100, 97, 50}, o), "lll");   // nothing of a prompt
    EXPECT_EQ(planned({101, 100, 51}, o), "eel");  // its last tokens; a request of none
    EXPECT_EQ(planned({500, 97, 0}, o), "ell");
    EXPECT_EQ(planned({0, 99, 0}, o),
              "batch: request 1: brings tokens 97 to 99 of a prompt of 99: by path policy by_prompt a step ends where "
              "the prompt does");
  }
  EXPECT_EQ(planned({}), "batch: path policy by_prompt needs prompt_lens, there are none");
  EXPECT_EQ(planned({1, 2}), "batch: prompt_lens has 2 entries, the batch has 3 requests");
  EXPECT_EQ(planned({1, -2, 3}), "batch: request 1: prompt_len is -2, must not be negative");
  // Captured steps are of latent rows.
  const PlanOptions maxima{.maxima = StepMaxima{.requests = 4, .tokens = 8, .query_len = 4, .seq_len = 200}};
  EXPECT_EQ(planned({100, 97, 50}, maxima), "lll");
  EXPECT_EQ(planned({100, 100, 50}, maxima),
            "batch: request 1: tokens of a prompt in a step of maxima (PlanOptions::maxima), which by path policy "
            "by_prompt are no latent ones");
  EXPECT_EQ(
      planned({101, 97, 50}, {.absorbed = true}),
      "plan: request 0 with 1 new tokens takes the expanded path by policy by_prompt, fully absorbed weights serve "
      "the latent path alone");
}

TEST(Plan, PoliciesChoosePaths) {
  const ModelConfig m = test::small_deepseek();
  const Made b({1, 3, 500}, {100, 100, 100}, 64);
  auto paths = [&](PathPolicy policy, SplitPolicy split = SplitPolicy::fast) {
    PlanOptions o;
    o.path = policy;
    o.split = split;
    o.reorder_batch_threshold = 1;
    std::string s;
    for (const RequestPlan& r : make(m, cache_spec(m, CacheFormat::bf16), b, o).requests) s += to_string(r.path)[0];
    return s;
  };
  EXPECT_EQ(paths(PathPolicy::latent), "lll");
  EXPECT_EQ(paths(PathPolicy::expanded), "eee");
  EXPECT_EQ(paths(PathPolicy::by_length), "lee");
  EXPECT_EQ(paths(PathPolicy::automatic), "lle");
  // One path for all, whatever a step brings.
  EXPECT_EQ(paths(PathPolicy::latent, SplitPolicy::batch_invariant), "lll");
  EXPECT_EQ(paths(PathPolicy::expanded, SplitPolicy::batch_invariant), "eee");
  EXPECT_EQ(paths(PathPolicy::by_length, SplitPolicy::batch_invariant), "lll");
  EXPECT_EQ(paths(PathPolicy::automatic, SplitPolicy::batch_invariant), "lll");
  // A prompt's tokens by their positions, under either.
  EXPECT_EQ(paths(PathPolicy::by_prompt), "lee");
  EXPECT_EQ(paths(PathPolicy::by_prompt, SplitPolicy::batch_invariant), "lee");
  const PlanOptions invariant{.split = SplitPolicy::batch_invariant};
  EXPECT_NE(make(m, cache_spec(m, CacheFormat::bf16), b, invariant)
                .describe()
                .find("paths by policy automatic, which is latent under batch_invariant:"),
            std::string::npos);
}

// A request's items, splits and chunks in a batch are those it has alone, shifted.
TEST(Plan, BatchInvariantPiecesDependOnTheRequestAlone) {
  const ModelConfig m = test::small_deepseek();
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16, 16);
  for (PathPolicy path : {PathPolicy::latent, PathPolicy::expanded}) {
    PlanOptions o;
    o.path = path;
    o.split = SplitPolicy::batch_invariant;
    auto ranges = [&](const Plan& p, int32_t request) {
      std::vector<std::pair<int32_t, int32_t>> r;
      for (const LatentItem& i : p.latent_items)
        if (i.request == request) r.emplace_back(i.kv_begin, i.kv_end);
      for (const ContextChunk& c : p.chunks)
        for (const GatherPiece& g : c.pieces)
          if (g.request == request) r.emplace_back(g.start, g.start + g.count);
      std::sort(r.begin(), r.end());
      return r;
    };
    const auto alone = ranges(make(m, spec, Made({3}, {9000}, 16), o), 0);
    EXPECT_EQ(ranges(make(m, spec, Made({1, 3, 70}, {50000, 9000, 12}, 16), o), 1), alone);
    EXPECT_EQ(ranges(make(m, spec, Made({1, 1, 1, 3}, {1, 2, 3, 9000}, 16), o), 3), alone);
    if (path == PathPolicy::latent) continue;
    // Nor on what of the sequence is new.
    EXPECT_EQ(alone, (std::vector<std::pair<int32_t, int32_t>>{{0, 4096}, {4096, 8192}, {8192, 9003}}));
    EXPECT_EQ(ranges(make(m, spec, Made({9003}, {0}, 16), o), 0), alone);
    EXPECT_EQ(ranges(make(m, spec, Made({5000}, {4003}, 16), o), 0), alone);
  }
}

// batch_invariant: new rows are read back; each query's rows end with the piece that has its own.
TEST(Plan, BatchInvariantExpandedRowsComeFromTheCache) {
  const ModelConfig m = test::small_deepseek();
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16, 16);
  PlanOptions o{.path = PathPolicy::expanded, .split = SplitPolicy::batch_invariant, .context_rows = 100};
  const Made b({130, 1, 20}, {90, 0, 60}, 16);
  const Plan p = make(m, spec, b, o);
  check(p);
  EXPECT_TRUE(p.expanded_tokens.empty() && p.suffix_items.empty());
  struct Item {
    int32_t q_begin, q_count, k_count, visible;
    bool last;
    bool operator==(const Item&) const = default;
  };
  const int32_t all = ExpandedItem::everything();
  const std::vector<std::vector<Item>> right{{{0, 10, 100, 90, true}, {10, 120, 100, all, false}},
                                             {{130, 1, 1, 0, true}, {131, 20, 80, 60, true}},
                                             {{10, 100, 100, 0, true}, {110, 20, 100, all, false}},
                                             {{110, 20, 20, 0, true}}};
  ASSERT_EQ(p.chunks.size(), right.size());
  for (size_t c = 0; c < right.size(); ++c) {
    std::vector<Item> items;
    for (const ExpandedItem& i : p.chunks[c].items)
      items.push_back({i.q_begin, i.q_count, i.k_count, i.visible, i.last});
    EXPECT_EQ(items, right[c]) << "chunk " << c;
    EXPECT_EQ(p.chunks[c].first, c < 2) << "chunk " << c;
  }
  EXPECT_NE(p.describe().find("expanded: new tokens read back from the cache; 4 context chunks of at most 100 rows"),
            std::string::npos)
      << p.describe();
  // Heads that no later chunk adds to need no f32 rows.
  o.output = parse_output_spec("fp8_128");
  EXPECT_EQ(make(m, spec, b, o).head_rows, 130);
  // Without a cache there is nothing to read back.
  o = {.form = LayerForm::attention, .cache_use = CacheUse::none, .split = SplitPolicy::batch_invariant};
  const Plan none = make(m, spec, Made({130}, {0}, 16), o);
  check(none);
  EXPECT_TRUE(none.chunks.empty() && none.suffix_items.size() == 1);
}

TEST(Plan, PureAndPrintable) {
  const ModelConfig m = test::small_deepseek();
  const Made b({1, 1, 300}, {5000, 40, 2000}, 64);
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16);
  const std::string text = make(m, spec, b).describe();
  EXPECT_EQ(text, make(m, spec, b).describe());
  for (const char* part : {"302 tokens in 3 requests", "latent", "expanded", "1 context chunk of", "workspace"})
    EXPECT_NE(text.find(part), std::string::npos) << part;
  EXPECT_LE(std::count(text.begin(), text.end(), '\n'), 40);
  EXPECT_NE(make(m, spec, Made({}, {}, 64)).describe().find("0 tokens in 0 requests"), std::string::npos);
}

TEST(Plan, OneOfAKindIsNoPlural) {
  const ModelConfig m = test::small_deepseek();
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16);
  for (const PathPolicy path : {PathPolicy::latent, PathPolicy::expanded}) {
    PlanOptions options;
    options.path = path;
    const std::string text = make(m, spec, Made({1}, {1}, 64), options).describe();
    EXPECT_NE(text.find("1 token in 1 request on cpu with 2 threads\n"), std::string::npos) << text;
    EXPECT_NE(text.find("1 request, 1 token; "), std::string::npos) << text;
    for (size_t at = 0; (at = text.find(" 1 ", at)) != std::string::npos; ++at) {
      const std::string thing = text.substr(at + 3, text.find_first_of(" ,;:\n", at + 3) - at - 3);
      EXPECT_FALSE(thing.ends_with("s")) << "1 " << thing << " in " << text;
    }
  }
}

TEST(Plan, OutputsSayWhereTheyAreQuantised) {
  ModelConfig m = test::small_deepseek();
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16);
  const Made b({1, 30, 20, 7}, {900, 0, 500, 0}, 64);
  auto planned = [&](const char* output) {
    PlanOptions o{.path = PathPolicy::by_length};
    o.output = parse_output_spec(output);
    const Plan p = make(m, spec, b, o);
    check(p);
    return p;
  };
  auto heads_bytes = [&](int64_t rows) { return static_cast<size_t>(rows * m.heads * m.value) * sizeof(float); };
  const Plan plain = planned("none");
  EXPECT_FALSE(plain.fused_output);
  EXPECT_EQ(plain.region("heads").bytes, heads_bytes(58));
  EXPECT_EQ(plain.describe().find("output:"), std::string::npos);

  // Rows up to the last one that context is merged into stay in f32 between two calls; none without context.
  const Plan fused = planned("fp8_128_tma");
  EXPECT_TRUE(fused.fused_output);
  EXPECT_EQ(fused.region("heads").bytes, heads_bytes(51));
  EXPECT_EQ(fused.region("query").bytes, 0u);  // the block form's
  EXPECT_LT(fused.workspace_bytes, plain.workspace_bytes);
  EXPECT_NE(
      fused.describe().find("output: fp8_128_tma, fused: heads are quantised where they are finished; 51 f32 rows"),
      std::string::npos);
  PlanOptions latent{.path = PathPolicy::latent};
  latent.output = parse_output_spec("nvfp4");
  EXPECT_EQ(make(m, spec, b, latent).region("heads").bytes, 0u);

  m.value = 64;
  const Plan spans = planned("fp8_128");
  EXPECT_FALSE(spans.fused_output);
  EXPECT_EQ(spans.region("heads").bytes, heads_bytes(58));
  EXPECT_NE(
      spans.describe().find("output: fp8_128, not fused: groups of 128 span heads of 64; f32 heads, then one quantize"),
      std::string::npos);
  EXPECT_TRUE(planned("fp8_64_packed").fused_output);
  m.value = 20;
  EXPECT_FALSE(planned("nvfp4").fused_output);
  EXPECT_NE(planned("mxfp4").describe().find("output: mxfp4, not fused: groups of 32 span heads of 20;"),
            std::string::npos);
  EXPECT_TRUE(planned("fp8").fused_output);

  // On a GPU for a reason of its own, whatever the groups.
  m.value = 128;
  PlanOptions o{.path = PathPolicy::latent};
  o.output = parse_output_spec("fp8_128");
  const DeviceInfo gpu{.device = {DeviceKind::cuda, 0}, .threads = 1, .scratch_per_worker = 4096};
  const Plan there = plan(m, spec, b.pages, b.batch(), gpu, o);
  EXPECT_FALSE(there.fused_output);
  EXPECT_NE(
      there.describe().find("output: fp8_128, not fused: a GPU's products write no codes, and no request takes the "
                            "expanded path; f32 heads"),
      std::string::npos)
      << there.describe();
  // Attention of the expanded path writes codes there; the latent path's rows are quantised after their products.
  const auto last_step = [](const Plan& p) { return std::string(p.steps.back().name); };
  o.path = PathPolicy::by_length;
  const Plan mixed = plan(m, spec, b.pages, b.batch(), gpu, o);
  EXPECT_TRUE(mixed.fused_output);
  EXPECT_EQ(last_step(mixed), "quantize");
  EXPECT_EQ(mixed.region("heads").bytes, heads_bytes(58));
  EXPECT_NE(mixed.describe().find("output: fp8_128, fused: the expanded path's heads are quantised where attention "
                                  "finishes them, the others by one quantize; 58 f32 rows"),
            std::string::npos)
      << mixed.describe();
  o.path = PathPolicy::expanded;
  const Plan expanded = plan(m, spec, b.pages, b.batch(), gpu, o);
  EXPECT_TRUE(expanded.fused_output);
  EXPECT_EQ(last_step(expanded), "scale_padding");
}

// batch_invariant on a GPU: rows of an item have equally many pieces of 1024 positions, and an item's pieces, for tiles
// of up to 128 rows, as many partial rows as scratch holds.
TEST(Plan, ItemsOfAGpuAreCutWhereRowsHaveOneMorePiece) {
  ModelConfig m = test::small_deepseek();
  m.heads = 40;
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16, 64);
  const Made b({1, 1500, 2, 30, 5}, {5000, 500, 1023, 20000, 1023}, 64);
  const DeviceInfo gpu{.device = {DeviceKind::cuda, 0}, .threads = 1, .scratch_per_worker = size_t{64} << 20};
  PlanOptions o{.path = PathPolicy::latent};
  EXPECT_EQ(plan(m, spec, b.pages, b.batch(), gpu, o).latent_items.size(), 5u);
  o.split = SplitPolicy::batch_invariant;
  const Plan p = plan(m, spec, b.pages, b.batch(), gpu, o);
  check(p);
  const auto pieces = [](int64_t positions) { return (positions + kInvariantKeys - 1) / kInvariantKeys; };
  for (const LatentItem& i : p.latent_items) {
    EXPECT_EQ(pieces(i.visible + 1), pieces(std::min(i.visible + i.q_count, i.kv_end)));
    EXPECT_EQ(pieces(i.kv_end), pieces(i.visible + 1));
    const int64_t rows = (i.q_count * m.heads + 127) / 128 * 128 * pieces(i.kv_end);
    EXPECT_LT(rows * (512 + 2) * 4, 64 << 20);
  }
  EXPECT_EQ(
      std::count_if(p.latent_items.begin(), p.latent_items.end(), [](const LatentItem& i) { return i.request == 2; }),
      2);
}

// Nor do they on a CPU.
TEST(Plan, RequestsWithoutTokensHaveNoItemsOnAGpu) {
  const ModelConfig m = test::small_deepseek();
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16, 64);
  const Made b({1, 0, 2}, {70, 30, 0}, 64);
  const DeviceInfo gpu{.device = {DeviceKind::cuda, 0}, .threads = 1, .scratch_per_worker = size_t{64} << 20};
  for (SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
    const Plan p = plan(m, spec, b.pages, b.batch(), gpu, {.path = PathPolicy::latent, .split = split});
    EXPECT_EQ(p.latent_items.size(), 2u);
    for (const LatentItem& i : p.latent_items) EXPECT_GT(i.q_count, 0);
  }
}

// However long the context, a range stays one that f32 sums.
TEST(Plan, RangesOfHugeContextsStayShort) {
  const ModelConfig m = test::small_deepseek();
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16);
  for (SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant})
    for (const std::vector<int64_t>& contexts :
         {std::vector<int64_t>{(int64_t{1} << 27) + 77}, std::vector<int64_t>(40, int64_t{1} << 20)}) {
      const Made b(std::vector<int64_t>(contexts.size(), 1), contexts, 64);
      const Plan p = make(m, spec, b, {.path = PathPolicy::latent, .split = split});
      int64_t positions = 0, longest = 0;
      for (const LatentItem& i : p.latent_items) {
        positions += i.kv_end - i.kv_begin;
        longest = std::max<int64_t>(longest, i.kv_end - i.kv_begin);
      }
      EXPECT_LE(longest, 1 << 18);
      EXPECT_EQ(positions,
                std::accumulate(contexts.begin(), contexts.end(), int64_t{0}) + static_cast<int64_t>(contexts.size()));
    }
}

// What only the block form uses is not reserved for the other one; attention itself is planned alike.
TEST(Plan, TheAttentionFormReservesNoProjections) {
  const ModelConfig m = test::small_deepseek();
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16);
  const Made b({1, 30, 20, 7}, {900, 0, 500, 0}, 64);
  const Plan block = make(m, spec, b), attention = make(m, spec, b, {.form = LayerForm::attention});
  check(attention);
  EXPECT_TRUE(block.serves_block());
  EXPECT_FALSE(attention.serves_block());
  size_t less = 0;
  for (const Region& r : block.regions) {
    const bool own = r.name == "query" || r.name == "query_latent" || r.name == "kv";
    EXPECT_EQ(attention.region(r.name).bytes, own ? 0 : r.bytes) << r.name;
    if (own) less += (r.bytes + 63) / 64 * 64;
  }
  EXPECT_EQ(attention.workspace_bytes + less, block.workspace_bytes);
  EXPECT_NE(attention.describe().find(", attention form"), std::string::npos);
  EXPECT_EQ(block.describe().find(", attention form"), std::string::npos);
  EXPECT_THROW(make(m, spec, b, {.form = LayerForm::attention, .path = PathPolicy::latent, .absorbed = true}),
               UnsupportedError);
}

TEST(Plan, OptionsThatCannotBe) {
  const ModelConfig m = test::small_deepseek();
  const Made b({1}, {4}, 64);
  auto message = [&](const ModelConfig& model, const CacheSpec& spec, const PlanOptions& o) -> std::string {
    try {
      make(model, spec, b, o);
    } catch (const Error& e) {
      return e.what();
    }
    return "planned";
  };
  PlanOptions o;
  o.fp8_query = true;
  EXPECT_EQ(message(m, cache_spec(m, CacheFormat::bf16), o),
            "plan: fp8 queries need cache format fp8, this one is bf16");
  o = {};
  o.decode = DecodeOperands::fp8;
  EXPECT_EQ(message(m, cache_spec(m, CacheFormat::fp8), o), "plan: decode fp8 needs fp8 queries (fp8_query)");
  o.fp8_query = true;
  EXPECT_EQ(message(m, cache_spec(m, CacheFormat::fp8), o), "planned");
  o.q_scale = 0;
  EXPECT_EQ(message(m, cache_spec(m, CacheFormat::fp8), o), "planned");
  o.q_scale = -1;
  EXPECT_EQ(message(m, cache_spec(m, CacheFormat::fp8), o),
            "plan: q_scale is -1.000000, must be finite and above 0, or 0: the layers'");
  o.q_scale = 0, o.tensor_parallel = 2;
  o.context_parallel = {.sharding = CacheSharding(2, 4), .rank = 0, .heads = {m.heads, m.heads}};
  EXPECT_NE(message(m, cache_spec(m, CacheFormat::fp8), o).find("over a cache that ranks share it must be one number"),
            std::string::npos);
  o.tensor_parallel = 1, o.context_parallel = {};
  EXPECT_EQ(message(test::small_sparse(), cache_spec(test::small_sparse(), CacheFormat::fp8), o),
            "plan: decode fp8 is of models without an indexer");
  o = {};
  o.compute = Dtype::f16;
  EXPECT_EQ(message(m, cache_spec(m, CacheFormat::bf16), o), "plan: compute dtype is f16; f32 and bf16 are supported");
  o = {};
  o.output = {.kind = OutputKind::fp8_groups, .group = 32};
  EXPECT_EQ(message(m, cache_spec(m, CacheFormat::bf16), o), "output: group is 32; 64 and 128 are supported");
  o.output = {.kind = OutputKind::fp8, .scale = 0};  // the scale comes with the output
  EXPECT_EQ(message(m, cache_spec(m, CacheFormat::bf16), o), "planned");
  ModelConfig v4 = m;
  v4.latent = 448;
  EXPECT_NE(message(v4, cache_spec(v4, CacheFormat::fp8_ds_v4), {}).find("values of 512"), std::string::npos);
  EXPECT_NE(message(m, cache_spec(m, CacheFormat::fp8_ds_v4), {}).find("holds latent 448"), std::string::npos);
  EXPECT_THROW(make(m, cache_spec(m, CacheFormat::bf16), b).region("nothing"), Error);
}

// Of a device's own least, and 16 ranges of few positions where that is 256.
TEST(Plan, FewPositionsAreCutToADevicesLeast) {
  const auto ranges = [](int32_t positions, int64_t split_keys) {
    const LatentRows row{0, 0, 1, positions - 1, positions};
    return plan_latent({&row, 1}, SplitPolicy::fast, split_keys).items.size();
  };
  EXPECT_EQ(ranges(256, 256), 1u);
  EXPECT_EQ(ranges(257, 256), 2u);
  EXPECT_EQ(ranges(4096, 256), 16u);
  EXPECT_EQ(ranges(8191, 256), 32u);
  EXPECT_EQ(ranges(8192, 256), 16u);
  EXPECT_EQ(ranges(16384, 256), 16u);
  EXPECT_EQ(ranges(65536, 256), 64u);
  EXPECT_EQ(ranges(512, 512), 1u);
  EXPECT_EQ(ranges(4096, 512), 8u);
  EXPECT_EQ(ranges(8191, 512), 16u);
  EXPECT_EQ(ranges(8192, 512), 8u);
  EXPECT_EQ(ranges(65536, 512), 64u);
  // Operands of f32 keep the usual least, whatever the device says.
  const ModelConfig model = preset("deepseek-v2-lite");
  const CacheSpec spec = cache_spec(model, CacheFormat::bf16);
  const std::vector<int32_t> starts{0, 1}, lengths{4096};
  std::vector<int32_t> table(64);
  for (int32_t i = 0; i < 64; ++i) table[static_cast<size_t>(i)] = i;
  const std::vector<int32_t> slots{4095};
  const Batch batch{starts, lengths, {table.data(), {1, 64}}, slots};
  for (Dtype compute : {Dtype::f32, Dtype::bf16}) {
    PlanOptions options;
    options.compute = compute;
    const Plan p = plan(model, spec, 64, batch, {.split_keys = 256}, options);
    EXPECT_EQ(p.latent_items.size(), compute == Dtype::bf16 ? 16u : 8u);
  }
}

TEST(Plan, NumbersOutOfRange) {
  const ModelConfig m = test::small_deepseek();
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16);
  const Made b({1}, {4}, 64);
  auto message = [&](const DeviceInfo& device, const PlanOptions& o) -> std::string {
    try {
      plan(m, spec, b.pages, b.batch(), device, o);
    } catch (const ShapeError& e) {
      return e.what();
    }
    return "planned";
  };
  EXPECT_EQ(message({}, {.context_rows = -1}), "plan: context_rows is -1, allowed 0 to 2147483647");
  EXPECT_EQ(message({}, {.max_model_len = int64_t{1} << 62}),
            "plan: max_model_len is 4611686018427387904, allowed 0 to 2147483647");
  EXPECT_EQ(message({}, {.max_requests = int64_t{1} << 60}),
            "plan: max_requests is 1152921504606846976, allowed 0 to 2147483647");
  EXPECT_EQ(message({.threads = -1}, {}), "plan: device threads is -1, allowed 1 to 2147483647");
  // A prefill so long that its partial rows could not be numbered.
  PlanOptions o{.path = PathPolicy::latent, .split = SplitPolicy::batch_invariant};
  EXPECT_THROW(make(m, spec, Made({int64_t{3} << 19}, {int64_t{1} << 29}, 64), o), UnsupportedError);
}

TEST(Plan, NamesParse) {
  for (PathPolicy p : {PathPolicy::automatic, PathPolicy::latent, PathPolicy::expanded, PathPolicy::by_length})
    EXPECT_EQ(parse_path_policy(to_string(p)), p);
  for (SplitPolicy p : {SplitPolicy::fast, SplitPolicy::batch_invariant})
    EXPECT_EQ(parse_split_policy(to_string(p)), p);
  EXPECT_THROW(parse_path_policy("fastest"), InputError);
  EXPECT_THROW(parse_split_policy(""), InputError);
}

// Rows of FlashMLA's callers: all of a sequence for every query, sequences without a key or longer than its queries.
TEST(PlanLatent, RowsThatAreNotCausalOrSeeNothing) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const LatentRows rows[] = {{0, 0, 200, kMost - 1, kMost}, {1, 200, 3, -1, 0}, {2, 203, 3, -2, 1}};
  const LatentWork work = plan_latent(rows, SplitPolicy::fast);
  std::map<int32_t, int64_t> seen;  // positions of a tile's items, by its first row
  for (const LatentItem& i : work.items) {
    EXPECT_LT(i.visible, rows[i.request].length);
    EXPECT_EQ(i.visible == kMost - 1, i.request == 0);
    seen[i.q_begin] += i.kv_end - i.kv_begin;
  }
  EXPECT_EQ(seen,
            (std::map<int32_t, int64_t>{{0, kMost}, {64, kMost}, {128, kMost}, {192, kMost}, {200, 0}, {203, 1}}));
}

}  // namespace
}  // namespace mla
