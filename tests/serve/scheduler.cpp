// The scheduler: order, budgets, reuse, preemption; and random traces against its invariants.
#include "serve/scheduler.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "cases/compare.hpp"
#include "mla/error.hpp"

namespace mla::serve {
namespace {

Trace trace_of(std::vector<TraceRequest> requests, int64_t block = 8) {
  Trace t{.source = "test", .format = "test", .block_tokens = block, .requests = std::move(requests)};
  for (size_t r = 0; r < t.requests.size(); ++r)
    while (static_cast<int64_t>(t.requests[r].blocks.size()) * block < t.requests[r].input)
      t.requests[r].blocks.push_back(1000 * (r + 1) + t.requests[r].blocks.size());
  return t;
}

TEST(Scheduler, ChunksPrefillsAndDecodesFirst) {
  const Trace t = trace_of({{.arrival = 0, .input = 10, .output = 3, .blocks = {}},
                            {.arrival = 0.5, .input = 6, .output = 1, .blocks = {}}});
  Scheduler s(t, {.pages = 100, .page_size = 4, .token_budget = 7});
  const auto step = [&](double now) {
    const auto pieces = s.plan_step(now);
    s.commit(now + 1);
    return pieces;
  };
  auto p = step(0);  // the second request is not there yet
  ASSERT_EQ(p.size(), 1u);
  EXPECT_EQ(p[0].count, 7);
  EXPECT_FALSE(p[0].emits);
  p = step(1);  // 3 left of the first, then 4 of the second
  ASSERT_EQ(p.size(), 2u);
  EXPECT_EQ(p[0].start, 7);
  EXPECT_EQ(p[0].count, 3);
  EXPECT_TRUE(p[0].emits);
  EXPECT_EQ(p[1].request, 1);
  EXPECT_EQ(p[1].count, 4);
  p = step(2);
  ASSERT_EQ(p.size(), 2u);
  EXPECT_TRUE(p[0].decode);
  EXPECT_EQ(p[0].start, 10);
  EXPECT_EQ(p[1].count, 2);
  p = step(3);
  ASSERT_EQ(p.size(), 1u);
  EXPECT_TRUE(p[0].decode);
  EXPECT_TRUE(s.done());
  EXPECT_EQ(s.times()[0].first_token, 2);
  EXPECT_EQ(s.times()[0].finish, 4);
  EXPECT_EQ(s.times()[1].first_token, 3);
  EXPECT_EQ(s.allocator().counts().referenced, 0);
}

TEST(Scheduler, SharesFullPagesOfEqualPrefixes) {
  const Trace t = trace_of({{.arrival = 0, .input = 20, .output = 1, .blocks = {7, 8, 9}},
                            {.arrival = 5, .input = 20, .output = 1, .blocks = {7, 8, 10}},
                            {.arrival = 9, .input = 16, .output = 1, .blocks = {7, 8}}});
  Scheduler s(t, {.pages = 100, .page_size = 4, .token_budget = 64});
  s.plan_step(0);
  s.commit(1);
  auto p = s.plan_step(5);
  ASSERT_EQ(p.size(), 1u);
  EXPECT_EQ(p[0].start, 16);  // blocks 7 and 8 are four full pages
  s.commit(6);
  p = s.plan_step(9);
  EXPECT_EQ(p[0].start, 12);  // the last prompt token is computed even when all is cached
  s.commit(10);
  EXPECT_EQ(s.hit_tokens(), 28);
  EXPECT_EQ(s.prompt_tokens(), 56);
}

TEST(Scheduler, RefusesWhatCanNeverFit) {
  const Trace t = trace_of(
      {{.arrival = 0, .input = 30, .output = 3, .blocks = {}}, {.arrival = 0, .input = 4, .output = 1, .blocks = {}}});
  Scheduler s(t, {.pages = 8, .page_size = 4, .token_budget = 64});
  const auto p = s.plan_step(0);
  ASSERT_EQ(p.size(), 1u);
  EXPECT_EQ(p[0].request, 1);
  s.commit(1);
  EXPECT_TRUE(s.done());
  EXPECT_EQ(s.refused(), 1);
  EXPECT_TRUE(s.times()[0].refused);
}

TEST(Scheduler, PreemptsTheLastAndStartsItOver) {
  // Both prompts fit; their outputs do not.
  const Trace t = trace_of(
      {{.arrival = 0, .input = 8, .output = 9, .blocks = {}}, {.arrival = 0, .input = 8, .output = 9, .blocks = {}}});
  Scheduler s(t, {.pages = 5, .page_size = 4, .token_budget = 64, .prefix_reuse = false});
  double now = 0;
  int64_t computed = 0;
  while (!s.done()) {
    const auto p = s.plan_step(now);
    ASSERT_FALSE(p.empty());
    for (const StepPiece& piece : p) computed += piece.count;
    s.commit(++now);
  }
  EXPECT_GE(s.preemptions(), 1);
  EXPECT_EQ(s.finished(), 2);
  EXPECT_GT(computed, 2 * 16);  // recomputation
  EXPECT_LT(s.times()[0].finish, s.times()[1].finish);
  EXPECT_EQ(s.allocator().available(), 5);
}

TEST(Scheduler, BadLimits) {
  const Trace t = trace_of({{.arrival = 0, .input = 1, .output = 1, .blocks = {}}});
  EXPECT_THROW(Scheduler(t, {.pages = 0}), InputError);
  EXPECT_THROW(Scheduler(t, {.pages = 1, .page_size = 0}), InputError);
  EXPECT_THROW(Scheduler(t, {.pages = 1, .token_budget = 0}), InputError);
}

// Whatever the trace: budgets hold, tokens run once each in order (but for preemption), pages belong to one sequence or
// to equal prefixes, everything ends, and nothing leaks.
TEST(Scheduler, RandomTraces) {
  cases::Random random(8);
  for (int round = 0; round < 150; ++round) {
    std::vector<TraceRequest> requests(random.integer(1, 25));
    double arrival = 0;
    for (TraceRequest& r : requests) {
      r = {.arrival = arrival, .input = random.integer(1, 60), .output = random.integer(1, 20), .blocks = {}};
      arrival += random.uniform() * 3;
      for (int64_t b = random.integer(0, r.input / 8); b > 0; --b)
        r.blocks.push_back(r.blocks.size());  // a common prefix
    }
    const Trace t = trace_of(std::move(requests));
    const Limits limits{.pages = random.integer(6, 60),
                        .page_size = random.integer(1, 9),
                        .token_budget = random.integer(1, 50),
                        .prompts_apart = round % 2 == 1};
    Scheduler s(t, limits);
    std::vector<int64_t> computed(t.requests.size()), generated(t.requests.size());
    double now = 0;
    for (int steps = 0; !s.done(); ++steps) {
      ASSERT_LT(steps, 20000);
      const auto pieces = s.plan_step(now);
      if (pieces.empty()) {
        if (!std::isfinite(s.next_arrival())) break;
        now = std::max(now, s.next_arrival());
        continue;
      }
      int64_t tokens = 0;
      bool prefill = false;
      std::map<PageId, std::pair<int64_t, int64_t>> written;
      for (const StepPiece& p : pieces) {
        tokens += p.count;
        EXPECT_GE(p.count, 1);
        const int64_t prompt = t.requests[p.request].input;
        EXPECT_TRUE(!limits.prompts_apart || p.start >= prompt || p.start + p.count <= prompt);
        EXPECT_GE(now, t.requests[p.request].arrival);
        if (p.decode) {
          EXPECT_FALSE(prefill) << "decodes come first";
          EXPECT_EQ(p.count, 1);
        }
        prefill = prefill || !p.decode;
        // In order, but after a preemption: then from the front, or from what the cache still holds of it.
        if (computed[p.request] > 0 && p.start != computed[p.request]) {
          EXPECT_GT(s.preemptions(), 0);
          EXPECT_LT(p.start, computed[p.request]);
          EXPECT_EQ(p.start % limits.page_size, 0);
        }
        computed[p.request] = p.start + p.count;
        EXPECT_EQ(p.emits, p.start + p.count == t.requests[p.request].input + generated[p.request]);
        generated[p.request] += p.emits;
        const auto pages = s.pages(p.request);
        ASSERT_GE(static_cast<int64_t>(pages.size()) * limits.page_size, p.start + p.count);
        for (int64_t i = p.start / limits.page_size; i * limits.page_size < p.start + p.count; ++i) {
          EXPECT_TRUE(written.emplace(pages[i], std::pair(p.request, i)).second) << "two sequences write a page";
        }
      }
      EXPECT_LE(tokens, limits.token_budget);
      const PageCounts c = s.allocator().counts();
      EXPECT_LE(c.referenced, limits.pages);
      EXPECT_EQ(c.referenced + c.cached + c.free, limits.pages);
      s.commit(now += 0.5);
    }
    EXPECT_EQ(s.allocator().counts().referenced, 0);
    EXPECT_EQ(s.finished() + s.refused(), static_cast<int64_t>(t.requests.size()));
    for (size_t r = 0; r < t.requests.size(); ++r) {
      EXPECT_EQ(generated[r], s.times()[r].refused ? 0 : t.requests[r].output);
    }
  }
}

}  // namespace
}  // namespace mla::serve
