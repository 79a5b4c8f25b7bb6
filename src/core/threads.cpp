#include "core/threads.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
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
  // A rehearsal's: how many threads it stands for, 0 of a real pool, and what it saw.
  int rehearsed = 0;
  std::vector<Rehearsal::Run> recorded;

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

ThreadPool::ThreadPool(std::unique_ptr<State> state) : state_(std::move(state)) {}

ThreadPool::~ThreadPool() = default;

int ThreadPool::threads() const {
  return state_->rehearsed > 0 ? state_->rehearsed : static_cast<int>(state_->workers.size()) + 1;
}

int ThreadPool::concurrent() const { return state_->concurrent; }

void ThreadPool::run_erased(int64_t tasks, Task task, void* fn) {
  if (tasks <= 0) return;
  State& s = *state_;
  if (s.rehearsed > 0) {
    Rehearsal::Run seconds(static_cast<size_t>(tasks));
    for (int64_t i = 0; i < tasks; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      task(fn, i, 0);
      seconds[static_cast<size_t>(i)] = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
    s.recorded.push_back(std::move(seconds));
    return;
  }
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

Rehearsal::Rehearsal(int threads) : pool_(std::make_unique<ThreadPool::State>()) {
  if (threads < 1) throw InputError("threads is " + std::to_string(threads) + ", at least 1 is needed");
  pool_.state_->rehearsed = pool_.state_->concurrent = threads;
}

std::vector<Rehearsal::Run> Rehearsal::take() { return std::exchange(pool_.state_->recorded, {}); }

double Rehearsal::shared(const Run& run, int threads) {
  // When each thread is free, the soonest in front.
  std::vector<double> free(std::min(static_cast<size_t>(threads), run.size()), 0.0);
  for (const double seconds : run) {
    std::pop_heap(free.begin(), free.end(), std::greater<>());
    free.back() += seconds;
    std::push_heap(free.begin(), free.end(), std::greater<>());
  }
  return free.empty() ? 0.0 : *std::max_element(free.begin(), free.end());
}

}  // namespace mla
