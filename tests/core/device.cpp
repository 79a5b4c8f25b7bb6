// Threads, buffers and errors.
#include "mla/device.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/named_buffer.hpp"
#include "core/threads.hpp"
#include "mla/error.hpp"

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

// What they cost is waking and waiting, which short runs show most. The best of the rounds counts, and of these there are
// as many as it takes within 20 s: other work on the machine slows either pool at times, a pool that wakes too many always.
TEST(ThreadPool, ThreadsBeyondTheProcessorsCostLittle) {
  const int processors = static_cast<int>(std::thread::hardware_concurrency());
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
