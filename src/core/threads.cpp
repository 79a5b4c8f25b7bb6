#include "core/threads.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
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
namespace {

// 0, or the system's error.
int pin(std::thread& thread, int cpu) {
  const size_t processors = static_cast<size_t>(cpu) + 1, bytes = CPU_ALLOC_SIZE(processors);
  cpu_set_t* mask = CPU_ALLOC(processors);
  if (!mask) return ENOMEM;
  CPU_ZERO_S(bytes, mask);
  CPU_SET_S(static_cast<size_t>(cpu), bytes, mask);
  const int error = pthread_setaffinity_np(thread.native_handle(), bytes, mask);
  CPU_FREE(mask);
  return error;
}

}  // namespace

// Workers sleep on a condition variable between runs and spin for a short while first: a step is a train of runs a few
// tens of microseconds apart, and waking a sleeping thread costs about that much.
//
// A run is open to workers from its start until the caller finds no task left; whoever joins is counted, and only those
// are waited for. So a worker that the system does not let run costs nothing, and a pool of more threads than
// processors wakes no more than can run.
//
// Each node has a range of the run's tasks and a counter of its own. A worker takes from its node's, then from the
// others': nodes do their own tasks while they have some, and one whose tasks take longer is helped. Never to help
// would leave the run to its slowest node, and ranges are equal in number alone: requests' contexts differ. It also
// keeps what a single counter promises: whoever comes ends the run, also when no worker of some node does.
struct ThreadPool::State {
  // Number of the run, whether it is open, and how many workers are in it.
  static constexpr uint64_t kOpen = 1 << 16, kInside = kOpen - 1, kRun = 2 * kOpen;

  // A node's tasks of the run: the next one, and where they end. What two nodes count lies 64 bytes apart.
  struct Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
    int first_worker = 0, past_worker = 1;
    std::byte unused[40];
  };
  static_assert(sizeof(Range) == 64);

  std::vector<std::thread> workers;
  std::vector<Range> several;
  Pinning pinning = Pinning::none;
  int concurrent = 1;
  std::mutex mutex;
  std::condition_variable wake;
  int asleep = 0;  // under the mutex
  // What waiting workers watch lies apart from what a caller writes for a run, and the latter together.
  alignas(64) std::atomic<uint64_t> gate{0};
  std::atomic<bool> stop{false};
  alignas(64) Task task = nullptr;
  void* fn = nullptr;
  std::span<Range> ranges{&only, 1};  // by node
  Range only;
  std::mutex error_mutex;
  std::exception_ptr error;
  // A rehearsal's: how many threads it stands for, 0 of a real pool, and what it saw.
  int rehearsed = 0;
  std::vector<Rehearsal::Run> recorded;

  int node(int worker) const {
    int n = 0;
    while (worker >= ranges[static_cast<size_t>(n)].past_worker) ++n;
    return n;
  }

  // `home`: the worker's node.
  void work(int worker, size_t home) {
    for (size_t n = 0; n < ranges.size(); ++n) {
      Range& range = ranges[(home + n) % ranges.size()];
      for (int64_t i; (i = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;) {
        try {
          task(fn, i, worker);
        } catch (...) {
          std::lock_guard lock(error_mutex);
          if (!error) error = std::current_exception();
        }
      }
    }
  }

  void share(int64_t tasks) {
    const int64_t all = static_cast<int64_t>(workers.size()) + 1;
    for (Range& r : ranges) {
      r.next.store(tasks * r.first_worker / all, std::memory_order_relaxed);
      r.end = tasks * r.past_worker / all;
    }
  }

  // A run that is open and not `seen` yet.
  bool called(uint64_t at, uint64_t seen) const { return (at & kOpen) != 0 && at / kRun != seen; }

  void loop(int worker) {
    constexpr int kSpins = 4000;
    const size_t home = static_cast<size_t>(node(worker));
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
      work(worker, home);
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

  // Starts the threads; pinned, `places` are theirs.
  void start(int threads, std::span<const Place> places) {
    workers.reserve(static_cast<size_t>(threads - 1));
    ranges.back().past_worker = threads;
    if (!places.empty()) {
      pinning = Pinning::cores;
      std::vector<int> first{0};
      for (int w = 1; w < threads; ++w)
        if (places[static_cast<size_t>(w)].node != places[static_cast<size_t>(w) - 1].node) first.push_back(w);
      if (first.size() > 1) ranges = several = std::vector<Range>(first.size());
      first.push_back(threads);
      for (size_t n = 0; n < ranges.size(); ++n)
        ranges[n].first_worker = first[n], ranges[n].past_worker = first[n + 1];
    }
    for (int w = 1; w < threads; ++w) {
      const auto failed = [&](const std::string& what) {
        return DeviceError("thread " + std::to_string(w + 1) + " of " + std::to_string(threads) + " could not be " +
                           what);
      };
      try {
        workers.emplace_back([this, w] { loop(w); });
      } catch (const std::system_error& e) {
        throw failed(std::string("started: ") + e.what());
      }
      if (places.empty()) continue;
      const int cpu = places[static_cast<size_t>(w)].cpu;
      if (const int refused = pin(workers.back(), cpu); refused != 0)
        throw failed("pinned to processor " + std::to_string(cpu) + ": " + std::generic_category().message(refused));
    }
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

int most_threads() { return std::max(64, 4 * usable_processors()); }

ThreadPool::ThreadPool(int threads, Pinning pinning) : state_(std::make_unique<State>()) {
  if (threads < 1 || threads > most_threads())
    throw InputError("threads is " + std::to_string(threads) + ", allowed 1 to " + std::to_string(most_threads()) +
                     ": four for each processor, or 64");
  State& s = *state_;
  if (pinning == Pinning::cores) {
    s.concurrent = threads;
    s.start(threads, places(this_topology(), threads));
    return;
  }
  s.concurrent = std::min(threads, usable_processors());
  s.start(threads, {});
}

ThreadPool pool_at(std::span<const Place> places) {
  auto state = std::make_unique<ThreadPool::State>();
  state->concurrent = static_cast<int>(places.size());
  state->start(state->concurrent, places);
  return ThreadPool(std::move(state));
}

ThreadPool::ThreadPool(std::unique_ptr<State> state) : state_(std::move(state)) {}

ThreadPool::~ThreadPool() = default;

int ThreadPool::threads() const {
  return state_->rehearsed > 0 ? state_->rehearsed : static_cast<int>(state_->workers.size()) + 1;
}

int ThreadPool::concurrent() const { return state_->concurrent; }

Pinning ThreadPool::pinning() const { return state_->pinning; }

int ThreadPool::nodes() const { return static_cast<int>(state_->ranges.size()); }

int ThreadPool::node(int worker) const { return state_->rehearsed > 0 ? 0 : state_->node(worker); }

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
  s.share(tasks);
  const int more = static_cast<int>(std::min<int64_t>(tasks, s.concurrent)) - 1;
  if (more > 0) s.open(more);
  s.work(0, 0);
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
