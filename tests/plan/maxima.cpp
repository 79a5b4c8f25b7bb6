// An engine's maxima: memory that every step within them fits, and plans of one shape for all of those.
#include <gtest/gtest.h>

#include <algorithm>

#include "cases/compare.hpp"
#include "mla/plan.hpp"
#include "plan/lists.hpp"
#include "support/batches.hpp"
#include "support/message.hpp"
#include "support/models.hpp"

namespace mla {
namespace {

using test::Made;

constexpr int64_t kPageSize = 16;

std::string to_string(const StepMaxima& m) {
  return "requests " + std::to_string(m.requests) + ", tokens " + std::to_string(m.tokens) + ", query_len " +
         std::to_string(m.query_len) + ", seq_len " + std::to_string(m.seq_len);
}

// Lengths within the maxima: often at them, often 0.
Made batch_within(const StepMaxima& m, cases::Random& random) {
  std::vector<int64_t> queries, contexts;
  int64_t left = m.tokens;
  const int64_t requests = random.integer(0, 2) == 0 ? m.requests : random.integer(0, m.requests);
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t most = std::min(left, m.query_len);
    const int64_t query =
        random.integer(0, 2) == 0 ? most : random.integer(0, random.integer(0, 1) ? most : std::min<int64_t>(most, 3));
    const int64_t room = m.seq_len - query;
    queries.push_back(query);
    contexts.push_back(random.integer(0, 2) == 0
                           ? room
                           : random.integer(0, random.integer(0, 1) ? room : std::min<int64_t>(room, 40)));
    left -= query;
  }
  return Made(queries, contexts, kPageSize);
}

StepMaxima random_maxima(cases::Random& random) {
  StepMaxima m{.requests = random.integer(1, random.integer(0, 1) ? 80 : 6)};
  m.query_len = random.integer(1, random.integer(0, 1) ? 4 : 300);
  m.seq_len = m.query_len + random.integer(0, random.integer(0, 1) ? 9000 : 600);
  m.tokens = random.integer(1, m.requests * m.query_len);
  return m;
}

struct Setting {
  std::string name;
  ModelConfig model;
  DeviceInfo device;
  PlanOptions options;
};
std::vector<Setting> settings() {
  std::vector<Setting> all;
  const DeviceInfo cpu{.threads = 2, .scratch_per_worker = 4096},
      gpu{.device = {DeviceKind::cuda, 0}, .scratch_per_worker = 1 << 20};
  const CostModel loads{.plain_elements = 1, .fp8_elements = 1};
  const auto add = [&](const std::string& name, const ModelConfig& model, const PlanOptions& options) {
    all.push_back({name + " on the CPU", model, cpu, options});
    PlanOptions wide = options;
    wide.compute = Dtype::bf16;
    all.push_back({name + " on a GPU", model, gpu, wide});
  };
  for (const SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant})
    for (const PathPolicy path : {PathPolicy::automatic, PathPolicy::latent, PathPolicy::expanded,
                                  PathPolicy::by_length, PathPolicy::by_prompt}) {
      const std::string how = std::string(to_string(path)) + ", " + std::string(to_string(split));
      add("dense, " + how, test::small_deepseek(), {.path = path, .split = split});
      for (const SparsePolicy sparse :
           {SparsePolicy::automatic, SparsePolicy::direct, SparsePolicy::upconvert, SparsePolicy::masked})
        add("sparse " + std::string(to_string(sparse)) + ", " + how, test::small_sparse(),
            {.path = path, .split = split, .sparse = sparse, .rates = loads});
    }
  add("selected by nobody", test::small_sparse(), {.sparse = SparsePolicy::dense});
  add("short splits", test::small_deepseek(), {.compute = Dtype::bf16});
  all.back().device.split_keys = all[all.size() - 2].device.split_keys = 64;
  add("attention form", test::small_sparse(), {.form = LayerForm::attention});
  add("quantised output", test::small_deepseek(),
      {.form = LayerForm::attention, .output = {.kind = OutputKind::fp8_groups, .group = 128}});
  add("no cache", test::small_deepseek(), {.form = LayerForm::attention, .cache_use = CacheUse::none});
  add("dummy", test::small_deepseek(), {.dummy = true});
  add("absorbed", test::small_deepseek(), {.absorbed = true});
  add("some context rows", test::small_deepseek(), {.path = PathPolicy::expanded, .context_rows = 100});
  for (const PathPolicy path : {PathPolicy::automatic, PathPolicy::expanded})
    add("prefills of codes, " + std::string(to_string(path)), test::small_deepseek(),
        {.path = path, .prefill = PrefillOperands::fp8});
  add("prefills of codes in few rows", test::small_deepseek(),
      {.path = PathPolicy::expanded, .prefill = PrefillOperands::fp8, .context_rows = 100});
  add("limits of its own", test::small_deepseek(), {.max_model_len = 20000, .max_requests = 7});
  PlanOptions shared{.tensor_parallel = 2};
  shared.context_parallel = {.sharding = CacheSharding(2, 4), .rank = 1, .heads = {2, 3}};
  add("a rank of a split cache", test::small_deepseek(), shared);
  shared.path = PathPolicy::expanded;
  add("a rank of a split cache, expanded", test::small_deepseek(), shared);
  shared.context_rows = 100;
  add("a rank of a split cache, expanded in few rows", test::small_deepseek(), shared);
  shared = {.tensor_parallel = 4, .path = PathPolicy::by_length, .reorder_batch_threshold = 2};
  shared.context_parallel = {.sharding = CacheSharding(2, 1), .rank = 2, .heads = {2, 3, 3, 1}};
  add("a rank of groups", test::small_deepseek(), shared);
  for (const SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant})
    for (const SparsePolicy sparse : {SparsePolicy::automatic, SparsePolicy::upconvert, SparsePolicy::masked}) {
      PlanOptions selects{.tensor_parallel = 4, .split = split, .sparse = sparse};
      selects.context_parallel = {
          .sharding = CacheSharding(2, sparse == SparsePolicy::automatic ? 1 : 16), .rank = 2, .heads = {2, 3, 3, 1}};
      add("a rank of groups that select, " + std::string(to_string(sparse)) + ", " + std::string(to_string(split)),
          test::small_sparse(), selects);
    }
  return all;
}

