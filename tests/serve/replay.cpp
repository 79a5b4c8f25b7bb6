// The replay end to end on a small model: every row that is sampled is recomputed in float64, through every cache
// format and path, with shared prefixes and with too few pages.
#include "serve/replay.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "mla/error.hpp"
#include "serve/chrome_trace.hpp"
#include "serve/series.hpp"
#include "support/models.hpp"
#include "support/nodes.hpp"

namespace mla::serve {
namespace {

struct Replayed {
  Trace trace = generate_trace({.requests = 8, .input = 60, .output = 6, .rate = 200, .seed = 3});
  Options options;
  ThreadPool pool{2};
  std::atomic<bool> stop{false};
  Replayed() {
    trace.block_tokens = 16;
    for (TraceRequest& r : trace.requests)
      while (static_cast<int64_t>(r.blocks.size()) * 16 < r.input) r.blocks.push_back(r.blocks.size());
    options.model = test::small_deepseek();
    options.limits = {.pages = 0, .page_size = 16, .token_budget = 50};
    options.verify = 12;
    options.plan.compute = Dtype::bf16;
  }
  Result go() { return replay(trace, options, pool, stop); }
};

TEST(Replay, EveryFormatAndPathVerifies) {
  for (CacheFormat format :
       {CacheFormat::f32, CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8, CacheFormat::fp8_ds_mla})
    for (PathPolicy path : {PathPolicy::automatic, PathPolicy::latent, PathPolicy::expanded}) {
      Replayed run;
      run.options.format = format;
      run.options.plan.path = path;
      const Result r = run.go();
      EXPECT_EQ(r.finished, 8);
      EXPECT_EQ(r.refused, 0);
      EXPECT_GT(r.hit_tokens, 0);
      ASSERT_EQ(r.samples.size(), 12u);
      const Verification v = verify(run.trace, run.options, r.samples, run.pool, run.stop);
      EXPECT_EQ(v.rows, 12);
      EXPECT_EQ(v.failed, 0) << to_string(format) << " " << to_string(path) << ": " << v.worst << " error "
                             << v.worst_error << " bound " << v.worst_bound;
    }
}

// Weights and caches are placed; where a byte lies moves no bit of a row.
TEST(Replay, APoolOverNodesGivesTheSameBits) {
  for (const bool sparse : {false, true}) {
    Replayed run;
    if (sparse) run.options.model = test::small_sparse();
    for (TraceRequest& q : run.trace.requests) q.arrival = 0;  // else steps follow from measured times
    const Result right = run.go();
    ThreadPool nodes = test::pool_of_nodes({1, 1});
    const Result r = replay(run.trace, run.options, nodes, run.stop);
    EXPECT_EQ(r.finished, 8);
    ASSERT_EQ(r.samples.size(), right.samples.size());
    for (size_t i = 0; i < r.samples.size(); ++i) EXPECT_EQ(r.samples[i].row, right.samples[i].row) << i;
  }
}

// Heads over ranks, more ranks than threads among them: the same steps, rows that are those of one rank.
TEST(Replay, RanksThatSplitTheHeadsVerify) {
  for (const bool sparse : {false, true})
    for (const Absorption absorption : {Absorption::runtime, Absorption::full}) {
      Replayed one;
      one.options.model = sparse ? test::small_sparse() : test::small_deepseek();
      one.options.model.heads = 5;
      one.options.absorption = absorption;
      const Result right = one.go();
      for (const int ranks : {2, 3, 5}) {
        Replayed run;
        run.options = one.options;
        run.options.plan.tensor_parallel = ranks;
        const Result r = run.go();
        const std::string what = std::to_string(ranks) + " ranks" + (sparse ? ", sparse" : "");
        EXPECT_EQ(r.finished, 8) << what;
        EXPECT_EQ(r.cache_bytes, static_cast<size_t>(ranks) * right.cache_bytes) << what;
        EXPECT_GT(r.weight_bytes, right.weight_bytes) << what;
        const Verification v = verify(run.trace, run.options, r.samples, run.pool, run.stop);
        EXPECT_EQ(v.rows, 12) << what;
        EXPECT_EQ(v.failed, 0) << what << ": " << v.worst << " error " << v.worst_error << " bound " << v.worst_bound;
        int64_t sums = 0;
        for (const Profile::Row& row : r.profile.rows())
          if (row.op == "all_reduce") sums += row.calls;
        EXPECT_EQ(sums, r.steps * r.layers) << what;
      }
    }
}

// An error of any rank is the replay's, and nobody waits for who had it.
TEST(Replay, AnErrorOfARankEndsAll) {
  Replayed run;
  run.options.model.heads = 2;
  run.options.plan.tensor_parallel = 3;
  EXPECT_THROW(run.go(), InputError);
  // The ranks' memory ends together with them: a replay that is given up in its steps leaves none behind.
  run.options.plan.tensor_parallel = 2;
  const auto give_up = [](const Progress& p) {
    if (p.steps == 2) throw InputError("enough");
  };
  EXPECT_THROW((void)replay(run.trace, run.options, run.pool, run.stop, give_up), InputError);
  EXPECT_EQ(run.go().finished, 8);
}

// Ranks as processes are: each with a trace, options and a scheduler of its own. Here they are threads, which is
// nothing to the replay; what went wrong by rank.
struct Processes {
  std::vector<std::unique_ptr<Replayed>> runs;
  std::vector<Result> results;
  std::vector<std::string> errors;
  explicit Processes(int n) : results(static_cast<size_t>(n)), errors(static_cast<size_t>(n)) {
    for (int r = 0; r < n; ++r) {
      runs.push_back(std::make_unique<Replayed>());
      runs.back()->options.plan.tensor_parallel = n;
      runs.back()->options.model.heads = 5;
      runs.back()->options.patience = std::chrono::seconds(20);
    }
  }
  void go() {
    std::vector<Communicator> group = thread_communicators(static_cast<int>(runs.size()));
    std::vector<std::jthread> threads;
    for (size_t r = 0; r < runs.size(); ++r)
      threads.emplace_back([this, r, &mine = group[r]] {
        runs[r]->options.group = &mine;
        try {
          results[r] = runs[r]->go();
        } catch (const std::exception& e) {
          mine.abort(e.what());
          errors[r] = e.what();
        }
        runs[r]->options.group = nullptr;
      });
  }
};

TEST(Replay, ProcessesRunTheSameStepsAndVerify) {
  for (const int groups_of : {1, 2, 4})
    for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8}) {
      Processes p(4);
      for (auto& run : p.runs) {
        run->options.format = format;
        run->options.context_parallel = groups_of;
        run->options.interleave = 4;
        if (groups_of > 1) run->options.limits.page_size = 32;
        run->options.layers = 2;
        if (format == CacheFormat::fp8) run->options.k_scales.assign(2, 0.0f);
      }
      p.runs[1]->options.verify = 0;
      p.go();
      for (const std::string& error : p.errors) EXPECT_EQ(error, "");
      const Result& first = p.results[0];
      EXPECT_EQ(first.finished, 8);
      for (const Result& r : p.results) {
        ASSERT_EQ(r.series.size(), first.series.size());
        for (size_t i = 0; i < r.series.size(); ++i) {
          // By rank 0's clock, on all ranks.
          EXPECT_EQ(r.series[i].start, first.series[i].start);
          EXPECT_EQ(r.series[i].seconds, first.series[i].seconds);
          EXPECT_EQ(r.series[i].prefill_tokens, first.series[i].prefill_tokens);
          EXPECT_EQ(r.series[i].decode_tokens, first.series[i].decode_tokens);
        }
        EXPECT_EQ(r.ttft, first.ttft);
        EXPECT_EQ(r.weight_bytes, first.weight_bytes);
        EXPECT_EQ(r.cache_bytes, first.cache_bytes);
        EXPECT_EQ(r.k_scales, first.k_scales);
      }
      Replayed& run = *p.runs[0];
      run.options.k_scales = first.k_scales;
      const Verification v = verify(run.trace, run.options, first.samples, run.pool, run.stop);
      EXPECT_EQ(v.rows, 12);
      EXPECT_EQ(v.failed, 0) << v.worst << " error " << v.worst_error << " bound " << v.worst_bound;
    }
}

