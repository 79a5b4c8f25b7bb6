// Threads, buffers and errors.
#include "mla/device.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/named_buffer.hpp"
#include "core/threads.hpp"
#include "core/topology.hpp"
#include "mla/error.hpp"
#include "support/message.hpp"
#include "support/nodes.hpp"

namespace mla {
namespace {

TEST(ThreadPool, EveryTaskOnceOnKnownWorkers) {
  for (int threads = 1; threads <= 8; ++threads) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
      std::atomic<bool> known{true};
      pool.run(tasks, [&](int64_t task, int worker) {
        ++runs[static_cast<size_t>(task)];
        if (worker < 0 || worker >= threads) known = false;
      });
      EXPECT_TRUE(known);
      for (const auto& n : runs) EXPECT_EQ(n, 1);
    }
  }
}

TEST(ThreadPool, ManyShortRuns) {
  ThreadPool pool(3);
  std::atomic<int64_t> sum{0};
  for (int i = 0; i < 5000; ++i) pool.run(3, [&](int64_t task, int) { sum += task; });
  EXPECT_EQ(sum, 15000);
}

TEST(Rehearsal, DoesEveryTaskOnTheCallersThreadAndTakesItsTime) {
  EXPECT_THROW(Rehearsal(0), InputError);
  Rehearsal rehearsal(300);
  ThreadPool& pool = rehearsal.pool();
  EXPECT_EQ(pool.threads(), 300);
  EXPECT_EQ(pool.concurrent(), 300);
  std::vector<int64_t> done;
  const auto caller = std::this_thread::get_id();
  pool.run(5, [&](int64_t task, int worker) {
    EXPECT_EQ(worker, 0);
    EXPECT_EQ(std::this_thread::get_id(), caller);
    done.push_back(task);
    if (task == 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  });
  pool.run(0, [&](int64_t, int) { ADD_FAILURE(); });
  EXPECT_EQ(done, (std::vector<int64_t>{0, 1, 2, 3, 4}));
  const std::vector<Rehearsal::Run> runs = rehearsal.take();
  ASSERT_EQ(runs.size(), 1u);
  ASSERT_EQ(runs[0].size(), 5u);
  EXPECT_GE(runs[0][3], 0.005);
  EXPECT_TRUE(rehearsal.take().empty());
  EXPECT_THROW(pool.run(2, [](int64_t, int) { throw InputError("task"); }), InputError);
}

TEST(Rehearsal, SharesTasksAsAPoolWould) {
  const Rehearsal::Run run{4, 1, 1, 1, 5};
  EXPECT_EQ(Rehearsal::shared({}, 3), 0);
  EXPECT_EQ(Rehearsal::shared(run, 1), 12);
  EXPECT_EQ(Rehearsal::shared(run, 2), 8);  // 4 | 1 1 1 5
  EXPECT_EQ(Rehearsal::shared(run, 3), 6);  // 4 | 1 5 | 1 1 would be 6 either way
  EXPECT_EQ(Rehearsal::shared(run, 100), 5);
}

TEST(ThreadPool, ExceptionsReachTheCallerAndThePoolGoesOn) {
  ThreadPool pool(4);
  for (int i = 0; i < 50; ++i) {
    EXPECT_THROW(pool.run(20,
                          [](int64_t task, int) {
                            if (task == 7) throw ShapeError("seven");
                          }),
                 ShapeError);
    std::atomic<int> runs{0};
    pool.run(20, [&](int64_t, int) { ++runs; });
    EXPECT_EQ(runs, 20);
  }
}

TEST(ThreadPool, PoolsOfManyThreadsRunAtOnce) {
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c)
    callers.emplace_back([c] {
      ThreadPool pool(c + 2);
      std::vector<int64_t> squares(40);  // no atomics: run() orders its tasks before what follows
      for (int i = 0; i < 200; ++i) {
        EXPECT_THROW(pool.run(3, [](int64_t, int) { throw ShapeError("every task"); }), ShapeError);
        pool.run(40, [&](int64_t task, int) { squares[task] = task * task + i; });
        for (int64_t task = 0; task < 40; ++task) ASSERT_EQ(squares[task], task * task + i);
      }
    });
  for (std::thread& t : callers) t.join();
}

TEST(ThreadPool, CallersTakeTurns) {
  ThreadPool pool(3);
  int64_t sum = 0;
  for (int c = 0; c < 20; ++c)
    std::thread([&] {
      std::vector<int64_t> parts(7);
      pool.run(7, [&](int64_t task, int) { parts[task] = task; });
      for (int64_t p : parts) sum += p;
    }).join();
  EXPECT_EQ(sum, 20 * 21);
}

