// The replay's engines in this process: one, that of all heads or, where ranks are processes (Options::group), of its
// own; or one a rank, where ranks that split the heads (PlanOptions::tensor_parallel) are threads, which run every step
// together.
#pragma once

#include <atomic>
#include <barrier>
#include <exception>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "core/threads.hpp"
#include "serve/engine.hpp"
#include "serve/processes.hpp"

namespace mla::serve {

class Ranks {
 public:
  /// As Engine; one engine works on `pool`, several have pools of their own, which share its number of threads.
  Ranks(const Options& options, int64_t positions, ThreadPool& pool, const std::atomic<bool>& stop, Result& result);
  ~Ranks();
  /// Before the first step: scales of fp8 caches, those that are 0 found on these hidden states, the same in all ranks.
  /// Given none, all are 1. Returns them.
  std::vector<float> use_k_scales(std::vector<float> scales, std::span<const float> hidden, Processes& processes);
  /// Rank 0's rows and time. An error of any rank ends the others' step, and is thrown.
  StepTime run(const Batch& batch, std::span<const float> hidden, std::span<WantedRow> rows, Result& result);
  void finish(Result& result);

 private:
  struct Rank {
    Rank(int threads, Result* shown) : pool(threads), result(shown ? *shown : own) {}
    Rank(std::span<const Place> places, Result* shown) : pool(pool_at(places)), result(shown ? *shown : own) {}
    ThreadPool pool;
    Result own;
    Result& result;  // rank 0's is the replay's
    std::unique_ptr<Engine> engine;
    std::exception_ptr error;
  };
  void work(int rank);
  StepTime step(int rank, std::span<WantedRow> rows);
  void make(int rank, int64_t positions, const std::atomic<bool>& stop);
  void rethrow() const;

  std::vector<Options> options_;  // of each rank: its device
  std::vector<Communicator> communicators_;
  std::unique_ptr<Engine> alone_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  const Batch* batch_ = nullptr;  // of the step under way
  std::span<const float> hidden_;
  std::barrier<> begin_, end_;
  bool over_ = false;
  std::vector<std::jthread> threads_;  // of the ranks from 1 on
};

}  // namespace mla::serve