TEST(Replay, AStopOfOneProcessEndsAllAfterTheSameStep) {
  Processes p(3);
  std::jthread stop([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    p.runs[2]->stop = true;
  });
  for (auto& run : p.runs) {
    run->trace = generate_trace({.requests = 2000, .input = 60, .output = 60, .rate = 200, .seed = 3});
    run->options.limits.pages = 200;
  }
  p.go();
  for (const std::string& error : p.errors) EXPECT_EQ(error, "");
  for (const Result& r : p.results) {
    EXPECT_TRUE(r.interrupted);
    EXPECT_EQ(r.steps, p.results[0].steps);
    EXPECT_LT(r.finished, 2000);
  }
}

// Whoever was given another trace, or other options, is named before any step; so is one whose call throws.
TEST(Replay, AProcessThatIsNotAlikeIsNamed) {
  for (int what = 0; what < 5; ++what) {
    Processes p(3);
    Replayed& odd = *p.runs[1];
    switch (what) {
      case 0: odd.trace.requests[3].output += 1; break;
      case 1: odd.options.seed = 2; break;
      case 2: odd.options.weights = Dtype::f32; break;
      case 3: odd.options.limits.token_budget = 51; break;
      default: odd.options.limits.page_size = 17;
    }
    p.go();
    for (size_t r = 0; r < 3; ++r) {
      EXPECT_NE(p.errors[r].find("rank 1 "), std::string::npos) << what << ": " << p.errors[r];
      EXPECT_NE(p.errors[r].find("trace and options"), std::string::npos) << what << ": " << p.errors[r];
    }
  }
  Processes p(3);
  p.runs[2]->options.layers = 99;
  p.go();
  EXPECT_EQ(p.errors[2].substr(0, 14), "--layers is 99");
  EXPECT_NE(p.errors[0].find("rank 2 aborted: --layers is 99"), std::string::npos) << p.errors[0];

  Processes two(2);
  for (auto& run : two.runs) run->options.plan.tensor_parallel = 3;
  two.go();
  EXPECT_EQ(two.errors[0], "tensor_parallel is 3, the group has 2 ranks");
}

