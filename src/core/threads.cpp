#include "core/threads.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "mla/device.hpp"
#include "mla/error.hpp"

namespace mla {

// Workers sleep on a condition variable between runs and spin for a short while first: a step is a train of runs a few
// tens of microseconds apart, and waking a sleeping thread costs about that much.
//
// A run is open to workers from its start until the caller finds no task left; whoever joins is counted, and only those
// are waited for. So a worker that the system does not let run costs nothing, and a pool of more threads than
// processors wakes no more than can run.
struct ThreadPool::State {
  // Number of the run, whether it is open, and how many workers are in it.
  static constexpr uint64_t kOpen = 1 << 16, kInside = kOpen - 1, kRun = 2 * kOpen;

  std::vector<std::thread> workers;
  int concurrent = 1;
  std::mutex mutex;
  std::condition_variable wake;
  int asleep = 0;  // under the mutex
  std::atomic<uint64_t> gate{0};
  std::atomic<int64_t> next{0};
  std::atomic<bool> stop{false};
  int64_t tasks = 0;
  Task task = nullptr;
  void* fn = nullptr;
  std::mutex error_mutex;
  std::exception_ptr error;

  void work(int worker) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      try {
        task(fn, i, worker);
      } catch (...) {
        std::lock_guard lock(error_mutex);
        if (!error) error = std::current_exception();
      }
    }
  }

  // A run that is open and not `seen` yet.
  bool called(uint64_t at, uint64_t seen) const { return (at & kOpen) != 0 && at / kRun != seen; }

  void loop(int worker) {
    constexpr int kSpins = 4000;
    uint64_t seen = 0;
    auto ready = [&] { return stop.load(std::memory_order_acquire) || called(gate.load(), seen); };
    while (!stop.load(std::memory_order_acquire)) {
      for (int i = 0; i < kSpins && !ready(); ++i) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
      if (!ready()) {
        std::unique_lock lock(mutex);
        ++asleep;
        wake.wait(lock, ready);
        --asleep;
      }
      uint64_t at = gate.load();
      while (called(at, seen) && !gate.compare_exchange_weak(at, at + 1)) {
      }
      if (!called(at, seen)) continue;
      seen = at / kRun;
      work(worker);
      gate.fetch_sub(1);
    }
  }

  // Lets up to `more` workers in.
  void open(int more) {
    int sleepers;
    {
      std::lock_guard lock(mutex);
      gate.store(gate.load() / kRun * kRun + kRun + kOpen);
      sleepers = std::min(asleep, more - (static_cast<int>(workers.size()) - asleep));
    }
    for (; sleepers > 0; --sleepers) wake.notify_one();
  }

  void close() {
    gate.fetch_and(~kOpen);
    while ((gate.load() & kInside) != 0) std::this_thread::yield();
  }

  // Also of a pool whose threads could not all be started, for whatever reason.
  ~State() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    wake.notify_all();
    for (std::thread& t : workers) t.join();
  }
};

int most_threads() { return std::max(64, 4 * static_cast<int>(std::thread::hardware_concurrency())); }

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  if (threads < 1 || threads > most_threads())
    throw InputError("threads is " + std::to_string(threads) + ", allowed 1 to " + std::to_string(most_threads()) +
                     ": four for each processor, or 64");
  State& s = *state_;
  const int processors = static_cast<int>(std::thread::hardware_concurrency());  // those this process may use
  s.concurrent = processors > 0 ? std::min(threads, processors) : threads;
  s.workers.reserve(static_cast<size_t>(threads - 1));
  try {
    for (int w = 1; w < threads; ++w) s.workers.emplace_back([&s, w] { s.loop(w); });
  } catch (const std::system_error& e) {
    throw DeviceError("thread " + std::to_string(s.workers.size() + 2) + " of " + std::to_string(threads) +
                      " could not be started: " + e.what());
  }
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::threads() const { return static_cast<int>(state_->workers.size()) + 1; }

int ThreadPool::concurrent() const { return state_->concurrent; }

void ThreadPool::run_erased(int64_t tasks, Task task, void* fn) {
  if (tasks <= 0) return;
  State& s = *state_;
  s.task = task;
  s.fn = fn;
  s.tasks = tasks;
  s.next.store(0, std::memory_order_relaxed);
  const int more = static_cast<int>(std::min<int64_t>(tasks, s.concurrent)) - 1;
  if (more > 0) s.open(more);
  s.work(0);
  if (more > 0) s.close();
  if (s.error) {
    const std::exception_ptr e = std::exchange(s.error, nullptr);
    std::rethrow_exception(e);
  }
}

}  // namespace mla