TEST(StepMemory, BoundsEveryPlanWithinTheMaxima) {
  cases::Random random(11);
  int plans = 0;
  for (const Setting& s : settings()) {
    const CacheSpec spec = cache_spec(s.model, CacheFormat::bf16, kPageSize);
    double nearest = 0;
    for (int i = 0; i < 40; ++i) {
      const StepMaxima m = random_maxima(random);
      const StepMemory most = step_memory(s.model, spec, m, s.device, s.options);
      for (int k = 0; k < 8; ++k) {
        Made b = batch_within(m, random);
        if (s.options.cache_use == CacheUse::none)
          for (int64_t r = 0; r < b.batch().requests(); ++r)
            b.lengths[static_cast<size_t>(r)] = static_cast<int32_t>(b.batch().query_len(r));
        const Plan p = plan(s.model, spec, b.pages, b.batch(), s.device, s.options);
        ASSERT_LE(p.workspace_bytes, most.workspace_bytes) << s.name << ": " << to_string(m) << '\n' << p.describe();
        ASSERT_LE(p.selection_bytes, most.selection_bytes) << s.name << ": " << to_string(m);
        nearest = std::max(nearest, static_cast<double>(p.workspace_bytes) / static_cast<double>(most.workspace_bytes));
        ++plans;
      }
    }
    // Not a bound that nothing comes near: some batch of each setting takes nearly half of it.
    EXPECT_GE(nearest, 0.4) << s.name;
  }
  EXPECT_GE(plans, 10000);
}

// Steps that a server is sized for.
TEST(StepMemory, IsThatOfTheLargestStep) {
  const ModelConfig model = preset("deepseek-v3");
  const CacheSpec spec = cache_spec(model, CacheFormat::bf16, 64);
  const DeviceInfo gpu{.device = {DeviceKind::cuda, 0}, .scratch_per_worker = size_t{64} << 20};
  const auto whole = [&](const std::vector<int64_t>& queries, const std::vector<int64_t>& contexts, const StepMaxima& m,
                         const PlanOptions& o) {
    const Made b(queries, contexts, 64);
    return static_cast<double>(step_memory(model, spec, m, gpu, o).workspace_bytes) /
           static_cast<double>(plan(model, spec, b.pages, b.batch(), gpu, o).workspace_bytes);
  };
  EXPECT_EQ(
      whole(std::vector<int64_t>(64, 1), std::vector<int64_t>(64, 4095), {64, 64, 1, 4096}, {.compute = Dtype::bf16}),
      1.0);
  EXPECT_EQ(whole(std::vector<int64_t>(16, 4), std::vector<int64_t>(16, 4092), {16, 64, 4, 4096},
                  {.path = PathPolicy::latent, .compute = Dtype::bf16}),
            1.0);
  EXPECT_EQ(whole({2048, 2048}, {63488, 63488}, {2, 4096, 2048, 65536},
                  {.path = PathPolicy::expanded, .compute = Dtype::bf16}),
            1.0);
}

