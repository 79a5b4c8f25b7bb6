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
struct ThreadPool::State {
  std::vector<std::thread> workers;
  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<uint64_t> generation{0};
  std::atomic<int64_t> next{0};
  std::atomic<int> busy{0};
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

  void loop(int worker) {
    constexpr int kSpins = 4000;
    uint64_t seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && generation.load(std::memory_order_acquire) == seen; ++i) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
      if (generation.load(std::memory_order_acquire) == seen) {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return generation.load(std::memory_order_acquire) != seen; });
      }
      seen = generation.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_acquire)) return;
      work(worker);
      busy.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  // Also of a pool whose threads could not all be started, for whatever reason.
  ~State() {
    stop = true;
    start_generation();
    for (std::thread& t : workers) t.join();
  }

  void start_generation() {
    {
      std::lock_guard lock(mutex);
      generation.fetch_add(1, std::memory_order_acq_rel);
    }
    wake.notify_all();
  }
};

int most_threads() { return std::max(64, 4 * static_cast<int>(std::thread::hardware_concurrency())); }

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  if (threads < 1 || threads > most_threads())
    throw InputError("threads is " + std::to_string(threads) + ", allowed 1 to " + std::to_string(most_threads()));
  State& s = *state_;
  try {
    for (int w = 1; w < threads; ++w) s.workers.emplace_back([&s, w] { s.loop(w); });
  } catch (const std::system_error& e) {
    throw DeviceError("thread " + std::to_string(s.workers.size() + 2) + " of " + std::to_string(threads) +
                      " could not be started: " + e.what());
  }
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::threads() const { return static_cast<int>(state_->workers.size()) + 1; }

void ThreadPool::run_erased(int64_t tasks, Task task, void* fn) {
  if (tasks <= 0) return;
  State& s = *state_;
  s.task = task;
  s.fn = fn;
  s.tasks = tasks;
  s.next.store(0, std::memory_order_relaxed);
  const bool shared = tasks > 1 && !s.workers.empty();
  if (shared) {
    s.busy.store(static_cast<int>(s.workers.size()), std::memory_order_relaxed);
    s.start_generation();
  }
  s.work(0);
  if (shared)
    while (s.busy.load(std::memory_order_acquire) != 0) std::this_thread::yield();
  if (s.error) {
    const std::exception_ptr e = std::exchange(s.error, nullptr);
    std::rethrow_exception(e);
  }
}

}  // namespace mla