TEST(Replay, SparseModelsVerifyOnEveryModeAndFormat) {
  for (SparsePolicy policy : {SparsePolicy::automatic, SparsePolicy::mixed, SparsePolicy::direct,
                              SparsePolicy::upconvert, SparsePolicy::dense, SparsePolicy::masked})
    for (IndexCacheFormat index : index_cache_formats()) {
      Replayed run;
      run.options.model = test::small_sparse();
      run.options.format = CacheFormat::fp8_ds_mla;
      run.options.plan.sparse = policy;
      run.options.plan.index_format = index;
      run.options.plan.index_hadamard = policy == SparsePolicy::mixed;
      const Result r = run.go();
      EXPECT_EQ(r.finished, 8);
      EXPECT_GT(r.hit_tokens, 0);
      const Verification v = verify(run.trace, run.options, r.samples, run.pool, run.stop);
      EXPECT_EQ(v.failed, 0) << to_string(policy) << " " << to_string(index) << ": " << v.worst << " error "
                             << v.worst_error << " bound " << v.worst_bound;
      if (policy == SparsePolicy::dense) {
        EXPECT_EQ(r.sparse_rows, 0);
        EXPECT_EQ(v.selections, 0);
        continue;
      }
      EXPECT_GT(v.selections, 0);
      EXPECT_GT(r.sparse_rows, 0);
      EXPECT_GT(r.unscored_rows, 0);
      EXPECT_EQ(r.sparse_rows + r.unscored_rows, r.prefill_tokens + r.decode_tokens);
      // Rows that topk holds whole are not among the selected ones, though their request selects.
      EXPECT_LT(r.selected_keys, r.seen_keys);
      EXPECT_EQ(r.selected_keys, r.sparse_rows * 24);
    }
}