// Barriers between tasks of a run end, for as many of them as are promised to run at a time.
TEST(ThreadPool, AsManyTasksAsArePromisedRunAtATime) {
  for (int threads : {1, 2, 3, 16}) {
    ThreadPool pool(threads);
    EXPECT_LE(pool.concurrent(), threads);
    for (int i = 0; i < 300; ++i) {
      std::atomic<int> arrived{0};
      pool.run(pool.concurrent(), [&](int64_t, int) {
        ++arrived;
        while (arrived < pool.concurrent()) std::this_thread::yield();
      });
      if (i % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // workers sleep meanwhile
    }
  }
}

// What they cost is waking and waiting, which short runs show most. The best of the rounds counts, and of these there
// are as many as it takes within 20 s: other work on the machine slows either pool at times, a pool that wakes too many
// always.
TEST(ThreadPool, ThreadsBeyondTheProcessorsCostLittle) {
  const int processors = usable_processors();
  if (processors < 1 || processors > 16) GTEST_SKIP() << processors << " processors";
  ThreadPool few(processors), many(64);
  auto seconds = [&](ThreadPool& pool) {
    std::vector<double> sums(64);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 100; ++i)
      pool.run(64, [&](int64_t task, int) {
        double& sum = sums[static_cast<size_t>(task)];
        for (int k = 0; k < 1000; ++k) sum += 1.0 / (k + 1 + sum);
      });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  double least = std::numeric_limits<double>::infinity();
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (least >= 1.5 && std::chrono::steady_clock::now() < end) least = std::min(least, seconds(many) / seconds(few));
  EXPECT_LT(least, 1.5);
}

TEST(ThreadPool, NeedsAThread) {
  for (int threads : {0, -1, 100'000, std::numeric_limits<int>::max()}) EXPECT_THROW(ThreadPool{threads}, InputError);
  EXPECT_THROW(ThreadPool(-3), InputError);
}

// Every task of the run begins before any ends.
template <class F>
void together(ThreadPool& pool, int64_t tasks, F&& f) {
  std::atomic<int64_t> arrived{0};
  pool.run(tasks, [&](int64_t task, int worker) {
    ++arrived;
    while (arrived < tasks) std::this_thread::yield();
    f(task, worker);
  });
}

TEST(ThreadPool, PinnedWorkersStayOnTheirProcessorsAndTheCallerIsLeftAlone) {
  const std::vector<int> allowed = allowed_processors();
  const int threads = std::min<int>(4, static_cast<int>(allowed.size()));
  const std::vector<Place> expected = places(this_topology(), threads);
  ThreadPool pool(threads, Pinning::cores);
  EXPECT_EQ(pool.pinning(), Pinning::cores);
  EXPECT_EQ(pool.threads(), threads);
  EXPECT_EQ(pool.concurrent(), threads);
  std::vector<std::vector<int>> found(static_cast<size_t>(threads));
  together(pool, threads, [&](int64_t, int worker) { found[static_cast<size_t>(worker)] = allowed_processors(); });
  EXPECT_EQ(found[0], allowed);
  for (int w = 1; w < threads; ++w)
    EXPECT_EQ(found[static_cast<size_t>(w)], std::vector<int>{expected[static_cast<size_t>(w)].cpu}) << w;
  EXPECT_EQ(allowed_processors(), allowed);
}

TEST(ThreadPool, ThreadsThatAreNotPinnedMayRunAnywhere) {
  ThreadPool pool(2);
  EXPECT_EQ(pool.pinning(), Pinning::none);
  EXPECT_EQ(pool.nodes(), 1);
  EXPECT_EQ(pool.node(1), 0);
  pool.run(2, [&, allowed = allowed_processors()](int64_t, int) { EXPECT_EQ(allowed_processors(), allowed); });
}

TEST(ThreadPool, MorePinnedThreadsThanProcessorsAreRefused) {
  const int processors = static_cast<int>(allowed_processors().size()), threads = processors + 1;
  EXPECT_EQ(test::message_of<InputError>([&] { ThreadPool(threads, Pinning::cores); }),
            "threads is " + std::to_string(threads) + ", each pinned to a processor of its own: this process may use " +
                std::to_string(processors) + (processors == 1 ? " processor" : " processors"));
  EXPECT_THROW(ThreadPool(0, Pinning::cores), InputError);
}

TEST(ThreadPool, AProcessorThatTheSystemRefusesIsNamed) {
  const int here = allowed_processors()[0];
  EXPECT_EQ(test::message_of<DeviceError>([&] {
              (void)pool_at(std::vector<Place>{{here, 0}, {here, 0}, {9999, 1}});
            }),
            "thread 3 of 3 could not be pinned to processor 9999: Invalid argument");
}

TEST(ThreadPool, OverNodesEveryTaskOnce) {
  for (const std::vector<int>& nodes : {std::vector<int>{1}, {1, 1}, {3, 1}, {1, 2, 3}}) {
    ThreadPool pool = test::pool_of_nodes(nodes);
    EXPECT_EQ(pool.nodes(), std::ssize(nodes));
    for (int64_t tasks : {0, 1, 2, 3, 5, 7, 1000}) {
      std::vector<int> runs(static_cast<size_t>(tasks));  // no atomics: run() orders its tasks before what follows
      for (int i = 0; i < 20; ++i) pool.run(tasks, [&](int64_t task, int) { ++runs[static_cast<size_t>(task)]; });
      for (const int n : runs) ASSERT_EQ(n, 20);
    }
    EXPECT_THROW(pool.run(20,
                          [](int64_t task, int) {
                            if (task == 19) throw ShapeError("the last");
                          }),
                 ShapeError);
    for (int c = 0; c < 5; ++c)
      std::thread([&] {
        std::atomic<int> runs{0};
        pool.run(7, [&](int64_t, int) { ++runs; });
        EXPECT_EQ(runs, 7);
      }).join();
  }
}

TEST(ThreadPool, AWorkerTakesItsNodesTasksFirst) {
  const std::vector<int> nodes{1, 3, 2};
  ThreadPool pool = test::pool_of_nodes(nodes);
  const std::vector<int> node_of{0, 1, 1, 1, 2, 2};
  for (int w = 0; w < 6; ++w) EXPECT_EQ(pool.node(w), node_of[static_cast<size_t>(w)]);
  // 23 tasks over 6 workers: 1 of 6, 3 of 6 and 2 of 6, rounded down where they begin.
  const auto node_of_task = [](int64_t task) { return task < 3 ? 0 : task < 15 ? 1 : 2; };
  for (int i = 0; i < 100; ++i) {
    std::vector<std::vector<int64_t>> taken(6);
    std::atomic<int> arrived{0};
    pool.run(23, [&](int64_t task, int worker) {
      std::vector<int64_t>& mine = taken[static_cast<size_t>(worker)];
      mine.push_back(task);
      if (mine.size() > 1) return;
      ++arrived;  // all have come before any goes on
      while (arrived < 6) std::this_thread::yield();
    });
    for (int w = 0; w < 6; ++w) {
      const std::vector<int64_t>& mine = taken[static_cast<size_t>(w)];
      const auto own = [&](int64_t task) { return node_of_task(task) == pool.node(w); };
      ASSERT_FALSE(mine.empty());
      EXPECT_TRUE(own(mine[0])) << w;
      EXPECT_TRUE(std::is_partitioned(mine.begin(), mine.end(), own)) << w;
    }
  }
}

// Else the run would not end: the node's only worker waits for the rest of its own tasks.
TEST(ThreadPool, ANodeThatIsHeldUpIsHelped) {
  ThreadPool pool = test::pool_of_nodes({1, 1});
  for (const int64_t held : {0, 10}) {
    std::atomic<int> done{0};
    pool.run(20, [&](int64_t task, int) {
      while (task == held && done < 19) std::this_thread::yield();
      ++done;
    });
    EXPECT_EQ(done, 20);
  }
}

TEST(ThreadPool, OverNodesAsManyTasksAsArePromisedRunAtATime) {
  ThreadPool pool = test::pool_of_nodes({2, 1, 3});
  for (int64_t tasks = 1; tasks <= pool.concurrent(); ++tasks)
    for (int i = 0; i < 50; ++i) {
      std::atomic<int64_t> done{0};
      together(pool, tasks, [&](int64_t, int) { ++done; });
      EXPECT_EQ(done, tasks);
      if (i % 25 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // workers sleep meanwhile
    }
}

TEST(Buffer, AlignedZeroMovable) {
  for (size_t bytes : {size_t{1}, size_t{4097}, size_t{1} << 16, size_t{1} << 22}) {
    Buffer b(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(b.data()) % 64, 0u);
    for (size_t i = 0; i < bytes; i += 61) EXPECT_EQ(b.data()[i], std::byte{0});
    b.as<uint8_t>()[bytes - 1] = 7;
    const Buffer moved = std::move(b);
    EXPECT_EQ(moved.as<uint8_t>()[bytes - 1], 7);
  }
  EXPECT_EQ(Buffer(0).size(), 0u);
  EXPECT_THROW(Buffer(size_t{1} << 62), DeviceError);
  EXPECT_THROW(Buffer(64, {DeviceKind::cuda, 1000}), DeviceError);
}

TEST(Buffer, TheErrorSaysWhatForAndHowMuch) {
  try {
    named_buffer("cache of 3 pages", size_t{1} << 60);
    FAIL();
  } catch (const DeviceError& e) {
    EXPECT_STREQ(e.what(), "cache of 3 pages: cpu has no 1152921504606846976 bytes to give (1.0 EiB)");
  }
}

TEST(Errors, OutOfPagesNamesItsNumbers) {
  const OutOfPages e(5, 2, 9);
  EXPECT_STREQ(e.what(), "out of pages: 5 wanted, 2 of 9 available");
  EXPECT_EQ(e.wanted(), 5);
  EXPECT_EQ(e.available(), 2);
}

TEST(Devices, Names) {
  EXPECT_EQ(to_string(Device{}), "cpu");
  EXPECT_EQ(to_string(Device{DeviceKind::cuda, 3}), "cuda:3");
}

}  // namespace
}  // namespace mla