TEST(StepMemory, NamesWhatCannotBe) {
  const ModelConfig model = test::small_deepseek();
  const CacheSpec spec = cache_spec(model, CacheFormat::bf16, kPageSize);
  const auto message = [&](const StepMaxima& m, const PlanOptions& o = {}) {
    return test::message_of([&] { (void)step_memory(model, spec, m, {}, o); });
  };
  EXPECT_EQ(message({-1, 1, 1, 1}), "plan: maxima requests is -1, allowed 0 to 2147483647");
  EXPECT_EQ(message({1, int64_t{1} << 31, 1, 1}), "plan: maxima tokens is 2147483648, allowed 0 to 2147483647");
  EXPECT_EQ(message({1, 8, 8, 7}), "plan: maxima seq_len is 7, below query_len 8");
  EXPECT_EQ(message({1, 1, 1, 1}, {.context_rows = -1}), "plan: context_rows is -1, allowed 0 to 2147483647");
  EXPECT_EQ(message({0, 0, 0, 0}), "no error");
}

// What steps of maxima may be planned with.
std::vector<Setting> shaped_settings() {
  std::vector<Setting> all;
  for (Setting s : settings()) {
    const PlanOptions& o = s.options;
    if (o.path == PathPolicy::expanded || o.path == PathPolicy::by_prompt || o.cache_use == CacheUse::none || o.dummy ||
        o.output.kind != OutputKind::none)
      continue;
    s.options.max_requests = s.options.max_model_len = 0;
    all.push_back(s);
  }
  return all;
}

Plan plan_of(const Setting& s, const CacheSpec& spec, const Made& b) {
  return plan(s.model, spec, b.pages, b.batch(), s.device, s.options);
}

// Rows that an index item covers, of all: each once at most.
void cover(std::vector<int>& rows, const IndexItem& i) {
  for (int32_t q = 0; q < i.q_count; ++q) ++rows.at(static_cast<size_t>(i.q_begin + q));
}

TEST(PlanOfMaxima, HasOneShapeForEveryBatch) {
  cases::Random random(23);
  for (Setting s : shaped_settings()) {
    const CacheSpec spec = cache_spec(s.model, CacheFormat::bf16, kPageSize);
    for (int i = 0; i < 20; ++i) {
      const StepMaxima m = random_maxima(random);
      s.options.maxima = m;
      const StepOfMaxima whole = plan_maxima(s.model, spec, s.device, s.options);
      const std::string how = s.name + ": " + to_string(m);
      const StepMemory most = step_memory(s.model, spec, m, s.device, s.options);
      ASSERT_LE(whole.plan.workspace_bytes, most.workspace_bytes) << how;
      ASSERT_LE(whole.plan.selection_bytes, most.selection_bytes) << how;
      ASSERT_EQ(whole.plan.tokens, std::min(m.tokens, m.requests * m.query_len)) << how;
      ASSERT_EQ(whole.batch.block_table.extent<Request>(), m.requests) << how;
      for (int k = 0; k < 6; ++k) {
        const Made b = batch_within(m, random);
        const Plan p = plan_of(s, spec, b);
        ASSERT_EQ(p.workspace_bytes, whole.plan.workspace_bytes) << how;
        ASSERT_EQ(p.selection_bytes, whole.plan.selection_bytes) << how;
        ASSERT_EQ(p.steps.size(), whole.plan.steps.size()) << how;
        for (size_t step = 0; step < p.steps.size(); ++step)
          ASSERT_EQ(p.steps[step].work.index(), whole.plan.steps[step].work.index()) << how << " step " << step;
        ASSERT_EQ(p.lists, whole.plan.lists) << how;
        for (const ListKey key : p.lists) {
          const auto list = planning::host_list(p, b.batch(), key),
                     of_whole = planning::host_list(whole.plan, whole.batch, key);
          ASSERT_EQ(list.count, of_whole.count) << how << ' ' << list.name;
        }
        // Every token has its row, and no other row is written.
        for (int64_t t = 0; t < p.tokens; ++t) {
          ASSERT_EQ(p.written_rows[static_cast<size_t>(t)], t < p.batch_tokens ? t : -1) << how;
          ASSERT_TRUE(t < p.batch_tokens || p.slots[static_cast<size_t>(t)] == -1) << how;
        }
        if (p.sparse_rows() == 0 || !p.serves_block()) continue;
        std::vector<int> selecting(static_cast<size_t>(p.tokens));
        for (const IndexItem& item : p.index_schedule.all) cover(selecting, item);
        for (const IndexTile& tile : p.index_schedule.selected) {
          int32_t next = 0;
          for (const IndexItem& item : tile.rows) {
            ASSERT_GE(item.row, next) << how;
            next = item.row + item.q_count;
            cover(selecting, item);
          }
          ASSERT_LE(next, p.index_schedule.tiles.rows) << how;
        }
        for (int64_t t = 0; t < p.tokens; ++t)
          ASSERT_EQ(selecting[static_cast<size_t>(t)], t < p.batch_tokens) << how << " token " << t;
      }
    }
  }
}