TEST(Replay, VerificationCatchesAWrongSelection) {
  Replayed run;
  run.options.model = test::small_sparse();
  run.options.layers = 1;  // the one with an indexer
  Result r = run.go();
  const auto sparse = std::find_if(r.samples.begin(), r.samples.end(), [](const Sample& s) {
    return static_cast<int64_t>(s.selected.size()) == 24 && s.position > 40;
  });
  ASSERT_NE(sparse, r.samples.end());
  EXPECT_EQ(verify(run.trace, run.options, r.samples, run.pool, run.stop).failed, 0);
  const std::vector<int32_t> chosen = sparse->selected;
  sparse->selected.pop_back();
  EXPECT_EQ(verify(run.trace, run.options, r.samples, run.pool, run.stop).failed, 1);
  sparse->selected = chosen;
  // The worst of the positions that were left out takes the place of the first.
  for (int32_t j = 0; j <= sparse->position; ++j)
    if (std::find(chosen.begin(), chosen.end(), j) == chosen.end()) {
      sparse->selected[0] = j;
      if (verify(run.trace, run.options, r.samples, run.pool, run.stop).failed == 1) return;
    }
  FAIL() << "no other choice is refused";
}

TEST(Replay, WeightsHeldOtherwiseVerify) {
  for (bool sparse : {false, true})
    for (const auto& [absorption, up] : {std::pair{Absorption::full, WeightFormat::plain},
                                         {Absorption::full_fp8, WeightFormat::plain},
                                         {Absorption::runtime, WeightFormat::fp8},
                                         {Absorption::runtime, WeightFormat::mxfp4}}) {
      Replayed run;
      if (sparse) run.options.model = test::small_sparse();
      run.options.absorption = absorption;
      run.options.up = up;
      const Result r = run.go();
      EXPECT_EQ(r.finished, 8);
      const Verification v = verify(run.trace, run.options, r.samples, run.pool, run.stop);
      EXPECT_EQ(v.failed, 0) << to_string(absorption) << " " << to_string(up) << ": " << v.worst << " error "
                             << v.worst_error << " bound " << v.worst_bound;
    }
}

TEST(Replay, Fp8ProductsVerify) {
  for (Activations activations : {Activations::plain, Activations::fp8_128}) {
    Replayed run;
    run.options.products = WeightFormat::fp8;
    run.options.plan.activations = activations;
    const Result r = run.go();
    EXPECT_EQ(r.finished, 8);
    const Verification v = verify(run.trace, run.options, r.samples, run.pool, run.stop);
    EXPECT_EQ(v.failed, 0) << to_string(activations) << ": " << v.worst << " error " << v.worst_error << " bound "
                           << v.worst_bound;
  }
}

TEST(Replay, VerificationCatchesAWrongRow) {
  Replayed run;
  Result r = run.go();
  r.samples[5].row[7] += 0.5f;
  EXPECT_EQ(verify(run.trace, run.options, r.samples, run.pool, run.stop).failed, 1);
  r.samples[6].row[0] = NAN;
  EXPECT_EQ(verify(run.trace, run.options, r.samples, run.pool, run.stop).failed, 2);
}

TEST(Replay, PreemptionRecomputesTheSameRows) {
  Replayed run;
  run.trace = generate_trace({.requests = 6, .input = 60, .output = 40, .rate = 1e6, .seed = 3});
  run.options.limits.pages = 12;
  run.options.limits.prefix_reuse = false;
  run.options.weights = Dtype::f32;
  run.options.plan.compute = Dtype::f32;
  const Result r = run.go();
  EXPECT_EQ(r.finished, 6);
  EXPECT_GT(r.preemptions, 0);
  EXPECT_EQ(r.hit_tokens, 0);
  EXPECT_EQ(verify(run.trace, run.options, r.samples, run.pool, run.stop).failed, 0);
}

// batch_invariant: rows do not follow from the token budget, from whether and how much of a prompt is found in the
// cache, nor from a second computation after preemption.
TEST(Replay, BatchInvariantRowsAreThoseOfAnySchedule) {
  struct Mode {
    ModelConfig model;
    PathPolicy path;
    CacheFormat format;
  };
  for (const Mode& mode : {Mode{test::small_deepseek(), PathPolicy::automatic, CacheFormat::fp8_ds_mla},
                           Mode{test::small_deepseek(), PathPolicy::expanded, CacheFormat::bf16},
                           Mode{test::small_deepseek(), PathPolicy::by_prompt, CacheFormat::bf16},
                           Mode{test::small_sparse(), PathPolicy::automatic, CacheFormat::bf16}}) {
    std::map<std::pair<int64_t, int64_t>, std::vector<float>> right;
    int64_t hits = 0, preemptions = 0;
    const auto compare = [&](int64_t token_budget, int64_t pages, bool prefix_reuse) {
      Replayed run;
      run.trace = generate_trace({.requests = 6, .input = 60, .output = 30, .rate = 1e6, .seed = 3});
      run.trace.block_tokens = 16;
      for (TraceRequest& r : run.trace.requests)
        while (static_cast<int64_t>(r.blocks.size()) * 16 < r.input) r.blocks.push_back(r.blocks.size());
      run.options.model = mode.model;
      run.options.format = mode.format;
      run.options.layers = 1;
      run.options.plan.path = mode.path;
      run.options.plan.split = SplitPolicy::batch_invariant;
      run.options.limits = {
          .pages = pages, .page_size = 16, .token_budget = token_budget, .prefix_reuse = prefix_reuse};
      run.options.verify = 100000;  // every row
      const Result r = run.go();
      EXPECT_EQ(r.finished, 6);
      hits += r.hit_tokens, preemptions += r.preemptions;
      const std::string how = std::string(to_string(mode.path)) + ", token budget " + std::to_string(token_budget);
      for (const Sample& s : r.samples) {
        const auto [at, first] = right.try_emplace({s.request, s.position}, s.row);
        ASSERT_TRUE(first || at->second == s.row) << how << ": request " << s.request << ", position " << s.position;
      }
    };
    compare(4096, 0, false);
    const size_t rows = right.size();
    for (const int64_t token_budget : {7, 50, 128}) compare(token_budget, 0, true);
    compare(40, 12, false);
    EXPECT_EQ(right.size(), rows);
    EXPECT_GT(hits, 0);
    EXPECT_GT(preemptions, 0);
  }
}

TEST(Replay, ResultAddsUp) {
  Replayed run;
  const Result r = run.go();
  int64_t prompt = 0, output = 0;
  for (const TraceRequest& q : run.trace.requests) {
    prompt += q.input;
    output += q.output - 1;
  }
  EXPECT_EQ(r.decode_tokens, output);
  EXPECT_EQ(r.prefill_tokens + r.hit_tokens, prompt);
  EXPECT_EQ(r.prompt_tokens, prompt);
  EXPECT_EQ(static_cast<int64_t>(r.step_latencies.size()), r.steps);
  EXPECT_EQ(r.ttft.size(), 8u);
  EXPECT_EQ(r.output_tokens, output + 8);
  EXPECT_GE(r.simulated_seconds, r.step_seconds);
  EXPECT_LE(r.peak_pages, r.pages);
  EXPECT_GT(r.peak_memory, 0u);
  double op_seconds = 0;
  for (const Profile::Row& row : r.profile.rows()) op_seconds += row.seconds;
  EXPECT_LE(op_seconds, r.step_seconds);
}