// Captured launches are sized by these lists.
TEST(PlanOfMaxima, ListsOfItsStepAreAsLargeAsAnyBatchs) {
  cases::Random random(29);
  for (Setting s : shaped_settings()) {
    if (s.device.device.kind != DeviceKind::cuda) continue;
    const CacheSpec spec = cache_spec(s.model, CacheFormat::bf16, kPageSize);
    for (int i = 0; i < 30; ++i) {
      const StepMaxima m = random_maxima(random);
      s.options.maxima = m;
      const StepOfMaxima whole = plan_maxima(s.model, spec, s.device, s.options);
      const std::string how = s.name + ": " + to_string(m);
      struct Size {
        int64_t tokens = 0, tiles = 0, longest = 0, keys = 0, last = 0;
      };
      // Tiles of sixteen rows: the smallest that any kernel has.
      const auto latent_size = [&](const Plan& p) {
        Size z;
        for (const LatentItem& item : p.latent_items) {
          z.tokens += item.q_count, z.longest = std::max<int64_t>(z.longest, item.q_count);
          z.tiles += (item.q_count * s.model.heads + 15) / 16;
          z.keys = std::max<int64_t>(z.keys, item.q_count > 0 ? item.kv_end : 0);
        }
        return z;
      };
      const auto index_size = [&](const std::vector<IndexItem>& items, int32_t IndexItem::*begin) {
        Size z;
        for (const IndexItem& item : items) {
          if (item.q_count == 0) continue;
          z.longest = std::max<int64_t>(z.longest, item.q_count);
          z.keys = std::max<int64_t>(z.keys, item.columns(item.q_count - 1));
          z.last = std::max<int64_t>(z.last, item.*begin + item.q_count);
        }
        return z;
      };
      const auto expect_less = [&](const Size& a, const Size& b, const std::string& what) {
        EXPECT_LE(a.tokens, b.tokens) << how << ' ' << what;
        EXPECT_LE(a.tiles, b.tiles) << how << ' ' << what;
        EXPECT_LE(a.longest, b.longest) << how << ' ' << what;
        EXPECT_LE(a.keys, b.keys) << how << ' ' << what;
        EXPECT_LE(a.last, b.last) << how << ' ' << what;
      };
      for (int k = 0; k < 6; ++k) {
        const Made b = batch_within(m, random);
        const Plan p = plan_of(s, spec, b);
        expect_less(latent_size(p), latent_size(whole.plan), "latent");
        if (p.sparse_rows() == 0 || !p.serves_block()) continue;
        const IndexSchedule &found = p.index_schedule, &most = whole.plan.index_schedule;
        expect_less(index_size(found.all, &IndexItem::q_begin), index_size(most.all, &IndexItem::q_begin), "filled");
        ASSERT_EQ(found.selected.size(), most.selected.size()) << how;
        for (size_t t = 0; t < found.selected.size(); ++t)
          expect_less(index_size(found.selected[t].rows, &IndexItem::row),
                      index_size(most.selected[t].rows, &IndexItem::row), "tile");
      }
      for (const LatentItem& item : whole.plan.latent_items) {
        EXPECT_LE(item.q_begin + item.q_count, whole.plan.tokens) << how;
        EXPECT_LE(item.kv_end, whole.batch.block_table.extent<Page>() * kPageSize) << how;
        EXPECT_LT(item.request, m.requests) << how;
      }
      if (testing::Test::HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace mla