TEST(Replay, StopsWhenAsked) {
  Replayed run;
  int steps = 0;
  const Result r = replay(run.trace, run.options, run.pool, run.stop, [&](const Progress& p) {
    EXPECT_EQ(p.steps, ++steps);
    EXPECT_EQ(p.requests, 8);
    if (steps == 3) run.stop = true;
  });
  EXPECT_TRUE(r.interrupted);
  EXPECT_EQ(r.steps, 3);
}

// As a signal does it, whenever it comes.
TEST(Replay, StopsWhenAnotherThreadAsks) {
  Replayed run;
  std::atomic<int64_t> steps{0};
  std::thread asks([&] {
    while (steps < 3) std::this_thread::yield();
    run.stop = true;
  });
  const Result r = replay(run.trace, run.options, run.pool, run.stop, [&](const Progress& p) {
    steps = p.steps;
    while (p.steps == 5 && !run.stop) std::this_thread::yield();
  });
  asks.join();
  EXPECT_TRUE(r.interrupted);
  EXPECT_GE(r.steps, 3);
  EXPECT_LE(r.steps, 5);

  run.stop = false;
  const Result whole = run.go();
  std::atomic<int64_t> rows{0};
  std::thread asks_again([&] {
    while (rows == 0) std::this_thread::yield();
    run.stop = true;
  });
  const Verification v =
      verify(run.trace, run.options, whole.samples, run.pool, run.stop, [&](const VerificationProgress& p) {
        rows = p.rows;
        while (p.rows > 0 && !run.stop) std::this_thread::yield();
      });
  asks_again.join();
  EXPECT_TRUE(v.interrupted);
  EXPECT_LT(v.rows, 12);
}

TEST(Replay, OnesOfOwnPoolsRunAtOnce) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i)
    threads.emplace_back([] {
      Replayed run;
      const Result r = run.go();
      EXPECT_EQ(r.finished, 8);
      const Verification v = verify(run.trace, run.options, r.samples, run.pool, run.stop);
      EXPECT_EQ(v.rows, 12);
      EXPECT_EQ(v.failed, 0) << v.worst;
    });
  for (std::thread& t : threads) t.join();
}

TEST(Replay, BadOptions) {
  Replayed run;
  run.options.layers = 3;
  EXPECT_THROW(run.go(), InputError);
  run.options.layers = 0;
  run.options.format = CacheFormat::fp8_ds_v4;
  EXPECT_THROW(run.go(), UnsupportedError);
}

TEST(Percentile, Interpolates) {
  EXPECT_EQ(percentile({}, 50), 0);
  EXPECT_EQ(percentile({3}, 99), 3);
  EXPECT_EQ(percentile({4, 1, 2, 3}, 50), 2.5);
  EXPECT_EQ(percentile({4, 1, 2, 3}, 100), 4);
  EXPECT_NEAR(percentile({0, 10}, 90), 9, 1e-12);
}

TEST(Replay, RecordsOfStepsAddUpToTheRun) {
  Replayed run;
  const Result r = run.go();
  ASSERT_EQ(static_cast<int64_t>(r.series.size()), r.steps);
  ASSERT_GT(r.steps, 10);
  StepRecord sum;
  double now = 0;
  for (const StepRecord& s : r.series) {
    EXPECT_GE(s.start, now);  // steps do not overlap
    now = s.start + s.seconds;
    EXPECT_GT(s.requests, 0);
    EXPECT_GT(s.pages, 0);
    EXPECT_LE(s.pages, r.peak_pages);
    EXPECT_LE(s.plan_seconds, s.seconds);
    EXPECT_LE(s.seconds, s.wall_end - s.wall_start + 1e-9);
    EXPECT_LE(s.prefill_tokens + s.decode_tokens, 50);
    sum.prefill_tokens += s.prefill_tokens;
    sum.decode_tokens += s.decode_tokens;
    sum.prompt_tokens += s.prompt_tokens;
    sum.hit_tokens += s.hit_tokens;
    sum.finished += s.finished;
    sum.context_tokens += s.context_tokens;
  }
  EXPECT_EQ(now, r.simulated_seconds);
  EXPECT_EQ(sum.prefill_tokens, r.prefill_tokens);
  EXPECT_EQ(sum.decode_tokens, r.decode_tokens);
  EXPECT_EQ(sum.prompt_tokens, r.prompt_tokens);
  EXPECT_EQ(sum.hit_tokens, r.hit_tokens);
  EXPECT_EQ(sum.finished, r.finished);
  EXPECT_GT(sum.context_tokens, sum.hit_tokens);
}

TEST(Replay, BucketsKeepSumsAndBounds) {
  std::vector<StepRecord> steps(1001);
  for (size_t i = 0; i < steps.size(); ++i)
    steps[i] = {.start = 2.0 * static_cast<double>(i),
                .seconds = i == 700 ? 1.5 : 1,
                .prefill_tokens = static_cast<int64_t>(i),
                .pages = static_cast<int64_t>(i % 7),
                .finished = 1};
  for (int64_t most : {1, 2, 600, 1001, 5000}) {
    const std::vector<StepBucket> all = buckets(steps, most);
    EXPECT_LE(static_cast<int64_t>(all.size()), most);
    StepBucket sum;
    for (const StepBucket& b : all) {
      sum.steps += b.steps;
      sum.seconds += b.seconds;
      sum.prefill_tokens += b.prefill_tokens;
      sum.finished += b.finished;
      sum.pages = std::max(sum.pages, b.pages);
      sum.max_seconds = std::max(sum.max_seconds, b.max_seconds);
    }
    EXPECT_EQ(sum.steps, 1001);
    EXPECT_EQ(sum.seconds, 1001.5);
    EXPECT_EQ(sum.prefill_tokens, 1000 * 1001 / 2);
    EXPECT_EQ(sum.finished, 1001);
    EXPECT_EQ(sum.pages, 6);
    EXPECT_EQ(sum.max_seconds, 1.5);
    EXPECT_EQ(all.front().start, 0);
    EXPECT_EQ(all.back().end, 2001);
    EXPECT_EQ(all.front().median_seconds, 1);
  }
  EXPECT_TRUE(buckets({}, 600).empty());
}

// The trace that a browser would open: every event within its parent on its track, op times those of the profile.
TEST(Replay, ChromeTraceNestsAndAddsUpToTheProfile) {
  Replayed run;
  run.options.model = test::small_sparse();
  run.options.spans = 1000000;
  const Result r = run.go();
  std::ostringstream out;
  write_chrome_trace(out, "run \"of\" </script>\xff", run.options, r);
  const nlohmann::json trace = nlohmann::json::parse(out.str());
  EXPECT_EQ(trace["otherData"]["op_calls_left_out"], 0);
  std::map<std::string, double> seconds, calls, bytes;
  std::vector<std::pair<int64_t, int64_t>> open;  // nanoseconds that are left for children, outermost first
  int64_t steps = 0, prefill = 0, decode = 0;
  for (const nlohmann::json& e : trace["traceEvents"]) {
    if (e["ph"] != "X") continue;
    const int64_t from = std::llround(e["ts"].get<double>() * 1e3),
                  to = from + std::llround(e["dur"].get<double>() * 1e3);
    const std::string category = e["cat"];
    const int64_t depth = category == "step" ? 0 : category == "op" ? 2 : 1;
    while (static_cast<int64_t>(open.size()) > depth) open.pop_back();
    ASSERT_EQ(static_cast<int64_t>(open.size()), depth) << e;
    if (depth > 0) {
      EXPECT_GE(from, open.back().first) << e;
      EXPECT_LE(to, open.back().second) << e;
      open.back().first = to;  // siblings follow one another
    }
    open.emplace_back(from, to);
    if (category == "step") {
      EXPECT_EQ(e["name"], "step " + std::to_string(steps++));
      prefill += e["args"]["prefill_tokens"].get<int64_t>();
      decode += e["args"]["decode_tokens"].get<int64_t>();
    } else if (category == "op") {
      const std::string name = e["name"];
      seconds[name] += e["dur"].get<double>() * 1e-6;
      bytes[name] += e["args"]["bytes"].get<double>();
      ++calls[name];
      EXPECT_LT(e["args"]["layer"].get<int64_t>(), r.layers);
    }
  }
  EXPECT_EQ(steps, r.steps);
  EXPECT_EQ(prefill, r.prefill_tokens);
  EXPECT_EQ(decode, r.decode_tokens);
  ASSERT_EQ(seconds.size(), r.profile.rows().size());
  for (const Profile::Row& row : r.profile.rows()) {
    const std::string op(row.op);
    EXPECT_EQ(calls[op], row.calls) << op;
    EXPECT_NEAR(seconds[op], row.seconds, 1e-9 * static_cast<double>(row.calls)) << op;  // a nanosecond a call
    EXPECT_NEAR(bytes[op], row.bytes, 1e-9 * row.bytes) << op;
  }
}

// A GPU's calls are a sample that ran after its step: they lie on a track of their own, in which layers hold ops.
TEST(Replay, ChromeTraceOfAGpuHasATrackOfSampledCalls) {
  Replayed run;
  run.options.spans = 1000000;
  const Result r = run.go();
  run.options.device = {DeviceKind::cuda, 0};
  std::ostringstream out;
  write_chrome_trace(out, "gpu", run.options, r);
  const nlohmann::json trace = nlohmann::json::parse(out.str());
  std::map<std::string, std::set<int>> tracks;
  std::set<int> named;
  int64_t ops = 0;
  for (const nlohmann::json& e : trace["traceEvents"]) {
    EXPECT_EQ(e["pid"], 1) << e;
    if (e["ph"] == "M" && e["name"] == "thread_name") named.insert(e["tid"].get<int>());
    if (e["ph"] != "X") continue;
    tracks[e["cat"]].insert(e["tid"].get<int>());
    EXPECT_GE(e["ts"].get<double>(), 0) << e;
    EXPECT_GE(e["dur"].get<double>(), 0) << e;
    ops += e["cat"] == "op";
  }
  EXPECT_EQ(tracks["step"], std::set<int>{1});
  EXPECT_EQ(tracks["plan"], std::set<int>{1});
  EXPECT_EQ(tracks["layer"], std::set<int>{2});
  EXPECT_EQ(tracks["op"], std::set<int>{2});
  EXPECT_EQ(named, (std::set<int>{1, 2}));
  EXPECT_EQ(ops, static_cast<int64_t>(r.spans.size()));
}

TEST(Replay, CallsPastTheLimitAreCounted) {
  Replayed run;
  run.options.spans = 5;
  const Result r = run.go();
  ASSERT_EQ(r.spans.size(), 5u);
  int64_t calls = 0;
  for (const Profile::Row& row : r.profile.rows()) calls += row.calls;
  EXPECT_EQ(r.spans_left_out, calls - 5);
  std::ostringstream out;
  write_chrome_trace(out, "run", run.options, r);
  EXPECT_EQ(nlohmann::json::parse(out.str())["otherData"]["op_calls_left_out"], calls - 5);
  run.options.spans = 0;
  const Result none = run.go();
  EXPECT_TRUE(none.spans.empty());
  EXPECT_EQ(none.spans_left_out, 0);
}

}  // namespace
}  // namespace mla::serve
